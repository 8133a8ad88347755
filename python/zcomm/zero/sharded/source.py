"""Source: the gathered value of a stand-in's parameter; and Keeper, the owner of the stand-in's elements.

With gradients the value is a function of the parameter. A write to the value is kept as this rank's part of the weight.
Thread rule: as the program's.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from zcomm.zero.rows.ops import RowKeeper, Rows

plain: Any = torch._C.DisableTorchFunctionSubclass
Act = Callable[[torch.Tensor, slice], object]
Use = AbstractContextManager[Callable[[torch.Tensor], None]]


class Keeper(RowKeeper, Protocol):
    """Owner of the elements of stand-ins. closed: it has released them."""

    closed: bool

    def has(self, param: nn.Parameter) -> bool: ...

    def whole(self, param: nn.Parameter, why: str) -> torch.Tensor:
        """Return a copy of the whole value. Collective."""

    def use(self, param: nn.Parameter) -> Use:
        """Make its unit whole for a function, as a module's call does. The value takes the function's output."""

    def use_part(self, param: nn.Parameter) -> Use | None:
        """Return ``use`` if a pass runs and the unit is a part of a block; otherwise None."""

    def by_rows(self, param: nn.Parameter) -> Rows | None:
        """Return the use of a weight that is gathered in blocks of rows; None: it is gathered whole."""

    def edit(self, param: nn.Parameter, act: Act, overwrites: bool = False) -> None:
        """``act(piece, elements)`` changes flat pieces of this rank's elements in place. overwrites: it sets all of
        them and reads none."""

    def revive(self, param: nn.Parameter, value: torch.Tensor) -> None:
        """Make it an ordinary parameter, after the keeper has released its values."""

    def set_aside(self, param: nn.Parameter, value: torch.Tensor) -> None:
        """Make it temporarily an ordinary parameter with ``value``, of another dtype (``model.half().float()``)."""

    def own_class(self, param: nn.Parameter) -> type: ...


def keep(keeper: Keeper, param: nn.Parameter, value: torch.Tensor) -> None:
    """Keep this rank's part of ``value`` as the weight."""
    flat = value.detach().reshape(-1)
    keeper.edit(param, lambda piece, elements: piece.copy_(flat[elements]), overwrites=True)


class _Gathered(torch.autograd.Function):
    """A copy of the whole value; its gradient is the parameter's."""

    @staticmethod
    def forward(ctx: Any, param: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
        return value

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class Source:
    """The gathered value of a parameter, and whether the program has written to it."""

    def __init__(self, keeper: Keeper, param: nn.Parameter, value: torch.Tensor) -> None:
        self.keeper, self.param, self.value = keeper, param, value
        self.differentiable: torch.Tensor | None = None
        self.leaves: dict[int, Any] = {}  # stand-ins, by id() of the tensor that took their place
        self._stamp = keeper.stamp(param)
        self._version = value._version

    def for_use(self, stand_in: Any) -> torch.Tensor:
        """Return the value for an operation on ``stand_in``."""
        with plain():
            connected = torch.is_grad_enabled() and isinstance(stand_in, nn.Parameter) and stand_in.requires_grad
            if not connected:
                used = self.value
            else:
                if self.differentiable is None:
                    self.differentiable = _Gathered.apply(stand_in, self.value)  # type: ignore[no-untyped-call]
                    # As for a parameter's own node: backward runs it as soon as possible.
                    self.differentiable.grad_fn._set_sequence_nr(2**64 - 1)  # type: ignore[union-attr]
                used = self.differentiable
        self.leaves[id(used)] = stand_in
        return used

    def write_back(self, force: bool = False, overwritten: bool = False) -> None:
        """Keep writes to the value since the last call. overwritten: all elements were set, without a read of them."""
        if not force and self.value._version == self._version:
            return
        if self.keeper.stamp(self.param) != self._stamp and not overwritten:
            raise RuntimeError(
                f"{self.keeper.name(self.param)}: the written tensor was gathered before the weight changed: take "
                "it (state_dict(), .data[...]) again"
            )
        with torch.no_grad():
            keep(self.keeper, self.param, self.value)
        self._version, self._stamp = self.value._version, self.keeper.stamp(self.param)

    def is_covered(self, tensor: torch.Tensor) -> bool:
        """Return True if ``tensor``, a view of the value, has each of its elements."""
        return tensor.numel() == self.value.numel() and 0 not in tensor.stride()

    def shares(self, tensor: torch.Tensor) -> bool:
        return bool(tensor.untyped_storage()._cdata == self.value.untyped_storage()._cdata)
