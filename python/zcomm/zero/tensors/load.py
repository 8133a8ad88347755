"""load_weights: weights from safetensors files straight into shards; each rank reads its own elements.

Source: the folder that transformers' save_pretrained writes (model.safetensors, or model.safetensors.index.json with
its parts), any folder of safetensors files, or one file. Or a folder that ``ZeroOptimizer.save`` wrote (weights only).
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch
from torch import nn

from zcomm.memory.swap_file import StrPath
from zcomm.zero.agree import ErrorHolder, agree, agreed, all_values, check_places
from zcomm.zero.files.folder import Folder, check_plain_name
from zcomm.zero.files.tensor_file import Entry, read_entries, read_into, read_part
from zcomm.zero.format_names import format_names
from zcomm.zero.layout.local_param import as_local, cut_of
from zcomm.zero.layout.sections import NoModel
from zcomm.zero.materialize import deferred
from zcomm.zero.parts import Parts
from zcomm.zero.registry import Owner, open_parts, parts_of, train_of
from zcomm.zero.saved_names import matched, other_paths, state_tensors
from zcomm.zero.tensors import shard_io

Entries = Mapping[str, Entry]
_NO_WEIGHTS = ("optimizer-", "client-state.", "extra-state-")  # other safetensors files of a checkpoint


def load_weights(
    target: Owner | nn.Module,
    path: StrPath,
    *,
    strict: bool = True,
    rename: Callable[[str], str | None] | None = None,
) -> None:
    """Load weights by name from a safetensors file, or a folder of them.

    target: a ZeroOptimizer, or a model before its construction. With a ZeroOptimizer the call is collective: each rank
    reads its own elements into masters and weights; the optimizer's state is unchanged. With a model call it on all
    ranks. Its parameters without memory (of ``zero.Init`` or torch's meta device) refer to the file, from which
    ZeroOptimizer reads its shards: keep the file until then. Other parameters are read at once.
    rename: maps a name in the file to a name in the model; None skips the tensor. Attributes of wrappers
    (checkpoint_wrapper, torch.compile, DistributedDataParallel) may be in the names of only one side. strict: the names
    are the same on both sides (one of the names of a tied weight is enough). Numbers are converted to the target's
    type, but never complex to real, nor real to integer.
    Raises, before any change: FileNotFoundError. OSError for a file that is short. ValueError for a file that is not
    valid safetensors, a tensor that is in two files, and listing names and shapes that do not fit.
    """
    where = Path(path)
    if isinstance(target, nn.Module):
        source, found = _fitting(target, where, rename, strict, {})
        with torch.no_grad():
            _load_model(target, source, found)
        return
    open_parts(target).updates.drain("load_weights()")
    parts = parts_of(target)
    # Each rank reads its own elements, which two files would mix.
    check_places("load_weights()", all_values(parts.comm, os.path.realpath(where), "file of weights"))
    kept, names = ErrorHolder(), list[str]()
    with kept.errors():
        if isinstance(parts.model, NoModel):
            raise ValueError("load_weights needs names: build ZeroOptimizer with the model, not with its parameters")
        names += dict(state_tensors(parts.model))
    names = [name for each in parts.comms.told(names, "names of the model") for name in each]
    with kept.errors():  # `rename` is the program's
        shapes = {number: parts.cuts[index].shape for number, index in parts.index_of.items()}
        source, found = _fitting(parts.model, where, rename, strict, shapes, names)
    what = f"loading weights from {where}"
    agree(parts.comm, kept.error, what)
    parts = parts_of(target)
    with torch.no_grad(), parts.comm.no_deadline(), train_of(target).poison.watch():
        _load_shards(parts, parts.model, source, found, what)


def _fitting(
    model: nn.Module,
    where: Path,
    rename: Callable[[str], str | None] | None,
    strict: bool,
    shapes: Mapping[int, torch.Size],
    known: Collection[str] = (),
) -> tuple[Source, dict[str, Entry]]:
    """Return the files, and their entries as ``match`` returns them. known: names of models of other ranks."""
    source = Source(where)
    entries = _renamed(source.entries, rename)
    entries = _renamed(entries, matched(entries, {*known, *dict(state_tensors(model))}, other_paths(model)))
    elsewhere = set(known).difference(dict(state_tensors(model)))
    entries = {name: entry for name, entry in entries.items() if name not in elsewhere}
    return source, match(model, entries, shapes, strict, where)


class Source:
    """Safetensors files of one folder: entries of all tensors by name, and reads of their elements.

    Raises: FileNotFoundError, OSError; ValueError naming a file or index that is not valid.
    """

    def __init__(self, path: Path) -> None:
        self.entries: dict[str, Entry] = {}
        self._folder = path.parent if path.is_file() else path
        self._seen: dict[str, tuple[int, ...]] = {}
        index = path / "model.safetensors.index.json"
        places = _places(index) if index.is_file() else {}
        for file in self._files(path, set(places.values())):
            self._seen[file.name] = _identity(file.stat())
            for name, entry in read_entries(file).items():
                known = self.entries.get(name)
                if known is None or places.get(name) == file.name:
                    self.entries[name] = entry
                elif places.get(name) != known.file:
                    raise ValueError(f"{path}: {name} is in {known.file} and in {file.name}; give the one to load")

    @staticmethod
    def _files(path: Path, named: set[str]) -> list[Path]:
        if path.is_file():
            return [path]
        whole = path / "model.safetensors"
        files = [path / name for name in sorted(named)] or ([whole] if whole.is_file() else [])
        files = files or [each for each in sorted(path.glob("*.safetensors")) if not each.name.startswith(_NO_WEIGHTS)]
        if not files:
            raise FileNotFoundError(errno.ENOENT, "no safetensors file is there", str(path))
        return files

    def open(self) -> Folder:
        """Open the folder for ``read``; it keeps read files open. Raises: OSError."""
        return Folder(self._folder, links=True)

    def read(self, entry: Entry, begin: int = 0, end: int | None = None, folder: Folder | None = None) -> torch.Tensor:
        """Return elements [begin, end) of a tensor, flat. Raises: OSError, also if the file has changed."""
        if folder is None:
            with self.open() as opened:
                return self.read(entry, begin, end, opened)
        self._check(folder, entry.file)
        return read_part(folder, entry, begin, end)

    def read_into(self, entry: Entry, out: torch.Tensor, folder: Folder) -> None:
        """Copy a tensor into ``out``, of its shape and any dtype, piece by piece. Raises: as ``read``."""
        self._check(folder, entry.file)
        read_into(folder, entry, out)

    def _check(self, folder: Folder, name: str) -> None:
        if _identity(os.fstat(folder.kept(name).fileno())) != self._seen[name]:
            what = "the file has changed since load_weights read its header; load it again"
            raise OSError(errno.ESTALE, what, str(self._folder / name))


def _identity(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _places(index: Path) -> dict[str, str]:
    """Return the file of each tensor in the index. Raises: OSError, ValueError naming the index."""
    try:
        weight_map = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(f"{index} is not a valid index of safetensors files: {error!r}") from error
    return {name: check_plain_name(file, index, f'weight_map["{name}"]') for name, file in weight_map.items()}


def _renamed(entries: Entries, rename: Callable[[str], str | None] | Mapping[str, str] | None) -> dict[str, Entry]:
    """Rename the tensors. rename: names missing in a mapping are kept. Raises: ValueError if two names become equal."""
    found: dict[str, Entry] = {}
    old: dict[str, str] = {}
    for name, entry in entries.items():
        new = name if rename is None else rename.get(name, name) if isinstance(rename, Mapping) else rename(name)
        if new is None:
            continue
        if new in found:
            raise ValueError(f"rename: {old[new]} and {name} both become {new}; return None for one of them")
        found[new], old[new] = entry, name
    return found


def _rank(dtype: torch.dtype) -> int:
    """Return 0 for integers, 1 for real and 2 for complex numbers."""
    return 2 if dtype.is_complex else int(dtype.is_floating_point)


def match(
    model: nn.Module, entries: Entries, shapes: Mapping[int, torch.Size], strict: bool, where: Path
) -> dict[str, Entry]:
    """Return the entries to load by the model's names, each tensor once. shapes: by id(), of sharded parameters."""
    found: dict[str, Entry] = {}
    tensors = dict(state_tensors(model))
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    missing, other, lossy = [], [], []
    for number, aliases in names.items():
        known = [alias for alias in aliases if alias in entries]
        if not known:
            missing.append(aliases[0])
            continue
        name = known[0]
        shape = tuple(shapes.get(number, cut_of(tensors[name]).shape))
        if entries[name].shape != shape:
            other.append(f"{name}: {entries[name].shape} there, {shape} here")
        if _rank(entries[name].torch_dtype) > _rank(tensors[name].dtype):
            lossy.append(f"{name}: {entries[name].dtype} there, {tensors[name].dtype} here")
        found[name] = entries[name]
    unexpected = [name for name in entries if name not in tensors]
    lines = [
        *([f"not in the file: {format_names(missing)}"] if missing and strict else []),
        *([f"not in the model: {format_names(unexpected)}"] if unexpected and strict else []),
        *([f"other shapes: {format_names(other)}"] if other else []),
        *([f"values would be lost: {format_names(lossy)}"] if lossy else []),
        *(["no name is the same"] if not found and not strict else []),
    ]
    if lines:
        raise ValueError(f"{where} has the weights of another model; {'; '.join(lines)}")
    return found


def _reader(source: Source, entry: Entry, folder: Folder | None = None) -> Callable[[int, int], torch.Tensor]:
    return lambda begin, end: source.read(entry, begin, end, folder).to(torch.float32)


def _load_model(model: nn.Module, source: Source, found: Entries) -> None:
    tensors = dict(state_tensors(model))
    with source.open() as folder:
        for name, entry in found.items():
            if tensors[name].is_meta:
                deferred.read_from(tensors[name], _reader(source, entry))
            else:
                _read_tensor(source, entry, tensors[name], folder)


def _read_tensor(source: Source, entry: Entry, tensor: torch.Tensor, folder: Folder) -> None:
    if cut_of(tensor).count == 1:
        source.read_into(entry, tensor.data, folder)
        return
    whole = torch.empty(entry.shape, dtype=tensor.dtype)
    source.read_into(entry, whole, folder)
    as_local(tensor).data.copy_(cut_of(tensor).part_of(whole))


def _load_shards(parts: Parts, model: nn.Module, source: Source, found: Entries, what: str) -> None:
    """Load this rank's shards. Collective: an error of one rank is raised on all."""
    agreed(parts.comm, what, parts.store.synchronize)  # no rank uses the old weights from here on
    agreed(parts.comm, what, lambda: _read_shards(parts, dict(state_tensors(model)), source, found))
    parts.store.publish()
    parts.comm.barrier(name="weights are loaded")


def _read_shards(parts: Parts, tensors: dict[str, torch.Tensor], source: Source, found: Entries) -> None:
    with source.open() as folder:
        reads: dict[int, shard_io.Reads] = {}
        for name, entry in found.items():
            index = parts.index_of.get(id(tensors[name]))
            if index is None:
                _read_tensor(source, entry, tensors[name], folder)
            else:
                read, cut = _reader(source, entry, folder), parts.cuts[index]
                reads[index] = shard_io.Reads(lambda part, read=read, cut=cut: cut.read(part, read))  # type: ignore[misc]
        for bucket in parts.geometry.every:
            shard_io.set_bucket(parts, bucket, reads)
