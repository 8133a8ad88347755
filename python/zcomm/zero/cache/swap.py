"""Swap: an optimizer's swap file, which can be copied while training continues.

[Note: gradual copy] If the file system shares blocks, the copy costs nothing (``_snapshot.Copy``). Otherwise the saving
thread makes it key by key, from the drive to the drive, one key in RAM. A write waits until the key that it replaces
has been copied, which the writing thread does itself. So the copy has the keys as they were when it began. Its errors
end the save, never the write.
[Note: stalled drive] A read or write that takes long is a wait, never an error. While a rank waits, it suspends the
deadline of the ranks that wait for it. After STALL_WARN_S it logs the pending operation.
Thread rule: ``copied`` and writes on one thread at a time, with nothing of it in flight elsewhere but reads. The copy's
``finish``, ``load`` and ``close`` on the saving thread.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from zcomm import _core
from zcomm.comm.communicator import Communicator
from zcomm.memory.snapshot import Copy, room_for
from zcomm.zero.cache.shadow import ShadowKeys

_FICLONE = 0x40049409  # ioctl of linux/fs.h
_PROBE_NBYTES = 4096
SCRATCH = "gradients."  # prefix of keys that no copy needs
STALL_S, STALL_WARN_S = 0.1, 5.0  # seconds until other ranks' deadlines are suspended, and until a wait is logged

logger = logging.getLogger("zcomm")


class DriveWork:
    """A read or write, with the interface of a Work; see [Note: stalled drive]."""

    def __init__(self, swap: Swap, work: _core.Work, what: str, key: str, nbytes: int) -> None:
        self._swap, self._work, self._about = swap, work, (what, key, nbytes)

    def done(self) -> bool:
        """Return True if it has ended, also with an error."""
        return self._work.done()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for its end. Raises: OSError naming key, offset and path; TimeoutError after ``timeout`` seconds."""
        if timeout is not None or self._ends_in(STALL_S):
            self._work.wait(timeout)
            return
        with self._swap.no_deadlines():
            if not self._ends_in(STALL_WARN_S - STALL_S):
                what, key, nbytes = self._about
                paths = ", ".join(str(path) for path in self._swap.stats()["paths"])
                words = "%s of key %r (%d bytes) in %s has not ended after %g s: the drive stalls, this rank waits"
                logger.warning(words, what, key, nbytes, paths, STALL_WARN_S)
                start = time.monotonic()
                self._work.wait()
                logger.warning(
                    "%s of key %r: the drive goes on, after %.1f s more", what, key, time.monotonic() - start
                )
            self._work.wait()

    def _ends_in(self, seconds: float) -> bool:
        """Return True once it has ended; False after ``seconds``. Raises: its error."""
        try:
            self._work.wait(seconds)
        except TimeoutError:  # a drive may report the same
            return self._work.done()
        return True


