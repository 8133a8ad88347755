"""safetensors files, written and read by pieces, because the library's own writer needs all tensors in memory.

Format: 8 bytes length of the header, header (JSON: name -> dtype, shape, data_offsets), data.
Source: https://github.com/huggingface/safetensors#format; tests read the files with that library.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from zcomm.zero.files import durable
from zcomm.zero.files.folder import Folder

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_LATER = {"float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e8m0fnu": "F8_E8M0"}
_NAMES.update({getattr(torch, kind): name for kind, name in _LATER.items() if hasattr(torch, kind)})
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
PIECE_NBYTES = 2 << 20  # bytes of a tensor that are written or read at a time


def holds(dtype: torch.dtype) -> bool:
    """Return True if a safetensors file can hold tensors of ``dtype``."""
    return dtype in _NAMES


def check_dtypes(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise ValueError naming a tensor of a dtype that safetensors lacks."""
    for name, tensor in tensors:
        if tensor.dtype not in _NAMES:
            raise ValueError(
                f"{name} is {tensor.dtype}, which a safetensors file cannot hold; register it with persistent=False, "
                "or keep it as torch.view_as_real gives it"
            )


@dataclass(frozen=True)
class Entry:
    """One tensor in a file: ``begin`` is its first byte; crc32 of its bytes."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int
    crc32: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return _DTYPES[self.dtype]

    @property
    def torch_dtype_or_none(self) -> torch.dtype | None:
        """Return torch's dtype; None: torch lacks it."""
        return _DTYPES.get(self.dtype)

    def as_json(self) -> list[Any]:
        return [self.file, self.dtype, list(self.shape), self.begin, self.nbytes, self.crc32]

    @staticmethod
    def from_json(values: list[Any]) -> Entry:
        file, dtype, shape, begin, nbytes, crc32 = values
        return Entry(str(file), str(dtype), tuple(int(n) for n in shape), int(begin), int(nbytes), int(crc32))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the tensor's bytes, without a copy if it is contiguous and on the CPU."""
    if tensor.numel() == 0:
        return memoryview(b"")
    array: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


class Writer:
    """A file of tensors with known names, dtypes and shapes.

    Each tensor is written in pieces, from its first element to its last; pieces of several tensors may alternate. An
    error is kept until ``close``, because a rank that cannot write must continue with the collectives that feed the
    others. A file object owns the descriptor, so that it is closed with the writer after an interrupt at any line.
    """

    def __init__(
        self, path: Path, plan: list[tuple[str, torch.dtype, torch.Size]], metadata: dict[str, str] | None = None
    ) -> None:
        self.path = path
        self.error: OSError | None = None
        self._names = [name for name, _, _ in plan]
        self._next = 0
        self._file: FileIO | None = None
        self._places: dict[str, _Place] = {}
        header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
        at = 0
        for name, dtype, shape in plan:
            nbytes = shape.numel() * dtype.itemsize
            header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + nbytes]}
            self._places[name] = _Place(dtype, shape, at, nbytes)
            at += nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        text = len(text).to_bytes(8, "little") + text
        self._data = len(text)
        self.nbytes = self._data + at
        self.header_crc32 = zlib.crc32(text)
        self._attempt(lambda: self._open(text))

    def _open(self, header: bytes) -> None:
        with contextlib.ExitStack() as failed:
            file = failed.enter_context(durable.new_file(self.path))
            durable.write_all(file.fileno(), memoryview(header), self.path)
            failed.pop_all()
        self._file = file

    def _attempt(self, action: Any) -> None:
        if self.error is None:
            try:
                action()
            except OSError as error:
                self.error = error

    @property
    def entries(self) -> dict[str, Entry]:
        """The tensors by name, with the checksums of the written bytes."""
        return {
            name: Entry(
                self.path.name, _NAMES[place.dtype], tuple(place.shape), self._data + place.at, place.nbytes, place.crc
            )
            for name, place in self._places.items()
        }

    def add(self, tensor: torch.Tensor) -> None:
        """Write the next tensor of the plan, whole."""
        name = self._names[self._next]
        self._next += 1
        assert tensor.shape == self._places[name].shape, name
        flat = tensor.detach().reshape(-1)
        step = PIECE_NBYTES // tensor.dtype.itemsize
        for begin in range(0, max(flat.numel(), 1), step):
            self.put(name, flat[begin : begin + step])

    def put(self, name: str, piece: torch.Tensor) -> None:
        """Write the next elements of a tensor."""
        place, data = self._places[name], bytes_of(piece)
        assert piece.dtype == place.dtype and place.done + data.nbytes <= place.nbytes, name
        at = self._data + place.at + place.done
        place.crc = zlib.crc32(data, place.crc)
        place.done += data.nbytes
        self._attempt(lambda: self._write(data, at))

    def _write(self, data: memoryview, at: int) -> None:
        assert self._file is not None, "the file was opened, or the error of that is kept"
        durable.write_all(self._file.fileno(), data, self.path, at)

    def close(self) -> None:
        """Sync and close. Raises: the first OSError of all calls."""
        file, self._file = self._file, None
        if file is not None:
            with file:
                self._attempt(lambda: durable.sync_file(file.fileno(), self.path))
        if self.error is not None:
            raise self.error

    def check_whole(self) -> None:
        """Raise RuntimeError naming an incomplete tensor."""
        for name, place in self._places.items():
            if place.done != place.nbytes:
                raise RuntimeError(f"{self.path}: {place.done} of {place.nbytes} bytes of {name} were written")


