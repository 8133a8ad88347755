"""Memory tiers for tensors: page-locked host memory and the swap file on NVMe.

Invariants: a swap file's directory never outlives the process in order (close, garbage collection or exit remove it).
A killed run leaves no data, and its directory is removed by the next SwapFile in the same place.
Thread rule: a SwapFile may be used by several threads; operations on one key run in call order.
Source: architecture decision D7; ZeRO-Infinity (arXiv:2104.07857) section 5.1.
"""

from __future__ import annotations

import asyncio
import atexit
import collections
import functools
import logging
import math
import os
import pathlib
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, SupportsIndex

import torch

from zcomm import _core
from zcomm.comm.tensors import has_memory, is_lazy, refuse_weights, whole
from zcomm.comm.work import Work
from zcomm.machine import swap_tuning
from zcomm.memory import snapshot as _snapshot
from zcomm.memory.pinned import PinnedArena as PinnedArena
from zcomm.memory.pinned import pinned_empty as pinned_empty

StrPath = str | os.PathLike[str]


def _check_key(what: str, key: object) -> None:
    if not isinstance(key, str):
        raise TypeError(f"{what}: key must be a str, got {type(key).__name__} ({key!r})")


def _check(what: str, key: str, tensor: torch.Tensor) -> None:
    _check_key(what, key)
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{what}: key {key!r}: {type(tensor).__name__} is not a tensor")
    where = f"{what}: key {key!r}: tensor of shape {tuple(tensor.shape)}"
    if tensor.device.type != "cpu":
        raise ValueError(f"{where} is on {tensor.device}, not on the CPU; copy it to a pinned_empty() tensor first")
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        raise ValueError(f"{where} is not contiguous; pass tensor.contiguous()")
    if is_lazy(tensor):
        raise ValueError(
            f"{where} is a conjugated or negated view (or zeros without memory), so that its memory lacks its values; "
            "pass tensor.resolve_conj().resolve_neg()"
        )
    if not has_memory(tensor):
        raise ValueError(f"{where} has less memory than elements")


def as_paths(directory: StrPath | Sequence[StrPath]) -> list[str]:
    """Return one directory, or several, as a list of strings for the core."""
    if isinstance(directory, (str, os.PathLike)):
        return [os.fspath(directory)]
    return [os.fspath(each) for each in directory]


@functools.cache
def _log_once(note: str) -> None:
    first = os.environ.get("LOCAL_RANK", "0") == "0"  # the others of the host would log the same
    logging.getLogger("zcomm").log(logging.WARNING if first else logging.DEBUG, "%s", note)


def log_fallbacks(swap: _core.SwapFile) -> None:
    """Warn of fallbacks that only cost speed, once per process and reason (for users of ``_core.SwapFile``)."""
    for note in swap.stats()["notes"]:
        _log_once(f"SwapFile: {note}")


