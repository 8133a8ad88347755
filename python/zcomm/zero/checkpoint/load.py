"""Loading: every rank reads just the elements that it keeps, whatever world size, stage, tier or precision wrote them.

First all checksums are compared (each rank a share of the tensors), then everything is checked against the model; only
then something changes. Collective.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zcomm.optim.fused import STATE_BLOCK
from zcomm.zero import access
from zcomm.zero.build import Parts
from zcomm.zero.checkpoint import durable, generators
from zcomm.zero.checkpoint.exchange import agree
from zcomm.zero.checkpoint.manifest import Manifest, read_manifest
from zcomm.zero.checkpoint.plain import from_json
from zcomm.zero.checkpoint.share import other_tensors
from zcomm.zero.checkpoint.tensor_file import Entry, check, read_part
from zcomm.zero.listed import listed
from zcomm.zero.tile import decoded

if TYPE_CHECKING:
    from zcomm.zero.optimizer import ZeroOptimizer


def load(
    optimizer: ZeroOptimizer, final: Path, scheduler: Any, with_optimizer: bool, with_random: bool, strict: bool
) -> Any:
    """See ZeroOptimizer.load."""
    with optimizer._open_parts.comm.no_deadline():
        return _load(optimizer, final, scheduler, with_optimizer, with_random, strict)


def _load(
    optimizer: ZeroOptimizer, final: Path, scheduler: Any, with_optimizer: bool, with_random: bool, strict: bool
) -> Any:
    parts = _quiet(optimizer)
    parts.store.settle()  # before all agree to go on
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
    with torch.no_grad(), optimizer._breakage.watch():
        _change(optimizer, folder, manifest, with_optimizer)
    parts.reducer.zero()
    if with_optimizer:
        _set_progress(optimizer, manifest)
        optimizer._breakage.mended()
    if scheduler is not None and manifest.scheduler is not None:
        scheduler.load_state_dict(from_json(manifest.scheduler))
    if with_random and len(manifest.rank_files) == parts.comm.world_size:  # converted ones have none
        generators.unpack((folder / manifest.rank_files[parts.comm.rank]).read_bytes(), parts.device)
    return from_json(manifest.client_state)


def _quiet(optimizer: ZeroOptimizer) -> Parts:
    """Its parts, none of which a step uses any more: also after one that failed."""
    parts = optimizer._open_parts
    if parts.behind is not None:
        try:
            optimizer.join()
        except Exception:
            parts.behind.forget()
    return parts


def _change(optimizer: ZeroOptimizer, folder: Path, manifest: Manifest, with_optimizer: bool) -> None:
    """Weights and state become those of the checkpoint, on all ranks."""
    parts, error = optimizer._live, None
    try:
        if optimizer._breakage.error is not None:
            parts.store.renew()
            parts.state.renew()
        _read_tensors(parts, folder, manifest, with_optimizer)
    except OSError as caught:
        error = caught
    agree(parts.comm, error, f"loading {folder}")
    parts.store.publish()
    parts.comm.barrier(name="checkpoint is loaded")


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
    wanted = {name: tuple(place.shape) for name, place in zip(parts.names, parts.geometry.places, strict=True)}
    wanted.update({name: tuple(tensor.shape) for name, tensor in other_tensors(parts)})
    known = {**manifest.weights, **{a: manifest.weights[n] for a, n in manifest.aliases.items()}}
    needed = wanted if strict else parts.names[: parts.geometry.trained_count]
    missing = [name for name in needed if name not in known]
    shapes = [f"{n}: {known[n].shape} there, {s} here" for n, s in wanted.items() if n in known and known[n].shape != s]
    here = set(parts.model.state_dict(keep_vars=True)) if parts.model is not None else set(wanted)
    unexpected = [name for name in known if name not in here | set(wanted)] if strict else []
    every = dict(parts.model.named_parameters()) if parts.model is not None else {}
    lean = bool(missing) and all(name in every and not every[name].requires_grad for name in missing)
    advice = " (all of them frozen: strict=False, load_module_strict=False of an engine, leaves them as they are)"
    lines = [
        *([f"not in the checkpoint: {listed(missing)}{advice if lean else ''}"] if missing else []),
        *([f"not in the model: {listed(unexpected)}"] if unexpected else []),
        *([f"other shapes: {listed(shapes)}"] if shapes else []),
    ]
    if lines:
        raise ValueError(f"the checkpoint is of another model; {'; '.join(lines)}")
    if with_optimizer:
        _check_optimizer(optimizer, manifest)


def _check_optimizer(optimizer: ZeroOptimizer, manifest: Manifest) -> None:
    parts = optimizer._live
    lacking = [
        f"{key}/{name}"
        for name in parts.names[: parts.geometry.trained_count]
        for key in parts.state.form.arrays
        if f"{key}/{manifest.aliases.get(name, name)}" not in manifest.optimizer
    ]
    if lacking:
        raise ValueError(
            f"the checkpoint has the state of {manifest.optimizer_name}, which lacks {listed(lacking)} of "
            f"{optimizer.rule.name}; load the weights alone with optimizer=False"
        )
    theirs_and_ours = {name.replace("adamw", "adam") for name in (manifest.optimizer_name, optimizer.rule.name)}
    if len(theirs_and_ours) > 1 and " " not in manifest.optimizer_name:  # a converted one may have no name
        raise ValueError(  # it has all arrays by chance, or needs none; options such as lr would come along
            f"the checkpoint has the state of {manifest.optimizer_name}, this optimizer is {optimizer.rule.name}; load "
            "the weights alone with optimizer=False"
        )
    ours = [{parts.names[parts.index_of[id(p)]] for p in group["params"]} for group in optimizer.param_groups]
    theirs = [set(group["params"]) for group in manifest.groups]
    if len(ours) != len(theirs) or [s ^ t for s, t in zip(ours, theirs, strict=True) if s != t]:
        raise ValueError(
            f"the checkpoint's param groups have {[len(t) for t in theirs]} parameters, this optimizer's "
            f"{[len(s) for s in ours]}, or others of them; build it with the same groups, or load with optimizer=False"
        )


def _read_tensors(parts: Parts, folder: Path, manifest: Manifest, with_optimizer: bool) -> None:
    for index, name in enumerate(parts.names):
        saved = manifest.aliases.get(name, name)
        if parts.geometry.is_frozen(index):
            entry = manifest.weights.get(saved)
            if entry is not None:
                access.set_master(parts, index, _reader(folder, entry))
            continue
        exact = manifest.optimizer.get(f"master/{saved}", manifest.weights[saved])
        access.set_master(parts, index, _reader(folder, exact))
        if with_optimizer:
            of_param = {key: manifest.optimizer.get(f"{key}/{saved}") for key in ("scales", *parts.state.form.arrays)}
            _read_state(parts, index, folder, {key: entry for key, entry in of_param.items() if entry is not None})
    for name, tensor in other_tensors(parts):
        entry = manifest.weights.get(manifest.aliases.get(name, name))
        if entry is not None:
            tensor.data.copy_(read_part(folder, entry).view(entry.shape))


def _reader(folder: Path, entry: Entry) -> Any:
    return lambda part: read_part(folder, entry, part.start, part.stop).to(torch.float32)


def _read_state(parts: Parts, index: int, folder: Path, entries: dict[str, Entry]) -> None:
    """entries: by array; with "scales", where it is 8-bit state."""
    if "scales" not in entries:
        access.set_arrays(parts, index, {key: _reader(folder, entry) for key, entry in entries.items()})
    elif parts.state.form.coded:
        access.set_codes(parts, index, lambda key, part: _read_codes(folder, key, entries[key], part))
    else:
        access.set_arrays(parts, index, {key: _decoder(folder, entries, key) for key in parts.state.form.arrays})


def _read_codes(folder: Path, key: str, entry: Entry, part: slice) -> torch.Tensor:
    width = entry.shape[1] if key == "scales" else 1
    return read_part(folder, entry, part.start * width, part.stop * width)


def _decoder(folder: Path, entries: dict[str, Entry], name: str) -> Any:
    """8-bit state as fp32."""

    def read(part: slice) -> torch.Tensor:
        count = torch.Size(entries[name].shape).numel()
        blocks = slice(part.start // STATE_BLOCK, -(-part.stop // STATE_BLOCK))
        begin, end = blocks.start * STATE_BLOCK, min(blocks.stop * STATE_BLOCK, count)
        parts = {key: blocks if key == "scales" else slice(begin, end) for key in entries}
        coded = {key: _read_codes(folder, key, entries[key], where) for key, where in parts.items()}
        return decoded(coded)[name][part.start - begin : part.stop - begin]

    return read


def _set_progress(optimizer: ZeroOptimizer, manifest: Manifest) -> None:
    for group, saved in zip(optimizer.param_groups, manifest.groups, strict=True):
        group.update(from_json(saved["options"]))
    optimizer.rule.set_progress(manifest.progress)
    optimizer.step_count = int(manifest.counters["step_count"])
    optimizer.skipped_steps = int(manifest.counters["skipped_steps"])
    if optimizer.scaler is not None and "loss_scale" in manifest.counters:
        optimizer.scaler.set_state(manifest.counters["loss_scale"])
