"""Numbers of the open optimizers for this rank's page, which ``zcomm top`` and the report of a run show.

Invariant: no function waits for an async step.
Thread rule: the training thread, before a step and at its end.
"""

from __future__ import annotations

import math
import time
import weakref

from zcomm.watch.page import TIERS, Drive
from zcomm.watch.rank import Numbers
from zcomm.zero.memory.usage import Memory, memory_formula, memory_of, stats_of
from zcomm.zero.params.stores import SharedStore
from zcomm.zero.parts import Parts, TrainState
from zcomm.zero.registry import Owner, open_optimizers, open_parts, train_of, whole_frozen

_RATIO = 4000.0  # memory is measured again after so many times the duration of a measurement


class _Sizes:
    """Memory and plan of one optimizer, which change seldom and take long to add up."""

    def __init__(self, parts: Parts, train: TrainState) -> None:
        self.plan = _plan(parts, train)
        self.memory = self.slots = (0.0,) * len(TIERS)
        self._next = 0.0

    def refresh(self, parts: Parts) -> None:
        """Add up the memory, if that is due. Looking at parameters would wait for a step that runs behind."""
        begin = time.perf_counter()
        if parts.updates.is_running() or begin < self._next:
            return
        memory = memory_of(parts)
        self.slots = tuple(float(memory[tier]["slots"]) for tier in TIERS)
        self.memory = _sums(memory)
        end = time.perf_counter()
        self._next = end + _RATIO * (end - begin)


def prepare(owner: Owner) -> None:
    """Measure an optimizer before its first step, which may run concurrently with the forward."""
    if owner not in _known:
        _known[owner] = _Sizes(open_parts(owner), train_of(owner))
        _known[owner].refresh(open_parts(owner))


def numbers() -> Numbers:
    """Return the counters of all open optimizers, added up; steps: the largest count."""
    owners = open_optimizers()
    every = [(open_parts(owner), train_of(owner)) for owner in owners]
    stats = [stats_of(parts, train) for parts, train in every]
    sizes = [_sizes_of(owner) for owner in owners]

    def total(name: str) -> float:
        return sum(each[name] for each in stats)

    def added(name: str) -> tuple[float, ...]:
        return tuple(map(sum, zip(*(getattr(each, name) for each in sizes), strict=True)))

    return Numbers(
        steps=max(train.updates for _, train in every),
        step=max(train.step_count for _, train in every),
        comm_s=total("comm_s"),
        swap_s=total("swap_s"),
        update_s=total("step_s"),
        link_nbytes=sum(_moved(parts) for parts, _ in every),
        memory=added("memory"),
        slots=added("slots"),
        plan=added("plan"),
        drives=tuple(drive for parts, _ in every for drive in _drives(parts)),
    )


def _moved(parts: Parts) -> int:
    if parts.comm.world_size == 1:
        return 0
    return parts.reducer.accumulators.moved_nbytes + parts.store.moved_nbytes + parts.replicas.moved_nbytes


def _drives(parts: Parts) -> list[Drive]:
    """Return the traffic of each drive: the swap file is striped over them evenly."""
    stats = parts.swap.stats()
    paths = stats["paths"]
    read, written = (stats[name] / max(len(paths), 1) for name in ("read_nbytes", "written_nbytes"))
    return [Drive(str(path), read, stats["read_s"], written, stats["write_s"]) for path in paths]


def _sizes_of(owner: Owner) -> _Sizes:
    prepare(owner)
    _known[owner].refresh(open_parts(owner))
    return _known[owner]


_known: weakref.WeakKeyDictionary[Owner, _Sizes] = weakref.WeakKeyDictionary()


def _sums(memory: Memory) -> tuple[float, ...]:
    """Return the bytes by tier without slots, which ZeRO's formula does not count."""
    return tuple(float(sum(memory[tier].values()) - memory[tier].get("slots", 0)) for tier in TIERS)


def _plan(parts: Parts, train: TrainState) -> tuple[float, ...]:
    """Return the formula's bytes by tier; NaN if tiers are chosen parameter by parameter."""
    trained = [place.count for index, place in enumerate(parts.geometry.places) if not parts.geometry.is_frozen(index)]
    frozen = sum(place.count for place in parts.geometry.places) - sum(trained)
    frozen += sum(param.numel() for _, param in whole_frozen(parts))
    try:
        return _sums(
            memory_formula(
                sum(trained),
                parts.comm.world_size,
                train.stage,
                train.precision,
                train.offload,
                share_parameters=isinstance(parts.store, SharedStore),
                state_arrays=len(train.rule.arrays),
                array_nbytes=train.rule.state_dtype.itemsize,
                frozen=frozen,
            )
        )
    except ValueError:
        return (math.nan,) * len(TIERS)
