"""Options of a group, and of a torch.distributed call besides tensors: asynchronous or not, timeout, reduction.

torch's option structs have grown over the versions (``asyncOp`` is of 2.7); this module hides the differences.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions, Backend
from torch.distributed.constants import default_pg_timeout

from zcomm import _core
from zcomm.comm.tensors import DTYPES

NAME = "zcomm"
Kind: Any = dist.ReduceOp.RedOpType
_KNOWS_ASYNC = hasattr(AllreduceOptions(), "asyncOp")
_ZERO = timedelta(0)

_CORE_OPS = {
    Kind.SUM: _core.ReduceOp.sum,
    Kind.AVG: _core.ReduceOp.avg,
    Kind.MIN: _core.ReduceOp.min,
    Kind.MAX: _core.ReduceOp.max,
    Kind.PRODUCT: _core.ReduceOp.prod,
}


class Options(Backend.Options):
    """Options of a process group: the timeout of its operations."""

    def __init__(self, timeout: timedelta = default_pg_timeout) -> None:
        """Take the timeout, as ``init_process_group`` does; torch's default is 30 minutes."""
        super().__init__(NAME, timeout)

    def __deepcopy__(self, memo: dict[int, Any]) -> Options:
        """Copy them: torch gives a part (``split_group``) a copy of its parent's options."""
        return Options(self._timeout)


def timeout_with(options: Any, timeout: timedelta) -> timedelta:
    """Return the timeout of a group made with ``timeout`` and ``options``. A timeout that was given comes first."""
    return options._timeout if isinstance(options, Options) and timeout == default_pg_timeout else timeout


def name_of(dtype: torch.dtype) -> str:
    """Return the short name of a dtype: "complex64"."""
    return str(dtype).removeprefix("torch.")


Native = tuple[_core.DType, _core.ReduceOp, int, str]
# torch's dtype and reduction -> the core's, the number of its elements per element of torch's, and a name, which ranks
# compare, for cases in which the core's dtype and reduction are ambiguous. Reductions are numbers: torch creates a new
# enum object at each read of ``opts.reduceOp.op``, and comparing those is slow.
_NATIVE: dict[torch.dtype, dict[int, Native]] = {
    dtype: {
        int(kind): (core_dtype, core_op, 1, "")
        for kind, core_op in _CORE_OPS.items()
        if kind != Kind.AVG or dtype.is_floating_point
    }
    for dtype, core_dtype in DTYPES.items()
}
for _complex, _real in ((torch.complex64, torch.float32), (torch.complex128, torch.float64)):
    _NATIVE[_complex] = {
        int(kind): (DTYPES[_real], _CORE_OPS[kind], 2, name_of(_complex)) for kind in (Kind.SUM, Kind.AVG)
    }
_of_bools = _NATIVE[torch.bool]
for _kind, _same in ((Kind.BOR, Kind.MAX), (Kind.BAND, Kind.MIN)):
    _of_bools[int(_kind)] = (*_of_bools[int(_same)][:3], _kind.name)
_NOTHING: dict[int, Native] = {}


def native(kind: Any, dtype: torch.dtype) -> Native | None:
    """Return how the core does this reduction, or None: then it is emulated (ops/emulate.py)."""
    return _NATIVE.get(dtype, _NOTHING).get(int(kind))


def is_async(opts: Any) -> bool:
    """Return True if the caller wants the call to return before the operation is done; always before torch 2.7."""
    return bool(opts.asyncOp) if _KNOWS_ASYNC else True


def timeout_of(opts: Any) -> float | None:
    """Return the operation's timeout in seconds; None: the group's."""
    timeout = opts.timeout
    return timeout.total_seconds() if timeout > _ZERO else None


def premul_factor(op: dist.ReduceOp) -> Any:
    """Return the number or tensor that PREMUL_SUM multiplies each input by."""
    state: Any = op.__getstate__()
    return state[1]


def only_one(what: str, tensors: Any, instead: str) -> Any:
    """Return the tensor of a list of one. Raises: ValueError for others, naming the call that takes several."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise ValueError(
            f"{what}: a list of {len(tensors)} tensors, which meant one for each device of a process; expected one "
            f"tensor. Call it for each, or {instead}"
        )
    return tensors[0]


def root_of(what: str, opts: Any) -> int:
    """Return the root's rank. Raises: ValueError for a root tensor out of several (see only_one)."""
    if getattr(opts, "rootTensor", 0) not in (0, -1):
        raise ValueError(f"{what}: rootTensor={opts.rootTensor}: expected 0; a call has one tensor")
    return int(opts.rootRank)


def made(kind: Any, opts: Any, timeout: timedelta | None = None, **fields: Any) -> Any:
    """Return the options of a call that named single values instead: ``allreduce(tensor, op, timeout)``."""
    if opts is not None and hasattr(opts, "asyncOp" if _KNOWS_ASYNC else "timeout"):
        return opts  # of this kind, or of a sibling: AllreduceCoalescedOptions
    result = kind()
    if opts is not None:  # in place of the options stands the root or the reduction
        field = "rootRank" if isinstance(opts, int) and hasattr(result, "rootRank") else "reduceOp"
        setattr(result, field, opts)
    if timeout is not None:
        result.timeout = timeout
    for name, value in fields.items():
        if value is not None:
            setattr(result, name, value)
    return result
