"""full_param, full_grad, full_optim_state and their setters: whole tensors by parameter, of any open optimizer.

Collective: every rank calls the same function for the same parameter, outside forward and backward. A frozen parameter
has only a value.
"""

from __future__ import annotations

from functools import partial

import torch

from zcomm.zero.layout.local_param import as_local, cut_of, whole_of
from zcomm.zero.parts import Parts, TrainState
from zcomm.zero.registry import owner_of
from zcomm.zero.tensors import shard_io

_VALUES = "values of a parameter"


def _found(param: torch.Tensor) -> tuple[TrainState, Parts, int | None]:
    """Return state, parts and number of a parameter; the number is None for a frozen parameter that is whole on each
    rank. Collective."""
    found = owner_of(param)
    if found is None or (found[2] is None and param.requires_grad):
        raise ValueError(f"a tensor of shape {tuple(param.shape)} is not a parameter of an open ZeroOptimizer")
    if found[2] is not None:
        found[1].updates.drain(_VALUES)
    return found


def trained(param: torch.Tensor, own: bool = False) -> tuple[TrainState, Parts, int]:
    """Return state, parts and number of a trained parameter. Collective, unless it is for this rank's ``own`` part.
    Raises: ValueError for a parameter that is not trained."""
    train, parts, index = owner_of(param) or _found(param)
    if index is None or parts.geometry.is_frozen(index):
        raise ValueError(f"a parameter of shape {tuple(param.shape)} is not trained: it has neither gradient nor state")
    if own:
        parts.updates.wait()
        train.poison.check(_VALUES)
    else:
        parts.updates.drain(_VALUES)
    return train, parts, index


def _value(parts: Parts, index: int, value: torch.Tensor) -> torch.Tensor:
    shape = parts.cuts[index].shape
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{parts.names[index]}: the value is a {type(value).__name__}, not a tensor")
    if value.shape != shape:
        raise ValueError(f"{parts.names[index]}: the value has shape {tuple(value.shape)}, not {tuple(shape)}")
    return parts.cuts[index].part_of(value.detach()).to(torch.float32).reshape(-1)


def state_key(train: TrainState, parts: Parts, index: int, key: str) -> str:
    """Return the name of the array that stores a parameter's state ``key``. Raises: ValueError."""
    names = train.rule.shown(parts.group_of[index])
    if key not in names:
        known = ", ".join((*names, "step"))
        raise ValueError(f"{parts.names[index]} has no optimizer state {key!r}; it has {known}")
    return names[key]


def key_to_set(train: TrainState, parts: Parts, index: int, key: str) -> str:
    """Return as ``state_key``. Raises: also RuntimeError before the first step, if the rule creates its state in it."""
    name = state_key(train, parts, index, key)
    if train.rule.counted and train.counters.scalars(index) is None:
        raise RuntimeError(
            f"{key} of {parts.names[index]}: {train.rule.name} begins its state in its first step, which is still to "
            "come: set it after that, or load a state_dict()"
        )
    return name


def steps(train: TrainState, index: int) -> torch.Tensor:
    """Return the number of steps that have updated a parameter, in the form of torch's state."""
    return torch.tensor(float(train.counters.steps(index, train.param_groups)))


def full_param(param: torch.Tensor) -> torch.Tensor:
    """Return a whole copy of the fp32 master of ``param`` (of a frozen one its weight), in every stage and tier.
    Collective.

    Raises: ValueError for a parameter that no open ZeroOptimizer trains; OSError from swap files; PeerLost and
    TimeoutError. The other functions of this module raise the same.
    """
    _, parts, index = _found(param)
    if index is None:
        return whole_of(param).to(torch.float32, copy=True)
    with parts.rebinder.shown():
        whole = shard_io.master(parts, index)
    assert whole is not None
    return whole


def set_full_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Replace the master and the weight (its rounded value). value: the same on each rank. Collective."""
    train, parts, index = _found(param)
    if index is None:
        cut = cut_of(param)
        if value.shape != cut.shape:
            raise ValueError(f"the value has shape {tuple(value.shape)}, the parameter {tuple(cut.shape)}")
        with torch.no_grad():
            as_local(param).data.copy_(cut.part_of(value))
        return
    flat = _value(parts, index, value)
    parts.rebinder.restore()
    parts.store.synchronize()
    parts.comm.barrier(name="old weights are unused")
    with torch.no_grad(), train.poison.watch():
        act = partial(shard_io.set_master, parts, index, lambda elements: flat[elements])
        shard_io.together(parts, act, f"setting {parts.names[index]}")
        parts.store.publish()


def full_grad(param: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient that ``step()`` would use, before clipping. Collective.

    It is fp32, averaged over ranks and micro-steps, without the loss scale. Inside ``no_sync()`` it is this rank's sum,
    as long as no bucket has been reduced. None if ``p.grad`` is None: before a backward pass, and after
    ``zero_grad()``.
    """
    _, parts, index = trained(param)
    return shard_io.gradient(parts, index)


def set_full_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Replace the gradient that ``full_grad`` returns. Raises: RuntimeError before a backward pass."""
    _, parts, index = trained(param)
    shard_io.set_gradient(parts, index, _value(parts, index, value))


def full_optim_state(param: torch.Tensor, key: str) -> torch.Tensor:
    """State array ``key`` of ``param`` by torch's name (Adam: exp_avg, exp_avg_sq), or "step". fp32 copy. Collective.

    Raises: ValueError naming the existing keys.
    """
    train, parts, index = trained(param)
    if key == "step":
        return steps(train, index)
    whole = shard_io.array(parts, index, state_key(train, parts, index, key))
    assert whole is not None
    return whole


def set_full_optim_state(param: torch.Tensor, value: torch.Tensor, key: str) -> None:
    """Replace state array ``key``. value: the same on each rank. Collective.

    Raises: ValueError as ``full_optim_state``; RuntimeError before the first step of one of torch's classes.
    """
    train, parts, index = trained(param)
    flat = _value(parts, index, value)
    name = key_to_set(train, parts, index, key)
    with train.poison.watch():
        act = partial(shard_io.set_arrays, parts, index, {name: lambda elements: flat[elements]})
        shard_io.together(parts, act, f"setting {key} of {parts.names[index]}")
