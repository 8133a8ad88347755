"""Snapshots of swap files: a directory with the copied data files and a manifest, replaced as a whole.

Invariant: manifest.json always names data files that are whole and on disk. A new snapshot writes its data next to the
old one's under a new generation's name. Then it renames its manifest over the old one, and removes unnamed data files.
A kill at any point leaves the last snapshot.
Thread rule: one process at a time works on a directory (flock); a second one gets an OSError with errno EBUSY.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zcomm import _core

FORMAT = "zcomm-swap-snapshot 1"
_OURS = b'"format": "zcomm-swap-snapshot '  # of any version, damaged or not
_MANIFEST = "manifest.json"
_NEW = f"{_MANIFEST}.new"
_DATA = re.compile(r"data-[0-9a-f]{16}-[0-9]+")

Form = tuple[tuple[int, ...], torch.dtype]


def write(
    directory: Path, drives: int, copy_to: Callable[[list[str]], dict[str, Any]], forms: dict[str, Form]
) -> dict[str, Any]:
    """Write a snapshot; return the core's description of it. Raises: OSError; FileExistsError if the manifest is of
    another format."""
    if not directory.exists():
        directory.mkdir(mode=0o700)
        _sync(directory.parent)
    with _locked(directory) as folder:
        old = _names(directory)
        if old is not None:
            _remove(directory, keep=old)
        generation = secrets.token_hex(8)
        names = [f"data-{generation}-{drive}" for drive in range(drives)]
        image = copy_to([str(directory / name) for name in names])
        try:
            for key in image["keys"]:
                shape, dtype = forms[key["key"]]
                key["shape"], key["dtype"] = list(shape), str(dtype).removeprefix("torch.")
            _write_manifest(directory, {**image, "files": names})
        except BaseException:
            if _names(directory) != names:  # else an interrupt came when it was in place
                _unlink(directory, [*names, _NEW])
            raise
        os.fsync(folder)
        _remove(directory, keep=names)
        return image


@dataclass(frozen=True)
class Key:
    """One key of a snapshot: its form, and the offsets of its tiles."""

    name: str
    nbytes: int
    form: Form
    first: int
    offsets: list[int]
    checksums: list[int]


class Snapshot:
    """A snapshot, open for reading. Use as a context manager.

    Raises: FileNotFoundError (no manifest); OSError EIO naming the damaged file; ValueError for another format, or
    naming an invalid field.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stack = contextlib.ExitStack()
        try:
            self._stack.enter_context(_locked(directory, shared=True))
            body = _read_manifest(directory)
            self._files: list[tuple[int, Path]] = []
            for name in _names_in(body, directory / _MANIFEST):
                path = directory / name
                file = _open_file(path)
                self._stack.callback(os.close, file)
                self._files.append((file, path))
            fields = _Fields(body, directory / _MANIFEST, len(self._files))
            self._tile, self._alignment, self.keys = fields.tile, fields.alignment, fields.keys()
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def load(self, key: Key) -> torch.Tensor:
        """Load the key's data, and compare each tile with its checksum.

        Raises: OSError EIO naming key, path and offset.
        """
        return _load(self._files, self._tile, self._alignment, key)


class Copy:
    """Copy of a swap file's present data, in unnamed files on its drives, which are freed by close() or process exit.

    If the file system can, blocks are shared; otherwise the drives need as many bytes again. Raises: as
    ``SwapFile.snapshot``.
    """

    def __init__(self, swap: _core.SwapFile) -> None:
        paths = [Path(path).with_name(_core.SwapFile.COPY_NAME) for path in swap.stats()["paths"]]
        try:
            image = swap.copy_beside()
        except FileNotFoundError as error:
            raise self.no_place(error) from error
        self._files: list[tuple[int, Path]] = list(zip(image["descriptors"], paths, strict=True))
        self._tile, self._alignment = int(image["tile_nbytes"]), int(image["alignment"])
        whole = torch.uint8
        self._keys = {
            each["key"]: Key(
                each["key"], each["nbytes"], ((each["nbytes"],), whole), each["first"], each["offsets"], each["crc32c"]
            )
            for each in image["keys"]
        }

    @staticmethod
    def no_place(error: FileNotFoundError) -> FileNotFoundError:
        """Return ``error`` with a remedy."""
        gone = "the swap file's directory was removed, so a copy has no place on its drive"
        return FileNotFoundError(errno.ENOENT, f"{gone}; save(wait=True) reads the state instead", error.filename)

    def finish(self) -> None:
        """Do nothing: the copy is whole."""

    def load(self, name: str, memory: torch.Tensor | None = None) -> torch.Tensor:
        """Load as flat uint8, each tile compared with its checksum, into ``memory`` if it is large enough.

        Raises: OSError EIO naming key, path and offset.
        """
        return _load(self._files, self._tile, self._alignment, self._keys[name], memory)

    def close(self) -> None:
        while self._files:
            os.close(self._files.pop()[0])


