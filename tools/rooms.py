#!/usr/bin/env python3
"""Generate CONTRIBUTING.md's picture of the rooms of zcomm.zero from the import contract in pyproject.toml.

A row of the contract is a row of the picture: its modules and rooms (folders), then the comment after it.

Usage: tools/rooms.py --check | --write. --check prints the difference and ends with status 1 if there is one.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONTRACT = re.compile(r'^name = "rooms of zcomm\.zero.*?^layers = \[\n(.*?)^\]', re.M | re.S)
ROW = re.compile(r'"(?P<names>[^"]+)",(?:\s*# (?P<text>.*))?$')
PICTURE = re.compile(r"(?<=^## Rooms of zcomm\.zero\n).*?^```\n(.*?)^```$", re.M | re.S)
COLUMN = 44  # of the texts, if the names leave room


def rows(root: Path) -> Iterator[str]:
    """Yield the lines of the picture."""
    contract = CONTRACT.search((root / "pyproject.toml").read_text(encoding="utf-8"))
    if contract is None:
        raise SystemExit("pyproject.toml: no contract of the rooms of zcomm.zero")
    for line in contract[1].splitlines():
        row = ROW.fullmatch(line.strip())
        if row is None:
            raise SystemExit(f"pyproject.toml: not a row of a contract: {line}")
        names = [name + "/" * (root / "python/zcomm/zero" / name).is_dir() for name in row["names"].split(" | ")]
        yield f"{'  '.join(names):<{COLUMN}}  {row['text'] or ''}".rstrip()


def main(root: Path, write: bool) -> int:
    """Compare the picture with the contract, or write it; return the exit status."""
    page = root / "CONTRIBUTING.md"
    text = page.read_text(encoding="utf-8")
    found = PICTURE.search(text)
    if found is None:
        raise SystemExit(f"{page.name}: no picture after the heading of the rooms of zcomm.zero")
    made = "".join(f"{row}\n" for row in rows(root))
    if made == found[1]:
        return 0
    if write:
        page.write_text(text[: found.start(1)] + made + text[found.end(1) :], encoding="utf-8")
        return 0
    sys.stdout.writelines(difflib.unified_diff(*(t.splitlines(True) for t in (found[1], made)), "picture", "contract"))
    print("CONTRIBUTING.md: the picture of the rooms is not the import contract's: tools/rooms.py --write")
    return 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="CONTRIBUTING.md's picture of the rooms, from the import contract.")
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--check", action="store_true", help="compare")
    mode.add_argument("--write", action="store_true", help="write the picture")
    sys.exit(main(ROOT, parser.parse_args().write))