@dataclass
class _Place:
    """A tensor in a file being written. at: its first byte, after the header. done: its written bytes."""

    dtype: torch.dtype
    shape: torch.Size
    at: int
    nbytes: int
    done: int = 0
    crc: int = 0


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> Writer:
    """Write a new file with these tensors, and sync it. Raises: OSError."""
    writer = Writer(path, [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()])
    try:
        for tensor in tensors.values():
            writer.add(tensor)
    finally:
        writer.close()
    return writer


def read_part(
    folder: Folder, entry: Entry, begin: int = 0, end: int | None = None, memory: torch.Tensor | None = None
) -> torch.Tensor:
    """Return elements [begin, end) of a tensor, flat, in ``memory`` if given.

    Raises: OSError naming the file if it is short or not readable.
    """
    dtype = entry.torch_dtype
    count = entry.nbytes // dtype.itemsize
    end = count if end is None else end
    if not 0 <= begin <= end <= count:
        path = str(folder.path / entry.file)
        raise OSError(errno.EIO, f"elements {begin} to {end} are wanted of a tensor that has {count}", path)
    out = torch.empty(end - begin, dtype=dtype) if memory is None else memory[: end - begin]
    target, at = bytes_of(out), entry.begin + begin * dtype.itemsize
    file, done = folder.kept(entry.file).fileno(), 0
    while done < target.nbytes:
        got = os.preadv(file, [target[done:]], at + done)
        if not got:
            path = str(folder.path / entry.file)
            raise OSError(errno.EIO, f"the file ends after {at + done} bytes, more are needed", path)
        done += got
    return out


def read_into(folder: Folder, entry: Entry, out: torch.Tensor) -> None:
    """Copy a tensor into ``out``, of its shape and any dtype, piece by piece. Raises: as ``read_part``."""
    step, count = PIECE_NBYTES // entry.torch_dtype.itemsize, out.numel()
    if count <= step or not out.is_contiguous():
        out.copy_(read_part(folder, entry).view(entry.shape))
        return
    flat = out.view(-1)
    for begin in range(0, count, step):
        end = min(begin + step, count)
        flat[begin:end].copy_(read_part(folder, entry, begin, end))