def _load(
    files: list[tuple[int, Path]], tile_nbytes: int, alignment: int, key: Key, memory: torch.Tensor | None = None
) -> torch.Tensor:
    if key.nbytes > sum(os.fstat(file).st_size for file, _ in files):  # before memory for it is asked for
        at = key.first % len(files)
        raise _damaged(files[at][1], f"key {key.name!r} at offset {key.offsets[at]}: unexpected end of file")
    out = room_for(key.nbytes, memory)
    octets = out.numpy().data
    for number, (begin, end) in enumerate(_tiles(key.nbytes, tile_nbytes, alignment)):
        tile = begin // tile_nbytes
        drive = (key.first + tile) % len(files)
        file, path = files[drive]
        offset = key.offsets[drive] + tile // len(files) * tile_nbytes + begin % tile_nbytes
        _read_whole(file, octets[begin:end], offset, key.name, path)
        if key.checksums:
            found = _core.crc32c(out.data_ptr() + begin, end - begin)
            if found != key.checksums[number]:
                what = f"crc32c {found:#010x} instead of {key.checksums[number]:#010x}"
                raise _damaged(path, f"key {key.name!r} at offset {offset} differs from the bytes written, {what}")
    return out


def room_for(nbytes: int, memory: torch.Tensor | None) -> torch.Tensor:
    """Return so many bytes of ``memory`` (flat uint8), or new memory if it is too small."""
    if memory is None or memory.numel() < nbytes:
        return torch.empty(nbytes, dtype=torch.uint8)
    return memory[:nbytes]


def _tiles(nbytes: int, tile_nbytes: int, alignment: int) -> Iterator[tuple[int, int]]:
    """Cut a key as the core does: tiles, then the rest beyond the last multiple of the alignment."""
    whole = nbytes // alignment * alignment
    for begin in range(0, whole, tile_nbytes):
        yield begin, min(begin + tile_nbytes, whole)
    if whole < nbytes:
        yield whole, nbytes


def _read_whole(file: int, memory: memoryview, offset: int, key: str, path: Path) -> None:
    done = 0
    while done < len(memory):
        got = os.preadv(file, [memory[done:]], offset + done)
        if got == 0:
            raise _damaged(path, f"key {key!r} at offset {offset + done}: unexpected end of file")
        done += got
    with contextlib.suppress(OSError):
        os.posix_fadvise(file, offset, done, os.POSIX_FADV_DONTNEED)


