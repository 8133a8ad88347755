"""RowWeights: the weights of a store that are gathered by rows, and how their rows are read.

Thread rule: as UnitManager.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import nn

from zcomm.zero.rows.grads import RowGrads
from zcomm.zero.rows.ops import Keeper, Rows
from zcomm.zero.rows.reader import RowReader, RowWeight

_COPIED = (
    "%s: %s has no path by rows (unit %s): the weight is copied whole, until backward has used the copy. F.linear, "
    "F.embedding, x @ weight.t() and zcomm.linear_cross_entropy have one. This is logged once"
)
_NO_ROOM = (
    "%s: %s has no path by rows (unit %s), and memory= has no room for the whole weight: use F.linear, F.embedding, "
    "x @ weight.t() or zcomm.linear_cross_entropy, or look at it outside of forward and backward"
)


class Life(Protocol):
    """The methods of UnitManager that reads of rows call. unit: its number."""

    def begin_rows(self, unit: int) -> None:
        """Prepare for a read of rows. Collective if weights were changed."""

    def note_part(self, unit: int) -> None:
        """Note that a forward reads only some of the rows."""

    def ask_rows(self, unit: int, buckets: Collection[int]) -> None:
        """Note that a gather of rows in ``buckets`` is about to be submitted."""

    def check_rows(self, unit: int) -> None:
        """Check the use of gathered rows."""

    def explain(self, error: BaseException) -> None:
        """Add to an error of the ranks which calls they must all make."""

    def fail(self, error: BaseException) -> None:
        """Handle the ``error`` of a read."""


class RowWeights:
    """The weights of ``reader``.

    grads: takes their gradients block by block; set at assembly. limited: none is copied whole while a pass runs.
    """

    grads: RowGrads
    limited = False

    def __init__(self, reader: RowReader, life: Life, keeper: Keeper, alone: bool) -> None:
        self._reader, self._life, self._keeper, self._alone = reader, life, keeper, alone
        self._weights = {id(weight.param): weight for weight in reader.weights}
        self._uses: dict[int, weakref.WeakSet[Rows]] = {weight.index: weakref.WeakSet() for weight in reader.weights}

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
        self._keeper.check_open(weight.param)
        self._life.begin_rows(weight.unit)
        every = self._reader.read(weight, ranges, self._keeper.edits, partial(self._life.ask_rows, weight.unit))
        while True:
            try:
                rows = next(every, None)
            except BaseException as error:
                self._life.explain(error)
                self._life.fail(error)
                raise
            if rows is None:
                return
            self._life.check_rows(weight.unit)
            yield rows

    def used_by_ranks(self, weight: RowWeight, used: torch.Tensor) -> torch.Tensor:
        """Return the maximum over ranks of ``used`` (``used_rows``). Collective."""
        self._keeper.check_open(weight.param)
        self._life.note_part(weight.unit)
        if self._alone:
            return used
        try:
            return self._reader.maximum(weight, used)
        except BaseException as error:
            self._life.explain(error)
            raise
