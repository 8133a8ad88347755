"""Export: a checkpoint's weights as safetensors, one file or Hugging Face's shards with their index.

Each tensor is read, converted and written in pieces, with one piece in memory. The output is renamed to its final name
after all checksums have been compared.
Tied weights are written once, under the first name, with the other names in the file's metadata (as safetensors'
save_model does). Transformers and ``safetensors.torch.load_model`` tie them again. No model and no ranks are needed.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path

import torch

from zcomm.zero.checkpoint.hf_layout import INDEX, index_of
from zcomm.zero.checkpoint.manifest import Manifest
from zcomm.zero.checkpoint.manifest_reader import open_checkpoint
from zcomm.zero.files import durable
from zcomm.zero.files.folder import Folder
from zcomm.zero.files.staging import NewFile, NewFolder
from zcomm.zero.files.tensor_file import Entry, Writer, read_pieces


@dataclass(frozen=True)
class _Item:
    """A tensor to write: its source in the checkpoint, and its dtype in the output."""

    name: str
    source: str
    entry: Entry
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.entry.shape).numel() * self.dtype.itemsize


def export(
    checkpoint: Path, out: Path, dtype: torch.dtype | None = None, shard_nbytes: int | None = None, untie: bool = False
) -> list[Path]:
    """Write the weights of folder ``checkpoint`` and return the files written.

    out: a name that ends in .safetensors (one file), or a new folder (model.safetensors, or shards and their index).
    dtype: of floating weights; None: as trained. fp32 uses the exact master. shard_nbytes: maximum bytes per shard (a
    larger tensor has a shard of its own). untie: write tied weights under each of their names.
    Raises: FileNotFoundError, FileExistsError, OSError (EIO) naming file and tensor of a wrong checksum.
    """
    folder, manifest = open_checkpoint(durable.find(checkpoint))
    with folder:
        items = _items(manifest, dtype, untie)
        tied = {} if untie else dict(manifest.aliases)
        if out.exists():
            raise FileExistsError(errno.EEXIST, "there is something already", str(out))
        if out.suffix == ".safetensors":
            if shard_nbytes is not None:
                raise ValueError(f"shards need a folder, but {out} is one file")
            with NewFile(out) as file:
                _write(folder, items, file.path, tied)
                file.put()
            return [out]
        with NewFolder(out) as new:
            names = _write_folder(folder, items, new.path, tied, shard_nbytes)
            new.put()
        return [out / name for name in names]


def _items(manifest: Manifest, dtype: torch.dtype | None, untie: bool) -> list[_Item]:
    def item(name: str, saved: str) -> _Item:
        entry, source = manifest.weights[saved], saved
        floating = entry.torch_dtype.is_floating_point
        wanted = dtype if dtype is not None and floating else entry.torch_dtype
        if wanted == torch.float32 and f"master/{saved}" in manifest.optimizer:
            source = f"master/{saved}"
            entry = manifest.optimizer[source]
        return _Item(name, source, entry, wanted)

    items = [item(name, name) for name in sorted(manifest.weights)]
    return items + [item(alias, saved) for alias, saved in sorted(manifest.aliases.items()) if untie]


def _write(folder: Folder, items: list[_Item], path: Path, metadata: dict[str, str]) -> None:
    writer = Writer(path, [(item.name, item.dtype, torch.Size(item.entry.shape)) for item in items], metadata)
    try:
        for item in items:
            for piece in read_pieces(folder, item.source, item.entry):
                writer.put(item.name, piece.to(item.dtype))
            if writer.error is not None:
                break
    finally:
        writer.close()


def _write_folder(
    folder: Folder, items: list[_Item], new: Path, tied: dict[str, str], shard_nbytes: int | None
) -> list[str]:
    shards = _shards(items, shard_nbytes)
    if len(shards) == 1:
        _write(folder, items, new / "model.safetensors", tied)
        return ["model.safetensors"]
    names = [f"model-{k + 1:05d}-of-{len(shards):05d}.safetensors" for k in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        here = {item.name for item in shard}
        _write(folder, shard, new / name, {alias: first for alias, first in tied.items() if first in here})
    weight_map = {item.name: name for name, shard in zip(names, shards, strict=True) for item in shard}
    durable.write_file(new / INDEX, index_of({item.name: item.nbytes for item in items}, weight_map))
    return [*names, INDEX]


def _shards(items: list[_Item], limit: int | None) -> list[list[_Item]]:
    shards: list[list[_Item]] = [[]]
    filled = 0
    for item in items:
        if limit is not None and shards[-1] and filled + item.nbytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(item)
        filled += item.nbytes
    return shards
