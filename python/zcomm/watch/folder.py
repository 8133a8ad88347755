"""The folder of this user for what the processes of a job share by name."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

VARIABLE = "ZCOMM_WATCH"
_OFF = ("0", "off")


def private_folder(make: bool = True) -> Path:
    """Return ``zcomm-UID`` in the folder for temporary files. make: where it is not there.

    Raises: PermissionError where it is not a folder of this user alone (mode 0700); OSError.
    """
    folder = Path(tempfile.gettempdir()) / f"zcomm-{os.getuid()}"
    if make:
        folder.mkdir(mode=0o700, exist_ok=True)
    if make or os.path.lexists(folder):
        check_private(folder)
    return folder


def check_private(folder: Path) -> None:
    """Raise PermissionError where ``folder`` is a link, or open to other users; OSError where it is not there."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} must be a folder of this user and be closed to others (mode 0700)")


def check_variable() -> None:
    """Raise ValueError where ``ZCOMM_WATCH`` is neither empty, nor 0, nor an absolute path."""
    given = os.environ.get(VARIABLE, "")
    if given and given.lower() not in _OFF and not os.path.isabs(given):
        raise ValueError(f"environment variable ZCOMM_WATCH={given!r}: expected 0 or the absolute path of a folder")


def pages_folder(make: bool = False) -> Path | None:
    """Return the folder of pages, or None where ``ZCOMM_WATCH=0`` leaves them out.

    It is "pages" in ``private_folder()``, or the folder that the variable names. make: where it is not there.
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