class Swap(_core.SwapFile):
    """A swap file that can be copied, except the keys of SCRATCH.

    comms: communicators on which other ranks may wait for this one. atomic: ``versions`` has two places for each key
    that is not SCRATCH.
    """

    def __init__(self, *args: Any, atomic: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self.copying: GradualCopy | None = None
        self.comms: Sequence[Communicator] = ()
        self.versions, self._atomic = ShadowKeys(), atomic

    def reserve(self, key: str, nbytes: int, fixed: bool = False) -> None:
        """Reserve space for ``key``. fixed: no step changes it, so it has one place."""
        super().reserve(key, nbytes)
        if self._atomic and not fixed and not key.startswith(SCRATCH):
            super().reserve(self.versions.add(key, nbytes), nbytes)

    def read(self, key: str, ptr: int, nbytes: int) -> Any:
        return self.read_place(self.versions.place(key), ptr, nbytes)

    def read_place(self, place: str, ptr: int, nbytes: int) -> Any:
        return DriveWork(self, super().read(place, ptr, nbytes), "read", place, nbytes)

    def write(self, key: str, ptr: int, nbytes: int) -> Any:
        place = self.versions.write_key(key)
        copying = self.copying  # the saving thread may close it meanwhile
        if copying is not None:
            copying.keep(place)
        return DriveWork(self, super().write(place, ptr, nbytes), "write", place, nbytes)

    def roll_back(self) -> None:
        """Forget the transaction's writes; nothing is in flight."""
        for place, nbytes in self.versions.written().items():  # one with a failed write must not reach a copy
            super().release(place)
            super().reserve(place, nbytes)
        self.versions.roll_back()

    def wait(self) -> None:
        with self.no_deadlines():
            super().wait()

    @contextmanager
    def no_deadlines(self) -> Iterator[None]:
        """Suspend the deadline of ranks that wait for this one. Leaves out communicators that are closed or failed."""
        with ExitStack() as resumed:
            for comm in self.comms:
                with suppress(Exception):
                    block = comm.no_deadline()
                    block.__enter__()
                    resumed.callback(_leave, block)
            yield

    def copied(self) -> SwapCopy:
        """Copy the present keys. Raises: OSError (ENOSPC: as many bytes again are needed; and the errors of
        ``wait``)."""
        paths = [Path(path) for path in self.stats()["paths"]]
        held = {key: nbytes for key, nbytes in self.written() if not key.startswith(SCRATCH)}
        places = self.versions.counting(held)
        if all(shares_blocks(path.parent) for path in paths):
            return CopyOfPlaces(Copy(self), places)
        self.wait()
        self.copying = GradualCopy(self, {place: held[place] for place in places.values()}, paths)
        return CopyOfPlaces(self.copying, places)


class NoSwap:
    """Null object: the swap file of an optimizer that has nothing on a drive."""

    comms: Sequence[Communicator] = ()

    def __init__(self) -> None:
        self.versions = ShadowKeys()

    def stats(self) -> dict[str, Any]:
        return {"paths": [], "read_nbytes": 0, "written_nbytes": 0, "read_s": 0.0, "write_s": 0.0}

    def copied(self) -> SwapCopy:
        return SwapCopy()

    def roll_back(self) -> None:
        self.versions.roll_back()

    def wait(self) -> None: ...

    def close(self) -> None: ...


AnySwap = Swap | NoSwap


def _leave(block: AbstractContextManager[None]) -> None:
    with suppress(Exception):  # the communicator has failed meanwhile: its next operation raises
        block.__exit__(None, None, None)


def shares_blocks(folder: Path) -> bool:
    """Return True if files there can share blocks (reflink: xfs, btrfs)."""
    files: list[int] = []
    try:
        for _ in range(2):
            files.append(os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600))
        os.pwrite(files[0], bytes(_PROBE_NBYTES), 0)
        fcntl.ioctl(files[1], _FICLONE, files[0])
        return True
    except OSError:
        return False
    finally:
        for file in files:
            os.close(file)


