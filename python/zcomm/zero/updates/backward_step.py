"""BackwardStep: the update of a bucket runs in the backward pass, as soon as its gradients are reduced.

[Note: update in backward] No sum is stored: a bucket's sum in the ring (SumRing) is used up by the update of its shard.
``step()`` then waits, agrees and counts. The rule, its options and its order within a shard are those of ``step()``,
and so are the bits.
Weights are updated in their source, never in a slot. A unit that is whole keeps the old weights until ``step()``, and
backward goes on to read these. Only a gather would bring new ones. So a use of a unit that was gathered after one of
its buckets was launched raises. An update waits for a gather that has begun before.
The first two steps with a backward pass are watched, and updated as ``ForwardStep`` does. A program that does what an
update in backward cannot follow goes on like that ("auto"), or gets an error before anything has changed ("backward").
With "auto" what concerns a unit or a parameter decides for its buckets alone: these stay with ``ForwardStep``, and the
ring stores their sums (``SumRing.stays``). ``step()`` begins these updates with what the others have used: one call of
the rule's ``prepare``, one norm. Ranks agree on these buckets in the steps that are watched.
From the first launch to the end of ``step()`` weights are of two steps: all that looks at weights, state or gradients
raises. A pass that ends with an error poisons. An error of an update is kept, so that collectives go on, until
``step()`` raises it on all ranks.
Updates run on a thread of their own: the drive works on while backward computes. A buffer of the ring is used anew once
its update has ended, so the ring bounds what waits.
Thread rule: ``run`` on the gathering thread, ``_update_now`` on that of updates; the rest on the thread that runs
backward and step. Source and state are that thread's from the first launch to the end of the last update.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from zcomm.comm.communicator import Communicator
from zcomm.zero.cache.span_cache import Works
from zcomm.zero.gradients.norm import GradientNorm
from zcomm.zero.gradients.reducer import GradientReducer
from zcomm.zero.gradients.sum_ring import SumRing
from zcomm.zero.layout.flat import FlatBucket, Geometry
from zcomm.zero.optim_state.ram import Run, ShardStep
from zcomm.zero.optim_state.state import OptimState
from zcomm.zero.param_groups import options_of
from zcomm.zero.poison import Poison, broadcast_error, check_error
from zcomm.zero.rules.cohorts import COUNTERS
from zcomm.zero.step_options import UPDATED, StepOptions
from zcomm.zero.units.store import UnitStore
from zcomm.zero.units.unit import Unit, UnitState
from zcomm.zero.updates.forward_step import ForwardStep, Parts
from zcomm.zero.updates.transaction import Transaction
from zcomm.zero.worker import Call, Worker

RunsOf = Callable[[FlatBucket], Sequence[Run]]
_REMEDY = "call step() first, or give Offload(update='forward')"
_OFF, _WATCHES, _ON = range(3)
_AHEAD = 4  # buckets of which state may come before their sums do
_WATCHED = 2  # steps: the first pass learns which parameters do not come, and the order of launches and gathers


class BackwardStep:
    """The updates of backward passes, once a step has been watched. forced: what prevents them raises.

    refusal: names an option that prevents them now, or "". prepare: prepares the rule; gives the runs of buckets.
    options: of all param groups. factor: of the gradients that are kept. skips: whether steps with gradients that are
    not finite are skipped.
    """

    refusal: Callable[[], str]
    prepare: Callable[[], RunsOf]
    options: Callable[[], list[dict[str, Any]]]
    factor: Callable[[], float]
    skips: Callable[[], bool]

    def __init__(
        self,
        store: UnitStore,
        state: OptimState,
        reducer: GradientReducer,
        forward_step: ForwardStep,
        geometry: Geometry,
        comm: Communicator,
        poison: Poison,
        forced: bool,
    ) -> None:
        self._store, self._state, self._reducer, self._forward_step = store, state, reducer, forward_step
        self._geometry, self._comm, self._poison, self._forced = geometry, comm, poison, forced
        ring = reducer.accumulators.ring
        assert ring is not None
        self._ring: SumRing = ring
        self._transaction: Transaction | None = None
        self._phase = _WATCHES
        self._to_watch = _WATCHED
        self._updates = False  # the pass that runs, or ran last, updates
        self.pending = False  # a bucket of such a pass was launched, and no step() has ended it
        self._ends = False  # step() ends it now
        self._error: BaseException | None = None  # of an update
        self._runs: RunsOf | None = None
        self._used: list[dict[str, Any]] = []  # options at the beginning of the pass
        self._factor = 1.0
        self._launched: set[int] = set()  # buckets, since the pass began
        self._late: set[int] = set()  # units that were gathered after one of their buckets was launched
        self._next: dict[int, int] = {}
        self._seen = ""  # what the watched step has done, for which no bucket can update
        self._seen_of_some = ""  # for which those cannot that are in ``_ring.stays``, the same on all ranks in the end
        self._rest = False  # gradients of these wait on some rank
        self._nonfinite = geometry.trained_count
        self._thread = Worker("zcomm-update")
        store.gather.updates = self
        store.settle = self._settle
        store.life.check = self._check_use
        store.life.asks_rows = self._ask_rows
        store.life.check_edit = partial(self.check, "a change of weights")
        reducer.before_pass, reducer.before_launch, reducer.again = self._begin_pass, self._launching, self._came_again
        reducer.before_reduce = self._check_sums

    def make_atomic(self, transaction: Transaction) -> None:
        """Let a pass that updates be undone where it fails."""
        self._transaction = transaction
        transaction.on_undo.append(self.forget)
        self._store.life.before = self._before_use

    # --- a pass -----------------------------------------------------------------------------------------------

    def _begin_pass(self) -> None:
        """Decide whether the pass that begins updates. Raises: RuntimeError, before anything has changed."""
        self.check("backward()")
        if self._ring.gone:
            raise RuntimeError(f"backward(): {self._ring.gone}")
        self._updates, self._ring.consume = False, None
        if self._phase == _OFF:
            self._forward_step.settle_sums()
            return
        reducer = self._reducer
        why = self.refusal()
        if not reducer.accumulators.fresh:
            why = why or "gradients are accumulated over several backward passes"
        why = why or reducer.grads.refusal()
        if reducer.local:
            why = why or "gradients of no_sync() wait"
        if why and self._forced:
            raise RuntimeError(f"Offload(update='backward'): {why}: give update='forward', which allows it")
        self._seen = self._seen or why
        self._used, self._factor = self.options(), self.factor()
        self._launched.clear()
        self._forward_step.settle_sums()  # now: what it forgets are not the squares of this pass
        if self._phase == _ON and not why:
            self._updates, self._ring.consume = True, self._update
            self._error, self._runs, self._nonfinite = None, None, self._geometry.trained_count
            stays = self._ring.stays
            self._next = dict(pairwise(bucket.index for bucket in reducer.order if bucket.index not in stays))

    def _launching(self, bucket: int) -> None:
        self._forward_step.settle_sums()
        if self._updates and not self.pending and self._transaction is not None:
            try:
                self._transaction.begin_alone()
            except OSError as error:  # of a write from before the step
                self._error = error
        if self._updates:
            self.pending = True  # from here on: another rank may update its shard of it
        if self._phase != _OFF and self._is_read(bucket):
            self._store.gather.synchronize()  # so that it counts as one of before, on whatever thread
        self._launched.add(bucket)

    def _unit_of(self, bucket: int) -> Unit:
        return self._store.units[self._geometry.buckets[bucket].unit]

    def _is_read(self, bucket: int) -> bool:
        """Return True if a gather that has begun reads the bucket, or rows of it."""
        return self._unit_of(bucket).state is UnitState.GATHERING or self._store.memory.rows.is_reading(bucket)

    def _came_again(self, name: str, bucket: int) -> None:
        words = f"a backward pass has reached {name} twice (reentrant checkpoints that share it)"
        if self._updates and bucket not in self._ring.stays:
            raise self._fail(f"{words}, in no step before: its weight was updated without the second gradient")
        self._see_of([bucket], words)

    def _fail(self, words: str) -> RuntimeError:
        error = RuntimeError(f"Offload(update='backward'): {words}: give update='forward', which allows it")
        self._poison.error = self._poison.error or error
        return error

    def _see(self, words: str) -> None:
        if self._phase == _WATCHES:
            self._seen = self._seen or words

    def _see_of(self, buckets: Iterable[int], words: str) -> None:
        """Let ``buckets`` update in forward, for what they do in a watched step."""
        if self._phase == _WATCHES:
            self._seen_of_some = self._seen_of_some or words
            self._ring.stays.update(buckets)

    def _update(self, number: int, sum_: torch.Tensor) -> Call[None] | None:
        """Start to update this rank's shard of a bucket. Keeps errors, so that this rank goes on to take part in
        collectives."""
        if self._error is not None or not self.pending:
            return None
        try:
            bucket = self._geometry.buckets[number]
            if self._runs is None:
                self._runs = self.prepare()
            if self._is_read(number):
                self._store.gather.synchronize()  # it reads the old weights
            return self._thread.submit(self._run_update, bucket, sum_, self._runs(bucket))
        except Exception as error:
            self._error = error
        except BaseException as error:  # an interrupt ends the pass, unless all ranks can learn of it in step()
            self._error = error
            if self._transaction is None:
                self._poison.error = error
                raise
        return None

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
        if self._nonfinite < self._geometry.trained_count and self.skips():
            return  # the step will be undone
        source = self._store.source
        weight = source.load(bucket)
        coming: list[int] = []
        while len(coming) < _AHEAD and (following := self._next.get((coming or [bucket.index])[-1])) is not None:
            coming.append(following)
        # From the end of a shard: with the launch order, which goes down, spans take windows in turn.
        self._state.expect(coming, reverse=True)
        if coming:
            source.expect(self._geometry.buckets[coming[0]], bucket)
        self._state.step(iter([ShardStep(bucket.index, weight, sum_, runs)]), True, {bucket.index})
        source.commit(bucket, weight)

    def _find_nonfinite(self, bucket: FlatBucket, sum_: torch.Tensor) -> None:
        shard = bucket.shard(self._comm.rank)
        for index in bucket.params:
            low, high = self._geometry.span_in(bucket, index).within(shard)
            if low < high and not bool(torch.isfinite(sum_[low - shard.start : high - shard.start]).all()):
                self._nonfinite = min(self._nonfinite, index)

    # --- on the gathering thread ------------------------------------------------------------------------------

    def run(self, comm: Communicator, parts: Parts, failed: Exception | None, bring: Callable[[], None]) -> list[Works]:
        """Gather as ForwardStep does, and note units that come with new weights."""
        self._note_late((b.unit, b.index) for b, _ in parts)
        return self._forward_step.run(comm, parts, failed, bring)

    def run_part(self, comm: Communicator, bucket: FlatBucket, bring: Callable[[torch.Tensor | None], None]) -> None:
        """Bring rows as ForwardStep does."""
        self._forward_step.run_part(comm, bucket, bring)

    def _note_late(self, buckets: Iterable[tuple[int, int]]) -> None:
        """Note the units of buckets that are read now, after they were launched."""
        stays = self._ring.stays if self._phase == _ON else ()  # these have their old weights
        self._late.update(unit for unit, bucket in buckets if bucket in self._launched and bucket not in stays)

    # --- what a program does meanwhile ------------------------------------------------------------------------

    def check(self, what: str) -> None:
        """Raise RuntimeError for ``what``, which needs weights, state or gradients of one step."""
        if self.pending and not self._ends:
            if self.take_back(what):
                return
            self.break_off()
            self._poison.check(what)
            raise RuntimeError(f"{what}: backward has updated the weights already: {_REMEDY}")
        if self._launched and not self._ends:
            self._see(f"{what} comes between backward and step()")

    def break_off(self) -> None:
        """Poison, where a pass that updates ended with an error, or an update did."""
        if self.pending and self._poison.error is None and (self._reducer.broken or self._error is not None):
            self._poison.error = self._error or RuntimeError("an error in backward, which updates the weights,")
            self._poison.untold = not self._reducer.broken  # else the other ranks are amid the pass

    def take_back(self, what: str, complete: bool = False) -> bool:
        """Undo the updates of a pass that ended with an error, where that is possible; return True then.

        complete: also those of a pass that did not. Local: ranks that do otherwise are found out in ``step()``.
        """
        if self._transaction is None or not self._transaction.open or not self.pending:
            return False
        if torch._C._current_graph_task_id() >= 0:
            return False
        if not self._reducer.broken and not complete:
            return False
        if self._reducer.broken or self._error is not None:
            self._transaction.warn(what)
        self._transaction.undo(self._error or RuntimeError("backward ended early"))
        return True

    def _before_use(self) -> None:
        if self.pending and self._reducer.broken:
            self.take_back("a forward, or a look at a weight,")

    def _ask_rows(self, unit: Unit, buckets: Collection[int]) -> None:
        """Note rows that are asked for late, which ``_check_use`` finds once they are there: other ranks take part."""
        if self._launched:
            self._note_late((unit.index, bucket) for bucket in buckets)

    def _check_use(self, unit: Unit) -> None:
        """Check a use of ``unit``, which is about to be whole or is, or has rows there."""
        if not self._launched or self._ends:
            return
        if torch._C._current_graph_task_id() < 0:
            self.check("a forward, or a look at a weight,")
        elif unit.index in self._late:
            words = f"backward uses unit {unit.name} again, of which it has all gradients"
            if self._updates:
                raise self._fail(words)
            self._see_of((b.index for b in self._geometry.buckets if b.unit == unit.index), words)

    def _check_sums(self) -> None:
        self.check("p.grad")
        if self._ring.gone:
            raise RuntimeError(f"p.grad: {self._ring.gone}")
        self._forward_step.settle_sums()

    def _settle(self) -> None:
        self.check("a look at weights or state, or a change of them,")
        self._forward_step.settle()

    @property
    def is_on(self) -> bool:
        """True if the next pass may update."""
        return self._phase == _ON

    @property
    def watches(self) -> bool:
        """True while steps are watched, on all ranks."""
        return self._phase == _WATCHES

    # --- step() -----------------------------------------------------------------------------------------------

    def agree(self, options: StepOptions) -> bool:
        """Return True if the pass has updated the weights. Collective, until updates in backward are given up.

        options: of the updates. Raises: RuntimeError or ValueError, where ranks differ (poisons), or the watched step
        is not one for updates in backward.
        """
        if self._phase == _OFF:
            return False
        if self.pending and self._reducer.broken and not self.take_back("step()"):
            self.break_off()
            self._poison.check("step()")
        if self._ring.gone:
            raise RuntimeError(f"step(): {self._ring.gone}")
        watched = self._watched() if self._phase == _WATCHES and not self.pending else ""
        reached = self._reducer.reached > 0
        failed = self.pending and self._poison.error is not None  # of which the other ranks are still to learn
        count = 0 if self._transaction is None else self._transaction.count
        rest = self.pending and bool(self._reducer.local)
        digest = options.digest() if self.pending and self._comm.world_size > 1 else 0
        own = [self.pending, not self.pending, bool(watched), reached, failed, rest, count, -count, digest, -digest]
        if self._phase == _WATCHES:
            own += [bucket.index in self._ring.stays for bucket in self._geometry.buckets]
        flags = torch.tensor(own, dtype=torch.int64)
        if self._comm.world_size > 1:
            self._comm.all_reduce(flags, op="max", name="updates in backward")
        pending, others, refused, reached, broken, self._rest = map(bool, flags.tolist()[:6])
        if self._transaction is not None:
            self._transaction.check_counts(*flags.tolist()[6:8])
        differs = flags[8] != -flags[9]
        stay = zip(self._geometry.buckets, flags.tolist()[10:], strict=False)
        self._ring.stays.update(bucket.index for bucket, stays in stay if stays)
        if broken:
            self._tell()
        if pending and others and self._transaction is not None:
            error = RuntimeError("backward has updated the weights on some ranks, and on others not")
            if self._transaction.open:
                self._transaction.undo(error)
            raise self._transaction.undone("step()", error)
        if pending and others:
            raise self._fail("backward has updated the weights on some ranks, and on others not")
        if pending and differs:
            self._raise_difference(options)
        if not pending:
            self._launched.clear()
            self._late.clear()
        if refused:
            self._give_up(watched or "another rank prevents it")
        elif self._phase == _WATCHES:
            self._end_watched(reached)
        return pending

    def _end_watched(self, reached: bool) -> None:
        """End a watched step, of which all ranks know what each bucket does. reached: by a backward pass."""
        stay, count = len(self._ring.stays), len(self._geometry.buckets)
        why = self._seen_of_some or "another rank prevents it"
        if stay == count or (stay and self._forced):
            self._give_up(why, "'auto', or 'forward', which allow it")
        elif reached:
            self._to_watch -= 1
            self._phase = _WATCHES if self._to_watch else _ON
            if stay and self._phase == _ON:
                words = "updates of %d of %d buckets run in the next forward, and not in backward: %s"
                logging.getLogger("zcomm").info(words, stay, count, why)

    def _raise_difference(self, options: StepOptions) -> None:
        """Raise what differs between the ranks, which have updated weights by it. Collective. It poisons, unless the
        step is undone by ``step()``, which this ends."""
        if self._transaction is not None:
            options.raise_difference()
        with self._poison.watch():
            options.raise_difference(UPDATED)

    def _tell(self) -> None:
        """Raise on all ranks the error that has poisoned one of them before its step(). Collective."""
        self._poison.untold = False
        undone = self._transaction is not None  # on all ranks: by step(), which this ends
        if self._poison.error is not None:
            broadcast_error(self._comm, self._poison.error)
            if undone:
                raise self._poison.error
            self._poison.check("step()")
        with self._poison.watch() if not undone or self.pending else nullcontext():
            check_error(self._comm)

    def _watched(self) -> str:
        """Return what prevents updates in backward in the step that was watched, or ""."""
        if self._reducer.reached > 1:
            return "several backward passes before a step"
        if self._seen:
            return self._seen
        if self._waits_elsewhere():
            return "gradients of no_sync() wait"
        if any(self._reducer.grads.held()) and self._reducer.reached:
            return "p.grad is dropped or assigned"
        if self._reducer.reached and not self._is_as_used():
            return "options of param groups change between backward and step()"
        return ""

    def _waits_elsewhere(self) -> bool:
        """Return True if gradients wait of other buckets than those that update in forward."""
        buckets, stays = self._geometry.by_block.places, self._ring.stays
        return any(buckets[number].bucket not in stays for number in self._reducer.local.sums)

    def _give_up(self, why: str, instead: str = "'forward', which allows it") -> None:
        self._seen = self._seen_of_some = ""
        self._ring.stays.clear()
        if self._forced:
            raise RuntimeError(f"Offload(update='backward'): {why}: nothing has been changed; give update={instead}")
        self._phase = _OFF
        logging.getLogger("zcomm").info("updates run in the next forward, and not in backward: %s", why)

    def _is_as_used(self) -> bool:
        return _are_equal(self._used, self.options()) and self._factor == self.factor()

    def finish(self, norm: GradientNorm) -> None:
        """End the updates, and add the squares of this rank's gradients. Not collective. Raises: what went wrong."""
        self._ends = True
        self._reducer.accumulators.finish()
        if self._error is not None:
            raise self._error
        if self._runs is None and self._geometry.buckets and self._nonfinite == self._geometry.trained_count:
            raise self._fail("no bucket was updated")
        if self._waits_elsewhere() or any(self._reducer.grads.held()):
            raise self._fail("p.grad was dropped or assigned after backward, which had updated the weights")
        if self.refusal() or not self._is_as_used():
            raise self._fail("options were changed after backward, which had updated the weights")
        assert self._ring.knows_squares
        norm.begin()
        if not self._rest:
            self._ring.add_squares(norm, ())

    def add_rest(self, norm: GradientNorm) -> None:
        """Add gradients that wait on any rank to the sums of their buckets, which update in forward, and squares of
        all. Collective."""
        if not self._rest:
            return

        def add() -> None:
            self._reducer.values.reduce_rest()
            self._ring.add_squares(norm, self._staying())

        self._reducer.accumulators.guarded(add)

    def _staying(self) -> list[FlatBucket]:
        return [bucket for bucket in self._geometry.buckets if bucket.index in self._ring.stays]

    def _find_in_sums(self) -> None:
        for bucket in self._staying():
            self._find_nonfinite(bucket, self._reducer.accumulators.shard(bucket))

    def first_nonfinite(self, names: Sequence[str]) -> str:
        """Name the first parameter with a gradient that was not finite. Collective."""
        if self._ring.stays:
            self._reducer.accumulators.guarded(self._find_in_sums)
        first = torch.tensor([self._nonfinite])
        if self._comm.world_size > 1:
            self._comm.all_reduce(first, op="min", name="first non-finite gradient")
        return names[int(first)] if int(first) < self._geometry.trained_count else "none that is left"

    def ended(self, skipped: bool) -> None:
        """All ranks have updated: weights and state are of one step again, or are once ``ForwardStep`` has updated the
        other buckets. skipped: the updates were undone."""
        if self._runs is not None and not skipped and self._ring.stays:
            self._forward_step.start({bucket.index: self._runs(bucket) for bucket in self._staying()})
        self.pending = self._ends = self._updates = False
        self._runs, self._ring.consume = None, None
        self._ring.gone = "backward has used the gradients up; call zero_grad(), and run backward again"
        self._launched.clear()
        self._late.clear()

    def leave(self) -> None:
        """End ``finish`` that failed."""
        self._ends = False

    def forget(self) -> None:
        """Forget a pass that failed, of which all weights and state are to be loaded."""
        self.pending = False  # sums that are still on their way update nothing
        self._thread.submit(int).wait()
        self._error = None
        self._launched.clear()
        self._late.clear()

    def close(self) -> None:
        """End the thread, after the update that runs."""
        self.pending = False
        self._thread.close()

    def reset(self) -> None:
        """Forget the last pass: its gradients are forgotten."""
        self._updates, self._ring.consume = False, None
        self._launched.clear()
        self._late.clear()


def options_now(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a copy of the options of param groups, without counters."""
    return [
        {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in options_of(group).items()
            if key not in COUNTERS
        }
        for group in groups
    ]


def _are_equal(before: Sequence[dict[str, Any]], now: Sequence[dict[str, Any]]) -> bool:
    def same(a: Any, b: Any) -> bool:
        if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
            return torch.equal(torch.as_tensor(a), torch.as_tensor(b))
        return bool(a == b)

    return len(before) == len(now) and all(
        a.keys() == b.keys() and all(same(a[key], b[key]) for key in a) for a, b in zip(before, now, strict=True)
    )
