"""Files of arrays of whole numbers: NAME.bin has their elements, NAME.idx their type, sizes and offsets.

The format is that of Megatron's and DeepSpeed's memory-mapped data sets (magic "MMIDIDX"), little-endian. Reading maps
the files and copies nothing. Sizes and offsets are checked against the files, and nothing in a file is run.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

_MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<QBQQ")  # version, dtype, arrays, documents
_DTYPES: dict[int, np.dtype[Any]] = {
    code: np.dtype(name) for code, name in enumerate(("u1", "i1", "<i2", "<i4", "<i8", "<u2", "<u4", "<u8"), start=1)
}


class MMapIndexedDataset:
    """The arrays of NAME.bin and NAME.idx. path: without the endings. skip_warmup: without effect.

    Raises: ValueError that names the file and the fault; OSError.
    """

    def __init__(self, path: str | os.PathLike[str], skip_warmup: bool = False) -> None:
        self._path = os.fspath(path)
        name = f"{self._path}.idx"
        index = Path(name).read_bytes()
        begin = len(_MAGIC) + _HEAD.size
        if not index.startswith(_MAGIC) or len(index) < begin:
            raise ValueError(f"{name}: not an index of arrays (MMIDIDX)")
        version, code, count, documents = _HEAD.unpack_from(index, len(_MAGIC))
        if version != 1 or code not in _DTYPES:
            raise ValueError(f"{name}: version {version}, dtype {code} is not known")
        if len(index) != begin + 12 * count + 8 * documents:
            raise ValueError(f"{name}: {len(index)} bytes do not hold {count} arrays and {documents} documents")
        self.dtype = _DTYPES[code]
        self.sizes = np.frombuffer(index, "<i4", count, begin)
        self._offsets = np.frombuffer(index, "<i8", count, begin + 4 * count)
        self.doc_idx = np.frombuffer(index, "<i8", documents, begin + 12 * count)
        nbytes = os.stat(f"{self._path}.bin").st_size
        ends = self._offsets + self.sizes.astype(np.int64) * self.dtype.itemsize
        if count and (self.sizes.min() < 0 or self._offsets.min() < 0 or max(self._offsets.max(), ends.max()) > nbytes):
            raise ValueError(f"{name}: arrays lie outside of {self._path}.bin, which has {nbytes} bytes")
        self._data = np.memmap(f"{self._path}.bin", np.uint8, "r") if nbytes else np.empty(0, np.uint8)

    def __len__(self) -> int:
        return len(self.sizes)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray[Any, Any]:
        """Return ``length`` elements of an array, from ``offset`` on; None: the rest. Read-only."""
        whole = self[index]
        return whole[offset : None if length is None else offset + length]  # type: ignore[no-any-return]

    def __getitem__(self, index: Any) -> Any:
        """Return an array, or a list of arrays for a slice. Read-only."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"{self._path}: array {index} of {len(self)}")
        begin = int(self._offsets[index])
        return self._data[begin : begin + int(self.sizes[index]) * self.dtype.itemsize].view(self.dtype)

    def size(self, index: int) -> int:
        """Return the elements of an array."""
        return int(self.sizes[index])

    @staticmethod
    def exists(path: str | os.PathLike[str]) -> bool:
        """Return True if both files are there."""
        return all(os.path.exists(f"{os.fspath(path)}{ending}") for ending in (".idx", ".bin"))

    def __reduce__(self) -> Any:
        return MMapIndexedDataset, (self._path,)


class MMapIndexedDatasetBuilder:
    """A writer of such files. out_file: path of NAME.bin. dtype: of whole numbers, numpy's or torch's."""

    def __init__(self, out_file: str | os.PathLike[str], dtype: Any = np.int64) -> None:
        self._code = code_of(dtype)
        self._file: IO[bytes] = open(out_file, "wb")  # noqa: SIM115  # finalize() closes it
        self._sizes: list[int] = []
        self._doc_idx = [0]

    def add_item(self, tensor: torch.Tensor) -> None:
        """Append an array."""
        self.add_item_numpy(tensor.numpy())

    def add_item_numpy(self, array: np.ndarray[Any, Any]) -> None:
        """Append an array. Raises: ValueError for an element that the dtype does not have."""
        stored = array.astype(_DTYPES[self._code])
        if not np.array_equal(stored, array):
            raise ValueError(f"{self._file.name}: an element does not fit into {stored.dtype}")
        self._file.write(stored.tobytes())
        self._sizes.append(stored.size)

    def add_items(self, arrays: Sequence[np.ndarray[Any, Any]]) -> None:
        """Append arrays."""
        for array in arrays:
            self.add_item_numpy(array)

    def end_document(self) -> None:
        """End a document."""
        self._doc_idx.append(len(self._sizes))

    def finalize(self, index_file: str | os.PathLike[str]) -> None:
        """Close the data, and write the index. index_file: path of NAME.idx."""
        self._file.close()
        sizes = np.asarray(self._sizes, "<i4")
        nbytes = sizes.astype("<i8") * _DTYPES[self._code].itemsize
        with open(index_file, "wb") as file:
            file.write(_MAGIC + _HEAD.pack(1, self._code, len(sizes), len(self._doc_idx)))
            file.write(sizes.tobytes() + (np.cumsum(nbytes) - nbytes).astype("<i8").tobytes())
            file.write(np.asarray(self._doc_idx, "<i8").tobytes())


def code_of(dtype: Any) -> int:
    """Return the number of a dtype in an index. Raises: ValueError for one that is not of whole numbers."""
    name = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
    for code, known in _DTYPES.items():
        if known == np.dtype(name):
            return code
    raise ValueError(f"dtype {dtype} is not one of whole numbers: {', '.join(map(str, _DTYPES.values()))}")


def find_fit_int_dtype(min_value: int, max_value: int) -> type[np.generic]:
    """Return the smallest dtype of whole numbers from ``min_value`` to ``max_value``."""
    kinds = (np.uint8, np.uint16, np.uint32, np.uint64) if min_value >= 0 else (np.int8, np.int16, np.int32, np.int64)
    for kind in kinds:
        if np.iinfo(kind).min <= min_value and max_value <= np.iinfo(kind).max:
            return kind
    raise ValueError(f"no dtype has whole numbers from {min_value} to {max_value}")


def create_mmap_dataset_builder(fname: str | os.PathLike[str], dtype: Any) -> MMapIndexedDatasetBuilder:
    """Return a writer of ``fname``, without the endings."""
    return MMapIndexedDatasetBuilder(f"{os.fspath(fname)}.bin", dtype=dtype)


def close_mmap_dataset_builder(builder: MMapIndexedDatasetBuilder, fname: str | os.PathLike[str]) -> None:
    """End the only document, and write the index of ``fname``."""
    builder.end_document()
    builder.finalize(f"{os.fspath(fname)}.idx")


def write_arrays(path: str | os.PathLike[str], arrays: Sequence[np.ndarray[Any, Any]], dtype: Any) -> None:
    """Write arrays as one document."""
    builder = create_mmap_dataset_builder(path, dtype)
    builder.add_items(arrays)
    close_mmap_dataset_builder(builder, path)
