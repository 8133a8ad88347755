"""The folder of this user for files that the processes of a job share by name."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

VARIABLE = "ZCOMM_WATCH"
_OFF = ("0", "off")


def private_folder(make: bool = True) -> Path:
    """Return ``zcomm-UID`` in the folder for temporary files. make: create it if it is missing.

    Raises: PermissionError if it is not a private folder of this user (mode 0700); OSError.
    """
    folder = Path(tempfile.gettempdir()) / f"zcomm-{os.getuid()}"
    if make:
        folder.mkdir(mode=0o700, exist_ok=True)
    if make or os.path.lexists(folder):
        check_private(folder)
    return folder


def check_private(folder: Path) -> None:
    """Raise PermissionError if ``folder`` is a link, or open to other users; OSError if it is missing."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} must be a folder of this user and be closed to others (mode 0700)")


def check_variable() -> None:
    """Raise ValueError if ``ZCOMM_WATCH`` is neither empty, nor 0, nor an absolute path."""
    given = os.environ.get(VARIABLE, "")
    if given and given.lower() not in _OFF and not os.path.isabs(given):
        raise ValueError(f"environment variable ZCOMM_WATCH={given!r}: expected 0 or the absolute path of a folder")


def pages_folder(make: bool = False) -> Path | None:
    """Return the folder of pages, or None if ``ZCOMM_WATCH=0`` disables them.

    It is "pages" in ``private_folder()``, or the folder that the variable names. make: create it if it is missing.
    Raises: as ``private_folder``; ValueError for a value that is not an absolute path.
    """
    check_variable()
    given = os.environ.get(VARIABLE, "")
    if given.lower() in _OFF:
        return None
    folder = Path(given) if given else private_folder(make) / "pages"
    if make:
        folder.mkdir(mode=0o700, exist_ok=True)
    if folder.exists():
        check_private(folder)
    return folder
