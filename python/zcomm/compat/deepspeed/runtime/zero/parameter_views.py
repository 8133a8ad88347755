"""``ds_id``, ``ds_shape``, ``ds_status`` and so on of sharded parameters, as views of zcomm's data.

[Note: parameter views] ``install`` sets descriptors on ``nn.Parameter``. They answer for parameters of an open stage 3,
and for parameters of ``zero.Init`` that have no memory yet, or have it in GatheredParameters. They also answer for
small ones of ``deepspeed.zero.Init``, which have memory before ``initialize`` (``number``). For any other parameter
they raise AttributeError, because programs test ``hasattr(p, "ds_id")`` for sharded parameters. A value that a program
sets under such a name wins.
Only ``ds_id`` and the open contexts of ``all_gather`` are stored.
Source: the attributes that DeepSpeed's zero.Init gives to parameters.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from zcomm.zero import GatheredParameters
from zcomm.zero.materialize.deferred import Waiting, is_marked_real
from zcomm.zero.parts import Parts
from zcomm.zero.registry import open_optimizers, open_parts, train_of
from zcomm.zero.tensors.gathered import is_made_real
from zcomm.zero.tensors.shard_io import pieces

_ID = "_zcomm_ds_id"
_numbers = itertools.count()
_gathered: dict[int, GatheredParameters] = {}  # by id(): contexts that all_gather() has opened


class ZeroParamType(Enum):
    """Kind of a parameter. zcomm's are PARTITIONED."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ZeroParamStatus(Enum):
    """Status of a parameter on this rank: whole or not. A parameter in flight is NOT_AVAILABLE, none is INFLIGHT."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def _parts_of(param: torch.Tensor) -> tuple[Parts, int] | None:
    """Find the open stage 3 that shards a parameter, and its number in it. Local; waits for no step."""
    for owner in open_optimizers():
        index = open_parts(owner).index_of.get(id(param))
        if index is not None and train_of(owner).stage == 3:
            return open_parts(owner), index
    return None


def number(param: nn.Parameter) -> int:
    """Return ``ds_id`` of ``param``, which the views answer for from now on if it is of ``zero.Init``."""
    if not _is_numbered(param):
        vars(param)[_ID] = (next(_numbers), id(param))
    return int(vars(param)[_ID][0])


def _is_numbered(param: nn.Parameter) -> bool:
    return bool(vars(param).get(_ID, (0, None))[1] == id(param))  # a copy has a number of its own


def _is_of_init(param: nn.Parameter) -> bool:
    """Return True for a parameter of zero.Init that no ZeroOptimizer has adopted."""
    return isinstance(param, Waiting) or is_made_real(param) or (is_marked_real(param) and _is_numbered(param))


def _id(param: nn.Parameter, found: tuple[Parts, int] | None) -> int:
    return number(param)


def _status(param: nn.Parameter, found: tuple[Parts, int] | None) -> ZeroParamStatus:
    whole = not param.is_meta if found is None else found[0].store.is_whole(found[1])
    return ZeroParamStatus.AVAILABLE if whole else ZeroParamStatus.NOT_AVAILABLE


class _Copy(torch.Tensor):
    """A copy that refuses to be changed, views of it as well: a change would reach no weight."""

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)  # as torch.Tensor does

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.__name__
        changes = name in _CHANGES or (name.endswith("_") and not name.endswith("__"))
        if any(isinstance(leaf, _Copy) for leaf in tree_leaves([args[:1] if changes else (), kwargs.get("out")])):
            raise RuntimeError(
                f"{name}(): ds_tensor is a copy of the elements that this rank keeps, and a change of it reaches no "
                "weight: change the parameter inside of zcomm.zero.GatheredParameters(param, modifier_rank=0), or by "
                "safe_set_full_fp32_param()"
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            if func is torch.Tensor.numpy:
                result.setflags(write=False)
            elif isinstance(result, torch.Tensor) and isinstance(args[0], _Copy):
                shared = result.untyped_storage()._cdata == args[0].untyped_storage()._cdata
                return result.as_subclass(_Copy) if shared else result
        return result


_AUGMENTED = "add sub mul truediv floordiv mod pow and or xor"
_CHANGES = {"__set__", "__setitem__", *(f"__i{op}__" for op in _AUGMENTED.split())}


def _tensor(param: nn.Parameter, found: tuple[Parts, int] | None) -> torch.Tensor | None:
    """Copy this rank's elements, flat. None before ZeroOptimizer."""
    if found is None:
        return None
    parts, index = found
    mine = [parts.store.read(piece.bucket)[piece.tile][piece.inside].cpu() for piece in pieces(parts, index)]
    return torch.cat([torch.empty(0, dtype=parts.state.form.dtype), *mine]).as_subclass(_Copy)


