"""UserGrads: ``p.grad`` of each parameter, which the program and the reducer share.

[Note: p.grad] The reducer's hook is the last of a parameter's hooks, so hooks of the program see this rank's gradient,
as under DDP. It removes the gradient and leaves a stand-in (sharded/grad.py). A stand-in is detached before autograd
accumulates, which would otherwise add to it, and restored if autograd does not (``autograd.grad``).
Changes of ``p.grad`` by the program count as in torch: None drops the gradient, and a step then skips the parameter. A
tensor of the program stays: autograd adds to it, and a step uses it as this rank's gradient. The program's values are
true gradients, but autograd adds ``factor`` times a gradient (loss scale, micro-steps). So unless the factor is 1, a
copy of the program's values is kept next to the sum. A step raises if the program changed the sum since.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zcomm.zero.gradients.values import GradientValues
from zcomm.zero.sharded.grad import GradAccess, GradStandIn


def _references(held: dict[int, Any]) -> dict[int, int]:
    """Count the references to each object, as seen from here."""
    return {index: sys.getrefcount(each) for index, each in held.items()}


_ALONE = _references({0: object()})[0]  # only by the dict


@dataclass
class _Sum:
    """A tensor of the program to which autograd adds. assigned: a copy of the program's part."""

    tensor: torch.Tensor
    assigned: torch.Tensor
    version: int
    changed: bool = False


