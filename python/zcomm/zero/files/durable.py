"""Files and folders that are synced before they are named, with modes for their owner only (0600, 0700)."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from io import FileIO
from pathlib import Path

from zcomm.zero.files.claim import Claim
from zcomm.zero.files.folder import Folder, check_plain_name

LATEST = "latest"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2

before_write: Callable[[str], None] = lambda what: None  # noqa: E731  # tests stop a save here


def new_file(path: Path, replaces: bool = False) -> FileIO:
    """Open an empty file to write to. Raises: OSError (EEXIST if it exists, unless ``replaces``)."""
    file = open(path, "wb" if replaces else "xb", buffering=0, opener=_private)  # noqa: SIM115  # the caller closes it
    assert isinstance(file, FileIO)
    return file


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def write_all(descriptor: int, data: memoryview, path: Path, at: int = 0) -> None:
    """Write all of ``data`` (bytes) from byte ``at`` of a file on. Raises: OSError naming the path."""
    before_write(f"write {path.name}")
    done = 0
    while done < data.nbytes:
        try:
            done += os.pwrite(descriptor, data[done : done + (1 << 28)], at + done)
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror} after {at + done} bytes", str(path)) from None


def sync_file(descriptor: int, path: Path) -> None:
    """Flush written data to the drive."""
    before_write(f"sync {path.name}")
    os.fsync(descriptor)


def write_file(path: Path, data: bytes) -> None:
    """Write a new file, and sync it."""
    with new_file(path, replaces=True) as file:
        write_all(file.fileno(), memoryview(data), path)
        sync_file(file.fileno(), path)


def sync_folder(path: Path) -> None:
    """Flush the names in a folder to the drive."""
    before_write(f"sync folder {path.name}")
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folders(path: Path) -> None:
    """Create and sync ``path`` and its missing parents, only for their owner (mkdir's ``parents`` would open them)."""
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        folder.mkdir(mode=0o700, exist_ok=True)
        sync_folder(folder.parent)


def resolved(final: Path) -> Path:
    """Return ``final``, or the target of a symbolic link: the link remains, and files lie on the target's drive."""
    return Path(os.path.realpath(final)) if final.is_symlink() else final


def find(final: Path) -> Path:
    """Return ``final``, or the folder set aside by a save that was killed between its two renames."""
    final = resolved(final)
    previous = previous_of(final)
    return previous if not final.exists() and previous.exists() else final


def latest_in(directory: Path, file: str = LATEST) -> Path | None:
    """Return the folder that the file ``latest`` of a directory with several checkpoints names; None without such a
    file.

    Raises: OSError; ValueError naming the file if its content is not a plain name.
    """
    pointer = directory / file
    if not pointer.is_file():
        return None
    with Folder(directory, links=True) as folder:
        name = folder.read(file, 1024).decode(errors="replace").strip()
    return directory / check_plain_name(name, pointer, "its content")


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file atomically: it holds the old or the new content. Concurrent jobs take turns."""
    path = resolved(path)
    claim = Claim(path, wait=True)
    new = path.with_name(f".{path.name}.saving")
    try:
        write_file(new, data)
        before_write(f"rename {path.name}")
        os.replace(new, path)
        sync_folder(path.parent)
    finally:
        claim.release()


def previous_of(final: Path) -> Path:
    return final.parent / f".{final.name}.previous"


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names atomically; return False if the kernel or the file system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    if libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(other))
