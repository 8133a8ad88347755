"""``deepspeed.io``: file objects for ``torch.save(state, writer)`` that write through a page-locked buffer.

Source: DeepSpeed's classes and their arguments. Thread rule: one thread.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["FastFileWriter", "FastFileWriterConfig", "MockFileWriter", "PyFileWriter"]


class _Writer:
    """A file to write to. written: bytes so far."""

    def __init__(self, file_path: Any) -> None:
        self._path, self.written = os.fspath(file_path), 0

    def file_path(self) -> str:
        """Return the path."""
        return str(self._path)

    def write(self, buffer: Any) -> int:
        """Append bytes. Returns: their number."""
        count = memoryview(buffer).nbytes
        self.written += count
        return count

    def flush(self) -> None:
        """Give buffered bytes to the operating system, if there are any."""

    def close(self) -> None:
        """Write all, and close. Call it before the file is read."""


class MockFileWriter(_Writer):
    """A file object that counts bytes, and writes none."""


class PyFileWriter(_Writer):
    """An ordinary file."""

    def __init__(self, file_path: Any) -> None:
        super().__init__(file_path)
        self._file = open(self._path, "wb")  # noqa: SIM115  (close() closes it)

    def write(self, buffer: Any) -> int:
        """Append bytes. Returns: their number."""
        self._file.write(buffer)
        return super().write(buffer)

    def flush(self) -> None:
        """Give buffered bytes to the operating system."""
        self._file.flush()

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._file.fileno()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@dataclass
class FastFileWriterConfig:
    """dnvme_handle: an aio_handle. pinned_tensor: page-aligned memory, for example from its new_cpu_locked_tensor.

    double_buffer: one half is filled while the other one is written. The other fields must have their defaults.
    """

    dnvme_handle: Any
    pinned_tensor: torch.Tensor
    double_buffer: bool = True
    num_parallel_writers: int = 1
    writer_rank: int = 0
    global_rank: int = 0


class FastFileWriter(_Writer):
    """A new file, written by ``config.dnvme_handle`` out of ``config.pinned_tensor``.

    Errors of a write are raised by the next call. Raises: ValueError for more than one parallel writer, or a buffer
    that is too small.
    """

    def __init__(self, file_path: Any, config: FastFileWriterConfig) -> None:
        super().__init__(file_path)
        if config.num_parallel_writers != 1:
            raise ValueError("FastFileWriter: num_parallel_writers must be 1; each rank writes files of its own")
        flat = config.pinned_tensor.view(-1).view(torch.uint8)
        size = flat.numel() // (2 if config.double_buffer else 1)
        if size < 1:
            raise ValueError(f"FastFileWriter: a pinned_tensor of {flat.numel()} bytes is too small")
        self._halves = [flat[:size], flat[size : 2 * size]] if config.double_buffer else [flat[:size]]
        self._handle, self._filled, self._flushed, self._busy = config.dnvme_handle, 0, 0, False
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)

    def write(self, buffer: Any) -> int:
        """Append bytes. Returns: their number. Raises: OSError, of an earlier write, too."""
        data, done = memoryview(buffer).cast("B"), 0
        while done < data.nbytes:
            half: Any = self._halves[0].numpy()
            count = min(data.nbytes - done, half.size - self._filled)
            memoryview(half)[self._filled : self._filled + count] = data[done : done + count]
            self._filled, done = self._filled + count, done + count
            if self._filled == half.size:
                self._drain()
        return super().write(buffer)

    def _drain(self) -> None:
        self._wait()
        if self._filled:
            self._handle.async_pwrite(self._halves[0][: self._filled], self._path, self._flushed)
            self._busy = True
            self._flushed, self._filled = self._flushed + self._filled, 0
            self._halves.reverse()
            if len(self._halves) == 1:
                self._wait()

    def _wait(self) -> None:
        if self._busy:
            self._busy = False
            self._handle.wait()

    def flush(self) -> None:
        """Write all buffered bytes. Raises: OSError."""
        self._drain()
        self._wait()

    def fileno(self) -> int:
        """Return a descriptor of the file."""
        return self._descriptor

    def close(self) -> None:
        """Write all, and close. Raises: OSError."""
        if self._descriptor >= 0:
            try:
                self.flush()
            finally:
                os.close(self._descriptor)
                self._descriptor = -1
