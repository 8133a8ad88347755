"""Snapshots of swap files: a directory with the copied data files and a manifest, replaced as a whole.

Invariant: manifest.json always names data files that are whole and on disk. A new snapshot puts its data beside the old
one's under a new generation's name, then renames its manifest over the old one, then removes what no manifest names.
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
    """Take a snapshot; returns the core's description of it. Raises: OSError; FileExistsError where the manifest is of
    something else."""
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
    """One key of a snapshot: its form, and where its tiles lie."""

    name: str
    nbytes: int
    form: Form
    first: int
    offsets: list[int]
    checksums: list[int]


class Snapshot:
    """A snapshot, open for reading. Use as a context manager.

    Raises: FileNotFoundError (no manifest); OSError EIO naming what is damaged; ValueError for another format.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stack = contextlib.ExitStack()
        try:
            self._stack.enter_context(_locked(directory, shared=True))
            body = _read_manifest(directory)
            self._tile, self._alignment = int(body["tile_nbytes"]), int(body["alignment"])
            self.keys = [_key(each) for each in body["keys"]]
            self._files: list[tuple[int, Path]] = []
            for name in body["files"]:
                if not _DATA.fullmatch(name):
                    raise _damaged(directory / _MANIFEST, f"{name!r} is not a data file's name")
                path = directory / name
                file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                self._stack.callback(os.close, file)
                self._files.append((file, path))
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def load(self, key: Key) -> torch.Tensor:
        """The key's data, each tile compared with its checksum. Raises: OSError EIO naming key, path and offset."""
        return _load(self._files, self._tile, self._alignment, key)


class Copy:
    """What a swap file holds now, in files without a name on its own drives: gone when closed, or with the process.

    Blocks are shared where the file system can; otherwise as many bytes again are needed there. Raises: what
    ``SwapFile.snapshot`` raises.
    """

    def __init__(self, swap: _core.SwapFile) -> None:
        paths = [Path(path).with_name(_core.SwapFile.COPY_NAME) for path in swap.stats()["paths"]]
        try:
            image = swap.copy_to([str(path) for path in paths], durable=False)
        except FileNotFoundError as error:
            raise self.no_place(error) from error
        self._files: list[tuple[int, Path]] = []
        try:
            for path in paths:
                self._files.append((os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), path))
                os.unlink(path)
        except BaseException:
            self.close()
            for path in paths:  # what stays would be in the way of the next copy
                path.unlink(missing_ok=True)
            raise
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
        """``error``, and what to do."""
        gone = "the swap file's directory was removed, so a copy has no place on its drive"
        return FileNotFoundError(errno.ENOENT, f"{gone}; save(wait=True) reads the state instead", error.filename)

    def finish(self) -> None:
        """It is whole."""

    def load(self, name: str) -> torch.Tensor:
        """As flat uint8, each tile compared with its checksum. Raises: OSError EIO naming key, path and offset."""
        return _load(self._files, self._tile, self._alignment, self._keys[name])

    def close(self) -> None:
        while self._files:
            os.close(self._files.pop()[0])


def _load(files: list[tuple[int, Path]], tile_nbytes: int, alignment: int, key: Key) -> torch.Tensor:
    out = torch.empty(key.nbytes, dtype=torch.uint8)
    memory = out.numpy().data
    for number, (begin, end) in enumerate(_tiles(key.nbytes, tile_nbytes, alignment)):
        tile = begin // tile_nbytes
        drive = (key.first + tile) % len(files)
        file, path = files[drive]
        offset = key.offsets[drive] + tile // len(files) * tile_nbytes + begin % tile_nbytes
        _read_whole(file, memory[begin:end], offset, key.name, path)
        if key.checksums:
            found = _core.crc32c(out.data_ptr() + begin, end - begin)
            if found != key.checksums[number]:
                what = f"crc32c {found:#010x} instead of {key.checksums[number]:#010x}"
                raise _damaged(path, f"key {key.name!r} at offset {offset} is not what was written, {what}")
    return out


def _tiles(nbytes: int, tile_nbytes: int, alignment: int) -> Iterator[tuple[int, int]]:
    """As the core cuts a key: tiles, then what lies beyond the last multiple of the alignment."""
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


def _key(each: dict[str, Any]) -> Key:
    form = tuple(int(size) for size in each["shape"]), getattr(torch, each["dtype"])
    if math.prod(form[0]) * form[1].itemsize != each["nbytes"]:
        raise ValueError(f"key {each['key']!r}: {each['nbytes']} bytes are not a tensor of {form[0]} {form[1]}")
    return Key(each["key"], each["nbytes"], form, each["first"], each["offsets"], each["crc32c"])


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
    raw = path.read_bytes()
    try:
        manifest = json.loads(raw)
        body: dict[str, Any] = manifest["body"]
        known = manifest["format"], manifest["crc32c"]
    except (ValueError, KeyError, TypeError) as error:
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
    """The data files that the manifest names; none where there is no manifest; None: of a snapshot that is damaged, or
    in another format. Raises: FileExistsError for what is no snapshot's."""
    path = directory / _MANIFEST
    try:
        return [str(name) for name in _read_manifest(directory)["files"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError):
        if _OURS not in path.read_bytes():
            what = "it is no swap file's snapshot; nothing was changed, take another directory"
            raise FileExistsError(errno.EEXIST, what, str(path)) from None
        return None


def _remove(directory: Path, keep: list[str]) -> None:
    """What killed or failed snapshots left, and the generation before."""
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
