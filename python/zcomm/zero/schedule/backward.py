"""InBackward: the update of a bucket runs in the backward pass, as soon as its gradients are reduced.

[Note: update in backward] No sum is stored: the update of a bucket's shard uses up its sum in the ring (SumRing).
``step()`` then waits, agrees and counts.
Weights are updated in their source, never in a slot. A gathered unit keeps its old weights until ``step()``, and
backward continues to read these. A unit that is gathered after one of its buckets was launched holds new weights, so
using it raises. An update waits for a gather that has begun before.
The first two steps with a backward pass are watched, and updated as InForward does. An update in backward cannot follow
all programs. The others get an error before anything has changed, on all ranks.
An error of an update is kept until ``step()`` ([Note: updates before the step]), so that collectives continue.
Updates run on a separate thread, so that the drive works while backward computes. A buffer of the ring is reused once
its update has ended, so the ring bounds the number of pending updates.
Thread rule: ``run`` on the gathering thread, ``_update_now`` on the update thread; the rest on the thread that runs
backward and step. The update thread owns source and state from the first launch to the end of the last update.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from itertools import pairwise

import torch

from zcomm import _core
from zcomm.comm.communicator import Communicator
from zcomm.zero.gradients.accumulators import SwappedAccumulators
from zcomm.zero.gradients.norm import GradientNorm
from zcomm.zero.layout.flat import FlatBucket
from zcomm.zero.optim_state.ram import Run, ShardStep
from zcomm.zero.parts import Parts, TrainState
from zcomm.zero.poison import broadcast_error, check_error
from zcomm.zero.schedule.before_step import GONE, BeforeStep
from zcomm.zero.schedule.facts import Facts
from zcomm.zero.schedule.forward import InForward
from zcomm.zero.schedule.scheduler import Counted
from zcomm.zero.schedule.transaction import NoTransaction
from zcomm.zero.step_options import UPDATED, StepOptions
from zcomm.zero.units.unit import UnitState
from zcomm.zero.update_hooks import Shards
from zcomm.zero.worker import Call, Worker

_AHEAD = 4  # buckets with state that may be read before their sums are complete
_WATCHED = 2  # steps: the first pass learns which parameters are unused, and the order of launches and gathers


class InBackward(BeforeStep, InForward):
    """The updates of backward passes, once steps have been watched.

    is_on: the next pass may update.
    """

    sees_gathers = True

    def __init__(self, train: TrainState) -> None:
        super().__init__(train)
        self.is_on = False
        self._to_watch = _WATCHED
        self._updates = False  # the running or last pass updates
        self._launched: set[int] = set()  # buckets, since the pass began
        self._late: set[int] = set()  # units that were gathered after one of their buckets was launched
        self._next: dict[int, int] = {}
        self._seen = ""  # an obstacle of the watched step
        self._nonfinite = 0
        self._thread = Worker("zcomm-update")

    def start(self, parts: Parts, arena: _core.PinnedArena, transaction: NoTransaction) -> None:
        super().start(parts, arena, transaction)
        assert isinstance(self.accumulators, SwappedAccumulators)
        self._ring = self.accumulators.ring
        self._nonfinite = self.geometry.trained_count

    # --- a pass -----------------------------------------------------------------------------------------------

    @property
    def gone(self) -> str:  # type: ignore[override]
        return self._ring.gone

    def begin_pass(self) -> None:
        self._check_begin()
        self._updates = self._ring.consumes = False
        self._refuse("" if self.accumulators.fresh else "gradients are accumulated over several backward passes")
        self._note_options()
        self._launched.clear()
        self.settle_sums()  # now, so that it does not forget squares of this pass
        if self.is_on:
            self._updates = self._ring.consumes = True
            self._error, self._facts, self._nonfinite = None, None, self.geometry.trained_count
            self._next = dict(pairwise(bucket.index for bucket in self.reducer.order))

    def before_launch(self, bucket: int) -> None:
        self.settle_sums()
        if self._updates and not self.pending:
            try:
                self.transaction.begin_alone()
            except OSError as error:  # of a write before the step
                self._error = error
        if self._updates:
            self.pending = True  # from here on, because another rank may update its shard of it
        if self._is_read(bucket):
            self.store.gather.synchronize()  # so that it counts as an earlier one, on any thread
        self._launched.add(bucket)

    def _is_read(self, bucket: int) -> bool:
        """Return True if a gather that has begun reads the bucket, or rows of it."""
        unit = self.store.units[self.geometry.buckets[bucket].unit]
        return unit.state is UnitState.GATHERING or self.store.memory.rows.is_reading(bucket)

    def reached_again(self, name: str, bucket: int) -> None:
        words = f"a backward pass has reached {name} twice (reentrant checkpoints that share it)"
        if self._updates:
            raise self._fail(f"{words}, in no step before: its weight was updated without the second gradient")
        self._seen = self._seen or words

    def on_sum(self, bucket: int, sum_: torch.Tensor) -> Call[None] | None:
        """Start to update this rank's shard of a bucket. Keeps errors, so that this rank still takes part in
        collectives."""
        if self._error is not None or not self.pending:
            return None
        try:
            found = self.geometry.buckets[bucket]
            if self._facts is None:
                self._facts = self._prepare()
            if self._is_read(bucket):
                self.store.gather.synchronize()  # it reads the old weights
            return self._thread.submit(self._run_update, found, sum_, self._facts.runs(found))
        except Exception as error:
            self._error = error
        except BaseException as error:  # an interrupt ends the pass, unless all ranks can learn of it in step()
            self._error = error
            if not self.transaction.undoes:
                self.poison.error = error
                raise
        return None

    def _prepare(self) -> Facts:
        self.reducer.consensus.skipped = frozenset()
        self.parts.grow_state(self.train.rule, self.train.param_groups)  # step() reports an error to other ranks
        return self.prepare(1.0 / self.train.gradient_factor)

    def _run_update(self, bucket: FlatBucket, sum_: torch.Tensor, runs: Sequence[Run]) -> None:
        if self._error is not None or not self.pending:
            return
        try:
            with torch.no_grad():
                self._update_now(bucket, sum_, runs)
        except BaseException as error:
            self._error = error

    def _update_now(self, bucket: FlatBucket, sum_: torch.Tensor, runs: Sequence[Run]) -> None:
        if not math.isfinite(float(sum_.sum())):
            self._find_nonfinite(bucket, sum_)
        if self._nonfinite < self.geometry.trained_count and self.train.skip_nonfinite:
            return  # the step will be undone
        source = self.store.source
        weight = source.load(bucket)
        coming: list[int] = []
        while len(coming) < _AHEAD and (following := self._next.get((coming or [bucket.index])[-1])) is not None:
            coming.append(following)
        # From the end of a shard: with the launch order, which goes down, spans take windows in turn.
        self.state.expect(coming, reverse=True)
        if coming:
            source.expect(self.geometry.buckets[coming[0]], bucket)
        self.apply(iter([ShardStep(bucket.index, weight, sum_, runs)]), True, {bucket.index})
        source.commit(bucket, weight)

    def _find_nonfinite(self, bucket: FlatBucket, sum_: torch.Tensor) -> None:
        shard = bucket.part
        for index in bucket.params:
            low, high = self.geometry.span_in(bucket, index).within(shard)
            if low < high and not bool(torch.isfinite(sum_[low - shard.start : high - shard.start]).all()):
                self._nonfinite = min(self._nonfinite, index)

    # --- reads of weights -------------------------------------------------------------------------------------

    def run(self, comm: Communicator, shards: Shards, bring: Callable[[], None]) -> None:
        self._note_late((bucket.unit, bucket.index) for bucket, _ in shards)
        super().run(comm, shards, bring)

    def _note_late(self, buckets: Iterable[tuple[int, int]]) -> None:
        """Note the units of buckets that are read after their launch."""
        self._late.update(unit for unit, bucket in buckets if bucket in self._launched)

    def check(self, what: str) -> None:
        super().check(what)
        if self._launched and not self._ends and not self.is_on:
            self._seen = self._seen or f"{what} comes between backward and step()"

    def take_back(self, what: str, complete: bool = False) -> bool:
        if not self.transaction.open or not self.pending or torch._C._current_graph_task_id() >= 0:
            return False
        if not self.reducer.broken and not complete:
            return False
        if self.reducer.broken or self._error is not None:
            logging.getLogger("zcomm").warning(self.transaction.warning(what))
        self.undo(self._error or RuntimeError("backward ended early"))
        return True

    def before_use(self) -> None:
        if self.pending and self.reducer.broken:
            self.take_back("a forward, or a look at a weight,")

    def rows_asked(self, unit: int, buckets: Collection[int]) -> None:
        """Note rows that are requested late. ``check_use`` raises after they are gathered: other ranks take part."""
        if self._launched:
            self._note_late((unit, bucket) for bucket in buckets)

    def check_use(self, unit: int) -> None:
        if not self._launched or self._ends:
            return
        if torch._C._current_graph_task_id() < 0:
            self.check("a forward, or a look at a weight,")
        elif unit in self._late:
            words = f"backward uses unit {self.store.units[unit].name} again, of which it has all gradients"
            if self._updates:
                raise self._fail(words)
            self._seen = self._seen or words

    # --- step() -----------------------------------------------------------------------------------------------

    def has_updated(self, options: StepOptions) -> bool:
        """Return True if the pass has updated the weights. Collective.

        Raises: RuntimeError or ValueError if ranks differ (poisons), or the watched step is not one for updates in
        backward.
        """
        if not self.is_on and self.transaction.open:
            self._commit("step()")  # a refusal below must not undo an earlier step
        if self.pending and self.reducer.broken and not self.take_back("step()"):
            self.break_off()
            self.poison.check("step()")
        self._check_left("step()")
        watched = self._watched() if not self.is_on and not self.pending else ""
        reached = self.reducer.reached > 0
        failed = self.pending and self.poison.error is not None  # the other ranks do not know yet
        count = self.transaction.count
        digest = options.digest() if self.pending and self.comm.world_size > 1 else 0
        own = [self.pending, not self.pending, bool(watched), reached, failed, count, -count, digest, -digest]
        flags = torch.tensor(own, dtype=torch.int64)
        if self.comm.world_size > 1:
            self.comm.all_reduce(flags, op="max", name="updates in backward")
        pending, others, refused, reached, broken = map(bool, flags.tolist()[:5])
        most, least, one, other = flags.tolist()[5:]
        if most != -least and self.transaction.open:
            self.undo(RuntimeError("ranks have committed different numbers of steps"))
        self.transaction.check_counts(most, least)
        if broken:
            self._tell()
        if pending and others:
            words = "backward has updated the weights on some ranks, and on others not"
            if not self.transaction.undoes:
                raise self._fail(words)
            error = RuntimeError(words)
            if self.transaction.open:
                self.undo(error)
            raise self.transaction.undone("step()", error)
        if pending and one != -other:
            self._raise_difference(options)
        if not pending:
            self._launched.clear()
            self._late.clear()
        if refused:
            self._seen = ""
            why = watched or "another rank prevents it"
            raise self._illegal(why, "nothing has been changed; ")
        if not self.is_on and reached:
            self._to_watch -= 1
            self.is_on = not self._to_watch
        return pending

    def _raise_difference(self, options: StepOptions) -> None:
        """Raise the differing options, which ranks have updated weights by. Collective. It poisons, unless ``step()``,
        which this ends, undoes the step."""
        if self.transaction.undoes:
            options.raise_difference()
        with self.poison.watch():
            options.raise_difference(UPDATED)

    def _tell(self) -> None:
        """Raise on all ranks the error that has poisoned one of them before its step(). Collective."""
        self.poison.unreported = False
        undone = self.transaction.undoes  # on all ranks: by step(), which this ends
        if self.poison.error is not None:
            broadcast_error(self.comm, self.poison.error)
            if undone:
                raise self.poison.error
            self.poison.check("step()")
        with self.poison.watch() if not undone or self.pending else nullcontext():
            check_error(self.comm)

    def _watched(self) -> str:
        """Name an obstacle to updates in backward in the watched step, or return ""."""
        if self.reducer.reached > 1:
            return "several backward passes before a step"
        if self._seen:
            return self._seen
        if self.reducer.local:
            return "gradients of no_sync() wait"
        if any(self.reducer.grads.held()) and self.reducer.reached:
            return "p.grad is dropped or assigned"
        if self.reducer.reached and not self._is_as_used():
            return "options of param groups change between backward and step()"
        return ""

    def end_updated(self, check: Callable[[], None], counted: Counted) -> None:
        parts, norm = self.parts, self.parts.norm

        def finish() -> None:
            parts.rebinder.restore()  # raises if the program has put other weights into the model
            self._finish(norm)
            check()

        with self.poison.watch():
            try:
                self.guarded(finish)
                check_error(self.comm)
                self.reducer.log_unused()
                total = norm.end()
                if self.train.skip_nonfinite and not math.isfinite(total):
                    self.transaction.take_back()
                counted(total, self._first_nonfinite)
                self.store.spread()
                self.store.count_change()
                self._ended()
            finally:
                self._ends = False
        self.transaction.commit()
        self.store.read_ahead()

    def end_step(self) -> None:
        if self.transaction.undoes and self.is_on:
            self.drain("step()")  # the next pass begins another step

    def _finish(self, norm: GradientNorm) -> None:
        """End the updates, and add the squares of this rank's gradients. Not collective. Raises: the first failure."""
        self._ends = True
        self.accumulators.finish()
        if self._error is not None:
            raise self._error
        if self._facts is None and self.geometry.buckets and self._nonfinite == self.geometry.trained_count:
            raise self._fail("no bucket was updated")
        self._check_unchanged()
        assert self._ring.knows_squares
        norm.begin()
        self._ring.add_squares(norm, ())

    def _first_nonfinite(self) -> str:
        """Name the first parameter with a gradient that was not finite. Collective."""
        first = torch.tensor([self._nonfinite])
        if self.comm.world_size > 1:
            self.comm.all_reduce(first, op="min", name="first non-finite gradient")
        return self.parts.names[int(first)] if int(first) < self.geometry.trained_count else "none that is left"

    def _ended(self) -> None:
        """Reset after all ranks have updated: weights and state are of one step again."""
        self.pending = self._ends = self._updates = self._ring.consumes = False
        self._facts = None
        self._ring.gone = GONE
        self._launched.clear()
        self._late.clear()

    # --- calls of the program ---------------------------------------------------------------------------------

    def reset(self) -> None:
        self._updates = self._ring.consumes = False
        self._launched.clear()
        self._late.clear()

    def _forget_pass(self) -> None:
        self.pending = False  # sums in flight update nothing
        self._thread.submit(int).wait()
        self._error = None
        self._launched.clear()
        self._late.clear()

    def close(self) -> None:
        """End the thread, after the update that runs."""
        self.pending = False
        self._thread.close()
