"""Saving: each parameter is put together on one rank, which writes it; then the folder is put in its place.

Memory: this rank's shards and one whole fp32 tensor. Every rank must see the same folder (a shared file system between
hosts). Collective; a rank that cannot write makes all raise, and the last checkpoint stays.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zcomm.zero import access
from zcomm.zero.build import Parts
from zcomm.zero.checkpoint import durable, generators
from zcomm.zero.checkpoint.exchange import agree, all_values
from zcomm.zero.checkpoint.manifest import Manifest
from zcomm.zero.checkpoint.plain import to_json
from zcomm.zero.checkpoint.tensor_file import Entry, Writer
from zcomm.zero.tile import TileForm

if TYPE_CHECKING:
    from zcomm.zero.optimizer import ZeroOptimizer


def save(optimizer: ZeroOptimizer, final: Path, scheduler: Any, client_state: Any) -> None:
    """See ZeroOptimizer.save."""
    parts = optimizer._live
    comm = parts.comm
    manifest = _describe(optimizer, scheduler, client_state)  # before anything is written: it may raise
    folder = _make_folder(parts, final)
    error: Exception | None = None
    try:
        mine = _write_rank(parts, folder)
    except OSError as caught:
        error, mine = caught, {}
    try:
        agree(comm, error, f"saving {final}")
        for of_rank in all_values(comm, mine, "what was written"):
            _merge(manifest, of_rank)
        error = None
        if comm.rank == 0:
            error = _finish(manifest, folder, final)
        agree(comm, error, f"saving {final}")
    except BaseException:
        if comm.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _make_folder(parts: Parts, final: Path) -> Path:
    error: Exception | None = None
    name: str | None = None
    if parts.comm.rank == 0:
        try:
            name = durable.temporary(final).name
        except OSError as caught:
            error = caught
    agree(parts.comm, error, f"making {final}")
    name = all_values(parts.comm, name, "folder of the checkpoint")[0]
    return final.parent / str(name)


def _finish(manifest: Manifest, folder: Path, final: Path) -> Exception | None:
    """Rank 0 has the last word."""
    try:
        unseen = manifest.missing_files(folder)
        if unseen:
            return OSError(errno.ENOENT, f"rank 0 does not see what others wrote ({unseen[0]}); all need one folder")
        manifest.write(folder)
        durable.put(folder, final)
    except OSError as error:
        return error
    return None


def _describe(optimizer: ZeroOptimizer, scheduler: Any, client_state: Any) -> Manifest:
    parts = optimizer._live
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        names = [parts.names[parts.index_of[id(param)]] for param in group["params"]]
        options = {key: value for key, value in group.items() if key != "params" and not callable(value)}
        options.pop("state_dtype", None)  # fp32
        groups.append({"params": names, "options": to_json(options, f"param_groups[{number}]")})
    counters: dict[str, Any] = {"step_count": optimizer.step_count, "skipped_steps": optimizer.skipped_steps}
    if optimizer.scaler is not None:
        counters["loss_scale"] = optimizer.scaler.state()
    state = scheduler.state_dict() if scheduler is not None else None
    return Manifest(
        world_size=parts.comm.world_size,
        stage=optimizer.stage,
        precision=optimizer.precision.name,
        optimizer_name=optimizer.rule.name,
        parameters=list(parts.names),
        groups=groups,
        progress=optimizer.rule.progress(),
        counters=counters,
        scheduler=to_json(state, "scheduler"),
        client_state=to_json(client_state, "client_state"),
    )


def other_tensors(parts: Parts) -> Iterator[tuple[str, torch.Tensor]]:
    """Frozen parameters and saved buffers of the model, each once."""
    if parts.model is None:
        return
    seen = set(parts.index_of)
    saved = set(parts.model.state_dict(keep_vars=True))
    tensors: list[tuple[str, torch.Tensor]] = [*parts.model.named_parameters(), *parts.model.named_buffers()]
    for name, tensor in tensors:
        if id(tensor) not in seen and name in saved:
            seen.add(id(tensor))
            yield name, tensor


def _aliases(parts: Parts) -> dict[str, str]:
    """Further names of what is saved once (tied weights)."""
    if parts.model is None:
        return {}
    first = {number: parts.names[index] for number, index in parts.index_of.items()}
    first.update({id(tensor): name for name, tensor in other_tensors(parts)})
    every = parts.model.state_dict(keep_vars=True)
    return {
        name: first[id(tensor)] for name, tensor in every.items() if id(tensor) in first and first[id(tensor)] != name
    }


def _owners(parts: Parts) -> list[int]:
    """Which rank writes each parameter: the one with the fewest elements so far."""
    load = [0] * parts.comm.world_size
    owners = []
    for place in parts.geometry.places:
        owners.append(load.index(min(load)))
        load[owners[-1]] += place.count
    return owners


def _keys(form: TileForm) -> list[str]:
    return [*(["master"] if form.dtype != torch.float32 else []), *form.arrays]


def _write_rank(parts: Parts, folder: Path) -> dict[str, Any]:
    """This rank's files; what the manifest says of them. Collective up to the end, whatever fails here."""
    rank, form, owners = parts.comm.rank, parts.state.form, _owners(parts)
    mine = [index for index, owner in enumerate(owners) if owner == rank]
    shapes = [place.shape for place in parts.geometry.places]
    others = list(other_tensors(parts)) if rank == 0 else []
    end = f"{rank + 1:05d}-of-{parts.comm.world_size:05d}.safetensors"
    weights = Writer(
        folder / f"model-{end}",
        [(parts.names[i], form.dtype, shapes[i]) for i in mine] + [(n, t.dtype, t.shape) for n, t in others],
    )
    state_plan = [(f"{key}/{parts.names[i]}", torch.float32, shapes[i]) for i in mine for key in _keys(form)]
    state = Writer(folder / f"optimizer-{end}", state_plan)
    with torch.no_grad():
        for index, owner in enumerate(owners):
            _write_param(parts, index, owner, weights, state)
        for _, tensor in others:
            weights.add(tensor)
    weights.close()
    state.close()
    random = folder / f"random-{rank:05d}.json"
    durable.write_file(random, generators.pack())
    return {
        "weights": {name: entry.as_json() for name, entry in weights.entries.items()},
        "optimizer": {name: entry.as_json() for name, entry in state.entries.items()},
        "aliases": _aliases(parts) if rank == 0 else {},
        "files": {writer.path.name: writer.nbytes for writer in (weights, state)}
        | {random.name: random.stat().st_size},
        "random": random.name,
    }


