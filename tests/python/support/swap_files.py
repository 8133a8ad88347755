"""Reaches the data files of this process's swap files, which have no name in their directories."""

from __future__ import annotations

import os
from pathlib import Path


def nameless(path: object) -> Path:
    """Return a path that opens the data file of ``stats()["path"]``. Raises: FileNotFoundError."""
    wanted = f"{os.path.abspath(str(path))} (deleted)"
    for each in Path("/proc/self/fd").iterdir():
        try:
            if os.readlink(each) == wanted:
                return each
        except FileNotFoundError:  # of the listing itself
            continue
    raise FileNotFoundError(f"this process has no open file that was {path}")