class UserGrads:
    """The ``p.grad`` of each parameter.

    params: by number. dropped: the program has dropped their gradients, and accumulators still have them.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter], values: GradientValues) -> None:
        self._params = params
        self._values = values
        self._of: weakref.ref[GradAccess] = weakref.ref(values)
        self._stand_ins: dict[int, GradStandIn] = {}
        self._attached: set[int] = set()
        self._detached: dict[int, GradStandIn] = {}
        self._theirs: set[int] = set()  # autograd is about to add their gradients to tensors of the program
        self._sums: dict[int, _Sum] = {}  # tensors of the program to which autograd has added scaled gradients
        self._restored_by = -1  # the graph task that puts detached ones back when it ends
        self.dropped: set[int] = set()

    # --- around an accumulation -------------------------------------------------------------------------------

    def detach_stand_in(self, index: int, had: torch.Tensor) -> None:
        """Remove a stand-in from ``p.grad``: autograd is about to add to ``had``, or only asked for the gradient."""
        if isinstance(had, GradStandIn):
            self._check(index, had)
            self._detached[index] = had
            self._params[index].grad = None
        else:
            self._theirs.add(index)
            if self._values.factor() != 1.0:
                self._keep_values(index, had)
        task = torch._C._current_graph_task_id()
        if self._restored_by != task:
            self._restored_by = task
            torch.autograd.Variable._execution_engine.queue_callback(self._restore)

    def _keep_values(self, index: int, had: torch.Tensor) -> None:
        """Copy the values that the program has assigned, before autograd adds a scaled gradient to them."""
        known = self._sums.get(index)
        if known is None or known.tensor is not had:
            self._sums[index] = _Sum(had, had.detach().clone(), had._version)
        elif known.version != had._version:
            known.changed = True

    def values_in(self, index: int) -> torch.Tensor | None:
        """Return the program's part of a sum with scaled gradients, as assigned before autograd added to it. None: all
        of it is the program's."""
        known = self._sums.get(index)
        return None if known is None else known.assigned

    def _restore(self) -> None:
        for index, stand_in in self._detached.items():
            if self._params[index].grad is None:
                self._put(index, stand_in)
        self._detached.clear()
        self._theirs.clear()

    def collect(self, index: int) -> torch.Tensor | None:
        """Return the gradient that autograd and the program's hooks have left, and put a stand-in in its place. None:
        there is none, or it stays the program's."""
        detached = self._detached.pop(index, None) if self._detached else None
        if index in self._theirs:
            self._theirs.discard(index)
            known, grad = self._sums.get(index), self._params[index].grad
            if known is not None and grad is not None:
                known.tensor, known.version = grad, grad._version
            return None
        param = self._params[index]
        grad = param.grad
        if detached is None and index in self._attached:
            self.dropped.add(index)
        if grad is None:  # dropped by a hook of the program
            self.dropped.add(index)
            self._attached.discard(index)
            return None
        self._put(index, detached)
        return grad

    def collect_rows(self, index: int) -> None:
        """Put a stand-in into ``p.grad``: the gradient comes by blocks ([Note: gradients by blocks])."""
        detached = self._detached.pop(index, None) if self._detached else None
        if detached is None and index in self._attached:
            self.dropped.add(index)
        self._put(index, detached)

    def attach_stand_in(self, index: int) -> None:
        """Attach a stand-in to a parameter that the pass has not reached. Its gradient counts as zero on this rank;
        other ranks may have one."""
        param = self._params[index]
        if param.grad is None:
            if index in self._attached:
                self.dropped.add(index)
                self._attached.discard(index)
            if param.requires_grad:
                self._put(index)

    def _put(self, index: int, stand_in: GradStandIn | None = None) -> None:
        param = self._params[index]
        if stand_in is None:
            stand_in = self._stand_ins.get(index)
        if stand_in is not None and (stand_in.dtype, stand_in.device) == (param.dtype, param.device):
            stand_in._generation = self._values.generation  # one that the program has kept is not used again
        else:
            form = (self._values.shape_of(index), None, param.dtype, param.device)
            stand_in = GradStandIn(self._of, index, self._values.generation, *form)
            self._stand_ins[index] = stand_in
        self._attached.add(index)
        if param.shape == stand_in.shape:
            param.grad = stand_in
            return
        data = param.data  # of a unit that is not gathered now: torch compares the shapes
        param.data = torch.empty((), dtype=param.dtype, device=param.device).expand(stand_in.shape)
        param.grad = stand_in
        param.data = data

    def _check(self, index: int, stand_in: GradStandIn) -> None:
        if not stand_in.is_for(self._values, index):
            raise RuntimeError(
                f"p.grad of {self._values.names[index]} is a part of a gradient, or that of another parameter: assign "
                "a copy of it (.clone())"
            )

    def refusal(self) -> str:
        """Name a parameter if the next pass will not give its whole gradient, or return ""."""
        for name, param in zip(self._values.names, self._params, strict=True):
            if not param.requires_grad:
                return f"{name} is frozen now, so that a step skips it"
            if param.grad is not None and not isinstance(param.grad, GradStandIn):
                return f"p.grad of {name} is a tensor of the program"
        return ""

    # --- at a step --------------------------------------------------------------------------------------------

    def held(self) -> tuple[list[int], list[int]]:
        """List the parameters with ``p.grad`` None, and those with a tensor of the program. Raises: RuntimeError for a
        stand-in of another parameter."""
        self._restore()
        absent, assigned = [], []
        for index, param in enumerate(self._params):
            grad = param.grad
            if grad is None:
                absent.append(index)
            elif isinstance(grad, GradStandIn):
                if grad is not self._stand_ins.get(index):
                    self._check(index, grad)
            else:
                if grad.shape != (shape := self._values.shape_of(index)):
                    raise RuntimeError(
                        f"p.grad of {self._values.names[index]} is a tensor of shape {tuple(grad.shape)}, but this "
                        f"rank's part of the parameter has {tuple(shape)}: assign a DTensor, placed as the parameter "
                        "(torch.distributed.tensor.distribute_tensor)"
                    )
                self._check_sum(index, grad)
                assigned.append(index)
        return absent, assigned

    def _check_sum(self, index: int, grad: torch.Tensor) -> None:
        """Raise RuntimeError if the program has changed a sum of its own and scaled gradients."""
        known = self._sums.get(index)
        if known is None:
            return
        if known.changed or known.tensor is not grad or known.version != grad._version:
            raise RuntimeError(
                f"p.grad of {self._values.names[index]} was a tensor of the program when backward() added gradients "
                f"that are scaled by {self._values.factor():g} (loss scale, micro-steps) to it, and was changed since: "
                "set p.grad = None (zero_grad()) before backward(), or assign it after the last backward()"
            )

    def clear(self, set_to_none: bool) -> None:
        """Forget the gradients, as torch's zero_grad does."""
        if not set_to_none:
            self._restore()
        self._detached.clear()
        self._theirs.clear()
        self._sums.clear()
        self.dropped.clear()
        for param in self._params:
            grad = param.grad
            if set_to_none or grad is None:
                param.grad = None
            elif not isinstance(grad, GradStandIn):
                if grad.grad_fn is not None:
                    grad.detach_()
                else:
                    grad.requires_grad_(False)
                grad.zero_()
        if set_to_none:
            self._attached.clear()
            counts = _references(self._stand_ins)
            self._stand_ins = {i: each for i, each in self._stand_ins.items() if counts[i] == _ALONE}

    def close(self) -> None:
        """Leave no stand-in to the model."""
        self._detached.clear()
        self._stand_ins.clear()
        for param in self._params:
            if isinstance(param.grad, GradStandIn):
                param.grad = None
