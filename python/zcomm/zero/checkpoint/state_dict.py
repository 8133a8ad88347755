"""ZeroOptimizer's state in the form of torch.optim: whole tensors, numbered through the param groups. Collective.

It has ``step``, the optimizer's arrays and its other counters, by torch's names. With 16-bit weights also ``master``,
fp32, which makes the state complete without the model's. It loads into torch.optim's class of the same formula, and
from it. 8-bit state is codes and ``scales``, as CPUAdam's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from zcomm.optim.fused import STATE_BLOCK
from zcomm.zero.groups.mesh_comms import is_expert
from zcomm.zero.layout.local_param import cut_of
from zcomm.zero.layout.tiles import decoded, joined
from zcomm.zero.param_groups import options_of
from zcomm.zero.parts import Parts, TrainState
from zcomm.zero.rules.counters import COUNTERS, reset_counters
from zcomm.zero.rules.rule import Rule
from zcomm.zero.tensors import shard_io


def state_dict(parts: Parts, train: TrainState) -> dict[str, Any]:
    """Return a state dict with tensors of its own, complete on every rank. Raises: NotImplementedError."""
    _check_numbers(parts, "state_dict()")
    state: dict[int, dict[str, Any]] = {}
    groups, number = [], 0
    for position, group in enumerate(train.param_groups):
        numbers = []
        for param in group["params"]:
            index = parts.index_of[id(param)]
            entry: dict[str, Any] = {}
            steps = train.counters.steps(index, train.param_groups)
            if steps:
                entry["step"] = torch.tensor(float(steps))
                entry.update(_cloned(train.counters.scalars(index) or {}))
                own = train.rule.scalars_of_param(parts.names[index])
                entry.update({key: torch.tensor(value, dtype=torch.float64) for key, value in own.items()})
                if parts.state.form.coded and parts.cuts[index].count == 1:
                    entry.update(shard_io.codes(parts, index) or {})
                else:
                    names = train.rule.shown(position)
                    begun = train.rule.begun(train.counters.counters(index, train.param_groups))
                    entry.update(
                        {key: shard_io.array(parts, index, array) if begun else None for key, array in names.items()}
                    )
            if parts.state.form.dtype != torch.float32:
                entry["master"] = shard_io.master(parts, index)
            if entry:
                state[number] = entry
            numbers.append(number)
            number += 1
        options = {key: value for key, value in options_of(group).items() if key != "step"}
        groups.append({**options, "params": numbers})
    cohorts = train.counters.state(parts.names)
    return {"state": state, "param_groups": groups} | ({"cohorts": cohorts} if cohorts else {})


def _check_numbers(parts: Parts, call: str) -> None:
    """Raise NotImplementedError, on all ranks, if ranks have other parameters of one number."""
    params = map(parts.store.parameter, range(len(parts.names)))
    if parts.comms.experts is not None and any(is_expert(p) and cut_of(p).count == 1 for p in params):
        raise NotImplementedError(
            f"{call}: parameters have numbers, and ranks have different experts of one number: use save() and load(), "
            "which have names"
        )


def load_state_dict(parts: Parts, train: TrainState, saved: dict[str, Any]) -> None:
    """Load options, step counts, arrays and masters. Raises: ValueError naming a value that does not fit, before any
    change."""
    if not isinstance(saved, dict) or not {"state", "param_groups"} <= saved.keys():
        has = ", ".join(map(str, saved)) if isinstance(saved, dict) else f"it is a {type(saved).__name__}"
        raise ValueError(f"load_state_dict: no state of an optimizer, which has state and param_groups: {has[:200]}")
    _check_numbers(parts, "load_state_dict()")
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    if len(saved["param_groups"]) == len(train.param_groups):
        arrays = {key for entry in saved["state"].values() for key, value in entry.items() if value is not None}
        groups = [{**old, **new} for old, new in zip(train.param_groups, saved["param_groups"], strict=True)]
        parts.grow_state(train.rule, groups, arrays)
    _check(parts, train, saved, numbers)
    params = [param for group in train.param_groups for param in group["params"]]
    with torch.no_grad(), train.poison.watch():
        parts.store.synchronize()
        parts.comm.barrier(name="old state is unused")
        for number, param in zip(numbers, params, strict=True):
            index = parts.index_of[id(param)]
            options = {**train.param_groups[parts.group_of[index]], **saved["param_groups"][parts.group_of[index]]}
            entry = saved["state"].get(number, {})
            act = partial(_load_param, parts, train, index, entry, train.rule.initial(options))
            shard_io.together(parts, act, f"load_state_dict of {parts.names[index]}")
        parts.store.publish()
    progress = []
    for group, new in zip(train.param_groups, saved["param_groups"], strict=True):
        own = ("params", "progress", "state_dtype", *COUNTERS)  # counters come from the entries
        options = {key: value for key, value in new.items() if key not in own}
        reset_counters(group)
        group.update(options)
        entries = [saved["state"].get(number, {}) for number in new["params"]]
        steps = [float(entry.get("step", 0)) for entry in entries]
        buffered = any(map(_has_momentum, entries))
        group["step"] = int(max(steps, default=0)) or int(buffered)
        if buffered:
            group["buffered"] = True
        most: dict[str, Any] = max(zip(steps, entries, strict=True), key=lambda each: each[0], default=(0.0, {}))[1]
        progress.append(_scalars(train.rule, most) or new.get("progress", {}))
    if train.rule.progress() is not None:
        train.rule.set_progress(progress)
    for number, param in zip(numbers, params, strict=True):
        entry, name = saved["state"].get(number, {}), parts.names[parts.index_of[id(param)]]
        ours = train.rule.scalars_of_param(name)
        ours.update({key: float(entry[key]) for key in ours if key in entry})
    train.counters.set_state(saved.get("cohorts") or _cohorts_of(parts, train, saved, progress), parts.names)


def _has_momentum(entry: dict[str, Any]) -> bool:
    return entry.get("momentum_buffer") is not None


def _scalars(rule: Rule, entry: dict[str, Any]) -> dict[str, float]:
    """Return the numbers that torch counts for each parameter, if the rule counts them for a group; otherwise none."""
    there = rule.counted and all(name in entry for name in rule.counted)
    return {name: float(entry[name]) for name in rule.counted} if there else {}


def _cohorts_of(
    parts: Parts, train: TrainState, saved: dict[str, Any], progress: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Find in torch's state the parameters with other counts than their group. progress: of the groups."""
    found: dict[Any, dict[str, Any]] = {}
    for number, (group, new) in enumerate(zip(train.param_groups, saved["param_groups"], strict=True)):
        for param, position in zip(group["params"], new["params"], strict=True):
            entry = saved["state"].get(position, {})
            steps = int(float(entry["step"])) if "step" in entry else 0 if not entry else group["step"]
            scalars, buffered = _scalars(train.rule, entry), _has_momentum(entry)
            same = steps == group["step"] and buffered == group.get("buffered", False)
            if not same or (scalars and scalars != progress[number]):
                counted = {"step": steps, "buffered": buffered}
                one = {"group": number, "params": [], "counters": counted, "scalars": scalars or None}
                key = (number, steps, buffered, tuple(scalars.values()))
                found.setdefault(key, one)["params"].append(parts.names[parts.index_of[id(param)]])
    return list(found.values())


