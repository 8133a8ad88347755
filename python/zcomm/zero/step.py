"""Sweep: the optimizer's rule over all shards of this rank, between the norm of the gradients and the new weights.

Sweeps alternate their direction ([Note: swapped step]); construction, which wrote first to last, counts as one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zcomm.zero.layout.flat import FlatBucket
from zcomm.zero.optim_state.ram import Run, ShardStep
from zcomm.zero.params.device import DeviceStore
from zcomm.zero.poison import hear, tell
from zcomm.zero.rules.cohorts import Cohorts
from zcomm.zero.rules.rule import Indexed, Rule

if TYPE_CHECKING:
    from zcomm.zero.assemble import Parts


Step = Callable[[], None]

_LATE = (
    "step(): a backward pass has reached a parameter twice on some rank, in no step before: weights were updated "
    "without its second gradient, so go on from a checkpoint. Reentrant checkpoints with a weight in common do so: use "
    "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
)


class NoGradientsError(Exception):
    """Error of a step without any rank's gradient. Raised on all ranks, before anything has changed."""


class Sweep:
    """whole: every rank updates everything (stage 0). waited_s: seconds of waiting for other ranks.

    Gradients that a pass did not take ([Note: arrivals]) are known to their rank alone; the norm's message carries them
    to all, which then reduce them and take the norm again.
    """

    def __init__(self, parts: Parts, rule: Rule, whole: bool, groups: int) -> None:
        self._parts, self._whole = parts, whole
        self.cohorts = Cohorts(rule, parts.group_of, groups)
        there = parts.resident.numbers if parts.resident is not None else ()
        self._on_host = [bucket for bucket in parts.geometry.buckets if bucket.index not in there]
        self._reverse = True
        self._rests: bool | None = None  # whether any rank ever had a rest of gradients; None: no step has told
        self.waited_s = 0.0

    def norm(self) -> float:
        """Return the norm of all accumulated gradients. Collective: afterwards no rank reads the old weights any more.
        Gradients may still be on their way ([Note: squares before the gradients])."""
        parts = self._parts
        if not parts.reducer.knows_squares:
            parts.reducer.finish()
        start = time.perf_counter()
        parts.store.settle()
        total = self._norm_now()
        if parts.norm.noted:
            self._agree()
            total = self._norm_now()
        self._rests = self._rests or False
        self.waited_s += time.perf_counter() - start
        return total

    def _agree(self) -> None:
        """Some rank has gradients that no pass took, or the program has dropped or assigned some. Collective."""
        self._rests = self._rests or not self._parts.reducer.is_special
        self._parts.reducer.agree()
        if self._parts.reducer.has_nothing:
            raise NoGradientsError

    def _norm_now(self) -> float:
        self._begin_norm()
        self._parts.reducer.add_squares(self._parts.norm, self._on_host)
        return self._end_norm()

    def _begin_norm(self) -> None:
        self._parts.norm.begin()
        if self._parts.resident is not None:
            self._parts.resident.start_norm()
        self._parts.reducer.send_squares()

    def _end_norm(self) -> float:
        if self._parts.resident is not None:
            self._parts.resident.end_norm(self._parts.norm)
        return self._parts.norm.end(note=self._parts.reducer.note)

    @property
    def can_land(self) -> bool:
        """Whether a sweep may begin while gradients are still on their way from the device.

        Who has a bucket's sum knows then that nobody reads its old weights ([Note: gradients from a device]); units do
        not say so. A rest of gradients would come too late: a rank alone knows whether it has one, ranks from their
        first step.
        """
        parts = self._parts
        alone = parts.comm.world_size == 1
        if not isinstance(parts.store, DeviceStore) or (self._whole and not alone):
            return False
        if parts.reducer.is_special:
            return False
        return not parts.reducer.has_rest if alone else self._rests is False

    def run(self, groups: Sequence[dict[str, Any]], scale: float) -> None:
        """A step with the accumulated gradients times ``scale``. Collective: every rank sees the new weights."""
        parts = self._parts
        turns = parts.state.turns or parts.store.turns
        late = parts.reducer.knows_squares and not turns  # the last buckets land first
        self.prepared(groups, scale, self._reverse or late)()

    def prepared(self, groups: Sequence[dict[str, Any]], scale: float, reverse: bool | None = None) -> Step:
        """``run`` for another thread, with the hyperparameters as they are now. reverse: None: first bucket first,
        where nothing is gained by turning round. The resident buckets are stepped now."""
        if reverse is None:
            reverse = self._reverse and self._parts.state.turns
        hyper = self._begin(groups, scale)

        def step() -> None:
            if self._whole and self._parts.comm.world_size > 1:
                self._parts.reducer.gather()
            self._step(self._shards(hyper, reverse), reverse)

        return step

    def run_early(
        self, groups: Sequence[dict[str, Any]], scale: float, watch: Callable[[], AbstractContextManager[None]]
    ) -> float | None:
        """As ``norm`` and ``run``, where the norm decides nothing and something is gained by it; else None. ``watch``
        is entered before weights change."""
        if self.can_land:
            with watch():
                return self._run_landing(groups, scale)
        if self._parts.lane is None and (not self._whole or self._parts.comm.world_size == 1):
            self._meet()
            with watch():
                return self._run_squaring(groups, scale)
        return None

    def _meet(self) -> None:
        """Bring all gradients into the accumulators; afterwards no rank reads the old weights any more. Collective."""
        parts = self._parts
        parts.reducer.finish()
        start = time.perf_counter()
        parts.store.settle()
        parts.norm.meet(note=parts.reducer.note)
        if parts.norm.noted:
            self._agree()
        self.waited_s += time.perf_counter() - start

    def _run_squaring(self, groups: Sequence[dict[str, Any]], scale: float) -> float:
        """One pass over the gradients, for the step and their norm."""
        hyper = self._begin(groups, scale)
        norm, reverse = self._parts.norm, self._reverse
        norm.begin()
        self._step((replace(shard, squares=norm.sum) for shard in self._shards(hyper, reverse)), reverse)
        start = time.perf_counter()
        total = norm.end()
        self.waited_s += time.perf_counter() - start
        return total

    def _run_landing(self, groups: Sequence[dict[str, Any]], scale: float) -> float:
        """Each bucket is updated as soon as its gradient has landed, last buckets first."""
        reverse = self._reverse or not self._parts.state.turns
        hyper = self._begin(groups, scale)
        self._begin_norm()
        self._step(self._landing(hyper, reverse), reverse)
        if self._parts.reducer.knows_squares:
            self._parts.reducer.add_squares(self._parts.norm, self._on_host)
        total = self._end_norm()
        if self._parts.norm.noted:
            raise RuntimeError(_LATE)
        return total

    def _begin(self, groups: Sequence[dict[str, Any]], scale: float) -> list[Any]:
        """What the rule needs of each group. Resident buckets are stepped: the device does so beside what follows."""
        self._parts.store.used()
        start = time.perf_counter()
        self._parts.store.take_edits()
        self._parts.attachment.looked_s += time.perf_counter() - start
        hyper = self.cohorts.prepare(groups, scale, self._parts.reducer.skipped)
        if self._parts.resident is not None:
            try:
                self._parts.resident.step(lambda bucket: self._runs(bucket, hyper))
            except BaseException as error:
                tell(self._parts.comm, error)
                raise
        return hyper

    def _step(self, shards: Iterator[ShardStep], reverse: bool) -> None:
        """Where it fails on one rank all ranks raise."""
        try:
            self._parts.state.step(shards, reverse)
        except BaseException as error:
            tell(self._parts.comm, error)
            raise
        start = time.perf_counter()
        hear(self._parts.comm)
        self._reverse = not self._reverse
        self._parts.store.spread()
        self.waited_s += time.perf_counter() - start

    def _shards(self, hyper: list[Any], reverse: bool) -> Iterator[ShardStep]:
        parts = self._parts
        for bucket, weight in parts.store.sweep(reverse):
            parts.reducer.finish(bucket)
            grad = parts.reducer.bucket_view(bucket) if self._whole else parts.reducer.shard_view(bucket)
            yield ShardStep(bucket.index, weight, grad, self._runs(bucket, hyper))

    def _landing(self, hyper: list[Any], reverse: bool) -> Iterator[ShardStep]:
        norm, known = self._parts.norm, self._parts.reducer.knows_squares
        for shard in self._shards(hyper, reverse):
            if not known:
                norm.add(shard.grad)
            yield shard

    def _runs(self, bucket: FlatBucket, hyper: list[Any]) -> list[Run]:
        parts = self._parts
        skipped, number_of = parts.reducer.skipped, self.cohorts.number_of
        if parts.param_runs is None:
            runs = parts.runs[bucket.index]
            if self.cohorts.others or not skipped.isdisjoint(bucket.params):
                numbers = [-1 if index in skipped else number for index, number in enumerate(number_of)]
                runs = parts.geometry.runs(bucket, parts.store.part(bucket), numbers)
            return [(begin, end, hyper[number]) for begin, end, number in runs if number >= 0]
        start = parts.store.part(bucket).start
        first = [parts.first_index[n] + start - parts.geometry.places[n].offset for n in bucket.params]
        indexed = {n: Indexed(hyper[number_of[n]], at) for n, at in zip(bucket.params, first, strict=True)}
        return [(begin, end, indexed[n]) for begin, end, n in parts.param_runs[bucket.index] if n not in skipped]
