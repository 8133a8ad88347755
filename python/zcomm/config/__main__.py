"""``python -m zcomm.config``: print the table of keys, or write it into a page (``--write docs/config.md``)."""

from __future__ import annotations

import argparse
from pathlib import Path

from zcomm.config.docs import markdown_table, write_table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m zcomm.config", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="PAGE", help="replace the table in this Markdown page")
    page: Path | None = parser.parse_args().write
    if page is None:
        print(markdown_table())
    else:
        write_table(page)


if __name__ == "__main__":
    main()
