"""``python -m zcomm.config``: print the tables of keys, or write them into the pages of a folder (``--write docs``)."""

from __future__ import annotations

import argparse
from pathlib import Path

from zcomm.config.docs import markdown_table, write_tables
from zcomm.config.keys import Status


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m zcomm.config", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="replace the tables in the pages of this folder")
    folder: Path | None = parser.parse_args().write
    if folder is None:
        print("\n\n".join(markdown_table(status) for status in Status))
    else:
        write_tables(folder)


if __name__ == "__main__":
    main()
