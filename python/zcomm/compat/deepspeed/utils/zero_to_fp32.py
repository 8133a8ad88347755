"""``deepspeed.utils.zero_to_fp32``: whole fp32 weights out of a checkpoint folder, without its model and ranks.

Reads zcomm's checkpoints: safetensors with a checksum per tensor, no pickle. ``zcomm ckpt convert`` makes one of
DeepSpeed's. Weights are the exact fp32 masters; buffers that are not floating keep their dtype.
Source: the command line and functions of DeepSpeed's zero_to_fp32.py.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zcomm.memory.sizes import as_nbytes
from zcomm.zero.checkpoint import extra_state
from zcomm.zero.checkpoint.manifest import Manifest
from zcomm.zero.checkpoint.manifest_reader import open_checkpoint
from zcomm.zero.files import durable
from zcomm.zero.files.folder import Folder
from zcomm.zero.files.tensor_file import Entry, Writer, read_pieces, read_whole
from zcomm.zero.format_names import format_names
from zcomm.zero.saved_names import matched, other_paths

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
]
State = dict[str, torch.Tensor]


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path,
    tag: str | int | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> State:
    """Return whole weights by name, in fp32 on the CPU; tied names share memory.

    checkpoint_dir: a folder that ``save_checkpoint`` was given. tag: one of its checkpoints; None: the newest, by the
    file ``latest``. lazy_mode has no effect: tensors are read one after the other, and all are returned.
    exclude_frozen_parameters: leave out the parameters that are not trained, but not buffers.
    Raises: FileNotFoundError, ValueError (no ``latest``), OSError (EIO) naming a tensor with a wrong checksum.
    NotImplementedError for exclude_frozen_parameters and a checkpoint that does not tell frozen ones from buffers.
    """
    with _opened(checkpoint_dir, tag) as (folder, manifest):
        found = {name: _read(folder, manifest, name) for name in _names(manifest, exclude_frozen_parameters)}
        return found | {alias: found[name] for alias, name in manifest.aliases.items() if name in found}


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | Path, tag: str | int | None = None
) -> nn.Module:
    """Load weights and extra state into ``model``, which is moved to the CPU, and return it. Names may be missing on
    either side.

    Raises: as ``get_fp32_state_dict_from_zero_checkpoint``; RuntimeError from torch for another shape.
    """
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model = model.cpu()
    ours = [*model.state_dict(keep_vars=True), *extra_state.extra_names(model)]
    with _opened(checkpoint_dir, tag) as (folder, manifest):
        named = {name: entry for name, entry in manifest.values.items() if extra_state.is_value(name)}
        values = {name: read_whole(folder, name, entry) for name, entry in named.items()}
        new = matched(manifest.names(), ours, other_paths(model))
        model.load_state_dict({new.get(name, name): value for name, value in state.items()}, strict=False)
        extra = extra_state.restored(manifest.renamed(new).extra or {}, values, str(folder.path))
        extra_state.restore(model, extra, False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | int | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the weights into folder ``output_dir``; if ``max_shard_size`` requires it, as shards with an index.

    Each file is whole or absent, even if several ranks call this at once.

    max_shard_size: most bytes per file; None: one file. safe_serialization: model.safetensors, with tied weights under
    their first name, written in pieces. Else pytorch_model.bin, a pickle; one shard at a time is in memory.
    Raises: as ``get_fp32_state_dict_from_zero_checkpoint``; ValueError for a size; OSError.
    """
    limit = None if max_shard_size is None else _bytes(max_shard_size)
    out = Path(output_dir)
    with _opened(checkpoint_dir, tag) as (folder, manifest):
        every = _names(manifest, exclude_frozen_parameters)
        shards = _shards(manifest, every, limit)
        out.mkdir(parents=True, exist_ok=True)
        stem, suffix = ("model", "safetensors") if safe_serialization else ("pytorch_model", "bin")
        index: dict[str, str] = {}
        total = 0
        for number, names in enumerate(shards, 1):
            part = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
            tied = {alias: name for alias, name in manifest.aliases.items() if name in names}
            total += sum(_nbytes(manifest, name) for name in names)
            file = f"{stem}{part}.{suffix}"
            with _replaced(out / file) as new:
                if safe_serialization:
                    _write_pieces(new, folder, manifest, names, tied)
                else:
                    state = {name: _read(folder, manifest, name) for name in names}
                    torch.save(state | {alias: state[name] for alias, name in tied.items()}, new)
            index |= dict.fromkeys((*names, *(() if safe_serialization else tied)), file)
    if len(shards) > 1:
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
        durable.replace_file(out / f"{stem}.{suffix}.index.json", text.encode() + b"\n")


