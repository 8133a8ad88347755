"""``AsyncIOBuilder().load()``: tensors to and from files of the program, by threads, with DeepSpeed's calls.

A tensor is cut into blocks, which threads read or write concurrently, past the page cache if offsets and memory are
whole pages. An error is an OSError (DeepSpeed returns -1), for asynchronous operations from ``wait()``.
zcomm.SwapFile is for data of one run: it reserves space, has checksums and uses io_uring, but its file has no name.
Thread rule: a handle may be used by several threads; ``wait`` is for the operations of all of them.
Source: the interface of DeepSpeed's csrc/aio.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from zcomm.comm.tensors import has_memory, is_lazy, refuse_weights, whole
from zcomm.memory.pinned import pinned_empty

_PAGE = 4096
_MOST_THREADS = 16
_DIRECT = getattr(os, "O_DIRECT", 0)


class aio_handle:
    """Reads and writes of files.

    block_size: bytes of one request. queue_depth, intra_op_parallelism: their product is the number of requests at a
    time, at most 16. single_submit, overlap_events have no effect: each request is submitted at once.
    Raises: ValueError.
    """

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        for name, value in (
            ("block_size", block_size),
            ("queue_depth", queue_depth),
            ("intra_op_parallelism", intra_op_parallelism),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"aio_handle: {name}={value!r}; expected a whole number of at least 1")
        self._block, self._depth, self._parallel = block_size, queue_depth, intra_op_parallelism
        self._single, self._overlap = bool(single_submit), bool(overlap_events)
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._pid = os.getpid()
        self._pending: list[_Operation] = []
        self._locked: dict[int, int] = {}  # bytes of tensors of new_cpu_locked_tensor, by address

    def get_block_size(self) -> int:
        """Return bytes of one request."""
        return self._block

    def get_queue_depth(self) -> int:
        """Return the argument queue_depth."""
        return self._depth

    def get_single_submit(self) -> bool:
        """Return the argument single_submit."""
        return self._single

    def get_overlap_events(self) -> bool:
        """Return the argument overlap_events."""
        return self._overlap

    def get_intra_op_parallelism(self) -> int:
        """Return the argument intra_op_parallelism."""
        return self._parallel

    def get_alignment(self) -> int:
        """Return the unit of sizes and places that go past the page cache, times the parallelism."""
        return _PAGE * self._parallel

    def read(self, buffer: torch.Tensor, filename: Any, validate: bool = False, file_offset: int = 0) -> int:
        """Fill ``buffer`` from the file, from byte ``file_offset`` on. Returns: 0.

        validate: read it once more, and compare. Raises: ValueError (not contiguous, or a weight that is sharded);
        OSError, also if the file is too short.
        """
        self._start(True, buffer, filename, validate, file_offset).finish()
        return 0

    def write(self, buffer: torch.Tensor, filename: Any, validate: bool = False, file_offset: int = 0) -> int:
        """Write ``buffer`` to the file, which is created but never cut. Returns: 0. Raises: as ``read``."""
        self._start(False, buffer, filename, validate, file_offset).finish()
        return 0

    def pread(self, buffer: torch.Tensor, filename: Any, validate: bool, *args: Any, **kwargs: Any) -> int:
        """``read``; with ``async`` (the next argument) in the background.

        Returns: 0 if it is asynchronous, else the number of completed operations, as ``wait`` does.
        """
        return self._parallel_call(True, buffer, filename, validate, args, kwargs)

    def pwrite(self, buffer: torch.Tensor, filename: Any, validate: bool, *args: Any, **kwargs: Any) -> int:
        """``write``; with ``async`` (the next argument) in the background. Returns: as ``pread``."""
        return self._parallel_call(False, buffer, filename, validate, args, kwargs)

    def sync_pread(self, buffer: torch.Tensor, filename: Any, file_offset: int = 0) -> int:
        """``read``. Returns: the number of completed operations, as ``wait``."""
        return self._synchronous(self._start(True, buffer, filename, False, file_offset))

    def sync_pwrite(self, buffer: torch.Tensor, filename: Any, file_offset: int = 0) -> int:
        """``write``. Returns: the number of completed operations, as ``wait``."""
        return self._synchronous(self._start(False, buffer, filename, False, file_offset))

    def async_pread(self, buffer: torch.Tensor, filename: Any, file_offset: int = 0) -> int:
        """Start a ``read``; ``wait`` ends it. Returns: 0. Raises: as ``read``, for arguments and missing files."""
        return self._queue(self._start(True, buffer, filename, False, file_offset))

    def async_pwrite(
        self, buffer: torch.Tensor, filename: Any = None, file_offset: int = 0, *, fd: int | None = None
    ) -> int:
        """Start a ``write`` to a file, or to the descriptor ``fd`` (also as second argument); ``wait`` ends it.

        ``buffer`` must not change before. Returns: 0. Raises: as ``write``.
        """
        return self._queue(self._start(False, buffer, filename if fd is None else fd, False, file_offset))

    def wait(self) -> int:
        """Wait for all asynchronous operations. Returns: their number. Raises: OSError, the first one."""
        with self._lock:
            pending, self._pending = self._pending, []
        error: BaseException | None = None
        for operation in pending:
            try:
                operation.finish()
            except (OSError, ValueError) as failed:
                error = error or failed
        try:
            if error is not None:
                raise error
        finally:
            del error
        return len(pending)

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of ``num_elem`` elements, of the example's dtype, in page-locked memory if CUDA is available.

        Raises: OSError (ENOMEM), as ``zcomm.pinned_empty``.
        """
        tensor = pinned_empty(int(num_elem), example_tensor.dtype)
        with self._lock:
            self._locked[tensor.data_ptr()] = tensor.nbytes
        return tensor

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Forget such a tensor; its memory is freed with the last reference. Returns: False if it is another one."""
        with self._lock:
            return self._locked.pop(tensor.data_ptr(), None) is not None

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """Return True for page-locked memory, and parts of tensors of ``new_cpu_locked_tensor``."""
        at = buffer.data_ptr()
        with self._lock:
            own = any(first <= at and at + buffer.nbytes <= first + size for first, size in self._locked.items())
        return own or buffer.is_pinned()

    def _parallel_call(
        self, reads: bool, buffer: torch.Tensor, filename: Any, validate: bool, args: Any, kwargs: Any
    ) -> int:
        names = ("async", "file_offset")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if "async" not in given or set(given) - set(names) or len(args) > len(names):
            raise TypeError("aio_handle: expected (buffer, filename, validate, async, file_offset=0)")
        operation = self._start(reads, buffer, filename, validate, given.get("file_offset", 0))
        return self._queue(operation) if given["async"] else self._synchronous(operation)

    def _start(self, reads: bool, buffer: torch.Tensor, file: Any, validate: bool, offset: int) -> _Operation:
        what = "aio_handle.read" if reads else "aio_handle.write"
        if reads:
            refuse_weights(what, [buffer])
        else:
            buffer = whole(what, buffer)
        buffer = buffer.detach()
        if not buffer.is_contiguous() or is_lazy(buffer) or not has_memory(buffer):
            raise ValueError(f"{what}: the tensor of shape {tuple(buffer.shape)} is not contiguous; pass .contiguous()")
        if offset < 0:
            raise ValueError(f"{what}: file_offset {offset} is negative")
        target = buffer if reads and buffer.device.type != "cpu" else None
        memory = buffer.cpu() if target is None else torch.empty(buffer.shape, dtype=buffer.dtype)
        operation = _Operation(reads, memory, target, file, offset, validate)
        with self._lock:
            if self._pool is None or self._pid != os.getpid():  # threads do not come along into a forked child
                count = min(_MOST_THREADS, self._depth * self._parallel)
                self._pool, self._pid = ThreadPoolExecutor(count, "zcomm-aio"), os.getpid()
                self._pending = []
            operation.submit(self._pool.submit, self._block)
        if reads:
            torch.autograd.graph.increment_version(buffer)
        return operation

    def _queue(self, operation: _Operation) -> int:
        with self._lock:
            self._pending.append(operation)
        return 0

    def _synchronous(self, operation: _Operation) -> int:
        operation.finish()  # by this thread: another one may be in wait()
        return 1 + self.wait()


class _Operation:
    """One read or write. memory: the bytes on the host; target: the tensor on a device that a read is for."""

    def __init__(
        self, reads: bool, memory: torch.Tensor, target: torch.Tensor | None, file: Any, offset: int, validate: bool
    ) -> None:
        self._reads, self._memory, self._target, self._validate = reads, memory, target, validate
        self._offset, self._futures = offset, list[Future[None]]()
        self._bytes = (ctypes.c_ubyte * memory.nbytes).from_address(memory.data_ptr()) if memory.nbytes else bytearray()
        self._owned, self._direct = not isinstance(file, int), -1
        self._name = os.fspath(file) if self._owned else f"descriptor {file}"
        flags = os.O_CLOEXEC | (os.O_RDONLY if reads else os.O_WRONLY | os.O_CREAT)
        self._descriptor = os.open(self._name, flags, 0o666) if self._owned else os.dup(int(file))
        aligned = not (offset | memory.nbytes | memory.data_ptr()) % _PAGE
        if self._owned and aligned and memory.nbytes and _DIRECT:
            with contextlib.suppress(OSError):  # the file system has none
                self._direct = os.open(self._name, flags | _DIRECT)

    def submit(self, submit: Callable[..., Future[None]], block: int) -> None:
        """Start the requests. Raises: OSError if the file is too short to be read."""
        size = self._memory.nbytes
        if self._reads and os.fstat(self._descriptor).st_size < self._offset + size:
            found = os.fstat(self._descriptor).st_size
            self._close()
            raise OSError(errno.EIO, f"the file has {found} bytes, {size} are read from {self._offset} on", self._name)
        if self._direct >= 0:
            block = max(block // _PAGE, 1) * _PAGE
        view = memoryview(self._bytes).cast("B")
        for begin in range(0, size, block):
            self._futures.append(submit(self._move, view[begin : begin + block], self._offset + begin))

    def _move(self, piece: memoryview, at: int) -> None:
        descriptor = self._direct if self._direct >= 0 else self._descriptor
        while piece.nbytes:
            try:
                moved = os.preadv(descriptor, [piece], at) if self._reads else os.pwrite(descriptor, piece, at)
            except OSError as error:
                if error.errno == errno.EINVAL and descriptor != self._descriptor:
                    descriptor = self._descriptor  # larger pages than 4 KiB, or a short transfer before
                    continue
                raise OSError(error.errno, error.strerror, self._name) from None
            if not moved:
                raise OSError(errno.EIO, f"nothing moved at byte {at}", self._name)
            piece, at = piece[moved:], at + moved

    def finish(self) -> None:
        """Wait for the requests. Raises: OSError."""
        error = next(filter(None, [future.exception() for future in self._futures]), None)
        self._futures.clear()
        try:
            if error is not None:
                raise error
            if self._validate and self._owned:
                self._compare()
            if self._target is not None:
                self._target.copy_(self._memory)
        finally:
            self._close()
            del error  # it refers to this frame

    def _compare(self) -> None:
        with open(self._name, "rb") as file:  # a descriptor may be one for writing only, and is never validated
            file.seek(self._offset)
            if file.read(self._memory.nbytes) != bytes(self._bytes):
                raise OSError(errno.EIO, "its bytes differ from the tensor's", self._name)

    def _close(self) -> None:
        for descriptor in (self._descriptor, self._direct):
            if descriptor >= 0:
                os.close(descriptor)
        self._descriptor = self._direct = -1


def aio_read(
    buffer: torch.Tensor,
    filename: Any,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """Fill ``buffer`` from a file. Returns: 0. Raises: as ``aio_handle.read``."""
    return aio_handle(block_size, queue_depth, single_submit, overlap_events).read(buffer, filename, validate)


def aio_write(
    buffer: torch.Tensor,
    filename: Any,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """Write ``buffer`` to a file. Returns: 0. Raises: as ``aio_handle.write``."""
    return aio_handle(block_size, queue_depth, single_submit, overlap_events).write(buffer, filename, validate)


def deepspeed_memcpy(dest: torch.Tensor, src: torch.Tensor) -> int:
    """Copy ``src`` to ``dest``. Returns: 0."""
    dest.copy_(src)
    return 0