class GradualCopy:
    """A copy that is made while training continues; see [Note: gradual copy]. Its files have no name, so they vanish
    when closed, or with the process."""

    def __init__(self, swap: Swap, holds: dict[str, int], paths: list[Path]) -> None:
        self._swap, self._nbytes = swap, dict(holds)
        self._left = dict.fromkeys(holds)  # in their order
        self._sums: dict[str, int] = {}
        self._places: dict[str, tuple[int, int]] = {}  # drive and offset: a key is on one drive
        self._lock = threading.Lock()
        self._buffer = _aligned(max(holds.values(), default=0))
        self._error: OSError | None = None
        self._files: list[int] = []
        page, ends = _core.page_nbytes(), [0] * len(paths)
        for number, (key, nbytes) in enumerate(holds.items()):
            drive = number % len(paths)
            self._places[key] = drive, ends[drive]
            ends[drive] += -(-nbytes // page) * page
        try:
            for path, end in zip(paths, ends, strict=True):
                self._files.append(_nameless(path.with_name(_core.SwapFile.COPY_NAME), end))
        except BaseException:
            self.close()
            raise

    def keep(self, key: str) -> None:
        """Copy ``key``, which may be overwritten afterwards. Raises nothing but an interrupt: ``load`` raises the
        error."""
        with self._lock:
            if key not in self._left:
                return
            del self._left[key]
            if self._error is not None:
                return
            try:
                self._copy(key)
            except OSError as error:
                self._error = error
            except BaseException:
                self._error = OSError(errno.EINTR, f"interrupted while key {key!r} was copied")
                raise

    def _copy(self, key: str) -> None:
        data = self._buffer[: self._nbytes[key]]
        self._swap.read_place(key, data.data_ptr(), data.nbytes).wait()
        self._sums[key] = _core.crc32c(data.data_ptr(), data.nbytes)
        (drive, offset), memory, done = self._places[key], data.numpy().data, 0
        while done < len(memory):
            put = os.pwrite(self._files[drive], memory[done:], offset + done)
            if put == 0:
                raise OSError(errno.EIO, f"copy of a swap file: no byte of key {key!r} was written at {offset + done}")
            done += put

    def finish(self) -> None:
        """Copy the remaining keys."""
        for key in self._nbytes:
            self.keep(key)

    def load(self, name: str, memory: torch.Tensor | None = None) -> torch.Tensor:
        """Load as flat uint8, into ``memory`` if that is large enough. Raises: OSError naming the key."""
        self.keep(name)
        if self._error is not None:
            raise self._error
        out = room_for(self._nbytes[name], memory)
        (drive, offset), octets, done = self._places[name], out.numpy().data, 0
        while done < len(octets):
            got = os.preadv(self._files[drive], [octets[done:]], offset + done)
            if got == 0:
                break
            done += got
        if done < len(octets) or _core.crc32c(out.data_ptr(), out.nbytes) != self._sums[name]:
            raise OSError(errno.EIO, f"copy of a swap file: key {name!r} at offset {offset} differs from its source")
        return out

    def close(self) -> None:
        with self._lock:
            self._left.clear()
            if self._swap.copying is self:
                self._swap.copying = None
            self._buffer = torch.empty(0, dtype=torch.uint8)
            while self._files:
                os.close(self._files.pop())


class SwapCopy:
    """A copy of a swap file: each key as flat uint8, compared with its checksum. The class itself has no key."""

    def finish(self) -> None:
        """Copy the remaining keys."""

    def load(self, name: str, memory: torch.Tensor | None = None) -> torch.Tensor:
        """Load as flat uint8, into ``memory`` if that is large enough. Raises: OSError naming the place."""
        raise KeyError(name)

    def close(self) -> None: ...


class CopyOfPlaces(SwapCopy):
    """A copy with the places that its keys had when it was made."""

    def __init__(self, copy: Copy | GradualCopy, places: dict[str, str]) -> None:
        self._copy, self._places = copy, places

    def finish(self) -> None:
        self._copy.finish()

    def load(self, name: str, memory: torch.Tensor | None = None) -> torch.Tensor:
        return self._copy.load(self._places[name], memory)

    def close(self) -> None:
        self._copy.close()


def _aligned(nbytes: int) -> torch.Tensor:
    """Return memory that begins at a page, so that no bounce buffer is needed."""
    page = _core.page_nbytes()
    memory = torch.empty(nbytes + page, dtype=torch.uint8)
    begin = -memory.data_ptr() % page
    return memory[begin : begin + nbytes]


def _nameless(path: Path, nbytes: int) -> int:
    """Create a file of so many bytes, preallocated, and remove its name. Raises: OSError (ENOSPC, ENOENT)."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileNotFoundError as error:
        raise Copy.no_place(error) from error
    try:
        os.unlink(path)
        if nbytes > 0:
            os.posix_fallocate(file, 0, nbytes)
    except BaseException as error:
        os.close(file)
        if isinstance(error, OSError) and error.filename is None:
            raise OSError(error.errno, f"no space for a copy of the state, {nbytes} bytes", str(path)) from error
        raise
    return file
