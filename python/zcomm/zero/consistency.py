"""Check that all ranks give ZeroOptimizer the same model and options; otherwise all raise before memory is allocated.

Padding and equal counts would hide many differences from the collectives (they compare counts), and training would
continue with different weights under one name. Cost: one all_gather of 32 bytes per rank; texts move only after a
difference.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from zcomm.zero.agree import all_values
from zcomm.zero.groups.mesh_comms import MeshComms, is_expert
from zcomm.zero.layout.sections import frozen_of, names_of
from zcomm.zero.layout.unit_policy import choose_units, members
from zcomm.zero.options import Units
from zcomm.zero.parts import TrainState
from zcomm.zero.sharded.closed import describe_closed
from zcomm.zero.step_options import plain_text

_SAID = 2000  # characters of a rank's differences
_SHOWN = 6


def check(train: TrainState, comms: MeshComms, model: nn.Module, units: Units, **options: Any) -> None:
    """Compare options, groups and parameters with the first rank that has the same tensors. Collective.

    Raises: ValueError on every rank, naming differences from rank 0 and their ranks.
    """
    offload = train.offload
    options |= {
        "optimizer": train.rule.name,
        "stage": train.stage,
        "precision": train.precision.name,
        "communication_dtype": train.precision.communication_dtype,
        "buffer_dtype": train.precision.buffer_dtype,
        "skip_nonfinite": train.skip_nonfinite,
        # It decides the units. The tier of the state may differ between ranks, unless a function chooses it.
        "tier of parameters": None if callable(offload.params) else offload.params,
        "tier of gradients": offload.gradients,
        "update": offload.update,
        "atomic": offload.atomic,
        "stored": offload.stored,
        "step_behind_forward": offload.step_behind_forward,
        "clip_norm": train.clip_norm,
        "grad_accum": train.grad_accum,
        "loss_scale": train.loss_scale,
        "compression": train.compression,
        "sparse_gradients": train.sparse and train.sparse.names,
    }
    lines = [(name, plain_text(value)) for name, value in options.items()]
    lines += _describe(model, train.param_groups, train.precision.buffer_dtype)
    if units != Units() and train.stage == 3:
        lines += _units(model, units)
    if callable(offload.optimizer) or callable(offload.params):
        lines += _tiers(train, model)
    digest = torch.tensor(list(hashlib.sha256(json.dumps(lines).encode()).digest()), dtype=torch.uint8)
    comm, first_of = comms.world, comms.first_of
    every = comm.all_gather(digest, name="model and options: digest")
    assert isinstance(every, torch.Tensor)
    rows = every.view(comm.world_size, -1)
    if bool((rows == rows[first_of]).all()):
        return
    first = first_of[comm.rank]
    of_first = all_values(comm, lines if comm.rank == first else None, "model and options")[first]
    differences = "; ".join(_differences([(name, value) for name, value in of_first], lines))
    texts = all_values(comm, differences[:_SAID], "model and options: differences")
    others = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
    more = f" | and {len(others) - 4} more ranks" if len(others) > 4 else ""
    raise ValueError(
        f"ZeroOptimizer: the ranks gave different models or options, but all must give the same. Against rank {first}, "
        + " | ".join(others[:4])
        + more
    )


def _describe(
    model: nn.Module, groups: Sequence[Mapping[str, Any]], buffers: torch.dtype | None
) -> list[tuple[str, str]]:
    """List values that must be equal, line by line and in order: param groups, parameters, buffers (in ``buffers``)."""
    lines: list[tuple[str, str]] = []
    group_of: dict[int, int] = {}
    for number, group in enumerate(groups):
        group_of.update({id(param): number for param in group["params"]})
        lines += [(f"{key} of group {number}", plain_text(value)) for key, value in group.items() if key != "params"]
    given = [param for group in groups for param in group["params"]]
    for name, param in [*model.named_parameters()] or enumerate(given):
        place = f"group {group_of[id(param)]}" if id(param) in group_of else "frozen"
        kind = ", an expert's" if is_expert(param) else ""
        lines.append((f"parameter {name}", f"{list(param.shape)}, {place}{kind}{describe_closed(param)}"))
    for name, buffer in model.named_buffers():
        kind = "" if buffers is not None and buffer.is_floating_point() else f", {buffer.dtype}"
        lines.append((f"buffer {name}", f"{list(buffer.shape)}{kind}"))
    return lines


def _units(model: nn.Module, units: Units) -> list[tuple[str, str]]:
    choices = choose_units(model, list(model.parameters()), replace(units, max_bytes=None, rows=False))
    leaves = members(model, units.leaf, "leaf")
    return [
        ("units", ", ".join(f"{choice.name}{' (kept)' if choice.keep else ''}" for choice in choices)),
        (
            "units: leaf",
            ", ".join(name or "the model" for name, module in model.named_modules() if id(module) in leaves),
        ),
        ("units: prefetch_bytes", str(units.prefetch_nbytes)),
        ("units: max_bytes", str(units.max_nbytes)),
        ("units: rows", str(units.rows)),
    ]


def _tiers(train: TrainState, model: nn.Module) -> list[tuple[str, str]]:
    """List the tiers: they decide which parameters are in one section."""
    trained = [param for group in train.param_groups for param in group["params"]]
    names, offload = names_of(model, trained), train.offload
    every = [*trained, *frozen_of(model, trained)]
    state = {id(param): offload.state_tier(names[id(param)], param) for param in trained}
    weights = {id(param): offload.param_tier(names[id(param)], param) for param in every}
    return [
        (f"tier of {names[key]}", f"{weights[key]}" + (f" (state: {state[key]})" if key in state else ""))
        for key in weights
    ]


def _differences(theirs: list[tuple[str, str]], ours: list[tuple[str, str]]) -> list[str]:
    there, here = dict(theirs), dict(ours)
    found = [
        f"{name} is {here[name]}, not {there[name]}" for name in there if here.get(name, there[name]) != there[name]
    ]
    found += [f"{name} is missing" for name in there if name not in here]
    found += [f"{name} is additional" for name in here if name not in there]
    if not found and theirs != ours:
        position = next(n for n, (a, b) in enumerate(zip(theirs, ours, strict=True)) if a != b)
        found = [f"{ours[position][0]} comes in place of {theirs[position][0]}"]
    return found[:_SHOWN] + ([f"{len(found) - _SHOWN} more"] if len(found) > _SHOWN else [])
