"""LocalStep: the steps of a rule that exchanges moments. Those with the turn "plain" are an OptimizerStep's.

[Note: local step] In other turns gradients stay on their rank ([Note: local gradients]). The norm's message still goes
to all ranks, with the squares of all ranks' gradients. So a gradient that is not finite on one rank skips the step on
all, and all ranks clip by one factor. The norm is the root mean square of the ranks' norms. It is at least the norm of
the mean gradient, which no rank knows. With the turn "mean" gradients are averaged as in a plain step, then gathered.
The message also tells whether anything but a step has changed weights or state of some rank. The ranks then continue
with each shard of its owner, as ranks without copies do. Changes that torch does not count (of ``p.data``) are found
every CHECK_STEPS steps.
Thread rule: as ZeroOptimizer.
"""

from __future__ import annotations

import logging
import math
from functools import partial

import torch

from zcomm import _core
from zcomm.zero.format_names import format_names
from zcomm.zero.gradients.norm import clip_factor
from zcomm.zero.onebit.replicas import LocalUpdate, Replicas
from zcomm.zero.parts import Parts, TrainState
from zcomm.zero.poison import check_error
from zcomm.zero.schedule.scheduler import UpdateScheduler
from zcomm.zero.steps.step import OptimizerStep

CHECK_STEPS = 100
logger = logging.getLogger("zcomm")


class LocalStep(OptimizerStep):
    """The steps of one optimizer with a rule that ``exchanges``."""

    def __init__(self, parts: Parts, train: TrainState, scheduler: UpdateScheduler) -> None:
        super().__init__(parts, train, scheduler)
        assert isinstance(parts.replicas, Replicas)
        self._replicas = parts.replicas
        self._since_check, self.check_steps = 0, CHECK_STEPS
        self._warned = False

    @property
    def _is_local(self) -> bool:
        return self._parts.reducer.stays_local

    def _run(self) -> None:
        parts, train, replicas = self._parts, self._train, self._replicas
        turn = train.rule.turn(train.param_groups)
        if turn == "plain":
            super()._run()
            replicas.close()
            replicas.note_edits()
            return
        self._options.refusal = None
        if self._is_local:
            parts.reducer.count_unreached()
        if not self._ready():
            return
        if self._is_local:
            parts.reducer.values.make_local()
        norm = self._counted(self.norm(), self._first_nonfinite)
        if train.overflow:
            return
        scale = 1.0 / train.gradient_factor
        if train.clip_norm is not None:
            scale *= clip_factor(norm, train.clip_norm)
        with train.poison.watch():
            self._renew()
            self._warn_of_still(turn)
            self._scheduler.guarded(partial(self._update, turn, scale))
            check_error(parts.comm)
            parts.store.count_change()
        replicas.note()
        self._check_weights()

    def _drain(self) -> None:
        if not self._train.poison.unreported:
            self._train.poison.check("step()")

    # --- the norm's message -------------------------------------------------------------------------------------

    def norm(self) -> float:
        total = super().norm()
        return total / math.sqrt(self._parts.comm.world_size) if self._is_local else total

    def _add_squares(self) -> None:
        if not self._is_local:
            super()._add_squares()
            return
        parts = self._parts
        for index, sum_ in parts.reducer.local.sums.items():
            parts.norm.squares.add(parts.geometry.bucket_of(index), sum_)

    def _end_norm(self, edited: bool = False) -> float:
        plain = self._train.rule.turn(self._train.param_groups) == "plain"
        return super()._end_norm(edited or (not plain and (self._replicas.is_stale or self._replicas.has_edits)))

    def _renew(self) -> None:
        """Continue with each shard of its owner, if weights or state of some rank have changed. Collective."""
        parts, train, replicas = self._parts, self._train, self._replicas
        if not parts.norm.edited:
            return
        changed = torch.tensor([replicas.has_edits, replicas.is_stale], dtype=torch.int32)
        parts.comm.all_reduce(changed, op="max", name="weights and state that were changed")
        edits, stale = map(bool, changed.tolist())
        if stale:
            if edits:
                parts.store.spread()
            replicas.gather(train.rule.begins(train.param_groups))
            self._warned = False
        elif edits:
            replicas.take_edits()

    def _warn_of_still(self, turn: str) -> None:
        """Log parameters that will never move, once: their frozen second moment is zero."""
        parts, rule = self._parts, self._train.rule
        if self._warned or not rule.freezes(turn):
            return
        self._warned, still = True, [parts.names[index] for index in self._replicas.still]
        if still and parts.comm.rank == 0:
            logger.warning(
                "%s: the second moment of %s is zero at the freeze, so these parameters never move again: freeze "
                "later, or exclude parameters that are not trained",
                rule.name,
                format_names(still),
            )

    # --- the update ---------------------------------------------------------------------------------------------

    def _update(self, turn: str, scale: float) -> None:
        """Update all weights with the gradients times ``scale``. Collective."""
        parts, train = self._parts, self._train
        if turn == "mean":
            parts.reducer.values.make_local()
        skipped = parts.reducer.consensus.skipped
        train.counters.prepare(train.param_groups, scale, skipped)  # counts the step
        numbers = {}
        for index in range(parts.geometry.trained_count):
            if index not in skipped:
                group = train.param_groups[parts.group_of[index]]
                steps = train.counters.steps(index, train.param_groups)
                numbers[index] = train.rule.local_numbers(group, steps, scale)
        self._replicas.update(LocalUpdate(turn, numbers, parts.reducer.local.sums))

    def _check_weights(self) -> None:
        """Compare the ranks' weights every CHECK_STEPS steps, if they are equal then. Collective."""
        parts, replicas = self._parts, self._replicas
        self._since_check += 1
        if self._since_check < self.check_steps or parts.comm.world_size == 1 or not replicas.is_settled:
            return
        self._since_check = 0
        wholes = (parts.store.whole(bucket) for bucket in parts.geometry.buckets)
        own = torch.tensor([_core.crc32c(whole.data_ptr(), whole.nbytes) for whole in wholes])
        every = parts.comm.all_gather(own, name="checksums of weights")
        assert isinstance(every, torch.Tensor)
        rows = every.view(parts.comm.world_size, -1)
        if bool((rows == rows[0]).all()):
            return
        if parts.comm.rank == 0:
            logger.warning(
                "the ranks' weights differ, in a way that torch does not count (p.data edited on some ranks?): each "
                "shard continues with the weights of its owner"
            )
        with self._train.poison.watch():
            replicas.take_edits()
            parts.store.count_change()
        replicas.note()
