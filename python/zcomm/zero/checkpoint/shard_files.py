"""A rank's share of a checkpoint: the tensors that it writes, their assembly by pieces, and its files."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from zcomm.optim.fused import STATE_BLOCK
from zcomm.zero.agree import ErrorHolder
from zcomm.zero.checkpoint.manifest import Manifest
from zcomm.zero.checkpoint.model_tensors import Named
from zcomm.zero.checkpoint.readable import Readable
from zcomm.zero.checkpoint.whole_names import Row
from zcomm.zero.files import durable
from zcomm.zero.files.tensor_file import Writer, write_tensors
from zcomm.zero.layout.tiles import TileForm
from zcomm.zero.parts import Parts
from zcomm.zero.tensors import chunks

WEIGHTS, STATE = 0, 1  # the two files of a rank
VALUES = "client-state.safetensors"  # tensors of the client state, the schedule and extra states; rank 0's
EXTRA = "extra-state-{:05d}.safetensors"  # of extra states that rank 0 does not have
Plan = list[tuple[str, torch.dtype, torch.Size]]
Saved = tuple[int, str, torch.Tensor]  # the file, the tensor's name in it, and its next elements


@dataclass(frozen=True)
class Content:
    """Content that this rank saves, with the values at the begin of the save.

    rows: the parameters of all ranks. plans: names, dtypes and shapes of this rank's tensors, by file. rest: the
    model's own memory that this rank writes, with the file and the name. random: states of the generators. values:
    tensors of the client state and the schedule, which are rank 0's, and of extra states. configs: of a transformers
    model, by file name (hf_layout.py), rank 0's.
    """

    manifest: Manifest
    rows: list[Row]
    plans: tuple[Plan, Plan]
    random: bytes
    rest: list[Saved]
    values: dict[str, torch.Tensor]
    configs: dict[str, bytes] = field(default_factory=dict)


def _owners(parts: Parts, rows: Sequence[Row]) -> list[int]:
    """Return the rank that writes each parameter: the one with the fewest elements so far."""
    load = [0] * parts.comm.world_size
    owners = []
    for row in rows:
        owners.append(load.index(min(load)))
        load[owners[-1]] += row.shape.numel()
    return owners


def _is_coded(form: TileForm, row: Row) -> bool:
    """Return True if 8-bit state is saved as codes: not of parts, because their blocks are no blocks of the whole."""
    return form.coded and row.cut.count == 1


def _state_of(form: TileForm, row: Row) -> Plan:
    """Plan the optimizer state and master of a parameter."""
    shape, coded = row.shape, _is_coded(form, row)
    master = [("master", torch.float32, shape)] if form.dtype != torch.float32 else []
    kind = torch.uint8 if coded else torch.float32
    blocks = torch.Size((-(-shape.numel() // STATE_BLOCK), len(form.arrays)))
    scales = [("scales", torch.float32, blocks)] if coded else []
    every = [*master, *scales, *((key, kind, shape) for key in form.arrays)]
    return [(f"{key}/{row.name}", dtype, size) for key, dtype, size in every]


def plans_of(parts: Parts, rows: Sequence[Row], rest: Named, lean: bool = False) -> tuple[Plan, Plan]:
    """Plan this rank's share of the files. All ranks compute the same, so nothing is communicated. lean: without
    frozen parameters. rest: the model's other tensors that this rank writes."""
    rank, form = parts.comm.rank, parts.state.form
    mine = [row for row, owner in zip(rows, _owners(parts, rows), strict=True) if owner == rank]
    trained = [row for row in mine if not row.frozen]
    weights = [(row.name, form.dtype, row.shape) for row in (trained if lean else mine)]
    weights += [(name, tensor.dtype, tensor.shape) for name, tensor in rest]
    state = [item for row in trained for item in _state_of(form, row)]
    return weights, state


def gathered(parts: Parts, rows: Sequence[Row], lean: bool = False) -> Iterator[Saved]:
    """Yield this rank's share of the parameters, piece by piece. Collective to the end, at which a failed read
    raises."""
    readable, form = Readable(parts), parts.state.form
    parts = readable.parts
    for row, owner in zip(rows, _owners(parts, rows), strict=True):
        whole = (row.name, row.cut, row.index)
        if row.frozen:
            if not lean:
                for chunk in chunks.stream(parts, *whole, [chunks.WEIGHT], root=owner):
                    yield WEIGHTS, row.name, chunk[chunks.WEIGHT]
            continue
        of_state = [chunks.MASTER, *([chunks.SCALES] if _is_coded(form, row) else []), *form.arrays]
        kept = of_state[form.dtype == torch.float32 :]  # an fp32 weight is its master
        for chunk in chunks.stream(parts, *whole, of_state, root=owner):
            yield WEIGHTS, row.name, rounded(form, chunk[chunks.MASTER])
            for key in kept:
                yield STATE, f"{key}/{row.name}", chunk[key]
    readable.check()


def rounded(form: TileForm, master: torch.Tensor) -> torch.Tensor:
    """Return the weights of an fp32 master, rounded as the kernels do."""
    if form.dtype != torch.bfloat16:
        return master.to(form.dtype)
    weight = torch.empty(master.numel(), dtype=torch.bfloat16)
    low = torch.empty(2 * master.numel(), dtype=torch.uint8)
    TileForm((), torch.bfloat16).set_master(weight, low, master.reshape(-1))
    return weight.view(master.shape)


def write(kept: ErrorHolder, rank: int, content: Content, saved: Iterable[Saved], folder: Path) -> dict[str, Any]:
    """Write this rank's files; return their entries for the manifest.

    ``saved`` is consumed to the end even after an error, because it is collective. ``kept`` has the first error then,
    and the result is incomplete.
    """
    end = f"{rank + 1:05d}-of-{content.manifest.world_size:05d}.safetensors"
    writers: list[Writer] = []
    with kept.errors():
        for kind, plan in zip(("model", "optimizer"), content.plans, strict=True):
            writers.append(Writer(folder / f"{kind}-{end}", plan))
    try:
        with torch.no_grad():
            for which, name, values in saved:
                if kept.error is None:
                    with kept.errors():
                        writers[which].put(name, values)
    finally:
        for writer in writers:
            with kept.errors():
                writer.close()
    states = folder / f"random-{rank:05d}.json"
    mine: dict[str, Any] = {"random": states.name, "values": {}}
    if kept.error is not None:
        return mine
    with kept.errors():
        for writer in writers:
            writer.check_whole()
        durable.write_file(states, content.random)
        if content.values:
            extra = write_tensors(folder / (VALUES if rank == 0 else EXTRA.format(rank)), content.values)
            mine["values"] = _listed(extra)
            writers.append(extra)
        mine["weights"], mine["optimizer"] = (_listed(writer) for writer in writers[:2])
        mine["files"] = {writer.path.name: writer.nbytes for writer in writers} | {states.name: len(content.random)}
        checksums = {writer.path.name: writer.header_crc32 for writer in writers}
        mine["checksums"] = checksums | {states.name: zlib.crc32(content.random)}
    return mine


def _listed(writer: Writer) -> dict[str, Any]:
    return {name: entry.as_json() for name, entry in writer.entries.items()}
