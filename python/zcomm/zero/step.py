"""One optimizer step, top to bottom in ``OptimizerStep.run``: norm, clip, update, publish.

Steps alternate their direction ([Note: swapped step]); construction, which wrote first to last, counts as one.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import torch

from zcomm.zero.format_names import format_names
from zcomm.zero.gradients.norm import clip_factor
from zcomm.zero.gradients.values import NonFinite
from zcomm.zero.layout.flat import FlatBucket
from zcomm.zero.optim_state.ram import Run, ShardStep
from zcomm.zero.params.device import DeviceStore
from zcomm.zero.parts import Parts, TrainState
from zcomm.zero.poison import broadcast_error, check_error
from zcomm.zero.rules.cohorts import COUNTERS
from zcomm.zero.rules.rule import Indexed, Update
from zcomm.zero.step_options import UPDATED, StepOptions
from zcomm.zero.updates.backward_step import BackwardStep, options_now
from zcomm.zero.updates.forward_step import ForwardStep
from zcomm.zero.whole_matrices import WholeMatrices
from zcomm.zero.whole_norms import WholeNorms

T = TypeVar("T")

_LATE = (
    "step(): a backward pass has reached a parameter twice on some rank, in no step before: weights were updated "
    "without its second gradient, so go on from a checkpoint. Reentrant checkpoints with a weight in common do so: use "
    "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
)

_EDITED_LATE = (
    "step(): weights were edited on the device between backward() and step() in a way that moves no version counter "
    "(p.data, DLPack, a kernel): one or more of parameters %s; the update did not use the edit, so go on from a "
    "checkpoint. Write `with torch.no_grad(): p.mul_(...)`, or edit before backward()"
)


class NoGradientsError(Exception):
    """Error of a step without any rank's gradient. Raised on all ranks, before anything has changed."""