def _write_param(parts: Parts, index: int, owner: int, weights: Writer, state: Writer) -> None:
    form = parts.state.form
    exact = access.master(parts, index, root=owner)
    if exact is not None:
        weights.add(rounded(form, exact))
        if form.dtype != torch.float32:
            state.add(exact)
    for key in form.arrays:
        whole = access.array(parts, index, key, root=owner)
        if whole is not None:
            state.add(whole)


def rounded(form: TileForm, master: torch.Tensor) -> torch.Tensor:
    """The weights that belong to an fp32 master, as the kernels round."""
    if form.dtype != torch.bfloat16:
        return master.to(form.dtype)
    weight = torch.empty(master.numel(), dtype=torch.bfloat16)
    low = torch.empty(2 * master.numel(), dtype=torch.uint8)
    TileForm((), torch.bfloat16).set_master(weight, low, master.reshape(-1))
    return weight.view(master.shape)


def _merge(manifest: Manifest, of_rank: dict[str, Any]) -> None:
    manifest.weights.update({name: Entry.from_json(entry) for name, entry in of_rank["weights"].items()})
    manifest.optimizer.update({name: Entry.from_json(entry) for name, entry in of_rank["optimizer"].items()})
    manifest.aliases.update(of_rank["aliases"])
    manifest.files.update(of_rank["files"])
    manifest.rank_files.append(of_rank["random"])