def _secondary(param: nn.Parameter, found: tuple[Parts, int] | None) -> torch.Tensor | None:
    """Copy the elements that the ranks of this host keep for this one, flat. None without hpZ."""
    if found is None or not found[0].comms.hpz:
        return None
    parts, index = found
    mine = []
    for bucket in parts.geometry.every:
        if index in bucket.params:
            held = bucket.held
            low, high = (place - held.start for place in parts.geometry.span_in(bucket, index).within(held))
            mine.append(parts.store.read_held(bucket)[low : max(low, high)].cpu())
    return torch.cat([torch.empty(0, dtype=parts.state.form.dtype), *mine]).as_subclass(_Copy)


def _each(param: nn.Parameter, param_list: Iterable[nn.Parameter] | None) -> list[nn.Parameter]:
    return [param] if param_list is None else list(param_list)


def _all_gather(param: nn.Parameter, found: tuple[Parts, int] | None) -> Callable[..., None]:
    def all_gather(
        param_list: Iterable[nn.Parameter] | None = None, async_op: bool = False, hierarchy: int = 0
    ) -> None:
        """Gather parameters until ``partition``. Collective. async_op: has no effect, it returns None."""
        for each in _each(param, param_list):
            if id(each) not in _gathered:
                opened = GatheredParameters([each], modifier_rank=0)
                opened.__enter__()
                _gathered[id(each)] = opened

    return all_gather


class _Gathered:
    """The handle of a gather that has ended."""

    def wait(self, **arguments: Any) -> None:
        """Return at once."""


def _all_gather_coalesced(param: nn.Parameter, found: tuple[Parts, int] | None) -> Callable[..., _Gathered]:
    def all_gather_coalesced(params: Iterable[nn.Parameter], **arguments: Any) -> _Gathered:
        """Gather parameters until ``partition``. Collective. Other arguments have no effect."""
        _all_gather(param, found)(params)
        return _Gathered()

    return all_gather_coalesced


def _partition(param: nn.Parameter, found: tuple[Parts, int] | None) -> Callable[..., None]:
    def partition(
        param_list: Iterable[nn.Parameter] | None = None, hierarchy: int = 0, has_been_updated: bool = False
    ) -> None:
        """End ``all_gather``. Collective. has_been_updated: the weights take rank 0's values; else changes are
        discarded."""
        for each in _each(param, param_list):
            opened = _gathered.pop(id(each), None)
            if opened is not None:
                opened.close(keep=has_been_updated)

    return partition


def _summary(param: nn.Parameter, found: tuple[Parts, int] | None) -> Callable[..., dict[str, Any]]:
    def ds_summary(use_debug_name: bool = False) -> dict[str, Any]:
        """Return id, status and sizes, for messages of programs."""
        return {
            "id": _id(param, found),
            "status": _status(param, found).name,
            "numel": param.numel(),
            "shape": tuple(param.shape),
            "requires_grad": param.requires_grad,
        }

    return ds_summary


View = Callable[[nn.Parameter, "tuple[Parts, int] | None"], Any]

_VIEWS: dict[str, View] = {
    "ds_id": _id,
    "ds_shape": lambda param, found: param.shape,
    "ds_numel": lambda param, found: param.numel(),
    "ds_status": _status,
    "ds_tensor": _tensor,
    "ds_secondary_tensor": _secondary,
    "ds_zero_param_process_group": lambda param, found: None,  # zcomm's groups have no torch group
    "ds_persist": lambda param, found: False,  # none is whole outside its use
    "ds_param_type": lambda param, found: ZeroParamType.PARTITIONED,
    "ds_summary": _summary,
    "all_gather": _all_gather,
    "all_gather_coalesced": _all_gather_coalesced,
    "partition": _partition,
}


class _View:
    """A descriptor without ``__set__``, so that a value set by a program is the parameter's own."""

    def __init__(self, name: str, view: View) -> None:
        self._name, self._view = name, view

    def __get__(self, param: nn.Parameter | None, kind: type) -> Any:
        if param is None:
            return self
        found = _parts_of(param)
        if found is None and not _is_of_init(param):
            raise AttributeError(f"{kind.__name__!r} object has no attribute {self._name!r}: stage 3 does not shard it")
        return self._view(param, found)


def install() -> None:
    """Add the views to parameters. Idempotent."""
    for name, view in _VIEWS.items():
        if name not in vars(nn.Parameter):
            setattr(nn.Parameter, name, _View(name, view))
