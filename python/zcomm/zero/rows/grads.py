"""RowGrads: gradients of weights in blocks, computed block by block when their bucket has a slot.

[Note: gradients by blocks] The node of backward that uses a weight by rows returns no gradient to autograd. Instead it
adds a function that computes rows of the gradient. Autograd calls the parameter's hooks after all of its uses have run:
then the gradient is complete, as for any parameter. Each block is computed when its bucket has a slot. Several uses (an
embedding tied to a head) add a term each. The terms are summed as autograd sums: in the order in which backward ran
them, in the weight's dtype. So a block has the bits of the whole gradient, and only a few buckets of it exist at a
time. linear_cross_entropy computes a block from logits before that. It hands the block over at once if the pass runs no
other use of the weight.
Hooks of the program on the parameter, ``autograd.grad``, and a ``p.grad`` of the program require the whole gradient.
Thread rule: as GradientReducer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from zcomm.zero.rows.blocks import RowBlock

Make = Callable[[int, int], torch.Tensor]  # rows [begin, end) of a gradient, in the weight's dtype
Lazy = Callable[[], torch.Tensor]
_executes = getattr(torch._C, "_will_engine_execute_node", None)


class Reducer(Protocol):
    """The methods of GradientReducer that rows need."""

    def is_assigned(self, index: int) -> bool:
        """Return True if ``p.grad`` of parameter ``index`` is a tensor of the program."""

    def begin_rows(self, index: int) -> None:
        """Begin the arrival of parameter ``index``, which hands over its blocks itself."""

    def take_block(self, number: int, grad: torch.Tensor | Lazy | None) -> None:
        """Take one block."""


@dataclass(frozen=True)
class _Term:
    """A use's part of a gradient. task: the graph task that has run it. gathers: ``make`` is collective."""

    task: int
    make: Make
    gathers: bool


class RowGrads:
    """The gradients that are not made yet, of ``params`` with ``blocks``, by number."""

    def __init__(
        self, reducer: Reducer, params: Sequence[torch.nn.Parameter], blocks: Mapping[int, Sequence[RowBlock]]
    ) -> None:
        self._reducer, self._params, self._blocks = reducer, params, blocks
        self._waiting: dict[int, list[_Term]] = {}
        self._came: dict[int, int] = {}  # by parameter: the graph task in which its gradient came by blocks last
        self.hooks = 1  # of each kind that the reducer has on a parameter

    def is_wanted(self, node: Any) -> bool:
        """Return False if the running pass does not need the gradient of the weight, the second input of ``node``."""
        edge = node.next_functions[1][0]
        if edge is None or _executes is None or torch._C._current_graph_task_id() < 0:
            return True
        try:
            return bool(_executes(edge))
        except RuntimeError:  # autograd.grad() returns it
            return True

    def runs(self, node: Any) -> bool:
        """Return True if the running pass executes ``node``. None: the node has been freed."""
        return node is not None and _executes is not None and bool(_executes(node))

    def takes(self, index: int, node: Any) -> bool:
        """Return True if the pass that runs ``node`` accumulates the gradient by blocks."""
        if index not in self._blocks or _executes is None or torch._C._current_graph_task_id() < 0:
            return False
        param: Any = self._params[index]
        hooks = (param._backward_hooks, param._post_accumulate_grad_hooks)
        if any(len(of_kind or ()) > self.hooks for of_kind in hooks) or not param.requires_grad:
            return False
        if self._reducer.is_assigned(index):
            return False
        try:
            return bool(_executes(node.next_functions[1][0]))
        except RuntimeError:
            return False

    def add(self, index: int, make: Make, gathers: bool) -> None:
        """Add a use's part of the gradient of parameter ``index``. gathers: ranks must call ``make`` alike."""
        self._waiting.setdefault(index, []).append(_Term(torch._C._current_graph_task_id(), make, gathers))

    def comes(self, index: int) -> bool:
        """Return True if uses that the running graph task has run are waiting, and autograd has no gradient."""
        task = torch._C._current_graph_task_id()
        waits = any(term.task == task for term in self._waiting.get(index, ()))
        return waits and self._params[index].requires_grad

    def came(self, index: int) -> bool:
        """Return True if the gradient came by blocks in the running graph task, so that autograd has none."""
        return bool(self._came) and self._came.get(index) == torch._C._current_graph_task_id()

    def begin(self, index: int) -> None:
        """Let the gradient come by blocks."""
        self._came[index] = torch._C._current_graph_task_id()

    def hand_over(self, index: int, dense: torch.Tensor | None) -> None:
        """Hand over the blocks of a parameter's gradient. dense: autograd's sum over uses of the whole weight.

        If ``make`` is collective, blocks are computed here, because all ranks must do so in the same order.
        """
        at_once = any(term.gathers for term in self._waiting.get(index, ()))
        for number, rows in self._take(index, dense):
            self._reducer.take_block(number, rows() if at_once and callable(rows) else rows)

    def _take(self, index: int, dense: torch.Tensor | None) -> list[tuple[int, torch.Tensor | Lazy | None]]:
        task, waiting = torch._C._current_graph_task_id(), self._waiting.pop(index, [])
        terms = [term for term in waiting if term.task == task]
        if len(terms) < len(waiting):  # a pass around this one
            self._waiting[index] = [term for term in waiting if term.task != task]
        found: list[tuple[int, torch.Tensor | Lazy | None]] = []
        for block in self._blocks[index]:
            rows = None if dense is None else dense[block.begin : block.end]
            found.append((block.number, partial(_made, terms, block, rows) if terms else rows))
        return found

    def writer(self, index: int) -> RowWriter:
        """Begin to hand over the complete gradient of parameter ``index``."""
        self._reducer.begin_rows(index)
        self.begin(index)
        return RowWriter(self._reducer, self._blocks[index])

    def clear(self) -> None:
        self._waiting.clear()
        self._came.clear()


class RowWriter:
    """Takes rows of one gradient from front to back, and hands over each block that is whole."""

    def __init__(self, reducer: Reducer, blocks: Sequence[RowBlock]) -> None:
        self._reducer, self._left = reducer, list(blocks)
        self._block: torch.Tensor | None = None

    def put(self, begin: int, rows: torch.Tensor) -> None:
        """Take rows from ``begin`` on."""
        end = begin + rows.shape[0]
        while self._left and begin < end:
            block = self._left[0]
            low, high = begin, min(end, block.end)
            if self._block is None:
                self._block = rows.new_empty(block.end - block.begin, rows.shape[1])
            self._block[low - block.begin : high - block.begin] = rows[: high - low]
            rows, begin = rows[high - low :], high
            if high == block.end:
                made, self._block = self._block, None
                self._left.pop(0)
                self._reducer.take_block(block.number, made)


@contextmanager
def no_autocast() -> Iterator[None]:
    """Disable autocast, because gradients are computed in the dtypes of forward."""
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _made(terms: Sequence[_Term], block: RowBlock, rows: torch.Tensor | None) -> torch.Tensor:
    """Make a block: the terms in their order, and the rows of autograd's own sum."""
    with torch.no_grad(), no_autocast():
        total = terms[0].make(block.begin, block.end)
        for term in terms[1:]:
            total += term.make(block.begin, block.end)
        return total if rows is None else total.add_(rows)
