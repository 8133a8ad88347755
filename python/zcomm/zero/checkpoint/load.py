"""Loading: every rank reads just the elements that it keeps, whatever world size, stage, tier or precision wrote them.

First all checksums are compared (each rank a share of the tensors), then everything is checked against the model; only
then something changes. Collective.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zcomm.zero import access
from zcomm.zero.build import Parts
from zcomm.zero.checkpoint import durable, generators
from zcomm.zero.checkpoint.exchange import agree
from zcomm.zero.checkpoint.manifest import Manifest, read_manifest
from zcomm.zero.checkpoint.plain import from_json
from zcomm.zero.checkpoint.share import other_tensors
from zcomm.zero.checkpoint.tensor_file import Entry, check, read_part

if TYPE_CHECKING:
    from zcomm.zero.optimizer import ZeroOptimizer


def load(
    optimizer: ZeroOptimizer, final: Path, scheduler: Any, with_optimizer: bool, with_random: bool, strict: bool
) -> Any:
    """See ZeroOptimizer.load."""
    with optimizer._live.comm.no_deadline():
        return _load(optimizer, final, scheduler, with_optimizer, with_random, strict)


def _load(
    optimizer: ZeroOptimizer, final: Path, scheduler: Any, with_optimizer: bool, with_random: bool, strict: bool
) -> Any:
    parts = optimizer._live
    folder = durable.find(final)
    error: Exception | None = None
    manifest: Manifest | None = None
    try:
        manifest = read_manifest(folder)
        _verify(parts, folder, manifest)
        _check(optimizer, manifest, with_optimizer, strict)
    except (OSError, ValueError) as caught:
        error = caught
    agree(parts.comm, error, f"loading {final}")
    assert manifest is not None
    with torch.no_grad():
        _read_tensors(parts, folder, manifest, with_optimizer)
        parts.store.publish()
    parts.comm.barrier(name="checkpoint is loaded")
    parts.reducer.zero()
    if with_optimizer:
        _set_progress(optimizer, manifest)
    if scheduler is not None and manifest.scheduler is not None:
        scheduler.load_state_dict(from_json(manifest.scheduler))
    if with_random and len(manifest.rank_files) == parts.comm.world_size:  # converted ones have none
        generators.unpack((folder / manifest.rank_files[parts.comm.rank]).read_bytes())
    return from_json(manifest.client_state)


def _verify(parts: Parts, folder: Path, manifest: Manifest) -> None:
    wrong = manifest.missing_files(folder)
    if wrong:
        raise OSError(errno.EIO, f"the checkpoint is not whole: {'; '.join(wrong)}")
    entries = [*manifest.weights.items(), *manifest.optimizer.items()]
    for name, entry in entries[parts.comm.rank :: parts.comm.world_size]:
        complaint = check(folder, name, entry)
        if complaint is not None:
            raise OSError(errno.EIO, complaint)


def _check(optimizer: ZeroOptimizer, manifest: Manifest, with_optimizer: bool, strict: bool) -> None:
    parts = optimizer._live
    wanted = {name: tuple(parts.geometry.places[index].shape) for index, name in enumerate(parts.names)}
    wanted.update({name: tuple(tensor.shape) for name, tensor in other_tensors(parts)} if strict else {})
    known = {**manifest.weights, **{a: manifest.weights[n] for a, n in manifest.aliases.items()}}
    missing = [name for name in wanted if name not in known]
    shapes = [f"{n}: {known[n].shape} there, {s} here" for n, s in wanted.items() if n in known and known[n].shape != s]
    here = set(parts.model.state_dict(keep_vars=True)) if parts.model is not None else set(wanted)
    unexpected = [name for name in known if name not in here | set(wanted)] if strict else []
    lines = [
        *([f"not in the checkpoint: {_some(missing)}"] if missing else []),
        *([f"not in the model: {_some(unexpected)}"] if unexpected else []),
        *([f"other shapes: {_some(shapes)}"] if shapes else []),
    ]
    if lines:
        raise ValueError(f"the checkpoint is of another model; {'; '.join(lines)}")
    if with_optimizer:
        _check_optimizer(optimizer, manifest)


def _check_optimizer(optimizer: ZeroOptimizer, manifest: Manifest) -> None:
    parts = optimizer._live
    lacking = [
        f"{key}/{name}"
        for name in parts.names
        for key in parts.state.form.arrays
        if f"{key}/{manifest.aliases.get(name, name)}" not in manifest.optimizer
    ]
    if lacking:
        raise ValueError(
            f"the checkpoint has the state of {manifest.optimizer_name}, which lacks {_some(lacking)} of "
            f"{optimizer.rule.name}; load the weights alone with optimizer=False"
        )
    ours = [{parts.names[parts.index_of[id(p)]] for p in group["params"]} for group in optimizer.param_groups]
    theirs = [set(group["params"]) for group in manifest.groups]
    if len(ours) != len(theirs) or [s ^ t for s, t in zip(ours, theirs, strict=True) if s != t]:
        raise ValueError(
            f"the checkpoint's param groups have {[len(t) for t in theirs]} parameters, this optimizer's "
            f"{[len(s) for s in ours]}, or others of them; build it with the same groups, or load with optimizer=False"
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more


def _read_tensors(parts: Parts, folder: Path, manifest: Manifest, with_optimizer: bool) -> None:
    for index, name in enumerate(parts.names):
        saved = manifest.aliases.get(name, name)
        exact = manifest.optimizer.get(f"master/{saved}", manifest.weights[saved])
        access.set_master(parts, index, _reader(folder, exact))
        for key in parts.state.form.arrays if with_optimizer else ():
            access.set_array(parts, index, key, _reader(folder, manifest.optimizer[f"{key}/{saved}"]))
    for name, tensor in other_tensors(parts):
        entry = manifest.weights.get(manifest.aliases.get(name, name))
        if entry is not None:
            tensor.data.copy_(read_part(folder, entry).view(entry.shape))


def _reader(folder: Path, entry: Entry) -> Any:
    return lambda part: read_part(folder, entry, part.start, part.stop).to(torch.float32)


def _set_progress(optimizer: ZeroOptimizer, manifest: Manifest) -> None:
    for group, saved in zip(optimizer.param_groups, manifest.groups, strict=True):
        group.update(from_json(saved["options"]))
    optimizer.rule.set_progress(manifest.progress)
    optimizer.step_count = int(manifest.counters["step_count"])
    optimizer.skipped_steps = int(manifest.counters["skipped_steps"])
    if optimizer.scaler is not None and "loss_scale" in manifest.counters:
        optimizer.scaler.set_state(manifest.counters["loss_scale"])