def read_whole(folder: Folder, name: str, entry: Entry) -> torch.Tensor:
    """Read the tensor, and compare it with its checksum. Raises: OSError naming file and tensor."""
    tensor = read_part(folder, entry).view(entry.shape)
    if zlib.crc32(bytes_of(tensor)) != entry.crc32:
        raise OSError(errno.EIO, _differs(folder, name, entry))
    return tensor


def read_pieces(folder: Folder, name: str, entry: Entry) -> Iterator[torch.Tensor]:
    """Yield the tensor in flat pieces, each until the next one.

    Raises: OSError naming file and tensor, after the last piece if the checksum is wrong. Then discard all results of
    the pieces.
    """
    dtype = entry.torch_dtype
    step, count, crc = PIECE_NBYTES // dtype.itemsize, entry.nbytes // dtype.itemsize, 0
    memory = torch.empty(min(step, count), dtype=dtype)
    for begin in range(0, max(count, 1), step):
        piece = read_part(folder, entry, begin, min(begin + step, count), memory)
        crc = zlib.crc32(bytes_of(piece), crc)
        yield piece
    if crc != entry.crc32:
        raise OSError(errno.EIO, _differs(folder, name, entry))


def _differs(folder: Folder, name: str, entry: Entry) -> str:
    return f"{folder.path / entry.file}: the bytes of {name} are not those that were written"


def check(folder: Folder, name: str, entry: Entry) -> str | None:
    """Return a description of the damage of the stored tensor, or None."""
    crc, at, end = 0, entry.begin, entry.begin + entry.nbytes
    try:
        with folder.open(entry.file) as file:
            while at < end:
                data = os.pread(file.fileno(), min(PIECE_NBYTES, end - at), at)
                if not data:
                    return f"{folder.path / entry.file}: ends {end - at} bytes before the end of {name}"
                crc = zlib.crc32(data, crc)
                at += len(data)
    except OSError as error:
        return f"{folder.path / entry.file}: {error.strerror}, but it holds {name}"
    return None if crc == entry.crc32 else _differs(folder, name, entry)


def read_entries(path: Path) -> dict[str, Entry]:
    """Read the entries of any safetensors file by name (without checksums). Its library checks all rules of the format.

    Raises: OSError (EIO: the file is shorter than its header says); ValueError naming the file that is not valid, or a
    dtype that torch lacks.
    """
    if not path.is_file():  # the library would wait for the writer of a pipe
        raise OSError(errno.ENOENT, "there is no such file", str(path))
    try:
        with safe_open(path, "numpy"):  # header's length, dtypes, shapes, offsets from 0 to the end without gaps
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length).decode(), object_pairs_hook=_once)
        header.pop("__metadata__", None)
        entries = {}
        for name, tensor in header.items():
            begin, end = tensor["data_offsets"]
            shape = tuple(tensor["shape"])
            entries[name] = Entry(path.name, tensor["dtype"], shape, 8 + length + begin, end - begin, 0)
    except (SafetensorError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        _check_length(path)
        raise ValueError(f"{path} is not a valid safetensors file: {error}") from error
    for name, entry in entries.items():
        if entry.dtype not in _DTYPES:
            raise ValueError(f"{path}: {name} is {entry.dtype}; known are {', '.join(_DTYPES)}")
    return entries


def _check_length(path: Path) -> None:
    """Raise OSError if the file ends before its last tensor, as a truncated copy or download does."""
    size = path.stat().st_size
    with (
        contextlib.suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError),
        path.open("rb") as file,
    ):
        length = int.from_bytes(file.read(8), "little")
        if length > min(size, 100_000_000):
            return
        header = json.loads(file.read(length).decode())
        needed = 8 + length + max(header[name]["data_offsets"][1] for name in header if name != "__metadata__")
        if size < needed:
            raise OSError(errno.EIO, f"the file has {size} bytes, but its tensors end at {needed}", str(path))


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises: ValueError for a duplicate name, which the format forbids."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice in its header")
    return found
