"""Optimizer state of this rank's shards, in tiles ([Note: state tile] in layout/tiles.py), and its tier RAM.

All tiers run the same arithmetic on the same elements (one pass of the rule per tile), so the bits are equal.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy as shallow_copy
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from zcomm import _core
from zcomm.comm.tensors import tensor_of
from zcomm.zero.cache.swap import SwapCopy
from zcomm.zero.layout.tiles import TileForm, TilePart, cut
from zcomm.zero.rules.rule import Rule

Held = AbstractContextManager[torch.Tensor]
Run = tuple[int, int, Any]  # begin and end in a shard, and the value for its param group


@dataclass(frozen=True)
class ShardStep:
    """The input of one bucket's shard to a step: flat weight and gradient, and (begin, end, hyperparameters) runs.
    ``squares``, ``addend``: see TilePart; not of shards that are stepped on a device."""

    bucket: int
    weight: torch.Tensor
    grad: torch.Tensor
    runs: Sequence[Run]
    squares: _core.ExactSum | None = None
    addend: torch.Tensor | None = None


def runs_in(runs: Sequence[Run], tile: slice) -> Iterator[Run]:
    """Yield the runs of a shard that a tile has a part of, relative to the tile."""
    for begin, end, value in runs:
        low, high = max(begin, tile.start) - tile.start, min(end, tile.stop) - tile.start
        if low < high:
            yield low, high, value


class Sums(Protocol):
    """Sums of squares over whole parameters."""

    def add(self, param: int, terms: Sequence[torch.Tensor]) -> None: ...
    def add_on(self, stream: Any, param: int, terms: Sequence[torch.Tensor]) -> None: ...


class StateSnapshot(Protocol):
    """A copy of a state."""

    form: TileForm

    def tile(self, bucket: int, part: slice, *, load: bool = True, store: bool = False) -> Held: ...


class ShardState(ABC):
    """State of the shards ``counts`` (elements per bucket) in one place, for weights of ``dtype``, updated by ``rule``.
    Buckets with state elsewhere have no elements."""

    nbytes_by_tier: dict[str, int]
    adds_squares = True  # whether ``step`` takes ``ShardStep.squares``

    def __init__(self, counts: Sequence[int], dtype: torch.dtype, rule: Rule) -> None:
        self.counts = list(counts)
        self.rule = rule
        self.form = TileForm(rule.arrays, dtype, rule.state_dtype)

    @abstractmethod
    def tile(self, bucket: int, part: slice, *, load: bool = True, store: bool = False) -> Held:
        """Open the state of one tile as flat uint8; ``store`` keeps changes. load False: all of it will be written."""

    @abstractmethod
    def snapshot(self, copy: SwapCopy) -> StateSnapshot:
        """Return a copy of the present state, for reading on another thread. copy: of the swap file, after its dirty
        windows were written."""

    @abstractmethod
    def renew(self) -> None:
        """Prepare a load of all state after a failure: nothing is in flight, and no element is lost to it."""

    @abstractmethod
    def resident(self) -> list[torch.Tensor]:
        """Return the state that is only in memory."""

    def check_grows(self) -> None:
        """Raise ValueError if ``grow`` cannot add arrays."""
        raise ValueError(_NO_ROOM)

    def grow(self, arrays: tuple[str, ...]) -> None:
        """Extend the state to ``arrays``, which begin with the present ones; others are zeros. Nothing is in flight."""
        self.check_grows()

    def start(
        self, bucket: int, part: slice, weight: torch.Tensor, master: torch.Tensor, initial: Sequence[Run]
    ) -> None:
        """Begin ``part``, whole tiles of a shard: weight and master from the fp32 ``master``, arrays from the runs
        ``initial`` of numbers. weight: the shard's."""
        for inside in cut(part.stop - part.start):
            tile, count = slice(part.start + inside.start, part.start + inside.stop), inside.stop - inside.start
            with self.tile(bucket, tile, load=False, store=True) as state:
                state.zero_()
                for begin, end, value in runs_in(initial, tile):
                    for name in self.form.arrays if value else ():
                        self.form.array(state, count, name)[begin:end] = value
                self.form.set_master(weight[tile], state, master[inside])

    def _step_tile(self, shard: ShardStep, state: torch.Tensor, tile: slice) -> None:
        weight, grad = shard.weight[tile], shard.grad[tile]
        addend = None if shard.addend is None else shard.addend[tile]
        assert addend is None or self.rule.takes_half, f"{self.rule.name} reads one gradient"
        for begin, end, hyper in runs_in(shard.runs, tile):
            part = TilePart(weight, grad, state, begin, end, tile.start, shard.squares, addend)
            self.rule.step(self.form, part, hyper)

    def measure(self, shard: ShardStep, sums: Sums) -> None:
        """Add the terms of whole parameters that the rule's update of a shard needs to ``sums``. Changes nothing."""
        for tile in cut(self.counts[shard.bucket]):
            with self.tile(shard.bucket, tile) as state:
                weight, grad = shard.weight[tile], shard.grad[tile]
                for begin, end, hyper in runs_in(shard.runs, tile):
                    part = TilePart(weight, grad, state, begin, end, tile.start)
                    sums.add(hyper.param, self.rule.terms(self.form, part, hyper))

    @abstractmethod
    def close(self) -> None: ...


