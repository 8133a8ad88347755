"""UnusedParams: parameters that a backward pass will not reach, known when it begins.

[Note: absent] A bucket is launched when all of its gradients have arrived, and later ones wait for it. An expert
without tokens has none: it would delay all others until the pass ends. Once a pass has ended without a parameter, the
next ones check whether their graph has it. If not, it counts as zero from the beginning.
Passes inside of a pass (reentrant checkpoints) have separate graphs. A parameter that one of them has reached is never
checked, and is waited for as before. A gradient that arrives nevertheless is a second arrival ([Note: arrivals]). Both
depend only on the program, so the bits do not depend on buckets, stage or overlap.
Thread rule: as GradientReducer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

_has_node = getattr(torch._C, "_will_engine_execute_node", None)
_NO_TASK = -1


class UnusedParams:
    """Parameters of ``params`` that passes have not reached."""

    def __init__(self, params: Sequence[torch.nn.Parameter]) -> None:
        self._params = params
        self._missed: set[int] = set()
        self._nested: set[int] = set()  # reached by passes inside of a pass
        self._task = _NO_TASK  # of the pass; none if it began inside of another one

    def begin_pass(self, nested: bool) -> list[int]:
        """Return the numbers of the parameters that the beginning pass will not reach."""
        self._task = _NO_TASK if nested else torch._C._current_graph_task_id()
        if self._task == _NO_TASK or _has_node is None:
            return []
        return [index for index in self._missed if not _in_graph(self._params[index])]

    def arrived(self, index: int) -> None:
        """Record a gradient of parameter ``index``."""
        if torch._C._current_graph_task_id() != self._task:
            self._nested.add(index)
            self._missed.discard(index)

    def missed(self, indices: Iterable[int]) -> None:
        """Record parameters that a pass has ended without."""
        self._missed.update(index for index in indices if index not in self._nested)


def _in_graph(param: torch.nn.Parameter) -> bool:
    """Return True if the pass that runs on this thread will accumulate a gradient of ``param``."""
    if not param.requires_grad:
        return False
    assert _has_node is not None
    with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
        viewed: Any = param.view_as(param)
    return bool(_has_node(viewed.grad_fn.next_functions[0][0]))
