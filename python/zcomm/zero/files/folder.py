"""Folders for reading: opened once, with every file opened by its plain name below them.

A name in a file (a manifest, an index, ``latest``) may be hostile, so it must not lead out of the folder. Paths,
symbolic links, pipes and devices are refused. Because the folder remains open, all reads are from one folder, even if a
save replaces it meanwhile. ``remove_unread`` does not remove an open folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
from io import BufferedReader, FileIO
from pathlib import Path

KEPT = 16  # files that a folder keeps open at most


def is_plain_name(name: object) -> bool:
    """Return True if ``name`` names something directly in a folder: it is not a path."""
    return isinstance(name, str) and 0 < len(name) < 256 and name not in (".", "..") and not set(name) & {"/", "\0"}


def check_plain_name(name: object, source: Path, field: str) -> str:
    """Return ``name``. Raises: ValueError naming the file ``source`` and the field if that does not hold a plain
    name."""
    if not isinstance(name, str) or not is_plain_name(name):
        raise ValueError(f"{source}: {field} is {name!r}; expected the plain name of a file in that folder")
    return name


class Folder:
    """An open folder. links: follow symbolic links to files (a cache of Hugging Face's hub consists of them).

    Raises: OSError if ``path`` is not a readable folder. Use it as a context manager.
    """

    _descriptor, _owner = -1, -1
    _files: dict[str, FileIO]  # by name, the most recently used file last

    def __init__(self, path: Path, links: bool = False) -> None:
        self.path = path
        self._links = links
        self._owner = os.getpid()
        self._files = {}
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # no locks, or the folder is being removed and files will be missing
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        files = self.__dict__.get("_files", {})  # an interrupt may have ended ``__init__`` earlier
        while files:
            files.popitem()[1].close()
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked child has the descriptor, too
            os.close(descriptor)

    def __del__(self) -> None:
        if os.getpid() == self._owner:  # a forked child has the lock, too
            self.close()  # an interrupt may come between the opening and ``with``

    def open(self, name: str) -> FileIO:
        """Open the regular file ``name`` for reading. Raises: OSError naming the path."""
        path = str(self.path / name)
        if not is_plain_name(name):
            raise OSError(errno.EINVAL, "the name may lead out of the folder", path)
        try:
            file = FileIO(name, "r", opener=self._opened)
        except OSError as error:
            what = {
                errno.ELOOP: "a symbolic link is not followed",
                errno.EISDIR: "it is not a regular file",
            }.get(error.errno or 0, os.strerror(error.errno or 0))
            raise OSError(error.errno, what, path) from None
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise OSError(errno.EINVAL, "it is not a regular file", path)
        return file

    def kept(self, name: str) -> FileIO:
        """Return the file ``name``, open for reading until ``close`` or until KEPT others are. Raises: as ``open``."""
        file = self._files.pop(name, None) or self.open(name)
        while len(self._files) >= KEPT:
            self._files.pop(next(iter(self._files))).close()
        self._files[name] = file
        return file

    def _opened(self, name: str, flags: int) -> int:
        flags |= os.O_NONBLOCK | (0 if self._links else os.O_NOFOLLOW)  # O_NONBLOCK: a pipe would wait for its writer
        return os.open(name, flags, dir_fd=self._descriptor)

    def nbytes(self, name: str) -> int:
        """Return the size of the file ``name``. Raises: OSError naming the path."""
        with self.open(name) as file:
            return os.fstat(file.fileno()).st_size

    def read(self, name: str, end: int | None = None) -> bytes:
        """Return the first ``end`` bytes of the file ``name`` (None: all). Raises: OSError naming the path."""
        with BufferedReader(self.open(name)) as file:
            return file.read() if end is None else file.read(end)


def remove_unread(path: Path) -> None:
    """Remove a folder with its content, unless a process has it open as a ``Folder``. Raises nothing."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        except OSError:  # the file system has no locks
            pass
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(descriptor)
