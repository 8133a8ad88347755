"""Work of forward and backward of one micro-batch: each operation's arithmetic and the bytes that it reads and writes.

Traced on the meta device, so nothing is computed. Views cost their start. Source: torch.utils.flop_counter's formulas;
the roofline model (Williams, Waterman, Patterson: CACM 52(4), 2009) then gives seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from zcomm.machine.speeds import Speeds
from zcomm.zero.layout.unit_policy import tensors_in
from zcomm.zero.registry import owned_params

_NEAR_NBYTES = 4 << 20  # an operation on fewer bytes finds most of them in a cache
_ROWS = {"embedding", "index_select", "gather", "index"}  # read only as many bytes as their result has
_FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias", "lift_fresh"}


@dataclass(frozen=True)
class Operation:
    """One operator call."""

    name: str
    flops: int
    nbytes: int


class Work(list[Operation]):
    """The operations of a micro-batch. forward_flops: of its forward, without recomputation."""

    forward_flops = 0

    @property
    def flops(self) -> int:
        return sum(operation.flops for operation in self)

    def seconds(self, speeds: Speeds, precision: str) -> float:
        """Return the seconds of all operations: for each the longer of its arithmetic and its bytes, and its start."""
        rate = speeds.flops[precision]
        total = 0.0
        for operation in self:
            bps = speeds.near_bps if operation.nbytes < _NEAR_NBYTES else speeds.far_bps
            total += speeds.start_s + max(operation.flops / rate, operation.nbytes / bps)
        return total * speeds.slowdown


class _Recorder(TorchDispatchMode):
    def __init__(self, work: Work) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._work = work

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func._overloadpacket
        name = str(packet).rpartition(".")[2]
        given, made = list(tensors_of([args, kwargs])), list(tensors_of(out))
        is_view = not func._schema.is_mutable and {storage(t) for t in made} <= {storage(t) for t in given}
        if name in _FREE:
            return out
        if is_view and given:
            self._work.append(Operation(name, 0, 0))
            return out
        formula = flop_registry.get(packet)
        flops = int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0
        written = sum(map(_nbytes, made))
        read = written if name in _ROWS else sum(map(_nbytes, given))
        self._work.append(Operation(name, flops, read + written))
        return out


def work_of(model: nn.Module, *args: Any, **kwargs: Any) -> Work:
    """Trace forward of ``model(*args, **kwargs)`` and backward from the sum of its floating outputs.

    On another device than meta, buffers and random numbers change as in training.
    Raises: ValueError for a model that an optimizer trains; errors of the model.
    """
    check_untrained(model)
    work = Work()
    with torch.enable_grad(), _Recorder(work):
        output = model(*args, **kwargs)
        work.forward_flops = work.flops
        run_backward(output)
    for param in model.parameters():
        param.grad = None
    return work


def check_untrained(model: nn.Module) -> None:
    """Raise ValueError if an open ZeroOptimizer has a parameter, because it would use the trace's gradients."""
    if owned_params() & {id(param) for param in model.parameters()}:
        raise ValueError(
            f"{type(model).__name__} has a ZeroOptimizer, which would take the gradients of a trace: give such a model "
            "without an optimizer, made in 'with torch.device(\"meta\"):'"
        )


def run_backward(output: Any) -> bool:
    """Run backward from the sum of the floating tensors in a model's output. Returns: False if there are none."""
    sums = [t.float().sum() for t in tensors_in(output) if t.is_floating_point() and t.requires_grad]
    if sums:
        total = torch.stack(sums).sum()
        engine = torch.autograd.Variable._execution_engine  # torch.autograd.backward leaves a mode of torch's functions
        first = ((total,), (torch.ones_like(total),), False, False, ())
        engine.run_backward(*first, allow_unreachable=True, accumulate_grad=True)
    return bool(sums)


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_of(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_of(each)


def storage(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's memory, as long as it lives."""
    return int(tensor.untyped_storage()._cdata)


def _nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor; an expanded one is read from its few bytes."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
