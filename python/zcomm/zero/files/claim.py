"""Claims: one save at a time writes a folder or a file; a save of a second job to the same place raises.

The lock file ``.NAME.lock`` lies next to the place and is removed with the claim. A killed job's lock is free at once,
because the kernel drops it with the process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
from io import FileIO
from pathlib import Path

_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)
_logged_errnos: set[int] = set()


class Claim:
    """The right to write ``place``, until ``release``. wait: wait for another job's claim instead of raising.

    Raises: OSError (EBUSY: another job, or another optimizer of this one, is writing it).
    """

    _file: FileIO | None = None

    def __init__(self, place: Path, wait: bool = False) -> None:
        self._path = place.parent / f".{place.name}.lock"
        self._owner = os.getpid()
        while self._file is None:
            self._file = self._locked(place, wait)

    def _locked(self, place: Path, wait: bool) -> FileIO | None:
        """Return the locked file; None if its owner removed it during the wait, so that it guards nothing."""
        file = FileIO(self._path, "r+", opener=_opened)
        try:
            _lock(file.fileno(), place, wait)
            if os.path.samestat(os.fstat(file.fileno()), os.stat(self._path, follow_symlinks=False)):
                return file
        except FileNotFoundError:
            pass
        except BaseException:
            file.close()
            raise
        file.close()
        return None

    def release(self) -> None:
        """Release the claim; idempotent. Raises nothing, because a lock file that cannot be removed is still free."""
        file, self._file = self._file, None
        if file is None or os.getpid() != self._owner:
            return
        with file:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)  # a forked child (a data loader's worker) has the descriptor, too

    def __del__(self) -> None:
        self.release()  # an interrupt may end a save between any two lines


def _opened(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW, 0o600)


def _lock(file: int, place: Path, wait: bool) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        what = "another save is writing there; give each job a folder of its own"
        raise OSError(errno.EBUSY, what, str(place)) from None
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        if error.errno not in _logged_errnos:
            _logged_errnos.add(error.errno or 0)
            logging.getLogger("zcomm").warning(
                "%s: its file system has no locks (%s), so two jobs that save there are not noticed",
                place,
                error.strerror,
            )