_NO_ROOM = (
    "the options need an array of optimizer state that they had no need of at construction, so the drive has no room "
    "for it (momentum was 0): give these options at construction"
)


class WholeState(ShardState):
    """State in one memory, of the host or of a device. ``_states``: by bucket, its tiles back to back."""

    _states: list[torch.Tensor]
    _master_first = False  # in fp16 tiles

    @abstractmethod
    def _allocate(self) -> None:
        """Allocate ``_states``, with any content, and count them in ``nbytes_by_tier``."""

    def renew(self) -> None:
        return  # a step that failed leaves nothing in flight

    def resident(self) -> list[torch.Tensor]:
        return list(self._states)

    def check_grows(self) -> None:
        return

    def grow(self, arrays: tuple[str, ...]) -> None:
        self.check_grows()
        self.renew()
        before, form = self._states, self.form
        self.form = TileForm(arrays, form.dtype, form.state_dtype)
        try:
            self._allocate()
        except BaseException:
            self.form = form
            raise
        for old, new, count in zip(before, self._states, self.counts, strict=True):
            for part in cut(count):
                source = old[form.nbytes(part.start) : form.nbytes(part.stop)]
                target = new[self.form.nbytes(part.start) : self.form.nbytes(part.stop)]
                self.form.extend(form, source, target, self._master_first)

    def _part(self, bucket: int, part: slice) -> torch.Tensor:
        return self._states[bucket][self.form.nbytes(part.start) : self.form.nbytes(part.stop)]

    def snapshot(self, copy: SwapCopy) -> StateSnapshot:
        twin = shallow_copy(self)
        twin._states = [state.to("cpu", copy=True) for state in self._states]
        return twin

    def close(self) -> None:
        self._states.clear()


def plan_nbytes(counts: Sequence[int], tiers: Sequence[str], form: TileForm, fraction: float) -> dict[str, int]:
    """Return the bytes of a RamState by the tier that they count as."""
    sizes = [form.nbytes(count) for count in counts]
    offloaded = round(fraction * sum(size for size, tier in zip(sizes, tiers, strict=True) if tier != "device"))
    return {"cpu": offloaded, "device": sum(sizes) - offloaded}


class RamState(WholeState):
    """State in host memory (tier "cpu") or next to the model (tier "device"; the same memory on the CPU).

    tiers: of each bucket. fraction: of the state in "cpu"; the rest counts as "device".
    """

    def __init__(
        self,
        counts: Sequence[int],
        tiers: Sequence[str],
        dtype: torch.dtype,
        rule: Rule,
        arena: _core.PinnedArena,
        fraction: float,
    ) -> None:
        super().__init__(counts, dtype, rule)
        self._tiers, self._arena, self._fraction = tiers, arena, fraction
        self._allocate()
        # A kernel takes all tiles of a shard in one call, and has more to share among its threads.
        self._whole = rule.spans_tiles and dtype != torch.float16

    def _allocate(self) -> None:
        sizes = [self.form.nbytes(count) for count in self.counts]
        nbytes = sum(sizes)
        self.nbytes_by_tier = plan_nbytes(self.counts, self._tiers, self.form, self._fraction)
        memory = tensor_of(self._arena.allocate(nbytes), torch.uint8) if nbytes else torch.empty(0, dtype=torch.uint8)
        memory.zero_()  # the first access allocates a page: here all threads do, and not tile by tile
        self._states = list(memory.split(sizes))

    def check_grows(self) -> None:
        if "nvme" in self._tiers:  # of a rule without state, for which no drive was needed
            raise ValueError(_NO_ROOM)

    def tile(self, bucket: int, part: slice, *, load: bool = True, store: bool = False) -> Held:
        return nullcontext(self._part(bucket, part))

    def step(self, shards: Iterator[ShardStep], reverse: bool = False, buckets: Collection[int] | None = None) -> None:
        """Step ``shards``, in their order."""
        for shard in shards:
            count = self.counts[shard.bucket]
            for part in [slice(0, count)] if self._whole else cut(count):
                self._step_tile(shard, self._part(shard.bucket, part), part)