class OptimizerStep:
    """The steps of one optimizer. frozen: parameters that were given to be trained, but were frozen then.

    Gradients that a pass did not take ([Note: arrivals]) are known to their rank alone. The norm's message carries them
    to all, which then reduce them and take the norm again.
    """

    def __init__(self, parts: Parts, train: TrainState, frozen: Sequence[torch.Tensor]) -> None:
        self._parts, self._train, self._frozen = parts, train, frozen
        self._accumulators, self._agreement = parts.reducer.accumulators, parts.reducer.agreement
        there = parts.device_step.numbers if parts.device_step is not None else ()
        self._on_host = [bucket for bucket in parts.geometry.buckets if bucket.index not in there]
        self._reverse = True
        self._whole_norms = None
        self._factors: list[float] | None = None  # of each parameter, in this step
        if train.rule.sums:
            params = parts.geometry.trained_count
            self._whole_norms = WholeNorms(parts.comm, params, train.rule.sums, parts.lane)
        self._matrices = WholeMatrices(parts, train.rule) if train.rule.whole_matrices else None
        self._updates: dict[int, Update] = {}  # of matrices of the batch that is being stepped
        self._options = StepOptions(parts.comm, self._option_names, self._option_values)
        self._rests: bool | None = None  # whether any rank ever had a rest of gradients; None: not known yet
        if parts.backward_step is not None:
            parts.backward_step.prepare = self.prepare
            parts.backward_step.options = lambda: options_now(train.param_groups)
            parts.backward_step.factor = lambda: train.gradient_factor
            parts.backward_step.refusal = lambda: train.needs_all_gradients or self._thawed()
            parts.backward_step.skips = lambda: train.skip_nonfinite

    def run(self) -> None:
        """Update weights and state with the accumulated gradients; does nothing where there are none. Collective.

        Raises: NoGradientsError; RuntimeError for what cannot be stepped with, before anything has changed.
        """
        transaction = self._parts.transaction
        if transaction is None:
            self._run()
            return
        with transaction.watch("step()"):
            self._run()

    def _run(self) -> None:
        parts, train = self._parts, self._train
        self._options.refusal = None
        if parts.backward_step is not None and parts.backward_step.watches:
            parts.settle_transaction("step()")  # what ``agree`` refuses now undoes no step before this one
        if parts.backward_step is not None and parts.backward_step.agree(self._options):
            with train.poison.watch():
                self._end_backward(parts.backward_step)
            forward_step = parts.forward_step
            assert forward_step is not None
            if forward_step.waits and parts.transaction is not None:
                # The next pass begins a step of its own, in its first launch. Ranks are not at one point there, so they
                # cannot compare this one.
                parts.settle(train.poison, "step()")
            self._commit()
            if not forward_step.waits:
                parts.store.read_ahead()
            return
        if not self._ready():
            return
        scale = 1.0 / train.gradient_factor

        # Norm. Where it decides nothing, the weights are updated in the same pass over the gradients, or before it.
        decides = train.skip_nonfinite or train.clip_norm is not None or parts.async_step is not None
        decides = decides or parts.forward_step is not None
        decides = decides or train.rule.sums > 0 or self._matrices is not None
        if self._accumulators.ring is not None:
            self._accumulators.ring.wants_squares = decides or not self._can_square  # in the next step
        parts.store.looks_early = not decides and self._can_overlap  # in the next pass
        total = None if decides else self._update_early(scale)
        early = total is not None
        if total is None:
            total = self.norm()
            self._begin_transaction()
        norm = self._counted(total)
        if train.overflow:
            self._commit()
            return

        # Clip.
        if train.clip_norm is not None:
            scale *= clip_factor(norm, train.clip_norm)

        # Update this rank's shards, and publish the new weights: now, on a thread behind the next forward, or in it.
        with train.poison.watch():
            if parts.forward_step is not None:
                self._defer(scale, parts.forward_step)
            elif parts.async_step is not None:
                parts.async_step.start(self._prepared(scale))
            else:
                if not early:
                    self._update(scale)
                parts.store.arrive()
            parts.store.count_change()
        if parts.transaction is not None and parts.backward_step is not None and parts.backward_step.is_on:
            parts.settle(train.poison, "step()")  # the next pass begins a step of its own
        if parts.forward_step is None:
            self._commit()
            parts.store.read_ahead()  # with forward_step a gather would update, before the program can look at the step

    def _begin_transaction(self) -> None:
        """Let what is counted and updated from now on be undone where the step fails. Collective."""
        if self._parts.transaction is not None:
            self._parts.transaction.begin()

    def _commit(self) -> None:
        """Let all of it count. Collective. Raises: the error of any rank."""
        if self._parts.transaction is not None:
            self._parts.transaction.commit()

    # --- updates in backward ------------------------------------------------------------------------------------

    def _end_backward(self, backward_step: BackwardStep) -> None:
        """End a step of which backward has made the updates, or some of them. Collective."""
        parts, train = self._parts, self._train

        def finish() -> None:
            parts.attachment.restore()  # raises where the program has put other weights into the model
            backward_step.finish(parts.norm)
            self._check_frozen()
            self._check_scaled()
            self._check_groups()

        try:
            self._guarded(finish)
            check_error(parts.comm)
            parts.reducer.log_unused()
            backward_step.add_rest(parts.norm)
            total = parts.norm.end()
            if parts.transaction is not None and train.skip_nonfinite and not math.isfinite(total):
                parts.transaction.take_back()
            self._counted(total, backward_step.first_nonfinite)
            parts.store.spread()
            parts.store.count_change()
            backward_step.ended(skipped=train.overflow)
        finally:
            backward_step.leave()

    def prepare(self) -> Callable[[FlatBucket], list[Run]]:
        """Prepare the rule for updates in backward. Returns: the runs of a bucket."""
        self._agreement.skipped = frozenset()
        self._parts.grow_state(self._train.rule, self._train.param_groups)  # step() tells other ranks of an error
        hyper = self._begin(1.0 / self._train.gradient_factor)
        return partial(self._runs, hyper=hyper)

    # --- before -------------------------------------------------------------------------------------------------

    def _ready(self) -> bool:
        """Check what the program has done since the last step. Returns: False where no rank has gradients. Collective.

        Raises: RuntimeError, and what ParamGroups.check raises.
        """
        self._parts.settle(self._train.poison, "step()")
        parts = self._parts.join(self._train.poison)
        if parts.reducer.broken:
            raise RuntimeError("step(): the last backward pass ended with an error; call zero_grad() and run it again")
        self._refusing(self._check_frozen)
        if not self._agreement.ask():
            return False
        self._refusing(self._check_scaled)
        self._refusing(self._check_groups)
        parts.reducer.log_unused()
        return True

    def _refusing(self, check: Callable[[], None]) -> None:
        """Call ``check``, which is not collective. Its error is raised on all ranks, after the next message to them."""
        if self._options.refusal is not None:
            return
        try:
            check()
        except Exception as error:
            if self._parts.comm.world_size == 1 or self._can_overlap:
                raise
            self._options.refusal = error

    def _check_groups(self) -> None:
        """Raise for options that cannot be stepped with, before anything is updated."""
        train = self._train
        train.tied.check(train.param_groups, train.rule)
        if train.rule.missing(train.param_groups):
            self._parts.state.check_grows()

    def _option_keys(self) -> tuple[str, ...]:
        """List the keys of param groups that must be the same on all ranks. Without the counters if backward updates:
        each rank counts there as soon as its first sum comes."""
        backward_step = self._parts.backward_step
        counts = backward_step is not None and backward_step.pending
        return self._train.rule.options if counts else (*self._train.rule.options, *COUNTERS)

    def _option_values(self) -> list[Any]:
        """List the options of the next update, which must be the same on all ranks."""
        train, keys = self._train, self._option_keys()
        values = [group.get(key) for group in train.param_groups for key in keys]
        scale = train.pass_scale if train.scaler is not None else 1.0
        return [*values, train.clip_norm, train.skip_nonfinite, train.grad_accum, scale, train.gradient_factor]

    def _option_names(self) -> list[str]:
        """Name what ``_option_values`` lists."""
        keys = self._option_keys()
        names = [f"{key} of group {number}" for number in range(len(self._train.param_groups)) for key in keys]
        of_step = "clip_norm", "skip_nonfinite", "grad_accum", "the loss scale of the gradients"
        return [*names, *of_step, "the factor of the gradients"]

    def _check_scaled(self) -> None:
        train = self._train
        if train.scaler is not None and self._parts.reducer.scaled_passes > train.scaled_passes:
            raise RuntimeError("precision='fp16' needs opt.backward(loss) instead of loss.backward()")

    def _thawed(self) -> str:
        """Name a parameter that was frozen at construction, and may get a gradient now; return "" if there is none."""
        thawed = next((param for param in self._frozen if param.requires_grad), None)
        return "" if thawed is None else f"parameter {self._name(thawed)}, which was frozen, requires a gradient now"

    def _name(self, param: torch.Tensor) -> str:
        modules = self._parts.model.named_parameters() if self._parts.model is not None else ()
        return next((name for name, other in modules if other is param), f"of shape {tuple(param.shape)}")

    def _check_frozen(self) -> None:
        """Raise RuntimeError for a parameter that was frozen at construction, and has a gradient now."""
        for param in self._frozen:
            if param.requires_grad and param.grad is not None:
                name = self._name(param)
                raise RuntimeError(
                    f"step(): parameter {name} requires a gradient now, but was frozen when ZeroOptimizer was built: "
                    "it has no place in its state: build ZeroOptimizer while it requires one (requires_grad_(False) "
                    "afterwards freezes it until it is wanted), or save, close() and build it again"
                )

    # --- norm ---------------------------------------------------------------------------------------------------

    def norm(self) -> float:
        """Return the norm of all accumulated gradients. Collective: afterwards no rank reads the old weights any more.
        Gradients may still be on their way ([Note: squares before the gradients])."""
        if not self._accumulators.knows_squares and self._accumulators.ring is None:
            self._accumulators.finish()
        start = time.perf_counter()
        self._parts.store.synchronize()
        total = self._norm_now()
        self._check_options()
        if self._parts.norm.flagged:
            self._agree()
            total = self._norm_now()
        self._rests = self._rests or False
        self._train.waited_s += time.perf_counter() - start
        return total

    def _check_options(self, more: str = "") -> None:
        """Raise on all ranks where the norm's message has found other options, or a refusal. more: of the text."""
        if self._parts.norm.differs:
            self._options.raise_difference(more)

    def _agree(self) -> None:
        """Reduce gradients that no pass took on some rank, or that the program has dropped or assigned. Compare what
        forwards have edited. Collective."""
        if self._parts.forward_edits is not None:
            self._parts.forward_edits.check()
        self._rests = self._rests or not self._agreement.is_special
        self._agreement.agree()
        if self._agreement.has_nothing:
            raise NoGradientsError

    @property
    def _flag(self) -> bool:
        """Return True if the ranks must agree before the step."""
        edits = self._parts.forward_edits
        return self._agreement.flag or (edits is not None and edits.some)

    def _norm_now(self) -> float:
        self._begin_norm()
        self._accumulators.guarded(self._add_squares)
        return self._end_norm()

    def _add_squares(self) -> None:
        if self._accumulators.ring is not None:
            self._accumulators.finish()
        self._accumulators.add_squares(self._parts.norm, self._on_host)

    def _begin_norm(self) -> None:
        self._parts.norm.begin()
        if self._parts.device_step is not None:
            self._parts.device_step.start_norm()
        self._accumulators.send_squares()

    def _end_norm(self, edited: bool = False) -> float:
        if self._parts.device_step is not None:
            self._parts.device_step.end_norm(self._parts.norm)
        return self._parts.norm.end(self._flag, self._options.word(), edited)

    def _counted(self, total: float, first: Callable[[Sequence[str]], str] | None = None) -> float:
        """Count a step with this norm of the accumulated gradients. first: names the first parameter of those with a
        gradient that is not finite; None: the gradients are there to be looked at. Returns: the norm of their mean."""
        train = self._train
        train.step_count += 1
        train.updates += 1
        train.grad_norm = norm = total / train.gradient_factor
        finite = math.isfinite(total)
        if not finite:
            self._report_nonfinite(first)
        if train.scaler is not None:
            train.scaler.update(overflow=not finite)
        train.overflow = train.skip_nonfinite and not finite
        if train.overflow:
            train.skipped_steps += 1
        return norm

    def _report_nonfinite(self, first: Callable[[Sequence[str]], str] | None) -> None:
        """Find the parameter, and log it: each time where the step is skipped, elsewhere once. Collective."""
        parts, train = self._parts, self._train
        first_time = train.nonfinite is None
        name = parts.reducer.values.first_nonfinite() if first is None else first(parts.names)
        train.nonfinite = NonFinite(train.step_count, name)
        if parts.comm.rank != 0 or not (first_time or train.skip_nonfinite):
            return
        scale = f"; loss scale {train.loss_scale:g}, step skipped"
        what = scale if train.scaler else "; step skipped" if train.skip_nonfinite else ""
        logging.getLogger("zcomm").warning("step %d: the gradient of %s is not finite%s", train.step_count, name, what)

    # --- update and publish -------------------------------------------------------------------------------------

    @property
    def _can_overlap(self) -> bool:
        """True if the update may begin while gradients are still on their way from the device.

        A rank that has a bucket's sum knows that no rank reads its old weights any more ([Note: gradients from a
        device]). Units have no such sign. A rest of gradients would come too late. With world_size 1 the rank knows
        whether it has one; several ranks know it from their first step.
        """
        parts = self._parts
        alone = parts.comm.world_size == 1
        if not isinstance(parts.store, DeviceStore):
            return False
        if self._agreement.is_special or self._accumulators.ring is not None:
            return False
        return not parts.reducer.local if alone else self._rests is False

    def _update(self, scale: float) -> None:
        """Update with the accumulated gradients times ``scale``. Collective: every rank sees the new weights."""
        parts = self._parts
        turns = parts.state.turns or parts.store.turns
        late = self._accumulators.knows_squares and not turns  # the last buckets come first
        late = late and self._matrices is None  # ranks go the same way then
        self._prepared(scale, self._reverse or late)()

    def _defer(self, scale: float, forward_step: ForwardStep) -> None:
        """Let the update wait for the next forward, with the hyperparameters as they are now. Collective."""
        hyper = self._begin(scale)
        self._accumulators.finish()  # the norm may have been there before the last gradients
        self._parts.store.spread()
        forward_step.start({bucket.index: self._runs(bucket, hyper) for bucket in self._parts.geometry.buckets})

    def _prepared(self, scale: float, reverse: bool | None = None) -> Callable[[], None]:
        """Prepare ``_update`` for another thread, with the hyperparameters as they are now. reverse: None: first bucket
        first, where nothing is gained by turning round. The buckets on the device are stepped now."""
        if reverse is None:
            reverse = self._reverse and self._parts.state.turns
        hyper = self._begin(scale)

        def step() -> None:
            if self._matrices is None:
                self._apply(self._shards(hyper, reverse), reverse)
            else:
                self._apply_batches(self._matrices, hyper, reverse)

        return step

    @property
    def _can_square(self) -> bool:
        """True if the update may take the norm in its own pass over the gradients."""
        return self._parts.lane is None

    def _update_early(self, scale: float) -> float | None:
        """Update before the norm is known, where something is gained by it. Returns: the norm; else None."""
        if self._can_overlap:
            with self._train.poison.watch():
                return self._update_as_ready(scale)
        if self._can_square:
            self._collect()
            self._begin_transaction()
            with self._train.poison.watch():
                return self._update_squaring(scale)
        return None

    def _collect(self) -> None:
        """Bring all gradients into the accumulators; afterwards no rank reads the old weights any more. Collective."""
        parts = self._parts
        self._accumulators.guarded(self._accumulators.finish)
        start = time.perf_counter()
        parts.store.synchronize()
        parts.norm.all_reduce_flag(self._flag, self._options.word())
        self._check_options()
        if parts.norm.flagged:
            self._agree()
        self._train.waited_s += time.perf_counter() - start

    def _update_squaring(self, scale: float) -> float:
        """Update and take the norm in one pass over the gradients. Returns: the norm."""
        hyper = self._begin(scale)
        norm, reverse = self._parts.norm, self._reverse
        norm.begin()
        self._apply((replace(shard, squares=norm.sum) for shard in self._shards(hyper, reverse)), reverse)
        start = time.perf_counter()
        total = norm.end()
        self._train.waited_s += time.perf_counter() - start
        return total

    def _update_as_ready(self, scale: float) -> float:
        """Update each bucket as soon as its gradient is on the host, last buckets first. Returns: the norm."""
        reverse = self._reverse or not self._parts.state.turns
        hyper = self._begin(scale, as_ready=True)
        self._begin_norm()
        self._apply(self._squared_shards(hyper, reverse), reverse)
        if self._accumulators.knows_squares:
            self._accumulators.add_squares(self._parts.norm, self._on_host)
        edited = [self._parts.names[index] for index in self._parts.store.edited_late()]
        total = self._end_norm(edited=bool(edited))
        self._check_options(UPDATED)
        if edited:
            raise RuntimeError(_EDITED_LATE % format_names(edited))
        if self._parts.norm.edited:
            raise RuntimeError(_EDITED_LATE % "of another rank")
        if self._parts.norm.flagged:
            if self._parts.forward_edits is not None:
                self._parts.forward_edits.check()
            raise RuntimeError(_LATE)
        return total

    def _begin(self, scale: float, as_ready: bool = False) -> list[Any]:
        """Prepare the rule for each group, and start the step of buckets on the device, which it does beside what
        follows. Returns: what the rule needs of each group.

        as_ready: do not wait until backward has ended on the device: edits are taken as backward found them."""
        start, store = time.perf_counter(), self._parts.store
        if not as_ready:
            store.look_for_edits()
        store.take_edits()
        if as_ready:
            store.look_for_edits()  # for ``edited_late``
        self._parts.attachment.looked_s += time.perf_counter() - start
        store.used()
        self._guarded(lambda: self._parts.grow_state(self._train.rule, self._train.param_groups))
        hyper = self._train.cohorts.prepare(self._train.param_groups, scale, self._agreement.skipped)
        if self._whole_norms is not None:
            self._measure(hyper, self._whole_norms)
        if self._parts.device_step is not None:
            try:
                self._parts.device_step.step(lambda bucket: self._runs(bucket, hyper))
            except BaseException as error:
                broadcast_error(self._parts.comm, error)
                raise
        return hyper

    def _measure(self, hyper: list[Any], norms: WholeNorms) -> None:
        """Find what the rule needs of each whole parameter before the update. Collective."""
        parts, rule, skipped = self._parts, self._train.rule, self._agreement.skipped
        self._accumulators.finish()
        self._factors = None
        try:
            norms.begin()
            if parts.device_step is not None:
                parts.device_step.measure(lambda bucket: self._runs(bucket, hyper), norms)
            for bucket in self._on_host:
                grad = self._accumulators.shard(bucket)
                shard = ShardStep(bucket.index, parts.store.read(bucket), grad, self._runs(bucket, hyper))
                parts.state.measure(shard, norms)
        except BaseException as error:
            broadcast_error(parts.comm, error)
            raise
        start = time.perf_counter()
        check_error(parts.comm)
        found = norms.end()
        number_of = self._train.cohorts.number_of
        self._factors = [
            1.0 if index in skipped else rule.factor(each, hyper[number_of[index]]) for index, each in enumerate(found)
        ]
        self._train.waited_s += time.perf_counter() - start

    def _apply(self, shards: Iterator[ShardStep], reverse: bool) -> None:
        """Apply the rule to this rank's shards, and publish them. Where that fails on one rank all ranks raise."""
        self._guarded(lambda: self._parts.state.step(shards, reverse))
        self._publish()

    def _apply_batches(self, matrices: WholeMatrices, hyper: list[Any], reverse: bool) -> None:
        """Do the same where updates are made of whole matrices: batch by batch ([Note: whole matrices])."""
        state, number_of, skipped = self._parts.state, self._train.cohorts.number_of, self._agreement.skipped
        self._accumulators.finish()
        shards = self._shards(hyper, reverse)

        def hyper_of(index: int) -> Any:
            return None if index in skipped else hyper[number_of[index]]

        for batch in matrices.batches(reversed(self._on_host) if reverse else self._on_host):
            local = self._guarded(partial(matrices.parts_of, batch, hyper_of, self._accumulators.shard))
            check_error(self._parts.comm)
            self._updates = matrices.updates(local, hyper_of)
            self._guarded(matrices.check)
            numbers = {bucket.index for bucket in batch}
            self._guarded(partial(state.step, islice(shards, len(batch)), reverse, numbers))
        self._updates = {}
        self._guarded(lambda: list(shards))  # lets the source of shards finish its last one
        self._publish()

    def _guarded(self, act: Callable[[], T]) -> T:
        """Return what ``act``, which is not collective, returns. Where it fails, other ranks learn of it."""
        try:
            return act()
        except BaseException as error:
            broadcast_error(self._parts.comm, error)
            raise

    def _publish(self) -> None:
        """Show the new weights to every rank. Raises: the error of a rank that could not step."""
        start = time.perf_counter()
        check_error(self._parts.comm)
        self._reverse = not self._reverse
        self._parts.store.spread()
        self._train.waited_s += time.perf_counter() - start

    def _shards(self, hyper: list[Any], reverse: bool) -> Iterator[ShardStep]:
        for bucket, weight in self._parts.store.iter_shards(reverse):
            self._accumulators.finish(bucket)
            grad = self._accumulators.shard(bucket)
            self._accumulators.expect(bucket.index + (-1 if reverse else 1))
            yield ShardStep(bucket.index, weight, grad, self._runs(bucket, hyper))

    def _squared_shards(self, hyper: list[Any], reverse: bool) -> Iterator[ShardStep]:
        norm, known = self._parts.norm, self._accumulators.knows_squares
        for shard in self._shards(hyper, reverse):
            if not known:
                norm.add(shard.grad)
            yield shard

    def _runs(self, bucket: FlatBucket, hyper: list[Any]) -> list[Run]:
        parts = self._parts
        skipped, number_of = self._agreement.skipped, self._train.cohorts.number_of
        if parts.param_runs is None:
            runs = parts.runs[bucket.index]
            if self._train.cohorts.others or not skipped.isdisjoint(bucket.params):
                numbers = [-1 if index in skipped else number for index, number in enumerate(number_of)]
                runs = parts.geometry.runs(bucket, parts.store.part(bucket), numbers)
            return [(begin, end, hyper[number]) for begin, end, number in runs if number >= 0]
        start = parts.store.part(bucket).start
        spans = [parts.geometry.span_in(bucket, n) for n in bucket.params]
        first = [
            parts.first_index[n] + span.begin + start - span.offset
            for n, span in zip(bucket.params, spans, strict=True)
        ]
        factors = self._factors
        indexed = {
            n: Indexed(hyper[number_of[n]], at, n, 1.0 if factors is None else factors[n], self._updates.get(n))
            for n, at in zip(bucket.params, first, strict=True)
        }
        return [(begin, end, indexed[n]) for begin, end, n in parts.param_runs[bucket.index] if n not in skipped]