class SwapFile:
    """Tensors by key on NVMe: asynchronous, preallocated, checksummed.

    directory: parent of the swap file's own subdirectory; created if only its last part is missing. A list has one
    directory per drive: blocks are striped over the drives, so each drive needs its part of the space.
    nbytes: disk space to preallocate at once; None grows with each new key. engine: "auto", "io_uring", "threads".
    block_nbytes: size of one I/O request. depth: requests in flight per drive. If neither is given: the values that
    ``zcomm doctor --calibrate`` measured for the (first) drive, or 1 MiB and 32. direct: bypass the page cache if the
    file system can (``stats()["direct"]`` is the result). checksum: crc32c of each block, compared when it is read.
    endurance_tbw: terabytes that the drives together are rated to be written with; ``stats()`` tells how long that is.
    Raises: OSError with errno ENOSPC (bytes needed and free), EACCES, ENOENT, ENOTDIR; NotImplementedError for
    engine="io_uring" if the kernel refuses it; ValueError. Missing features that only cost speed (io_uring, O_DIRECT)
    are logged once per process, as a warning of the logger "zcomm", and listed in ``stats()["notes"]``. A file system
    on which the data file keeps its name is reported in the same way.
    """

    def __init__(
        self,
        directory: StrPath | Sequence[StrPath],
        nbytes: int | None = None,
        *,
        engine: str = "auto",
        block_nbytes: int | None = None,
        depth: int | None = None,
        direct: bool = True,
        checksum: bool = True,
        endurance_tbw: float | None = None,
    ) -> None:
        if nbytes is not None and (isinstance(nbytes, bool) or not isinstance(nbytes, SupportsIndex)):
            raise TypeError(f"SwapFile: nbytes must be an int, got {nbytes!r}; 1 GB is 10**9")
        if nbytes is not None and nbytes < 0:
            raise ValueError(f"SwapFile: nbytes {nbytes} is negative")
        if endurance_tbw is not None and not endurance_tbw > 0:
            raise ValueError(f"SwapFile: endurance_tbw {endurance_tbw} is not positive")
        paths = as_paths(directory)
        built_in = swap_tuning.SwapTuning(origin="given")
        tuned = swap_tuning.load(paths[0]) if paths and block_nbytes is None and depth is None else built_in
        block_nbytes = tuned.block_nbytes if block_nbytes is None else block_nbytes
        depth = tuned.depth if depth is None else depth
        self._about = {"block_nbytes": block_nbytes, "depth": depth, "tuning": tuned.origin}
        self._endurance_nbytes = None if endurance_tbw is None else endurance_tbw * 1e12
        self._since = time.monotonic()
        self._core = _core.SwapFile(
            paths,
            nbytes=nbytes or 0,
            engine=engine,
            block_nbytes=block_nbytes,
            depth=depth,
            direct=direct,
            checksum=checksum,
        )
        log_fallbacks(self._core)
        self._lock = threading.Lock()
        self._forms: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        # Keeps each tensor until its I/O ended, whether or not the caller keeps the Work: dropping one does not block.
        self._pending: collections.deque[Work] = collections.deque()
        close_at_exit(self)

    def reserve(self, key: str, shape: int | Sequence[int], dtype: torch.dtype) -> None:
        """Reserve disk space for ``key``, a tensor of this shape and dtype, so that a full disk fails at the start.

        A key of another form is replaced, and its data are lost. Raises: OSError ENOSPC; ValueError while in use.
        """
        _check_key("SwapFile.reserve", key)
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        with self._lock:
            self._core.reserve(key, math.prod(sizes) * dtype.itemsize)
            self._forms[key] = (sizes, dtype)

    def release(self, key: str) -> None:
        """Remove ``key`` and free its disk space. Raises: ValueError if unknown or in use."""
        _check_key("SwapFile.release", key)
        with self._lock:
            self._core.release(key)
            self._forms.pop(key, None)

    def write(self, key: str, tensor: torch.Tensor) -> Work:
        """Queue tensor -> disk. Reserves the key at its first use.

        The tensor must not change before the Work is done; the swap file holds a reference to it until then.
        Raises: ValueError (not contiguous, not on the CPU, another shape or dtype than the key has); OSError ENOSPC.
        From ``wait()``: OSError with the failing offset and path.
        """
        if isinstance(tensor, torch.Tensor):
            tensor = whole("SwapFile.write", tensor)
        _check("SwapFile.write", key, tensor)
        tensor = tensor.detach()
        form = (tuple(tensor.shape), tensor.dtype)
        with self._lock:
            self._check_form("SwapFile.write", key, form)
            core = self._core.write(key, tensor.data_ptr(), tensor.nbytes)
            self._forms[key] = form
            return self._track(core, tensor)

    def read(self, key: str, out: torch.Tensor) -> Work:
        """Queue disk -> out.

        Raises: ValueError (unknown key, not contiguous, not on the CPU, another shape or dtype than was written).
        From ``wait()``: OSError EIO naming key, path and offset if the data differ from the written data.
        """
        refuse_weights("SwapFile.read", [out])
        _check("SwapFile.read", key, out)
        out = out.detach()
        with self._lock:
            self._check_form("SwapFile.read", key, (tuple(out.shape), out.dtype))
            core = self._core.read(key, out.data_ptr(), out.nbytes)
            torch.autograd.graph.increment_version(out)
            return self._track(core, out)

    def wait(self) -> None:
        """Wait for all queued operations. Raises: the first error that no ``Work.wait()`` has raised yet."""
        self._core.wait()
        with self._lock:
            self._forget_done()

    def snapshot(self, directory: StrPath) -> dict[str, Any]:
        """Wait, then copy all keys that hold data into ``directory``, for a checkpoint, past the caller's memory.

        The kernel shares the blocks if the file system can (xfs, btrfs: no time, no space) or copies them. All data are
        on disk when it returns. An existing snapshot is replaced as a whole: a kill at any point leaves the old or the
        new one. The directory is created if only its last part is missing. Operations of other threads wait.
        Returns: nbytes (of the keys), keys (their number), methods (of each drive: reflink, copy_file_range,
        read_write). Raises: as ``wait()``; OSError ENOSPC; OSError EBUSY while another process uses the directory;
        OSError EIO for a key if its last write failed.
        """
        with self._lock:
            drives = len(self._core.stats()["paths"])
            image = _snapshot.write(pathlib.Path(directory), drives, self._core.copy_to, self._forms)
        nbytes = sum(key["nbytes"] for key in image["keys"])
        return {"nbytes": nbytes, "keys": len(image["keys"]), "methods": image["methods"]}

    def restore(self, directory: StrPath) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Load all keys of a snapshot, each compared with its checksums; return their shapes and dtypes.

        Block size and number of drives may differ from the snapshot's. An existing key is replaced. Memory: the largest
        two keys. After an error the keys before it are loaded, the others unchanged.
        Raises: FileNotFoundError (no snapshot). OSError EIO naming key, path and offset of damaged or missing data.
        OSError ENOSPC. ValueError (unknown format, or a key with operations in flight).
        """
        work: Work | None = None
        with _snapshot.Snapshot(pathlib.Path(directory)) as found:
            for key in found.keys:
                data = found.load(key)
                if work is not None:
                    work.wait()
                with self._lock:
                    self._core.reserve(key.name, key.nbytes)
                    core = self._core.write(key.name, data.data_ptr(), key.nbytes)
                    self._forms[key.name] = key.form
                    work = self._track(core, data)
        if work is not None:
            work.wait()
        return {key.name: key.form for key in found.keys}

    def stats(self) -> dict[str, Any]:
        """Return counters since the start.

        - read_nbytes, written_nbytes
        - read_s, write_s: time with at least one request in flight
        - read_gbps, write_gbps: 1e9 bytes per second of that time
        - read_count, read_p50_s, read_p90_s, read_p99_s, read_max_s and the same of write: latency of single requests
          of up to block_nbytes, retries included
        - reserved_nbytes, file_nbytes
        - bounced_nbytes: copied through aligned buffers (bounce_nbytes: their memory), because O_DIRECT transfers only
          whole pages: keys of other sizes, and unaligned memory
        - block_nbytes, depth, tuning (the source of these two)
        - endurance_days: how long the rated endurance lasts at the rate of writing since the start (None: not known, or
          nothing written)
        - error_count, retry_count
        - direct, engine
        - path (that the data file of the first drive was opened with; it has no name any more), paths
        - notes: requested features that are missing, with the reason
        """
        stats = self._core.stats()
        for nbytes, seconds, gbps in (
            ("read_nbytes", "read_s", "read_gbps"),
            ("written_nbytes", "write_s", "write_gbps"),
        ):
            elapsed = float(stats[seconds])
            stats[gbps] = float(stats[nbytes]) / elapsed / 1e9 if elapsed > 0 else 0.0
        stats.update(self._about, endurance_days=None)
        if self._endurance_nbytes is not None and stats["written_nbytes"] > 0:
            a_day = stats["written_nbytes"] / (time.monotonic() - self._since) * 86400
            stats["endurance_days"] = self._endurance_nbytes / a_day
        return stats

    def close(self) -> None:
        """Wait for queued operations and remove the directory. Idempotent; later calls raise ValueError."""
        self._core.close()
        with self._lock:
            self._pending.clear()
        _open_files.discard(self)

    def __enter__(self) -> SwapFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_form(self, what: str, key: str, form: tuple[tuple[int, ...], torch.dtype]) -> None:
        known = self._forms.get(key)
        if known is not None and known != form:
            raise ValueError(f"{what}: key {key!r} has shape {known[0]} {known[1]}, the tensor {form[0]} {form[1]}")

    def _track(self, core: _core.Work, tensor: torch.Tensor) -> Work:
        work = Work(core, tensor)
        self._forget_done()
        self._pending.append(work)
        return work

    def _forget_done(self) -> None:
        while self._pending and self._pending[0].done():
            self._pending.popleft()


async def finished(work: Work, timeout: float | None = None) -> None:
    """Await an operation without blocking the event loop: it polls after pauses of 0.1 to 5 ms.

    A cancelled await leaves the operation running; its error then shows in ``SwapFile.wait()``. For whole calls that
    block, such as ``snapshot``: ``await asyncio.to_thread(swap.snapshot, directory)``; they hold no interpreter lock.
    Raises: as ``Work.wait``.
    """
    deadline, pause_s = math.inf if timeout is None else time.monotonic() + timeout, 1e-4
    while not work.done():  # a thread in Work.wait would take the error of a cancelled await, and it would be lost
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"finished: not done after {timeout} s; the operation goes on")
        await asyncio.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, 5e-3)
    work.wait()


_open_files: weakref.WeakSet[SwapFile | _core.SwapFile] = weakref.WeakSet()


def close_at_exit(file: SwapFile | _core.SwapFile) -> None:
    """Close ``file`` when the interpreter exits, unless it has been freed (for users of ``_core.SwapFile``)."""
    _open_files.add(file)


@atexit.register
def _close_all() -> None:
    for file in list(_open_files):
        file.close()