class _Fields:
    """Fields of a manifest, checked, because its checksum does not authenticate the writer.

    drives: number of the data files. Raises: ValueError naming manifest and field.
    """

    def __init__(self, body: dict[str, Any], path: Path, drives: int) -> None:
        self._path, self._drives = path, drives
        self._body = body
        self.alignment = self._whole("alignment", body.get("alignment"), 1)
        self.tile = self._whole("tile_nbytes", body.get("tile_nbytes"), self.alignment)
        if self.tile % self.alignment:
            raise self._wrong("tile_nbytes", self.tile, f"a multiple of alignment={self.alignment}")

    def keys(self) -> list[Key]:
        listed = self._list("keys", self._body.get("keys"))
        if listed and not self._drives:
            raise self._wrong("files", [], "the files of the keys' data")
        return [self._key(f"keys[{number}]", each) for number, each in enumerate(listed)]

    def _key(self, field: str, each: Any) -> Key:
        if not isinstance(each, dict) or not isinstance(each.get("key"), str):
            raise self._wrong(field, each, "an object with the name of a key")
        shape = tuple(self._whole(f"{field}.shape", size) for size in self._list(f"{field}.shape", each.get("shape")))
        kind = each.get("dtype")
        dtype = getattr(torch, kind, None) if isinstance(kind, str) else None
        if not isinstance(dtype, torch.dtype):
            raise self._wrong(f"{field}.dtype", kind, "a dtype of torch")
        nbytes = self._whole(f"{field}.nbytes", each.get("nbytes"))
        if math.prod(shape) * dtype.itemsize != nbytes:
            raise self._wrong(f"{field}.nbytes", nbytes, f"those of a tensor of {shape} {dtype}")
        whole = nbytes // self.alignment * self.alignment
        tiles = -(-whole // self.tile) + (whole < nbytes)  # as _tiles() cuts it
        offsets = self._numbers(f"{field}.offsets", each.get("offsets"), (self._drives,))
        checksums = self._numbers(f"{field}.crc32c", each.get("crc32c"), (0, tiles))
        first = self._whole(f"{field}.first", each.get("first"))
        return Key(each["key"], nbytes, (shape, dtype), first, offsets, checksums)

    def _numbers(self, field: str, value: Any, lengths: tuple[int, ...]) -> list[int]:
        numbers = [self._whole(field, each) for each in self._list(field, value)]
        if len(numbers) not in lengths:
            raise self._wrong(field, value, f"{' or '.join(map(str, lengths))} numbers")
        return numbers

    def _list(self, field: str, value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise self._wrong(field, value, "a list")
        return value

    def _whole(self, field: str, value: Any, low: int = 0) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value < 2**62:
            raise self._wrong(field, value, f"a whole number of at least {low}")
        return value

    def _wrong(self, field: str, value: Any, expected: str) -> ValueError:
        return ValueError(f"{self._path}: {field} is {str(value)[:100]!r}; expected {expected}")


def _names_in(body: Any, path: Path) -> list[str]:
    """Return the data files that a manifest names. Raises: OSError EIO, ValueError."""
    names = body.get("files") if isinstance(body, dict) else None
    if not isinstance(names, list):
        raise ValueError(f"{path}: files is {str(names)[:100]!r}; expected a list of names")
    for name in names:
        if not isinstance(name, str) or not _DATA.fullmatch(name):
            raise _damaged(path, f"{name!r} is not a data file's name")
    return names


def _open_file(path: Path) -> int:
    """Open a regular file for reading: no link, and no pipe, which would wait for its writer. Raises: OSError."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file


def _write_manifest(directory: Path, body: dict[str, Any]) -> None:
    text = json.dumps(body, sort_keys=True)
    new = directory / _NEW
    file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(file, "w", encoding="utf-8") as stream:
        stream.write(json.dumps({"format": FORMAT, "crc32c": _crc_of(text), "body": body}, sort_keys=True))
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(new, directory / _MANIFEST)


def _read_manifest(directory: Path) -> dict[str, Any]:
    path = directory / _MANIFEST
    with open(_open_file(path), "rb") as stream:
        raw = stream.read()
    try:
        manifest = json.loads(raw)
        body: dict[str, Any] = manifest["body"]
        known = manifest["format"], manifest["crc32c"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(path, f"not a manifest: {type(error).__name__}: {error}") from None
    if known[0] != FORMAT:
        raise ValueError(f"{path}: format {known[0]!r}, this zcomm reads {FORMAT!r}")
    if _crc_of(json.dumps(body, sort_keys=True)) != known[1]:
        raise _damaged(path, "its checksum does not fit its text")
    return body


def _crc_of(text: str) -> int:
    raw = bytearray(text.encode())
    return _core.crc32c(torch.frombuffer(raw, dtype=torch.uint8).data_ptr(), len(raw))


def _names(directory: Path) -> list[str] | None:
    """Return the data files that the manifest names; an empty list without a manifest.

    Returns: None for a snapshot that is damaged, or in another format.
    Raises: FileExistsError for a manifest of another program.
    """
    path = directory / _MANIFEST
    try:
        return _names_in(_read_manifest(directory), path)
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError):
        if not path.is_file() or _OURS not in path.read_bytes():
            what = "it is not a swap file's snapshot; nothing was changed, take another directory"
            raise FileExistsError(errno.EEXIST, what, str(path)) from None
        return None


def _remove(directory: Path, keep: list[str]) -> None:
    """Remove data files of killed or failed snapshots, and of the previous generation."""
    _unlink(directory, [n for n in os.listdir(directory) if n not in keep and (_DATA.fullmatch(n) or n == _NEW)])


def _unlink(directory: Path, names: list[str]) -> None:
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(directory / name)


@contextlib.contextmanager
def _locked(directory: Path, shared: bool = False) -> Iterator[int]:
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(folder, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(errno.EBUSY, "another snapshot or restore works here", str(directory)) from None
        yield folder
    finally:
        os.close(folder)


def _sync(directory: Path) -> None:
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _damaged(path: Path, what: str) -> OSError:
    return OSError(errno.EIO, f"snapshot of a swap file: {what}", str(path))
