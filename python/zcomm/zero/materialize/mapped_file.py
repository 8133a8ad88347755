"""Tensors in the memory of a mapped file (safetensors, ``torch.load(mmap=True)``), read from that file by pieces.

[Note: mapped files] Such a tensor uses no RAM until its elements are read. Pages that were read count as the process's
until the last tensor of the file is freed. So its elements are read by pread instead. That returns the same bytes if
the mapping is private and its pages were not written, because a written page becomes the process's own.
/proc/self/maps names the file of an address, and /proc/self/pagemap marks the pages that are the file's. If one of them
cannot be read, or the path now names another file, the tensor is treated like any other tensor in memory.
The file remains open. If it is changed in place meanwhile, its size or its time of change differs and a read raises.
Thread rule: any; reads of one file may run at once.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy
import torch

from zcomm.zero.files.tensor_file import bytes_of
from zcomm.zero.materialize.replay import pages

MIN_NBYTES = 1 << 16  # smaller tensors are read as they are
_PAGE = mmap.PAGESIZE
_LINE = re.compile(rb"([0-9a-f]+)-([0-9a-f]+) (\S{4}) ([0-9a-f]+) (\S+) (\d+) +(/.*)\n")
_PRESENT, _SWAPPED, _OF_FILE = 1 << 63, 1 << 62, 1 << 61  # bits of an entry of pagemap
_CHECKED_PAGES = 1 << 16  # entries that are read together


@dataclass(frozen=True)
class _Line:
    """A private mapping: addresses [begin, end) are the bytes from ``offset`` on of file ``inode`` on ``device``."""

    begin: int
    end: int
    offset: int
    device: bytes
    inode: int
    path: bytes


def _lines() -> Iterator[_Line]:
    with open("/proc/self/maps", "rb") as maps:
        for match in map(_LINE.fullmatch, maps):
            if match is not None and match[3].endswith(b"p"):
                path = match[7].replace(rb"\012", b"\n")
                yield _Line(int(match[1], 16), int(match[2], 16), int(match[4], 16), match[5], int(match[6]), path)


def _line_at(address: int) -> _Line | None:
    return next((line for line in _lines() if line.begin <= address < line.end), None)


class _File:
    """An open file, with its size and time of change at open."""

    def __init__(self, path: bytes) -> None:
        self.path = os.fsdecode(path)
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.identity = self._identity()  # size and time of change

    def _identity(self) -> tuple[int, ...]:
        found = os.fstat(self.number)
        return found.st_size, found.st_mtime_ns

    def is_of(self, line: _Line) -> bool:
        """Return True if the mapping is of this file. On some file systems devices in /proc/self/maps differ from
        stat(), so the comparison uses a new mapping of the file."""
        memory = torch.frombuffer(mmap.mmap(self.number, 1, access=mmap.ACCESS_COPY), dtype=torch.uint8)
        own = _line_at(memory.data_ptr())
        return own is not None and (own.device, own.inode) == (line.device, line.inode)

    def unchanged(self) -> bool:
        """Return True while its size and time of change are the same as at open."""
        return self._identity() == self.identity

    def read(self, octets: memoryview, at: int) -> None:
        """Fill ``octets``. Raises: OSError naming the file, also if it has changed."""
        done = 0
        while done < octets.nbytes:
            got = os.preadv(self.number, [octets[done:]], at + done)
            if not got:
                raise OSError(errno.EIO, f"the file ends after {at + done} bytes, more are needed", self.path)
            done += got
        if not self.unchanged():
            what = "the file has changed since the model was loaded from it; load it again, and keep it until then"
            raise OSError(errno.ESTALE, what, self.path)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


_open: weakref.WeakValueDictionary[tuple[bytes, bytes, int], _File] = weakref.WeakValueDictionary()


def _file_of(line: _Line) -> _File | None:
    key = line.path, line.device, line.inode
    file = _open.get(key)
    if file is None:
        try:
            file = _File(line.path)
            if not file.is_of(line):
                return None
        except (OSError, ValueError):  # removed, or no file that can be mapped
            return None
        _open[key] = file
    return file if file.unchanged() else None


@dataclass(frozen=True)
class FileRange:
    """Bytes from ``offset`` on of a file: ``count`` elements of ``dtype``."""

    file: _File
    offset: int
    dtype: torch.dtype
    count: int

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Return elements [begin, end). Raises: OSError naming a file that is short, or has changed."""
        assert 0 <= begin <= end <= self.count
        memory = pages((end - begin) * self.dtype.itemsize)  # because malloc would keep holes of pieces
        out = torch.empty(0, dtype=self.dtype).set_(memory, 0, (end - begin,), (1,))
        self.file.read(bytes_of(out), self.offset + begin * self.dtype.itemsize)
        return out


def _range_of(tensor: torch.Tensor) -> tuple[FileRange, int] | None:
    """Return the file that a tensor's memory is mapped from, and its address."""
    with torch._C.DisableTorchFunction():
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.nbytes < MIN_NBYTES:
            return None
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            return None
        address = tensor.data_ptr()
    line = _line_at(address)
    if line is None or address + tensor.nbytes > line.end:
        return None
    file = _file_of(line)
    return (
        None
        if file is None
        else (FileRange(file, line.offset + address - line.begin, tensor.dtype, tensor.numel()), address)
    )


def _is_the_files(address: int, nbytes: int) -> bool:
    """Return True if no page of this part of a private mapping was written."""
    page, last = address // _PAGE, -(-(address + nbytes) // _PAGE)
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pages:
            while page < last:
                count = min(last - page, _CHECKED_PAGES)
                data = os.pread(pages.fileno(), 8 * count, 8 * page)
                if len(data) < 8 * count:
                    return False
                entries = numpy.frombuffer(data, dtype=numpy.uint64)
                written = (entries & _SWAPPED != 0) | ((entries & _PRESENT != 0) & (entries & _OF_FILE == 0))
                if written.any():
                    return False
                page += count
    except OSError:
        return False
    return True


def file_range(tensor: torch.Tensor) -> FileRange | None:
    """Return the range of a file that has the elements of ``tensor``; None: no file has them, or pages were written."""
    found = _range_of(tensor)
    return found[0] if found is not None and _is_the_files(found[1], tensor.nbytes) else None


def reader_of(tensor: torch.Tensor) -> Callable[[int, int], torch.Tensor] | None:
    """Return ``read(begin, end)`` of the flat elements of ``tensor``; None if its memory is no mapped file. Written
    pages are read from memory."""
    found = _range_of(tensor)
    if found is None:
        return None
    (whole, address), flat, size = found, tensor.detach().reshape(-1), tensor.itemsize

    def read(begin: int, end: int) -> torch.Tensor:
        if _is_the_files(address + begin * size, (end - begin) * size):
            return whole.read(begin, end)
        return flat[begin:end].clone()

    return read
