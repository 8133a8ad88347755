"""ForwardStep: the update of a unit runs when the next forward gathers the unit, on the gathering thread.

[Note: update in forward] ``step()`` takes the norm, agrees with the other ranks, counts, and keeps the hyperparameters
of that moment. No weight moves. A gather of a unit brings this rank's shard into the slot, updates it there, and starts
to write it back. Then the other ranks see it. So the step's own read of the weights is saved, and prefetch runs updates
behind the forward before. The arithmetic and its order within a shard are the step's, so the bits are, too. A step that
is skipped marks nothing.
Weights that are gathered by rows are updated in their source, a bucket at a time: each before the first read of it.
Buckets of an embedding that no token of this forward lies in are updated behind it, some with each use of a unit.
Where shards are wanted otherwise, or sums of gradients are about to change, ``settle`` updates what is left. That is in
the first reduction of a backward pass (units that no forward used), in step, save, load, close and all that looks.
Errors poison as in ``step()``. One in a gather does so on all ranks, which compare at its end. One elsewhere does so on
its rank. All raise it in their next gather. It poisons all in ``step()``, save, and calls that look at whole values.
Thread rule: ``run`` and ``run_part`` on the gathering thread; the rest on the main thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import pairwise

import torch

from zcomm.comm.communicator import Communicator
from zcomm.zero.cache.span_cache import Works
from zcomm.zero.gradients.accumulators import Accumulators
from zcomm.zero.layout.flat import FlatBucket
from zcomm.zero.optim_state.ram import Run, ShardStep
from zcomm.zero.optim_state.state import OptimState
from zcomm.zero.poison import Poison, broadcast_error, check_error
from zcomm.zero.units.store import UnitStore
from zcomm.zero.units.unit import Unit

Parts = list[tuple[FlatBucket, torch.Tensor]]


class ForwardStep:
    """The updates that wait for a gather, and what they need. Memory: a list of runs for each bucket."""

    def __init__(
        self,
        store: UnitStore,
        state: OptimState,
        accumulators: Accumulators,
        poison: Poison,
        trained: Sequence[FlatBucket],
    ) -> None:
        self._store, self._state, self._accumulators, self._poison = store, state, accumulators, poison
        self._trained = trained
        self._left: dict[int, Sequence[Run]] = {}  # by bucket: the update that waits
        self._open = False  # whether the last step is not settled
        self._after: dict[int, frozenset[int]] = {}  # buckets that were updated after those that begin with this one
        self._last = -1  # first bucket of the last update
        self._unread: deque[FlatBucket] = deque()  # of embeddings that a forward has used since the step
        self._noted: set[int] | None = None  # the units of these; None: no update can wait
        self._at_once = 1  # so many of them with each use of a unit
        store.gather.updates = self
        store.settle = self.settle
        store.life.used_in_part, store.life.behind = self._note_part, self._update_behind

    def start(self, runs: dict[int, Sequence[Run]]) -> None:
        """Let the update of these buckets wait. runs: as of ShardStep."""
        self._open = True
        self._accumulators.hold()
        self._left = dict(runs)
        self._last = -1
        self._unread.clear()
        self._noted = set()

    @property
    def waits(self) -> bool:
        """True if an update waits for a gather."""
        return bool(self._left)

    # --- on the gathering thread ------------------------------------------------------------------------------

    def run(self, comm: Communicator, parts: Parts, failed: Exception | None, bring: Callable[[], None]) -> list[Works]:
        """Bring this rank's shards of a unit by ``bring``, and update those that wait. Collective.

        parts: buckets with memory of their shards. failed: error of a write of weights that were in the same memory.
        Returns: writes of the new weights, which must end before the memory is used anew.
        """
        waits = any(bucket.index in self._left for bucket, _ in parts)
        works: list[Works] = []
        if failed is not None and not waits:
            self._poison.untold = True  # the others raise here, but count nothing of this unit
        with self._together(comm, waits or failed is not None):
            if failed is not None:
                raise failed
            self._expect([bucket for bucket, _ in parts])
            if waits:
                with torch.no_grad():
                    works = self._update(parts, bring)
            else:
                bring()
        return works

    def run_part(self, comm: Communicator, bucket: FlatBucket, bring: Callable[[torch.Tensor | None], None]) -> None:
        """Update this rank's shard of a bucket in its source, if that waits; then call ``bring``, which reads rows.
        Collective.

        bring: takes the shard where RAM has it; None: it reads the source.
        """
        some, waits = bool(self._left), bucket.index in self._left
        with self._together(comm, waits):
            if waits:
                self._expect([bucket])
                with torch.no_grad():
                    self._update_part(bucket)
            bring(self._store.source.kept(bucket) if some else None)  # else a pass may have begun, which updates

    @contextmanager
    def _together(self, comm: Communicator, counts: bool) -> Iterator[None]:
        """Let all ranks raise where the block fails on one. counts: it poisons then. Collective."""
        if self._poison.error is not None:  # of this rank alone, perhaps
            broadcast_error(comm, self._poison.error)
            self._poison.check("forward")
        with self._poison.watch() if counts or self._poison.undone() else nullcontext():
            try:
                yield
            except BaseException as error:
                broadcast_error(comm, error)
                raise
            check_error(comm)

    def _follow(self, numbers: frozenset[int], first: int) -> list[int]:
        """Note an update of the buckets ``numbers``. Returns: the buckets after them in the last step that wait."""
        self._after[self._last], self._last = numbers, first
        return [index for index in sorted(self._after.get(first, ())) if index in self._left]

    def _update_part(self, bucket: FlatBucket) -> None:
        source, numbers = self._store.source, frozenset((bucket.index,))
        coming = self._follow(numbers, bucket.index)
        following = self._trained[coming[0]] if coming else None
        self._state.expect(coming)

        def shards() -> Iterator[ShardStep]:
            weight = source.load(bucket)  # now: reads of the state are on their way
            grad = self._accumulators.shard(bucket)
            if following is not None:
                self._accumulators.expect(following.index)
                if following.unit == bucket.unit:
                    source.expect(following, bucket)
            yield ShardStep(bucket.index, weight, grad, self._left[bucket.index])
            source.commit(bucket, weight)

        self._state.step(shards(), buckets=numbers)
        del self._left[bucket.index]

    def _update(self, parts: Parts, bring: Callable[[], None]) -> list[Works]:
        mine = [(bucket, shard) for bucket, shard in parts if bucket.index in self._left]
        works: list[Works] = []
        numbers = frozenset(bucket.index for bucket, _ in mine)
        coming = self._follow(numbers, mine[0][0].index)
        self._state.expect(coming)

        def shards() -> Iterator[ShardStep]:
            bring()  # now: reads of the state are on their way
            for position, (bucket, weight) in enumerate(mine):
                grad = self._accumulators.shard(bucket)
                if position + 1 < len(mine):
                    self._accumulators.expect(mine[position + 1][0].index)
                elif coming:
                    self._accumulators.expect(coming[0])
                yield ShardStep(bucket.index, weight, grad, self._left[bucket.index])
                work = self._store.source.put(bucket, weight)
                works.extend([work] if work is not None else [])

        self._state.step(shards(), buckets=numbers)
        for bucket, _ in mine:
            del self._left[bucket.index]
        return works

    def _expect(self, buckets: Sequence[FlatBucket]) -> None:
        """Let the first sum that is wanted come."""
        first = next((bucket.index for bucket in buckets if bucket.index in self._left), None)
        if first is not None:
            self._accumulators.expect(first)

    def _update_unread(self, bucket: FlatBucket) -> None:
        """Update a bucket that no rows were read of, if that waits. Not collective: ranks may use units that are whole
        a different number of times. The next gather tells its error."""
        if self._poison.error is not None or bucket.index not in self._left:
            return
        try:
            with self._poison.watch(), torch.no_grad():
                self._expect([bucket])
                self._update_part(bucket)
        except BaseException:
            self._poison.untold = True
            raise

    # --- on the main thread -----------------------------------------------------------------------------------

    def settle(self, writes: bool = True) -> None:
        """Update what is left of the last step. writes: also wait until all new weights are on the drive. Local.

        Raises: the error of an update, which poisons.
        """
        if not self._open:
            return
        if self._left or writes:
            self._store.gather.synchronize()
        if self._poison.error is not None:  # perhaps of an update there, which raises where its unit is used
            return
        try:
            with self._poison.watch(), torch.no_grad():
                if self._left:
                    self._settle_left()
                if writes:
                    self._store.memory.wait_written()
        except BaseException:
            self._poison.untold = True
            raise
        self._accumulators.release()
        self._open = bool(self._open and not writes)

    def _settle_left(self) -> None:
        numbers = set(self._left)
        order = [bucket for bucket in self._trained if bucket.index in numbers]
        following = {bucket.index: after.index for bucket, after in pairwise(order)}

        def shards() -> Iterator[ShardStep]:
            for bucket, weight in self._store.source.iter_shards(False, numbers):
                grad = self._accumulators.shard(bucket)
                self._accumulators.expect(following.get(bucket.index, -1))
                yield ShardStep(bucket.index, weight, grad, self._left[bucket.index])

        self._state.step(shards(), buckets=numbers)
        self._left.clear()

    def _note_part(self, unit: Unit) -> None:
        """Note an embedding of which rows are about to be read. A head that it is tied to reads all of them."""
        if self._noted is not None and not unit.is_shared and unit.index not in self._noted:
            self._noted.add(unit.index)
            self._unread.extend(unit.buckets)
            self._at_once = -(-len(self._unread) // len(self._store.units))

    def _update_behind(self) -> None:
        """Let some buckets be updated behind the gathers that have been asked for."""
        for _ in range(min(self._at_once, len(self._unread))):
            self._store.gather.submit(self._update_unread, self._unread.popleft())

    def settle_sums(self) -> None:
        """Settle before sums of gradients change. Keeps an error: other ranks are amid a backward pass, which goes on
        to the next gather or to ``step()``."""
        if self._open and (self._left or self._accumulators.held):
            with suppress(Exception):
                self.settle(writes=False)
            if self._poison.error is not None:
                self._accumulators.release()

    def forget(self) -> None:
        """Drop the updates of a step that failed: all weights and state are to be loaded."""
        self._store.gather.synchronize()
        self._left.clear()
        self._unread.clear()
        self._noted = None
        self._open = False
        self._store.memory.forget_written()
        self._accumulators.release()
