"""DeepSpeed's public names with their statuses in zcomm: ``python tools/docs/deepspeed_surface.py --write docs``.

deepspeed_surface.txt lists the names by module. The status of a name is found by asking for it, so that docs/compat.md,
which is written from here, tells the truth about the package.
"""

from __future__ import annotations

import argparse
import importlib
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OWN = "zcomm.compat.deepspeed"
PAGE = "compat.md"
BEGIN = "<!-- names: written by `python tools/docs/deepspeed_surface.py --write docs` -->"
END = "<!-- end of the names -->"
_LIST = Path(__file__).with_suffix(".txt")


@dataclass(frozen=True)
class Name:
    """A public name. status: "present", "refuses" or "absent"; reason: of a refusal."""

    module: str
    name: str
    status: str
    reason: str = ""


def listed(path: Path = _LIST) -> Iterator[tuple[str, str]]:
    """Yield module (below deepspeed; "": the package itself) and name of the list."""
    module = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        head, colon, names = line.partition(": ")
        if colon and not line.startswith(" "):
            module, line = head.replace("~", ""), names
        for name in line.split():
            yield module, name


def found(module: str, name: str) -> Any:
    """Return the value that the package has under a name. Raises: ModuleNotFoundError, AttributeError."""
    whole = f"{OWN}.{module}" if module else OWN
    try:
        place = importlib.import_module(whole)
    except ModuleNotFoundError as error:
        owner, _, last = whole.rpartition(".")
        if not last[:1].isupper():
            raise
        try:
            place = getattr(importlib.import_module(owner), last)
        except AttributeError:
            raise error from None
    return getattr(place, name)


def names() -> list[Name]:
    """Return all names of the list with their statuses."""
    every = []
    for module, name in listed():
        try:
            value = found(module, name)
        except (AttributeError, ModuleNotFoundError):
            every.append(Name(module, name, "absent"))
            continue
        reason = getattr(value, "zcomm_reason", None)
        every.append(Name(module, name, "present") if reason is None else Name(module, name, "refuses", str(reason)))
    return every


def table() -> str:
    """Return the page's tables: a row for each module, status and reason, between two markers."""
    every = names()
    counts = ", ".join(f"{sum(one.status == status for one in every)} {status}" for status in _STATUSES)
    lines = [BEGIN, f"{len(every)} names: {counts}.", "", "| module | status | names |", "|---|---|---|"]
    rows: dict[tuple[str, str, str], list[str]] = {}
    for one in every:
        rows.setdefault((one.module, one.status, one.reason), []).append(one.name)
    order = sorted(rows, key=lambda row: (row[0], _STATUSES.index(row[1]), row[2]))
    for module, status, reason in order:
        shown = f"`deepspeed.{module}`" if module else "`deepspeed`"
        why = f"refuses: {reason}" if reason else status
        lines.append(f"| {shown} | {why} | {' '.join(f'`{name}`' for name in rows[module, status, reason])} |")
    return "\n".join([*lines, END])


_STATUSES = ("present", "refuses", "absent")


def write(folder: Path) -> None:
    """Replace the text between the markers in the page of ``folder``. Raises: ValueError for a missing marker."""
    page = folder / PAGE
    text = page.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise ValueError(f"{page} has no {BEGIN!r} and {END!r}")
    before, after = text.split(BEGIN)[0], text.split(END, 1)[1]
    page.write_text(before + table() + after, encoding="utf-8")


def main() -> None:
    """Print the tables, or write them."""
    parser = argparse.ArgumentParser(prog="tools/docs/deepspeed_surface.py", description=textwrap.dedent(str(__doc__)))
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="replace the tables in the page of this folder")
    folder: Path | None = parser.parse_args().write
    if folder is None:
        print(table())
    else:
        write(folder)


if __name__ == "__main__":
    main()