def _load_param(parts: Parts, train: TrainState, index: int, entry: dict[str, Any], initial: float) -> None:
    """Load a parameter's arrays and master. initial: the value of an array that ``entry`` lacks."""
    form, cut = parts.state.form, parts.cuts[index]
    if cut.count > 1:
        entry = decoded(entry) | {"master": entry.get("master")} if "scales" in entry else entry
        entry = {
            key: cut.part_of(value) if isinstance(value, torch.Tensor) and value.shape == cut.shape else value
            for key, value in entry.items()
        }
    if "scales" in entry and form.coded:
        shard_io.set_codes(
            parts, index, lambda key, part: entry[key][part] if key == "scales" else entry[key].reshape(-1)[part]
        )
    else:
        arrays = decoded(entry) if "scales" in entry else entry
        names = train.rule.shown(parts.group_of[index])
        shard_io.set_arrays(parts, index, {array: _reader(arrays.get(key), initial) for key, array in names.items()})
    if entry.get("master") is not None:
        flat = entry["master"].to(torch.float32).reshape(-1)
    elif entry.get("remainder") is not None:  # of zcomm.optim's classes: bits(master) = bits(weight) + remainder
        weight = parts.store.full(index).cpu().reshape(-1)
        if weight.dtype != torch.bfloat16:
            raise ValueError(f"{parts.names[index]}: the state holds the remainder of bf16 weights, they are not bf16")
        flat = joined(weight, entry["remainder"].reshape(-1))
    else:
        return
    shard_io.set_master(parts, index, lambda elements: flat[elements])


def _cloned(scalars: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in scalars.items()}


def _reader(value: torch.Tensor | None, initial: float) -> Callable[[slice], torch.Tensor]:
    flat = None if value is None else value.detach().to(torch.float32).reshape(-1)
    return lambda elements: torch.tensor(initial) if flat is None else flat[elements]


def _check(parts: Parts, train: TrainState, saved: dict[str, Any], numbers: list[int]) -> None:
    sizes = [len(group["params"]) for group in train.param_groups]
    theirs = [len(group["params"]) for group in saved["param_groups"]]
    if sizes != theirs:
        raise ValueError(f"load_state_dict: it has groups of {theirs} parameters, this optimizer has {sizes}")
    params = [param for group in train.param_groups for param in group["params"]]
    for number, param in zip(numbers, params, strict=True):
        index = parts.index_of[id(param)]
        shape = parts.cuts[index].shape
        entry = saved["state"].get(number, {})
        for key, value in entry.items():
            wanted = (-(-shape.numel() // STATE_BLOCK), len(parts.state.form.arrays)) if key == "scales" else shape
            if isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape != wanted:
                what = f"{key} of {parts.names[index]}"
                raise ValueError(f"load_state_dict: {what} has shape {tuple(value.shape)}, not {tuple(wanted)}")
        wanted_keys = [*train.rule.shown(parts.group_of[index])]
        if "progress" not in saved["param_groups"][parts.group_of[index]]:
            wanted_keys += train.rule.counted
        missing = [key for key in wanted_keys if key not in entry] if train.rule.begun({}) else []
        if float(entry.get("step", 0)) > 0 and missing:
            raise ValueError(
                f"load_state_dict: {parts.names[index]} lacks {', '.join(missing)} of {train.rule.name}; is it "
                "the state of another optimizer?"
            )
    for group, new in zip(train.param_groups, saved["param_groups"], strict=True):
        train.rule.check_fixed(group, new)
        train.rule.check({**options_of(group), **options_of(new)})
