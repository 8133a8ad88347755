"""Plan: one step of all parameters, prepared for the core as a batch; it is valid while only gradients move in memory.

[Note: plan] Python code dominates the step of a small tensor. So a few passes over lists gather all facts that a step
depends on, and compare them with the plan's. They are: which parameters have gradients, addresses of weights, states
and counters, types, sizes, and the identities of the objects in ``opt.state``. Any difference needs a new plan.
Gradients contribute only their types, because zero_grad drops them.
"""

from __future__ import annotations

import collections
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from zcomm import _core
from zcomm.comm.tensors import is_lazy

Hyper = TypeVar("Hyper")
_address, _numel, _contiguous = torch.Tensor.data_ptr, torch.Tensor.numel, torch.Tensor.is_contiguous
_negated = torch.Tensor.is_neg


class Facts(NamedTuple):
    """Facts that a plan depends on. objects: compared by identity; values: by value."""

    objects: list[object]
    values: list[object]

    def holds(self, other: Facts) -> bool:
        return (
            self.values == other.values
            and len(self.objects) == len(other.objects)
            and all(map(operator.is_, self.objects, other.objects))
        )


def gather(
    groups: list[dict[str, Any]], state: Mapping[Any, Any], forms: list[Hashable], memory: list[torch.Tensor]
) -> tuple[Facts, list[torch.Tensor]]:
    """Return the present facts, and the gradients.

    forms: of the groups' state; memory: tensors that are not to move.
    It does not read a gradient's address and contiguity, because a sparse one has neither.
    """
    params: list[torch.Tensor] = [param for group in groups for param in group["params"]]
    every = [param.grad for param in params]
    grads = [grad for grad in every if grad is not None]
    active = [param for param, grad in zip(params, every, strict=True) if grad is not None]
    objects: list[object] = [*params, *active]
    for each in state.values():
        objects += each.values() if isinstance(each, dict) else (each,)
    values: list[object] = [*forms, *map(len, (group["params"] for group in groups)), len(active)]
    values += map(_numel, params)
    values += map(_address, active)
    values += map(_contiguous, active)
    values += map(_negated, active)
    values += [param.dtype for param in active]
    values += [grad.dtype for grad in grads]
    values += [grad.layout for grad in grads]
    values += map(_numel, grads)
    values += map(_address, memory)
    return Facts(objects, values), grads


class Turns(Generic[Hyper]):
    """Batch in which some weights are listed more than once: these step as often, one step after the other, as in
    torch. make: creates a batch. weights: addresses, in the order of ``add``."""

    def __init__(self, make: Callable[[], _core.Batch[Hyper]], weights: Sequence[int]) -> None:
        self._make, self._weights = make, weights
        self._turns: list[tuple[_core.Batch[Hyper], list[int]]] = []  # with the numbers of their gradients
        self._seen: collections.Counter[int] = collections.Counter()  # by address
        self._count = 0

    def add(
        self, shard: _core.OptimShard, group: int, counter: int = 0, buffer: bool = False, first: bool = False
    ) -> None:
        """Add a shard to the first turn without its weight."""
        weight = self._weights[self._count]
        turn = self._seen[weight]
        self._seen[weight] += 1
        if turn == len(self._turns):
            self._turns.append((self._make(), []))
        batch, numbers = self._turns[turn]
        batch.add(shard, group, counter, buffer, first)
        numbers.append(self._count)
        self._count += 1

    def step(
        self, groups: Sequence[Hyper], grads: Sequence[int], threads: int = 0, squares: _core.ExactSum | None = None
    ) -> None:
        """Run all turns. squares: of the first, which has each gradient once."""
        for batch, numbers in self._turns:
            batch.step(groups, [grads[number] for number in numbers], threads, squares)
            squares = None


def in_memory(grads: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients with their values in contiguous memory: copies of strided or negated views, and of zeros
    without memory."""
    return [grad if grad.is_contiguous() and not is_lazy(grad) else _copied(grad) for grad in grads]


def _copied(grad: torch.Tensor) -> torch.Tensor:
    return torch.empty(grad.shape, dtype=grad.dtype, device=grad.device).copy_(grad)


@dataclass(frozen=True)
class Plan(Generic[Hyper]):
    """Prepared step. batch: of parameters that have a gradient. memory: of their states and counters, in any order."""

    batch: _core.Batch[Hyper]
    memory: list[torch.Tensor]
    facts: Facts

    def step(
        self, hypers: list[Hyper], grads: list[torch.Tensor], threads: int, squares: _core.ExactSum | None
    ) -> None:
        """Run the step. hypers: of the groups. grads: in the order of the batch."""
        dense = in_memory(grads)
        self.batch.step(hypers, list(map(_address, dense)), threads, squares)
