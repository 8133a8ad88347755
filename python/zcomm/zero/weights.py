"""load_weights: weights from safetensors files straight into shards; each rank reads what it keeps.

Source: the folder that transformers' save_pretrained writes (model.safetensors, or model.safetensors.index.json with
its parts), any folder of safetensors files, one file, or a folder that ``ZeroOptimizer.save`` wrote (weights alone).
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import nn

from zcomm.offload import StrPath
from zcomm.zero import access, deferred
from zcomm.zero.checkpoint.exchange import agree
from zcomm.zero.checkpoint.tensor_file import Entry, read_entries, read_part
from zcomm.zero.listed import listed
from zcomm.zero.optimizer import ZeroOptimizer

Entries = Mapping[str, Entry]


def load_weights(
    target: ZeroOptimizer | nn.Module,
    path: StrPath,
    *,
    strict: bool = True,
    rename: Callable[[str], str | None] | None = None,
) -> None:
    """Load weights by name from a safetensors file, or a folder of them.

    target: a ZeroOptimizer (collective: each rank reads its own elements into masters and weights; the optimizer's
    state stays), or a model before it (parameters without memory, of ``zero.Init`` or torch's meta device, remember
    the file, and ZeroOptimizer reads its shards from there: keep the file until then; others are read now; call it on
    all ranks). rename: the name in the model of a name in the file; None skips it. strict: the names are the same on
    both sides (one of the names of a tied weight is enough). Numbers are converted to the target's type.
    Raises, before anything has changed: FileNotFoundError; OSError for a file that is short; ValueError listing names
    and shapes that do not fit.
    """
    where = Path(path)
    optimizer = target if isinstance(target, ZeroOptimizer) else None
    model = target if isinstance(target, nn.Module) else target._live.model
    error: Exception | None = None
    found: dict[str, Entry] = {}
    try:
        if model is None:
            raise ValueError("load_weights needs names: build ZeroOptimizer with the model, not with its parameters")
        folder, entries = find_entries(where)
        shapes = {} if optimizer is None else _sharded_shapes(optimizer)
        found = match(model, _renamed(entries, rename), shapes, strict, where)
    except (OSError, ValueError) as caught:
        error = caught
    if optimizer is not None:
        agree(optimizer._live.comm, error, f"loading weights from {where}")
    elif error is not None:
        raise error
    assert model is not None
    with torch.no_grad():
        if optimizer is None:
            _load_model(model, folder, found)
        else:
            with optimizer._live.comm.no_deadline():
                _load_shards(optimizer, model, folder, found)


def find_entries(path: Path) -> tuple[Path, dict[str, Entry]]:
    """The folder, and every tensor of the file or files by name. Raises: FileNotFoundError, OSError, ValueError."""
    if path.is_file():
        return path.parent, read_entries(path)
    index = path / "model.safetensors.index.json"
    if index.is_file():
        files = sorted({path / name for name in json.loads(index.read_text())["weight_map"].values()})
    else:
        whole = path / "model.safetensors"
        files = [whole] if whole.is_file() else sorted(path.glob("*.safetensors"))
        files = [file for file in files if not file.name.startswith("optimizer-")]
    if not files:
        raise FileNotFoundError(errno.ENOENT, "no safetensors file is there", str(path))
    entries: dict[str, Entry] = {}
    for file in files:
        entries.update(read_entries(file))
    return path, entries


def _renamed(entries: Entries, rename: Callable[[str], str | None] | None) -> dict[str, Entry]:
    names = {name: name if rename is None else rename(name) for name in entries}
    return {new: entries[old] for old, new in names.items() if new is not None}


def _sharded_shapes(optimizer: ZeroOptimizer) -> dict[int, torch.Size]:
    parts = optimizer._live
    return {number: parts.geometry.places[index].shape for number, index in parts.index_of.items()}


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All names of the parameters and saved buffers."""
    yield from model.state_dict(keep_vars=True).items()


def match(
    model: nn.Module, entries: Entries, shapes: Mapping[int, torch.Size], strict: bool, where: Path
) -> dict[str, Entry]:
    """By the model's name the entry to load, each tensor once. shapes: by id(), of what is not whole now."""
    found: dict[str, Entry] = {}
    tensors = dict(_tensors(model))
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    missing, other = [], []
    for number, aliases in names.items():
        known = [alias for alias in aliases if alias in entries]
        if not known:
            missing.append(aliases[0])
            continue
        name = known[0]
        shape = tuple(shapes.get(number, tensors[name].shape))
        if entries[name].shape != shape:
            other.append(f"{name}: {entries[name].shape} there, {shape} here")
        found[name] = entries[name]
    unexpected = [name for name in entries if name not in tensors]
    lines = [
        *([f"not in the file: {listed(missing)}"] if missing and strict else []),
        *([f"not in the model: {listed(unexpected)}"] if unexpected and strict else []),
        *([f"other shapes: {listed(other)}"] if other else []),
        *(["no name is the same"] if not found and not strict else []),
    ]
    if lines:
        raise ValueError(f"{where} has the weights of another model; {'; '.join(lines)}")
    return found


def _reader(folder: Path, entry: Entry) -> Callable[[int, int], torch.Tensor]:
    return lambda begin, end: read_part(folder, entry, begin, end).to(torch.float32)


def _load_model(model: nn.Module, folder: Path, found: Entries) -> None:
    tensors = dict(_tensors(model))
    for name, entry in found.items():
        if tensors[name].device.type == "meta":
            deferred.read_from(tensors[name], _reader(folder, entry))
        else:
            tensors[name].data.copy_(read_part(folder, entry).view(entry.shape))


def _load_shards(optimizer: ZeroOptimizer, model: nn.Module, folder: Path, found: Entries) -> None:
    parts = optimizer._live
    tensors = dict(_tensors(model))
    parts.store.settle()
    parts.comm.barrier(name="nobody uses the old weights")
    for name, entry in found.items():
        index = parts.index_of.get(id(tensors[name]))
        if index is None:
            tensors[name].data.copy_(read_part(folder, entry).view(entry.shape))
        else:
            read = _reader(folder, entry)
            access.set_master(parts, index, lambda part, read=read: read(part.start, part.stop))  # type: ignore[misc]
    parts.store.publish()
    parts.comm.barrier(name="weights are loaded")
