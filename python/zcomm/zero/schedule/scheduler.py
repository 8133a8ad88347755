"""UpdateScheduler: when the update of a bucket runs, and which updates must precede a read.

An update of a bucket is legal once its facts are known, and due before the next read of the new weights. Its facts:
- The bucket's sum is complete: known in backward (``on_sum``), else in ``step()``.
- Norm, clip factor, loss scale and skip decision, if a program needs them: known in ``step()``.
- The hyperparameters of this step (Facts). In backward they are read at its beginning, and ``step()`` compares them.
- No rank reads the old weights any more: after a barrier in ``step()``; in backward once the bucket's unit is done.

A policy decides which moments of UpdateHooks run legal updates. It is chosen once (legality.py):
- "step": UpdateScheduler itself runs all of them in ``step()``. On a device each runs there as soon as its sum is
  complete, if nothing needs the norm first (``run_as_ready``). The policies "forward" do so, too.
- "forward": InForward runs them when a gather reads the shard. Behind runs them on a thread, for weights that are
  whole on a device.
- "backward" (BeforeStep): InBackward runs them once a sum is complete, and the rest as InForward. FromSlots does so on
  a thread, for weights that are whole on the device of one rank.

Each has the same bits: the rule, its options and its order within a shard are the same. ``apply`` is the only call of
``ShardState.step``. Buckets that are only on devices go to torch's stream (on_device.py), which orders them by itself.

[Note: readers] A program that reads weights or state between ``step()`` and a later update must see the new values, or
get an error. Readers, the call that each goes through, and its test. T: test_gradient_tiers.py, P:
test_mode_programs.py in tests/python/zero/updates; D: test_device_behind.py:
- forward and evaluation: ``run``, ``run_part`` (InForward), module hooks and attributes (Behind). T, P ``evaluates``,
  D ``evaluation``; with rows: test_row_updates.py
- ``state_dict``, ``full_state_dict``, ``iter_state``, ``save``, ``load``, export: ``drain``. T ``looked_at``, P, D
- a parameter outside of its module, ``p.data`` and other edits, ``full_param``, ``GatheredParameters``, hooks of the
  program: ``before_shards``, ``check``, ``wait``. T ``looked_at``, P ``clamps``, ``gathers``, ``hooks``
- ``p.grad``, a second backward, ``zero_grad``, ``no_sync``: ``before_sums``, ``begin_pass``, ``begin_zero``. T, P
- schedules of rates, changed options: an update uses its Facts; in backward ``step()`` compares them. P, D
- ``grad_norm``, counters, a loss scale that overflows: counted in ``step()``, and a skipped step makes no Facts. T
  ``skipped_one``, P, test_norm_in_step.py
- ``close`` and the end of the program: ``end``. T ``looked_at``, test_mode_kills.py
- a deep copy of the model reads its parameters as any program does, of the optimizer it raises. D ``copies``
- errors and interrupts: ``watch``, ``gather_failed``, Poison. test_mode_faults.py, test_mode_kills.py, test_atomic.py
- a second optimizer of the same weights is refused. test_second_owner.py
Only Behind has readers that it cannot see: [Note: async step] names them, and "auto" does not choose it.
Thread rule: as UpdateHooks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TypeVar

import torch

from zcomm import _core
from zcomm.zero.gradients.norm import GradientNorm
from zcomm.zero.optim_state.ram import ShardStep
from zcomm.zero.parts import Parts, TrainState
from zcomm.zero.poison import StepUndoneError, broadcast_error, check_error
from zcomm.zero.schedule.facts import Facts
from zcomm.zero.schedule.on_device import DeviceUpdates
from zcomm.zero.schedule.transaction import OF_RANKS, NoTransaction, uninterrupted
from zcomm.zero.schedule.whole import WholeMatrices, WholeNorms
from zcomm.zero.step_options import StepOptions
from zcomm.zero.update_hooks import UpdateHooks

logger = logging.getLogger("zcomm")
T = TypeVar("T")
Through = Callable[[ShardStep], ShardStep]
Counted = Callable[[float, Callable[[], str]], float]

EDITED_LATE = (
    "step(): weights were edited on the device between backward() and step() in a way that moves no version counter "
    "(p.data, DLPack, a kernel): one or more of parameters %s; the update did not use the edit, so go on from a "
    "checkpoint. Write `with torch.no_grad(): p.mul_(...)`, or edit before backward()"
)


class UpdateScheduler(UpdateHooks):
    """The updates of one optimizer, in ``step()``.

    needs_norm: the norm precedes the first update. in_step: all updates run in ``step()``, so that one pass over the
    gradients may do more than update. reverse: the next step begins with the last bucket.
    """

    needs_norm = False
    in_step = True

    def __init__(self, train: TrainState) -> None:
        self.train, self.poison = train, train.poison
        self.transaction = NoTransaction()
        self.reverse = True

    def start(self, parts: Parts, arena: _core.PinnedArena, transaction: NoTransaction) -> None:
        """Set the parts, which have been built with this scheduler. arena: of page-locked memory."""
        self.parts, self.transaction = parts, transaction
        self.comm, self.reducer, self.accumulators = parts.comm, parts.reducer, parts.reducer.accumulators
        self.on_device = DeviceUpdates(parts, arena)
        self.on_host = [bucket for bucket in parts.geometry.buckets if bucket.index not in self.on_device.numbers]
        rule = self.train.rule
        self._norms = WholeNorms(parts.comms.state, parts.geometry.trained_count, rule.sums, parts.lane)
        self._matrices = WholeMatrices(parts, rule)

    # --- facts ------------------------------------------------------------------------------------------------

    @property
    def norm_decides(self) -> bool:
        """True if the norm must be known before the first update."""
        return self.train.needs_norm or self.needs_norm

    def prepare(self, scale: float, as_ready: bool = False) -> Facts:
        """Fix the facts of a step with gradients times ``scale``, and start the updates of buckets on the device.

        as_ready: do not wait until backward has ended on the device: edits are taken as backward found them. Collective
        if ranks measure whole parameters.
        """
        parts = self.parts
        start, store = time.perf_counter(), parts.store
        if not as_ready:
            store.look_for_edits()
        # Other ranks may still copy the old weights out of memory that they share, until their gradients have come.
        store.take_edits(self.accumulators.finish if as_ready and self.comm.world_size > 1 else None)
        if as_ready:
            store.look_for_edits()  # for ``edited_late``
        parts.rebinder.looked_s += time.perf_counter() - start
        store.used()
        facts = self.fix(scale)
        self.guarded(partial(self.on_device.step, facts.runs))
        return facts

    def fix(self, scale: float) -> Facts:
        """Fix the facts of a step with gradients times ``scale``: options and counters. Collective as ``prepare``."""
        parts, train = self.parts, self.train
        self.guarded(self._grow)
        skipped = parts.reducer.consensus.skipped
        facts = Facts(parts, train, train.counters.prepare(train.param_groups, scale, skipped), skipped)
        if train.rule.sums:
            facts.factors = self._measure(facts, self._norms)
            train.rule.measured(
                {parts.names[index]: f for index, f in enumerate(facts.factors) if index not in skipped}
            )
        return facts

    def _grow(self) -> None:
        """Make room for arrays of state that the options need."""
        parts, train = self.parts, self.train
        try:
            parts.grow_state(train.rule, train.param_groups)
        except BaseException as error:
            if parts.comms.hpz:  # the other ranks gather new weights before they compare errors
                parts.comms.fail(error)
            raise

    def _measure(self, facts: Facts, norms: WholeNorms) -> list[float]:
        """Return the factor of each parameter, from norms over the whole one before the update. Collective."""
        parts, rule = self.parts, self.train.rule
        self.accumulators.finish()

        def measure() -> None:
            norms.begin()
            self.on_device.measure(facts.runs, norms)
            for bucket in self.on_host:
                grad = self.accumulators.shard(bucket)
                parts.state.measure(ShardStep(bucket.index, parts.store.read(bucket), grad, facts.runs(bucket)), norms)

        self.guarded(measure)
        start = time.perf_counter()
        check_error(parts.comm)
        found = norms.end()
        hypers = [facts.hyper_of(index) for index in range(len(found))]
        self.train.waited_s += time.perf_counter() - start
        return [1.0 if h is None else rule.factor(each, h) for each, h in zip(found, hypers, strict=True)]

    # --- step() -----------------------------------------------------------------------------------------------

    def has_updated(self, options: StepOptions) -> bool:
        """Return True if backward has run updates of this step; ``end_updated`` then ends it. Collective if a policy
        can. options: of these updates."""
        return False

    def end_updated(self, check: Callable[[], None], counted: Counted) -> None:
        """End a step with updates in backward. Collective.

        check: of the program's changes since. counted: counts a step with this norm; it may ask for the name of the
        first parameter with a gradient that is not finite.
        """
        raise NotImplementedError("no update runs in backward")

    def update(self, scale: float) -> None:
        """Update with the accumulated gradients times ``scale``, now or when due. Collective."""
        turns = self.parts.state.turns or self.parts.store.turns
        late = self.accumulators.knows_squares and not turns  # the last buckets are complete first
        late = late and not self.train.rule.whole_matrices  # these require one direction on all ranks
        self.run_all(self.prepare(scale), self.reverse or late)
        self.parts.store.arrive()

    def run_as_ready(self, facts: Facts, norm: GradientNorm | None) -> None:
        """Update each bucket as soon as its sum is complete, last buckets first. norm: of the sums; None: it is known
        without them."""

        buckets = self.parts.geometry.buckets

        def squared(shard: ShardStep) -> ShardStep:
            if norm is None:
                return shard
            if self.parts.state.adds_squares(shard.bucket):
                return replace(shard, squares=norm.squares.of(buckets[shard.bucket]))
            assert shard.addend is None
            norm.squares.add(buckets[shard.bucket], shard.grad)
            return shard

        self.run_all(facts, True, squared)
        self.parts.store.arrive()

    def end_step(self) -> None:
        """End a step that has not failed. Collective. Raises: the error of any rank."""
        self.transaction.commit()
        self.parts.store.read_ahead()

    def run_all(self, facts: Facts, reverse: bool, through: Through = lambda shard: shard) -> None:
        """Update this rank's shards, and publish them to every rank. If that fails on one rank all raise. Collective.

        through: sees each shard before it is updated, and returns it.
        """
        shards = map(through, self._shards(facts, reverse))
        if self.train.rule.whole_matrices:
            self._apply_batches(self._matrices, facts, shards, reverse)
        else:
            self._apply_all(shards, reverse)
        start = time.perf_counter()
        self._check_updated()
        self.reverse = not self.reverse
        self.parts.store.spread()
        self.train.waited_s += time.perf_counter() - start

    def _apply_all(self, shards: Iterator[ShardStep], reverse: bool) -> None:
        """Update all shards. A failure is told to the other ranks, which may wait for new weights first."""
        store = self.parts.store
        try:
            self.apply(shards, reverse)
        except BaseException as error:
            store.give_up_spread(reverse)
            broadcast_error(self.comm, error)
            store.end_spread()
            raise

    def _check_updated(self) -> None:
        """Raise if the updates of any rank have failed. Collective."""
        try:
            check_error(self.comm)
        except BaseException:
            self.parts.store.end_spread()
            raise

    def apply(self, shards: Iterator[ShardStep], reverse: bool = False, buckets: Collection[int] | None = None) -> None:
        """Run the updates of ``shards``: the only call of ``ShardState.step``, with its arguments."""
        self.parts.state.step(shards, reverse, buckets)

    def _shards(self, facts: Facts, reverse: bool) -> Iterator[ShardStep]:
        for bucket, weight in self.parts.store.iter_shards(reverse):
            self.accumulators.finish(bucket)
            grad, addend = self.accumulators.terms(bucket)
            self.accumulators.expect(bucket.index + (-1 if reverse else 1))
            yield ShardStep(bucket.index, weight, grad, facts.runs(bucket), addend=addend)

    def _apply_batches(self, matrices: WholeMatrices, facts: Facts, shards: Iterator[ShardStep], reverse: bool) -> None:
        """Update by whole matrices, batch by batch ([Note: whole matrices])."""
        self.accumulators.finish()
        for batch in matrices.batches(reversed(self.on_host) if reverse else self.on_host):
            local = self.guarded(partial(matrices.parts_of, batch, facts.hyper_of, self.accumulators.shard))
            check_error(self.comm)
            facts.updates = matrices.updates(local, facts.hyper_of)
            self.guarded(matrices.check)
            numbers = {bucket.index for bucket in batch}
            self.guarded(partial(self.apply, islice(shards, len(batch)), reverse, numbers))
        facts.updates = {}
        self.guarded(lambda: list(shards))  # lets the source of shards finish its last one

    def guarded(self, act: Callable[[], T]) -> T:
        """Return the result of ``act``, which is not collective. If it fails, report the error to the other ranks."""
        try:
            return act()
        except BaseException as error:
            broadcast_error(self.comm, error)
            raise

    # --- failed steps -----------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Drop pending and running updates: all weights and state are to be loaded, or rolled back."""

    def undo(self, error: BaseException) -> None:
        """Undo the step that ``error`` has ended. Local."""
        with uninterrupted():
            self.poison.error = self.poison.error or error  # until all is done
            self.forget()
            if not self.reducer.running and not self.reducer.broken:  # otherwise zero_grad() does so
                self.reducer.zero()
                self.reset()
            self.train.forget_passes()
            self.train.backwards = self.reducer.backwards
            with torch.no_grad():
                self.transaction.take_back()
            self.poison.clear()

    @contextmanager
    def watch(self, what: str) -> Iterator[None]:
        """Undo the open step if an error ends the block. All ranks' blocks end so.

        Raises: StepUndoneError, caused by that error. Interrupts, and errors of lost or late ranks, stay as they are.
        """
        try:
            yield
        except BaseException as error:
            if not self.transaction.open:
                raise
            self.undo(error)
            if isinstance(error, OF_RANKS) or not isinstance(error, Exception):
                raise
            raise self.transaction.undone(what, error) from error

    def gather_failed(self, error: BaseException) -> None:
        """Undo a step after an error in a gather, on all ranks of the shard group: they compare in it. Other groups,
        which do not know it, get an error in their next call between groups."""
        if isinstance(error, Exception):
            self.parts.comms.fail(error)
        cause = self.poison.error  # of this gather, or of one before it
        if self.transaction.open and cause is not None and isinstance(error, Exception):
            self.undo(cause)
            if not isinstance(error, OF_RANKS):
                raise self.transaction.undone("forward", cause) from cause

    # --- calls of the program ---------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        self.parts.store.begin_pass()

    def wait(self) -> None:
        self.join()
        self.check("a look at weights, state or gradients")
        self.settle()

    def drain(self, what: str) -> None:
        if not self.poison.unreported:
            self.poison.check(what)
        if not self.parts.replicas.is_settled:
            with torch.no_grad(), self.poison.watch():
                self.parts.replicas.settle(what)

    def break_off(self) -> None:
        """Poison if a pass that updates has failed."""

    def begin_load(self, whole: bool) -> None:
        if self.transaction.open:
            with suppress(StepUndoneError):  # a load repairs that
                self.drain("load()")
        self.break_off()
        if self.poison.error is None:
            self.check("load()")
        if not whole:
            self.drain("load(optimizer=False)")
        self.end_updates()

    def end_updates(self) -> None:
        """Run pending updates, or forget them. A load repairs their failures."""

    def loaded(self, whole: bool) -> None:
        self.reset()
        if whole:
            self.poison.clear()
            self.transaction.forget()

    def end(self) -> bool:
        if not self.parts.replicas.is_settled:
            logger.warning(
                "rank %d: %s was closed between two exchanges: each rank has weights of its own; save(), "
                "state_dict() or full_state_dict() of all ranks before close() makes them equal",
                self.comm.rank,
                self.train.rule.name,
            )
        return super().end()

    def state_grew(self) -> None:
        self.transaction.state_grew()

    def version_nbytes(self) -> tuple[int, int] | None:
        return self.transaction.nbytes()