@contextmanager
def _replaced(path: Path) -> Iterator[Path]:
    """Create a private file, which becomes ``path`` whole or not at all, because programs call this on each rank and
    read the result at once."""
    descriptor, new = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(descriptor)
    try:
        yield Path(new)
        os.replace(new, path)
    finally:
        Path(new).unlink(missing_ok=True)


def _write_pieces(new: Path, folder: Folder, manifest: Manifest, names: list[str], tied: dict[str, str]) -> None:
    """Write a safetensors file, in the order of safetensors' own writer: wide dtypes first."""
    new.unlink()  # the writer makes it
    plan = [(name, _dtype(manifest, name), torch.Size(_entry(manifest, name)[1].shape)) for name in names]
    writer = Writer(new, sorted(plan, key=lambda each: (-each[1].itemsize, each[0])), tied)
    try:
        for name, dtype, _ in plan:
            for piece in read_pieces(folder, *_entry(manifest, name)):
                writer.put(name, piece.to(dtype))
    finally:
        writer.close()


@contextmanager
def _opened(checkpoint_dir: str | Path, tag: str | int | None) -> Iterator[tuple[Folder, Manifest]]:
    place = Path(checkpoint_dir).absolute()
    if tag is not None:
        place = place / str(tag)
    else:
        newest = durable.latest_in(place)
        if newest is None and not (durable.find(place) / "manifest.json").is_file():
            raise ValueError(f"there is no file 'latest' in {place}, and no tag is given")
        place = newest or place
    folder, manifest = open_checkpoint(durable.find(place))
    with folder:
        yield folder, manifest


def _names(manifest: Manifest, without_frozen: bool) -> list[str]:
    """Return the requested weights. Raises: NotImplementedError if frozen ones are indistinguishable from buffers."""
    others = [name for name in manifest.weights if name not in manifest.parameters]
    if without_frozen and others and manifest.frozen is None:
        raise NotImplementedError(
            "exclude_frozen_parameters is not available for this checkpoint of an older version, which does not tell "
            f"frozen parameters from buffers: {format_names(others)}; leave the argument out, and remove the names "
            "that are not wanted"
        )
    frozen = set(manifest.frozen or ()) if without_frozen else ()
    return [name for name in manifest.weights if name not in frozen]


def _entry(manifest: Manifest, name: str) -> tuple[str, Entry]:
    master = f"master/{name}"
    return (master, manifest.optimizer[master]) if master in manifest.optimizer else (name, manifest.weights[name])


def _read(folder: Folder, manifest: Manifest, name: str) -> torch.Tensor:
    value = read_whole(folder, *_entry(manifest, name))
    return value.float() if value.is_floating_point() else value


def _dtype(manifest: Manifest, name: str) -> torch.dtype:
    dtype = _entry(manifest, name)[1].torch_dtype
    return torch.float32 if dtype.is_floating_point else dtype


def _nbytes(manifest: Manifest, name: str) -> int:
    return torch.Size(_entry(manifest, name)[1].shape).numel() * _dtype(manifest, name).itemsize


def _shards(manifest: Manifest, names: list[str], limit: int | None) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name in names:
        size = _nbytes(manifest, name)
        if limit is not None and shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _bytes(size: str | int) -> int:
    try:
        return as_nbytes(size)
    except ValueError as error:
        raise ValueError(f"max_shard_size={error}") from None


def main(arguments: list[str] | None = None) -> None:
    """Run the command line: CHECKPOINT_DIR OUTPUT_DIR and options."""
    parser = argparse.ArgumentParser(description="Write whole fp32 weights out of a checkpoint folder.")
    parser.add_argument("checkpoint_dir", help="the folder that save_checkpoint was given")
    parser.add_argument("output_dir", help="the folder to write to")
    parser.add_argument("--max_shard_size", default="5GB", help="most bytes per file (default 5GB)")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors, not a pickle")
    parser.add_argument("-t", "--tag", default=None, help="the checkpoint, for example global_step1 (default: newest)")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave out untrained parameters")
    parser.add_argument("-d", "--debug", action="store_true", help="has no effect")
    args: Any = parser.parse_args(arguments)
    convert_zero_checkpoint_to_fp32_state_dict(
        args.checkpoint_dir,
        args.output_dir,
        max_shard_size=args.max_shard_size,
        safe_serialization=args.safe_serialization,
        tag=args.tag,
        exclude_frozen_parameters=args.exclude_frozen_parameters,
    )


if __name__ == "__main__":
    main()
