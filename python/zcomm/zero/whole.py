"""full_param, full_grad, full_optim_state and their setters: whole tensors by parameter, whichever optimizer has it.

Collective: every rank calls the same function for the same parameter, outside of forward and backward.
"""

from __future__ import annotations

import torch

from zcomm.zero import access
from zcomm.zero.build import Parts
from zcomm.zero.optimizer import ZeroOptimizer, open_optimizers


def _owner(param: torch.Tensor) -> tuple[ZeroOptimizer, Parts, int]:
    for optimizer in open_optimizers():
        parts = optimizer._live
        index = parts.index_of.get(id(param))
        if index is not None:
            return optimizer, parts, index
    raise ValueError(f"a tensor of shape {tuple(param.shape)} is no parameter that an open ZeroOptimizer trains")


def _value(parts: Parts, index: int, value: torch.Tensor) -> torch.Tensor:
    shape = parts.geometry.places[index].shape
    if value.shape != shape:
        raise ValueError(f"{parts.names[index]}: the value has shape {tuple(value.shape)}, not {tuple(shape)}")
    return value.detach().to(torch.float32).reshape(-1)


def _key(parts: Parts, index: int, key: str) -> str:
    if key not in parts.state.form.arrays:
        known = ", ".join((*parts.state.form.arrays, "step"))
        raise ValueError(f"{parts.names[index]} has no optimizer state {key!r}; it has {known}")
    return key


def full_param(param: torch.Tensor) -> torch.Tensor:
    """The fp32 master of ``param``, whole, as a copy, in every stage and tier. Collective.

    Raises: ValueError for a parameter that no open ZeroOptimizer trains; OSError from swap files; PeerLost and
    TimeoutError. So do the other functions here.
    """
    _, parts, index = _owner(param)
    whole = access.master(parts, index)
    assert whole is not None
    return whole


def set_full_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Replace the master and the weight (its rounded value). value: the same on each rank. Collective."""
    _, parts, index = _owner(param)
    flat = _value(parts, index, value)
    parts.comm.barrier(name="nobody uses the old weights")
    with torch.no_grad():
        access.set_master(parts, index, lambda elements: flat[elements])
        parts.store.publish()


def full_grad(param: torch.Tensor) -> torch.Tensor | None:
    """The gradient that ``step()`` would use, before clipping: fp32, averaged over ranks and micro-steps, without the
    loss scale. None before a backward pass, and after ``zero_grad()``. Collective."""
    optimizer, parts, index = _owner(param)
    return access.gradient(parts, index, 1.0 / optimizer.gradient_factor)


def set_full_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Replace the gradient that ``full_grad`` gives. Raises: RuntimeError before a backward pass."""
    optimizer, parts, index = _owner(param)
    access.set_gradient(parts, index, _value(parts, index, value) * optimizer.gradient_factor)


def full_optim_state(param: torch.Tensor, key: str) -> torch.Tensor:
    """State array ``key`` of ``param`` by torch's name (Adam: exp_avg, exp_avg_sq), or "step". fp32 copy. Collective.

    Raises: ValueError naming the keys that there are.
    """
    optimizer, parts, index = _owner(param)
    if key == "step":
        return torch.tensor(float(optimizer.param_groups[parts.group_of[index]].get("step", 0)))
    whole = access.array(parts, index, _key(parts, index, key))
    assert whole is not None
    return whole


def set_full_optim_state(param: torch.Tensor, value: torch.Tensor, key: str) -> None:
    """Replace state array ``key``. value: the same on each rank. Collective."""
    _, parts, index = _owner(param)
    flat = _value(parts, index, value)
    access.set_array(parts, index, _key(parts, index, key), lambda elements: flat[elements])
