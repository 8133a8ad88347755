"""safetensors files, written tensor by tensor (the library's own writer wants all in memory), and read in parts.

Format: 8 bytes length of the header, header (JSON: name -> dtype, shape, data_offsets), data.
Source: https://github.com/huggingface/safetensors#format; tests read the files with that library.
"""

from __future__ import annotations

import errno
import json
import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zcomm.zero.checkpoint import durable

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
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def check_dtypes(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises: ValueError naming a tensor that safetensors has no word for."""
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

    def as_json(self) -> list[Any]:
        return [self.file, self.dtype, list(self.shape), self.begin, self.nbytes, self.crc32]

    @staticmethod
    def from_json(values: list[Any]) -> Entry:
        file, dtype, shape, begin, nbytes, crc32 = values
        return Entry(str(file), str(dtype), tuple(int(n) for n in shape), int(begin), int(nbytes), int(crc32))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes, without a copy where it is contiguous and on the CPU."""
    if tensor.numel() == 0:
        return memoryview(b"")
    array: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


class Writer:
    """A file whose tensors are known by name, dtype and shape beforehand and are then given in that order.

    An error is kept until ``close`` (a rank that cannot write must go on with the collectives that feed the others).
    """

    def __init__(
        self, path: Path, plan: list[tuple[str, torch.dtype, torch.Size]], metadata: dict[str, str] | None = None
    ) -> None:
        self.path = path
        self.entries: dict[str, Entry] = {}
        self.error: OSError | None = None
        self._plan = plan
        self._next = 0
        self._descriptor = -1
        header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
        at = 0
        for name, dtype, shape in plan:
            nbytes = shape.numel() * dtype.itemsize
            header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + nbytes]}
            at += nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._at = 8 + len(text)
        self.nbytes = self._at + at
        self._attempt(lambda: self._open(len(text).to_bytes(8, "little") + text))

    def _open(self, header: bytes) -> None:
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        durable.write_all(self._descriptor, memoryview(header), self.path)

    def _attempt(self, action: Any) -> None:
        if self.error is None:
            try:
                action()
            except OSError as error:
                self.error = error

    def add(self, tensor: torch.Tensor) -> None:
        """The next tensor of the plan."""
        name, dtype, shape = self._plan[self._next]
        assert tensor.dtype == dtype and tensor.shape == shape, name
        data = bytes_of(tensor)
        entry = Entry(self.path.name, _NAMES[dtype], tuple(shape), self._at, data.nbytes, zlib.crc32(data))
        self.entries[name] = entry
        self._at += data.nbytes
        self._next += 1
        self._attempt(lambda: durable.write_all(self._descriptor, data, self.path))

    def close(self) -> None:
        """Sync and close. Raises: the first OSError of all calls."""
        if self._descriptor >= 0:
            self._attempt(lambda: durable.sync_file(self._descriptor, self.path))
            os.close(self._descriptor)
            self._descriptor = -1
        if self.error is not None:
            raise self.error


def read_part(folder: Path, entry: Entry, begin: int = 0, end: int | None = None) -> torch.Tensor:
    """Elements [begin, end) of a tensor, flat. Raises: OSError naming the file when it is short or not readable."""
    dtype = entry.torch_dtype
    count = entry.nbytes // dtype.itemsize
    end = count if end is None else end
    out = torch.empty(end - begin, dtype=dtype)
    target, at = bytes_of(out), entry.begin + begin * dtype.itemsize
    path = folder / entry.file
    with path.open("rb", buffering=0) as file:
        file.seek(at)
        done = 0
        while done < target.nbytes:
            got = file.readinto(target[done:])
            if not got:
                raise OSError(5, f"the file ends after {at + done} bytes, the checkpoint needs more", str(path))
            done += got
    return out


def read_whole(folder: Path, name: str, entry: Entry) -> torch.Tensor:
    """The tensor, compared with its checksum. Raises: OSError naming file and tensor."""
    tensor = read_part(folder, entry).view(entry.shape)
    if zlib.crc32(bytes_of(tensor)) != entry.crc32:
        raise OSError(errno.EIO, _differs(folder, name, entry))
    return tensor


def _differs(folder: Path, name: str, entry: Entry) -> str:
    return f"{folder / entry.file}: the bytes of {name} are not those that were written"


def read_entries(path: Path) -> dict[str, Entry]:
    """The tensors of any safetensors file by name (without checksums). Raises: OSError, ValueError naming the file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length < 2 or 8 + length > size:
            raise ValueError(f"{path} is no safetensors file: its header would have {length} of {size} bytes")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            entries = {
                name: Entry(
                    path.name,
                    tensor["dtype"],
                    tuple(tensor["shape"]),
                    8 + length + tensor["data_offsets"][0],
                    tensor["data_offsets"][1] - tensor["data_offsets"][0],
                    0,
                )
                for name, tensor in header.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"{path} is no safetensors file: {error!r} in its header") from error
    for name, entry in entries.items():
        if entry.dtype not in _DTYPES:
            raise ValueError(f"{path}: {name} is {entry.dtype}; known are {', '.join(_DTYPES)}")
        if entry.begin + entry.nbytes > size:
            raise OSError(5, f"the file has {size} bytes, {name} ends at {entry.begin + entry.nbytes}", str(path))
    return entries


def check(folder: Path, name: str, entry: Entry) -> str | None:
    """What is wrong with the stored tensor, or None."""
    crc, step = 0, 1 << 24
    try:
        with (folder / entry.file).open("rb", buffering=0) as file:
            file.seek(entry.begin)
            left = entry.nbytes
            while left > 0:
                data = file.read(min(step, left))
                if not data:
                    return f"{folder / entry.file}: ends {left} bytes before the end of {name}"
                crc = zlib.crc32(data, crc)
                left -= len(data)
    except OSError as error:
        return f"{folder / entry.file}: {error.strerror}, but it holds {name}"
    return None if crc == entry.crc32 else _differs(folder, name, entry)
