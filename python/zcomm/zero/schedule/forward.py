"""InForward: the update of a unit runs when the next forward gathers the unit, on the gathering thread.

[Note: update in forward] ``step()`` computes the norm, agrees with the other ranks, counts, and keeps the facts of that
moment. No weight moves. A gather of a unit reads this rank's shard into the slot and updates it there. A copy of it is
written, because the program may change the slot once the unit is gathered. Then the other ranks see it. This saves the
step's own read of the weights, and prefetch runs updates behind the preceding forward. A skipped step defers nothing.
A unit that is copied to a device from memory which has it whole is updated in its source. One rank with such units
begins in backward, if nothing needs the norm first (``run_as_ready``).
Weights that are gathered by rows are updated in their source, a bucket at a time: each before the first read of it.
Buckets of an embedding without a token of this forward are updated behind it, some with each use of a unit.
``settle`` updates the rest before other reads of shards, and before sums of gradients change. So the first reduction of
a backward pass (units that no forward used), step, save, load, close and all looks call it.
Errors poison as in ``step()``. An error in a gather does so on all ranks, which compare at its end. Another error
poisons its rank. All ranks raise it in their next gather, in ``step()``, save, and calls that look at whole values.
Thread rule: ``run`` and ``run_part`` on the gathering thread; the rest on the main thread.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from heapq import heappop, heappush
from itertools import pairwise

import torch

from zcomm import _core
from zcomm.comm.communicator import Communicator
from zcomm.zero.gradients.norm import GradientNorm
from zcomm.zero.layout.flat import FlatBucket
from zcomm.zero.optim_state.ram import Run, ShardStep
from zcomm.zero.parts import Parts, TrainState
from zcomm.zero.poison import broadcast_error, check_error
from zcomm.zero.schedule.facts import Facts
from zcomm.zero.schedule.scheduler import UpdateScheduler
from zcomm.zero.schedule.transaction import NoTransaction
from zcomm.zero.units.store import UnitStore
from zcomm.zero.update_hooks import Shards

Weights = Iterator[tuple[FlatBucket, torch.Tensor]]


class InForward(UpdateScheduler):
    """Updates that wait for a gather. Memory: a list of runs for each bucket."""

    in_gathers = True
    in_step = False

    def __init__(self, train: TrainState) -> None:
        super().__init__(train)
        self._left: dict[int, Sequence[Run]] = {}  # by bucket: the pending update
        self._open = False  # whether the last step is not settled
        self._after: dict[int, frozenset[int]] = {}  # buckets that were updated after those that begin with this one
        self._last = -1  # first bucket of the last update
        self._unread: deque[FlatBucket] = deque()  # of embeddings that a forward has used since the step
        self._noted: set[int] | None = None  # the units of these; None: no update can wait
        self._at_once = 1  # so many of them with each use of a unit
        self._summed: list[int] = []  # a heap of buckets with complete sums, to be updated while others are in flight

    def start(self, parts: Parts, arena: _core.PinnedArena, transaction: NoTransaction) -> None:
        super().start(parts, arena, transaction)
        assert isinstance(parts.store, UnitStore)
        self.store, self.state, self.geometry = parts.store, parts.state, parts.geometry

    # --- step() -----------------------------------------------------------------------------------------------

    @property
    def needs_norm(self) -> bool:  # type: ignore[override]
        return not self.store.overlaps

    def run_as_ready(self, facts: Facts, norm: GradientNorm | None) -> None:
        """Defer the updates. Until the last sum is complete the gathering thread updates buckets with complete sums in
        their source. It takes the one that the next forward gathers first. Gathers update the rest."""
        self.store.spread()
        self._defer({bucket.index: facts.runs(bucket) for bucket in self.geometry.buckets})
        try:
            for bucket in self.reducer.order:
                self.accumulators.finish(bucket)
                if norm is not None:
                    norm.squares.add(bucket, self.accumulators.shard(bucket))
                heappush(self._summed, bucket.index)
                self.store.gather.submit(self._update_summed)
        finally:
            self._summed.clear()

    def update(self, scale: float) -> None:
        facts = self.prepare(scale)
        self.accumulators.finish()  # the norm may have been known before the last gradients arrived
        self.store.spread()
        self._defer({bucket.index: facts.runs(bucket) for bucket in self.geometry.buckets})

    def end_step(self) -> None:
        """Neither commit nor read ahead: a gather would update before the program can look at the step."""

    def _defer(self, runs: dict[int, Sequence[Run]]) -> None:
        """Defer the update of these buckets. runs: as in ShardStep."""
        self._open = True
        self.accumulators.hold()
        self._left = dict(runs)
        self._last = -1
        self._unread.clear()
        self._noted = set()

    @property
    def waits(self) -> bool:  # type: ignore[override]
        return bool(self._left)

    # --- on the gathering thread ------------------------------------------------------------------------------

    def run(self, comm: Communicator, shards: Shards, bring: Callable[[], None]) -> None:
        waiting = [bucket for bucket, _ in shards if bucket.index in self._left]

        def weights() -> Weights:
            bring()  # now, because reads of the state are pending
            for bucket, weight in shards:
                if bucket.index in self._left:
                    yield bucket, weight
                    self.store.source.keep(bucket, weight)

        with self._together(comm, bool(waiting)):
            if waiting:
                self.accumulators.expect(waiting[0].index)
                self._update(waiting, weights, self._follow(waiting))
            else:
                bring()

    def run_part(self, comm: Communicator, bucket: FlatBucket, bring: Callable[[torch.Tensor | None], None]) -> None:
        some, waits = bool(self._left), bucket.index in self._left
        with self._together(comm, waits):
            if waits:
                self._update_part(bucket)
            bring(self.store.source.kept(bucket) if some else None)  # otherwise a pass may have begun, which updates

    @contextmanager
    def _together(self, comm: Communicator, counts: bool) -> Iterator[None]:
        """Raise on all ranks if the block fails on one. counts: it poisons then. Collective."""
        if self.poison.error is not None:  # perhaps only of this rank
            broadcast_error(comm, self.poison.error)
            self.poison.check("forward")
        with self.poison.watch() if counts or self.poison.undone() else nullcontext():
            try:
                yield
            except BaseException as error:
                broadcast_error(comm, error)
                raise
            check_error(comm)

    def _follow(self, buckets: Sequence[FlatBucket]) -> list[int]:
        """Note an update of ``buckets``. Returns: the deferred buckets that followed them in the last step."""
        first = buckets[0].index
        self._after[self._last], self._last = frozenset(bucket.index for bucket in buckets), first
        return [index for index in sorted(self._after.get(first, ())) if index in self._left]

    def _update(self, buckets: Sequence[FlatBucket], weights: Callable[[], Weights], coming: Sequence[int]) -> None:
        """Update ``buckets``, which are deferred. weights: yields each with its weights. coming: the following
        buckets."""
        order = [*(bucket.index for bucket in buckets), *coming[:1]]
        following = dict(pairwise(order))

        def shards() -> Iterator[ShardStep]:
            for bucket, weight in weights():
                grad, addend = self.accumulators.terms(bucket)
                self.accumulators.expect(following.get(bucket.index, -1))
                yield ShardStep(bucket.index, weight, grad, self._left[bucket.index], addend=addend)

        with torch.no_grad():
            self.state.expect(coming)
            self.apply(shards(), buckets={bucket.index for bucket in buckets})
        for bucket in buckets:
            del self._left[bucket.index]

    def _update_part(self, bucket: FlatBucket) -> None:
        """Update a bucket in its source."""
        source, coming = self.store.source, self._follow([bucket])

        def weights() -> Weights:
            weight = source.load(bucket)  # now, because reads of the state are in flight
            following = self.geometry.buckets[coming[0]] if coming else None
            if following is not None and following.unit == bucket.unit:
                source.expect(following, bucket)
            yield bucket, weight
            source.commit(bucket, weight)

        self.accumulators.expect(bucket.index)
        self._update([bucket], weights, coming)

    def _update_summed(self) -> None:
        """Update a bucket before its gather. The next gather reports its error."""
        if self._summed and self.poison.error is None:
            bucket = self.geometry.buckets[heappop(self._summed)]
            with self._untold():
                self.store.memory.wait_copied(self.store.units[bucket.unit])
                self._update_part(bucket)

    def _update_unread(self, bucket: FlatBucket) -> None:
        """Update a deferred bucket without a read of its rows. Not collective, because ranks may use gathered units a
        different number of times. The next gather reports its error."""
        if self.poison.error is None and bucket.index in self._left:
            with self._untold():
                self._update_part(bucket)

    @contextmanager
    def _untold(self) -> Iterator[None]:
        """Poison with an error that ends the block; other ranks do not know it yet."""
        try:
            with self.poison.watch(), torch.no_grad():
                yield
        except BaseException:
            self.poison.unreported = True
            raise

    # --- on the main thread -----------------------------------------------------------------------------------

    def settle(self) -> None:
        self._settle(writes=True)

    def _settle(self, writes: bool) -> None:
        """Run all deferred updates. writes: also wait until all new weights are on the drive."""
        if not self._open:
            return
        if self._left or writes:
            self.store.gather.synchronize()
        if self.poison.error is not None:  # perhaps of a deferred update, which raises when its unit is used
            return
        with self._untold():
            if self._left:
                buckets = [bucket for bucket in self.geometry.buckets if bucket.index in self._left]
                numbers = {bucket.index for bucket in buckets}
                self._update(buckets, lambda: self.store.source.iter_shards(False, numbers), ())
            if writes:
                self.store.source.finish_writes()
        self.accumulators.release()
        self._open = not writes

    def used_in_part(self, unit: int) -> None:
        """Note an embedding before some of its rows are read. A tied head reads all of them."""
        found = self.store.units[unit]
        if self._noted is not None and not found.is_shared and unit not in self._noted:
            self._noted.add(unit)
            self._unread.extend(found.buckets)
            self._at_once = -(-len(self._unread) // len(self.store.units))

    def after_use(self) -> None:
        """Update some buckets behind the gathers that have been submitted."""
        for _ in range(min(self._at_once, len(self._unread))):
            self.store.gather.submit(self._update_unread, self._unread.popleft())

    def begin_pass(self) -> None:
        self.settle_sums()  # now, so that it does not forget squares of this pass

    def before_launch(self, bucket: int) -> None:
        self.settle_sums()

    def before_sums(self) -> None:
        self.settle_sums()

    def settle_sums(self) -> None:
        """Settle before sums of gradients change. Keeps an error, because other ranks are in a backward pass: the next
        gather or ``step()`` raises it."""
        if self._open and (self._left or self.accumulators.held):
            with suppress(Exception):
                self._settle(writes=False)
            if self.poison.error is not None:
                self.accumulators.release()

    def drain(self, what: str) -> None:
        self.check(what)
        if self.transaction.open:
            self._commit(what)
            return
        if not self.poison.unreported:
            self.poison.check(what)
        try:
            self.poison.check(what)
            self.settle()
        except BaseException as error:
            self.poison.unreported = False
            broadcast_error(self.comm, self.poison.error or error)
            raise
        with self.poison.watch():
            check_error(self.comm)

    def _commit(self, what: str) -> None:
        """Run the updates of an open transaction, and commit it. Collective.

        Raises: StepUndoneError if an update fails on some rank.
        """
        with self.watch(what):
            try:
                if self.poison.error is None:
                    self.settle()
            except BaseException as error:
                broadcast_error(self.comm, self.poison.error or error)
                raise
            self.transaction.commit()

    def end_updates(self) -> None:
        with suppress(Exception):  # an error poisons; a load replaces half-done weights
            self.settle()
        if self.poison.error is not None:
            self.forget()

    def end(self) -> bool:
        if not self.parts.gathers_end():
            return False
        try:
            self.settle()
        except Exception as error:
            logging.getLogger("zcomm").warning("close(): the last update could not be made: %s", error)
            if self.transaction.open:
                self.undo(error)
        return self.poison.error is None

    def forget(self) -> None:
        self.store.gather.synchronize()
        self._left.clear()
        self._unread.clear()
        self._noted = None
        self._open = False
        self.store.source.forget()
        self.accumulators.release()
