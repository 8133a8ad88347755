"""One optimizer step, top to bottom in ``OptimizerStep.run``: norm, clip, update, publish.

Steps alternate their direction ([Note: swapped step]); construction, which wrote first to last, counts as one.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from zcomm.zero.format_names import format_names
from zcomm.zero.gradients.norm import clip_factor
from zcomm.zero.gradients.values import NonFinite
from zcomm.zero.groups.copies import check_copies, warn_of_other_copies
from zcomm.zero.optim_state.ram import ShardStep
from zcomm.zero.parts import Parts, TrainState
from zcomm.zero.rules.counters import COUNTERS
from zcomm.zero.schedule.legality import name_in
from zcomm.zero.schedule.scheduler import EDITED_LATE, UpdateScheduler
from zcomm.zero.step_options import UPDATED, StepOptions
from zcomm.zero.units.store import UnitStore

T = TypeVar("T")

_LATE = (
    "step(): a backward pass has reached a parameter twice on some rank, in no step before: weights were updated "
    "without its second gradient, so go on from a checkpoint. Reentrant checkpoints with a weight in common do so: use "
    "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
)


class NoGradientsError(Exception):
    """Error of a step without any rank's gradient. Raised on all ranks, before anything has changed."""


class OptimizerStep:
    """The steps of one optimizer. scheduler: of its updates.

    Only their rank knows of gradients that a pass did not reduce ([Note: arrivals]). The norm's message reports them to
    all ranks, which then reduce them and compute the norm again.
    """

    def __init__(self, parts: Parts, train: TrainState, scheduler: UpdateScheduler) -> None:
        self._parts, self._train, self._scheduler = parts, train, scheduler
        self._accumulators, self._agreement = parts.reducer.accumulators, parts.reducer.consensus
        self._options = StepOptions(parts.comm, self._option_names, self._option_values)
        self._rests: bool | None = None  # whether any rank ever had a rest of gradients; None: not known yet

    def run(self) -> None:
        """Update weights and state with the accumulated gradients; does nothing if there are none. Collective.

        Raises: NoGradientsError; RuntimeError for a state that a step does not support, before anything has changed.
        """
        with self._scheduler.watch("step()"):
            self._run()

    def _run(self) -> None:
        parts, train, scheduler = self._parts, self._train, self._scheduler
        with train.poison.watch():  # the last update may have had wrong sums
            parts.verify(behind=True)
        self._options.refusal = None
        if scheduler.has_updated(self._options):
            scheduler.end_updated(self._check_program, self._counted)
            self._check_copies()
            return
        if not self._ready():
            return
        self._check_copies()
        scale = 1.0 / train.gradient_factor

        # Norm. If it decides nothing, the weights are updated in the same pass over the gradients, or before it.
        decides = scheduler.norm_decides
        self._accumulators.want_squares(decides or not self._can_square)  # in the next step
        parts.store.looks_early = not decides and self._can_overlap  # in the next pass
        total = None if decides else self._update_early(scale)
        early = total is not None
        if total is None:
            total = self.norm()
            scheduler.transaction.begin()
        norm = self._counted(total, self._first_nonfinite)
        if train.overflow:
            scheduler.transaction.commit()
            return

        # Clip.
        if train.clip_norm is not None:
            scale *= clip_factor(norm, train.clip_norm)

        # Update this rank's shards, and publish the new weights: now, or when they are due.
        with train.poison.watch():
            if not early:
                scheduler.update(scale)
            parts.store.count_change()
        scheduler.end_step()

    def _check_copies(self) -> None:
        parts = self._parts
        read, updates = parts.store.read_held, self._train.updates
        check_copies(parts.comms, parts.geometry, parts.names, read, updates)
        warn_of_other_copies(parts.comms, parts.geometry, parts.names, parts.duplicates, read, updates)

    # --- before -------------------------------------------------------------------------------------------------

    def _ready(self) -> bool:
        """Check the program's changes since the last step. Returns: False if no rank has gradients. Collective.

        Raises: RuntimeError, and errors of ParamGroups.check.
        """
        self._drain()
        parts = self._parts.join()
        if parts.reducer.broken:
            raise RuntimeError("step(): the last backward pass ended with an error; call zero_grad() and run it again")
        self._refusing(self._check_frozen)
        if not self._agreement.ask():
            return False
        self._accumulators.complete()
        self._refusing(self._check_scaled)
        self._refusing(self._check_groups)
        parts.reducer.log_unused()
        return True

    def _drain(self) -> None:
        self._scheduler.drain("step()")

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

    def _check_program(self) -> None:
        """Raise for changes by the program that a step does not support."""
        self._check_frozen()
        self._check_scaled()
        self._check_groups()

    def _check_groups(self) -> None:
        """Raise for options that a step does not support, before anything is updated."""
        train = self._train
        train.tied.check(train.param_groups, train.rule)
        if train.rule.missing(train.param_groups):
            self._parts.state.check_grows()

    def _option_keys(self) -> tuple[str, ...]:
        """List the keys of param groups that must be the same on all ranks. Counters are left out if backward updates,
        because each rank then counts at its first sum."""
        return self._train.rule.options if self._scheduler.pending else (*self._train.rule.options, *COUNTERS)

    def _option_values(self) -> list[Any]:
        """List the options of the next update, which must be the same on all ranks."""
        train, keys = self._train, self._option_keys()
        values = [group.get(key) for group in train.param_groups for key in keys]
        scales = train.pass_scale, train.gradient_factor
        return [*values, train.clip_norm, train.skip_nonfinite, train.grad_accum, *scales]

    def _option_names(self) -> list[str]:
        """Name the values of ``_option_values``."""
        keys = self._option_keys()
        names = [f"{key} of group {number}" for number in range(len(self._train.param_groups)) for key in keys]
        of_step = "clip_norm", "skip_nonfinite", "grad_accum", "the loss scale of the gradients"
        return [*names, *of_step, "the factor of the gradients"]

    def _check_scaled(self) -> None:
        train = self._train
        if train.scaler.scales and self._parts.reducer.scaled_passes > train.scaled_passes:
            raise RuntimeError("precision='fp16' needs opt.backward(loss) instead of loss.backward()")

    def _check_frozen(self) -> None:
        """Raise RuntimeError for a parameter that was frozen at construction, and has a gradient now."""
        for param in self._train.frozen:
            if param.requires_grad and param.grad is not None:
                name = name_in(self._parts.model, param)
                raise RuntimeError(
                    f"step(): parameter {name} requires a gradient now, but was frozen when ZeroOptimizer was built: "
                    "it has no place in its state: build ZeroOptimizer while it requires one (requires_grad_(False) "
                    "afterwards freezes it until it is wanted), or save, close() and build it again"
                )

    # --- norm ---------------------------------------------------------------------------------------------------

    def norm(self) -> float:
        """Return the norm of all accumulated gradients. Collective: afterwards no rank reads the old weights any more.
        Gradients may still be in flight ([Note: squares before the gradients])."""
        if not self._accumulators.knows_squares and not self._accumulators.on_drive:
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
        """Raise on all ranks if the norm's message has found other options, or a refusal. more: of the text."""
        if self._parts.norm.differs:
            self._options.raise_difference(more)

    def _agree(self) -> None:
        """Reduce gradients that no pass reduced on some rank, or that the program has dropped or assigned. Compare the
        edits of forwards. Collective."""
        self._parts.forward_edits.check()
        self._rests = self._rests or not self._agreement.is_special
        self._agreement.agree()
        if self._agreement.has_nothing:
            raise NoGradientsError

    @property
    def _flag(self) -> bool:
        """Return True if the ranks must agree before the step."""
        return self._agreement.flag or self._parts.forward_edits.some

    def _norm_now(self) -> float:
        self._begin_norm()
        self._accumulators.guarded(self._add_squares)
        return self._end_norm()

    def _add_squares(self) -> None:
        if self._accumulators.on_drive:
            self._accumulators.finish()
        self._accumulators.add_squares(self._parts.norm, self._scheduler.on_host)

    def _begin_norm(self) -> None:
        self._parts.norm.begin()
        self._scheduler.on_device.start_norm()
        self._accumulators.send_squares()

    def _end_norm(self, edited: bool = False) -> float:
        self._scheduler.on_device.end_norm(self._parts.norm)
        return self._parts.norm.end(self._flag, self._options.word(), edited)

    def _first_nonfinite(self) -> str:
        return self._parts.reducer.values.first_nonfinite()

    def _counted(self, total: float, first: Callable[[], str]) -> float:
        """Count a step with this norm of the accumulated gradients. first: names the first parameter with a gradient
        that is not finite. Collective. Returns: the norm of their mean."""
        train = self._train
        train.step_count += 1
        train.updates += 1
        train.grad_norm = norm = total / train.gradient_factor
        finite = math.isfinite(total)
        if not finite:
            self._report_nonfinite(first)
        train.scaler.update(overflow=not finite)
        train.overflow = train.skip_nonfinite and not finite
        if train.overflow:
            train.skipped_steps += 1
        return norm

    def _report_nonfinite(self, first: Callable[[], str]) -> None:
        """Find the parameter, and log it: each time if the step is skipped, otherwise once. Collective."""
        parts, train = self._parts, self._train
        first_time = train.nonfinite is None
        train.nonfinite = NonFinite(train.step_count, name := first())
        if parts.comm.rank != 0 or not (first_time or train.skip_nonfinite):
            return
        scale = f"; loss scale {train.loss_scale:g}, step skipped"
        what = scale if train.scaler.scales else "; step skipped" if train.skip_nonfinite else ""
        logging.getLogger("zcomm").warning("step %d: the gradient of %s is not finite%s", train.step_count, name, what)

    # --- updates before the norm is known ----------------------------------------------------------------------------

    @property
    def _can_overlap(self) -> bool:
        """True if the update may begin while gradients are in flight from the device.

        A rank that has a bucket's sum knows that no rank reads its old weights any more ([Note: gradients from a
        device]). Units have no such sign from other ranks. A rest of gradients would come too late. With world_size 1
        the rank knows whether it has one; several ranks know it from their first step.
        """
        parts = self._parts
        alone = parts.comm.world_size == 1
        if not parts.store.overlaps:
            return False
        if self._agreement.is_special or self._accumulators.on_drive:
            return False
        return not parts.reducer.local if alone else self._rests is False

    @property
    def _can_square(self) -> bool:
        """True if the update may compute the norm in its own pass over the gradients, once all have arrived.

        With weights that are whole on a device it need not wait for all: see ``_can_overlap``. Nor does the host
        compute a norm that the device knows.
        """
        parts = self._parts
        if not parts.lane.on_device:
            return True
        squares = self._scheduler.in_step and isinstance(parts.store, UnitStore) and parts.state.is_on_host
        return squares and not self._accumulators.knows_squares

    def _update_early(self, scale: float) -> float | None:
        """Update before the norm is known, if possible. Returns: the norm; else None."""
        if self._can_overlap:
            self._scheduler.transaction.begin()
            with self._train.poison.watch():
                return self._update_as_ready(scale)
        if self._can_square:
            self._collect()
            self._scheduler.transaction.begin()
            with self._train.poison.watch():
                return self._update_squaring(scale)
        return None

    def _collect(self) -> None:
        """Wait until the accumulators have all gradients; afterwards no rank reads the old weights. Collective."""
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
        """Update and compute the norm in one pass over the gradients. Returns: the norm."""
        facts, norm = self._scheduler.prepare(scale), self._parts.norm
        norm.begin()
        buckets = self._parts.geometry.buckets

        def squaring(shard: ShardStep) -> ShardStep:
            return replace(shard, squares=norm.squares.of(buckets[shard.bucket]))

        self._scheduler.run_all(facts, self._scheduler.reverse, squaring)
        start = time.perf_counter()
        total = norm.end()
        self._train.waited_s += time.perf_counter() - start
        return total

    def _update_as_ready(self, scale: float) -> float:
        """Update each bucket as soon as its gradient is on the host. Returns: the norm."""
        norm, known = self._parts.norm, self._accumulators.knows_squares
        facts = self._scheduler.prepare(scale, as_ready=True)
        self._begin_norm()
        for bucket in self._parts.reducer.order:
            self._accumulators.expect(bucket.index)  # here, because updates may be on another thread
        self._scheduler.run_as_ready(facts, None if known else norm)
        if known:
            self._accumulators.add_squares(norm, self._scheduler.on_host)
        edited = [self._parts.names[index] for index in self._parts.store.edited_late()]
        total = self._end_norm(edited=bool(edited))
        self._check_options(UPDATED)
        if edited:
            raise RuntimeError(EDITED_LATE % format_names(edited))
        if self._parts.norm.edited:
            raise RuntimeError(EDITED_LATE % "of another rank")
        if self._parts.norm.flagged:
            self._parts.forward_edits.check()
            raise RuntimeError(_LATE)
        return total
