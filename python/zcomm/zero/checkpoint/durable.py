"""Folders that appear whole or not at all: written beside their place, synced, then put there by one rename.

A folder that is already there is exchanged in one step (renameat2 of Linux); where the file system cannot, it is first
set aside as ``.NAME.previous``, which ``find`` knows. What a killed save left is removed by the next one.
Files and folders are made for their owner alone (0600, 0700).
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2

before_write: Callable[[str], None] = lambda what: None  # noqa: E731  # tests stop a save here


def write_all(descriptor: int, data: memoryview, path: Path) -> None:
    """All of ``data`` (bytes). Raises: OSError naming the path."""
    before_write(f"write {path.name}")
    while data:
        try:
            data = data[os.write(descriptor, data[: 1 << 28]) :]
        except OSError as error:
            raise OSError(
                error.errno, f"{error.strerror} after {os.lseek(descriptor, 0, 1)} bytes", str(path)
            ) from None


def sync_file(descriptor: int, path: Path) -> None:
    """What was written is on the drive."""
    before_write(f"sync {path.name}")
    os.fsync(descriptor)


def write_file(path: Path, data: bytes) -> None:
    """A new file, synced."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        write_all(descriptor, memoryview(data), path)
        sync_file(descriptor, path)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """The names in it are on the drive."""
    before_write(f"sync folder {path.name}")
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folders(path: Path) -> None:
    """``path`` and what lacks above it; new folders are their owner's alone (mkdir's ``parents`` would open them)."""
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        folder.mkdir(mode=0o700, exist_ok=True)


def temporary(final: Path) -> Path:
    """Make the folder that will become ``final``; what earlier saves left is removed.

    Raises: FileExistsError where ``final`` is neither a checkpoint nor an empty folder: it would be replaced.
    """
    make_folders(final.parent)
    if final.exists() and not _may_go(final):
        raise FileExistsError(
            errno.EEXIST, "this is no checkpoint, it will not be replaced; save elsewhere", str(final)
        )
    for left in final.parent.glob(f".{final.name}.saving-*"):
        shutil.rmtree(left, ignore_errors=True)
    folder = final.parent / f".{final.name}.saving-{os.getpid()}"
    folder.mkdir(mode=0o700)
    return folder


def _may_go(final: Path) -> bool:
    """Whether it is an empty folder, or its manifest.json begins as that of a checkpoint, whatever is in it."""
    try:
        with (final / "manifest.json").open("rb") as file:
            return b"zcomm checkpoint" in file.read(64)
    except OSError:
        return final.is_dir() and not any(final.iterdir())


def put(folder: Path, final: Path) -> None:
    """``folder`` becomes ``final``; one that was there is removed afterwards, and what a killed save had set aside."""
    sync_folder(folder)
    before_write("rename")
    previous = _previous(final)
    if not final.exists():
        os.rename(folder, final)
    elif not _exchange(folder, final):
        shutil.rmtree(previous, ignore_errors=True)
        os.rename(final, previous)
        before_write("rename the new one")
        os.rename(folder, final)
    sync_folder(final.parent)
    for old in (folder, previous):
        shutil.rmtree(old, ignore_errors=True)


def find(final: Path) -> Path:
    """``final``, or the one that was set aside when a save was killed between its two renames."""
    previous = _previous(final)
    return previous if not final.exists() and previous.exists() else final


def replace_file(path: Path, data: bytes) -> None:
    """A file that holds the old or the new content, never less."""
    new = path.with_name(f".{path.name}.saving")
    write_file(new, data)
    before_write(f"rename {path.name}")
    os.replace(new, path)
    sync_folder(path.parent)


def _previous(final: Path) -> Path:
    return final.parent / f".{final.name}.previous"


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names at once; False where the kernel or the file system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    if libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(other))
