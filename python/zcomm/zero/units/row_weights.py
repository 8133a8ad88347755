"""RowWeights: the weights of a store that are gathered by rows, and how their rows are read.

Thread rule: as UnitManager.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import nn

from zcomm.zero.rows.grads import RowGrads
from zcomm.zero.rows.ops import RowKeeper, Rows
from zcomm.zero.rows.weight import RowWeight
from zcomm.zero.units.memory import UnitPool, add_remedy
from zcomm.zero.units.unit import Unit
from zcomm.zero.update_hooks import UpdateHooks

_COPIED = (
    "%s: %s has no path by rows (unit %s): the weight is copied whole, until backward has used the copy. F.linear, "
    "F.embedding, x @ weight.t(), zcomm.linear_cross_entropy and w[i] of experts have one. This is logged once"
)
_NO_ROOM = (
    "%s: %s has no path by rows (unit %s), and memory= has no room for the whole weight: use F.linear, F.embedding, "
    "x @ weight.t(), zcomm.linear_cross_entropy or w[i] of experts, or look at it outside of forward and backward"
)


class Keeper(RowKeeper, Protocol):
    """The members of UnitWeights that reads of rows need. in_forward: a module of the model runs forward."""

    @property
    def in_forward(self) -> bool: ...

    def take_back(self, units: Sequence[Unit]) -> None:
        """Take back parameters of ``units`` that the program has replaced."""


class RowWeights:
    """The weights by rows of ``memory``.

    updates: hooks that are called at each read. grads: takes their gradients block by block; set at assembly. limited:
    none is copied whole while a pass runs.
    """

    grads: RowGrads
    limited = False

    def __init__(self, memory: UnitPool, keeper: Keeper, updates: UpdateHooks, alone: bool) -> None:
        self._memory, self._reader, self._keeper = memory, memory.rows, keeper
        self._updates, self._alone = updates, alone
        weights = self._reader.weights
        self._weights = {id(weight.param): weight for weight in weights}
        self._uses: dict[int, weakref.WeakSet[Rows]] = {weight.index: weakref.WeakSet() for weight in weights}

    def of(self, param: nn.Parameter) -> Rows | None:
        """Return the rows of a weight; None: it is gathered whole."""
        weight = self._weights.get(id(param))
        return None if weight is None else Rows(self, weight, self._keeper, self._uses[weight.index])

    def whole(self, param: nn.Parameter) -> torch.Tensor | None:
        """Return a whole copy; None: the weight is not gathered by rows. Collective."""
        rows = self.of(param)
        if rows is None:
            return None
        whole = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        for begin, end, block in rows.blocks():
            whole[begin:end] = block
        return whole

    def in_forward(self) -> bool:
        """Return True while a forward runs on the only rank."""
        return self._alone and self._keeper.in_forward

    def warning(self, param: nn.Parameter, why: str) -> str | None:
        """Return the warning of a whole copy while a pass runs; None: the weight is not gathered by rows.

        why: the operation. Raises: RuntimeError if memory= has no room for a copy.
        """
        weight = self._weights.get(id(param))
        if weight is None:
            return None
        names = (self._keeper.name(param), why, weight.name)
        if self.limited:
            raise RuntimeError(_NO_ROOM % names)
        return _COPIED % names

    def read(self, weight: RowWeight, ranges: Sequence[tuple[int, int]]) -> Iterator[torch.Tensor]:
        """Yield the rows of each range, which the next rows overwrite. Collective."""
        self._before(weight)
        every = self._reader.read(weight, ranges, self._keeper.edits, partial(self._updates.rows_asked, weight.unit))
        while True:
            try:
                rows = next(every, None)
            except BaseException as error:
                add_remedy(error)
                self._updates.gather_failed(error)
                raise
            if rows is None:
                return
            self._updates.check_use(weight.unit)
            yield rows

    def take(self, weight: RowWeight, number: int) -> torch.Tensor:
        """Return a matrix of a weight with three dimensions, which a running forward indexes."""
        self._before(weight)
        found = self._reader.matrices.take(weight, number, self._keeper.edits)
        self._updates.check_use(weight.unit)
        return found

    def expect(self, wanted: Sequence[tuple[nn.Parameter, int]]) -> None:
        """Read ahead matrices of weights, which a forward is about to index in this order."""
        weights = [(self._weights[id(param)], number) for param, number in wanted]
        for weight in {weight.index: weight for weight, _ in weights}.values():
            self._before(weight)
        self._reader.matrices.expect(weights, self._keeper.edits)

    def _before(self, weight: RowWeight) -> None:
        self._keeper.check_open(weight.param)
        self._keeper.take_back([self._memory.units[weight.unit]])
        self._updates.before_use()
        self._memory.end_edits()

    def used_by_ranks(self, weight: RowWeight, used: torch.Tensor) -> torch.Tensor:
        """Return the maximum over ranks of ``used`` (``used_rows``). Collective."""
        self._keeper.check_open(weight.param)
        self._updates.used_in_part(weight.unit)
        if self._alone:
            return used
        try:
            return self._reader.maximum(weight, used)
        except BaseException as error:
            add_remedy(error)
            raise
