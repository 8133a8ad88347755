"""Masters, gradients and optimizer state of one parameter: reads and writes of this rank's elements.

Stage 3. The elements are flat and in order. A rank keeps the elements in its shard of the flat bucket, possibly none.
The ranks' counts add up to the parameter's.
Source: DeepSpeed's safe_get_local_fp32_param and so on; in DeepSpeed each rank has an equal share of each parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from zcomm.zero.parts import Parts, TrainState
from zcomm.zero.tensors import shard_io
from zcomm.zero.tensors.full_tensor import full_grad, key_to_set, set_full_grad, state_key, steps, trained


def _sharded(param: torch.Tensor, own: bool = False) -> tuple[TrainState, Parts, int]:
    """Do as ``trained``. Raises: ValueError unless the stage is 3."""
    train, parts, index = trained(param, own)
    if train.stage != 3:
        raise ValueError(
            f"{parts.names[index]}: stage {train.stage} does not shard weights; a rank has a part of them in stage 3"
        )
    return train, parts, index


def _mine(parts: Parts, index: int, value: torch.Tensor) -> tuple[list[slice], torch.Tensor]:
    """Return the slices of this rank's elements, and their new ``value``, checked, flat and in fp32."""
    mine = shard_io.own_elements(parts, index)
    count = sum(each.stop - each.start for each in mine)
    if value.numel() != count:
        raise ValueError(f"{parts.names[index]}: the value has {value.numel()} elements, this rank keeps {count}")
    return mine, value.detach().to("cpu", torch.float32).reshape(-1)


def _taken(whole: torch.Tensor, mine: Sequence[slice]) -> torch.Tensor:
    return torch.cat([whole[each] for each in mine]) if mine else whole[:0].clone()


def _read(flat: torch.Tensor, mine: Sequence[slice]) -> Callable[[slice], torch.Tensor]:
    """Return a reader of the parameter's elements from ``flat``, which holds the slices ``mine`` one after another."""

    def read(elements: slice) -> torch.Tensor:
        before = 0
        for each in mine:
            if each.start <= elements.start < each.stop:
                break
            before += each.stop - each.start
        begin = before + elements.start - each.start
        return flat[begin : begin + elements.stop - elements.start]

    return read


def own_param(param: torch.Tensor) -> torch.Tensor:
    """Return a copy of this rank's elements of the fp32 master. Local.

    Raises: ValueError for a parameter that no open ZeroOptimizer trains, or not in stage 3; OSError from swap files.
    The other functions of this module raise the same.
    """
    _, parts, index = _sharded(param, own=True)
    return _taken(shard_io.own_master(parts, index), shard_io.own_elements(parts, index))


def own_grad(param: torch.Tensor) -> torch.Tensor | None:
    """Return a copy of this rank's elements of ``full_grad``; None if ``full_grad`` is None. Collective."""
    _, parts, index = _sharded(param)
    whole = full_grad(param)
    return None if whole is None else _taken(whole.reshape(-1), shard_io.own_elements(parts, index))


def own_optim_state(param: torch.Tensor, key: str) -> torch.Tensor:
    """Return a copy of this rank's elements of state array ``key`` in fp32, or "step". Local."""
    train, parts, index = _sharded(param, own=True)
    if key == "step":
        return steps(train, index)
    own = shard_io.own_array(parts, index, state_key(train, parts, index, key))
    return _taken(own, shard_io.own_elements(parts, index))


def set_own_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Replace this rank's elements of the master and, rounded, of the weight. Collective: each rank gives its own."""
    _, parts, index = _sharded(param)
    mine, flat = _mine(parts, index, value)
    parts.rebinder.restore()
    parts.store.synchronize()
    parts.comm.barrier(name="old weights are unused")
    with torch.no_grad():
        shard_io.set_master(parts, index, _read(flat, mine))
        parts.store.publish()


def set_own_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Replace this rank's elements of the gradient. Collective. Raises: RuntimeError before a backward pass."""
    _, parts, index = _sharded(param)
    mine, flat = _mine(parts, index, value)
    whole = full_grad(param)
    if whole is None:
        raise RuntimeError(f"{parts.names[index]} has no gradient to set: call backward() first")
    read = _read(flat, mine)
    for each in mine:
        whole.view(-1)[each] = read(each)
    set_full_grad(param, whole)


def set_own_optim_state(param: torch.Tensor, value: torch.Tensor, key: str) -> None:
    """Replace this rank's elements of state array ``key``. Local."""
    train, parts, index = _sharded(param, own=True)
    mine, flat = _mine(parts, index, value)
    key = key_to_set(train, parts, index, key)
    shard_io.set_arrays(parts, index, {key: _read(flat, mine)})
