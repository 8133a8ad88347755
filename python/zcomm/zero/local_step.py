"""LocalStep: the steps of a rule that exchanges moments. Until its freeze they are an OptimizerStep's.

[Note: local step] Afterwards gradients stay on their rank ([Note: local gradients]). The norm's message still goes to
all ranks, with the squares of all ranks' gradients. So a gradient that is not finite on one rank skips the step on all,
and all ranks clip by one factor. The norm is the root mean square of the ranks' norms. It is at least the norm of the
mean gradient, which no rank knows. The message also tells whether anything but a step has changed weights or state of
some rank. The ranks then continue with each shard of its owner, as ranks without copies do. Changes that torch does not
count (of ``p.data``) are found every CHECK_STEPS steps.
Thread rule: as ZeroOptimizer.
"""

from __future__ import annotations

import logging
import math
from functools import partial

import torch

from zcomm import _core
from zcomm.optim.onebit import AdamNumbers, step_weight
from zcomm.zero.format_names import format_names
from zcomm.zero.gradients.norm import clip_factor
from zcomm.zero.layout.flat import FlatBucket
from zcomm.zero.onebit.replicas import Replicas
from zcomm.zero.onebit.signs import average_signs
from zcomm.zero.parts import Parts, TrainState
from zcomm.zero.poison import check_error
from zcomm.zero.schedule.scheduler import UpdateScheduler
from zcomm.zero.step import OptimizerStep

CHECK_STEPS = 100


class LocalStep(OptimizerStep):
    """The steps of one optimizer with a rule that ``exchanges``. replicas: of its state."""

    def __init__(self, parts: Parts, train: TrainState, scheduler: UpdateScheduler, replicas: Replicas) -> None:
        super().__init__(parts, train, scheduler)
        self._replicas = replicas
        self._edits = -1  # of the weights, as of the last step
        self._since_check, self.check_steps = 0, CHECK_STEPS

    @property
    def _is_local(self) -> bool:
        return self._parts.reducer.stays_local

    def _run(self) -> None:
        if not self._is_local:
            super()._run()
            self._edits = self._parts.store.edits
            return
        parts, train = self._parts, self._train
        self._options.refusal = None
        parts.reducer.count_unreached()
        if not self._ready():
            return
        parts.reducer.values.make_local()
        norm = self._counted(self.norm(), self._first_nonfinite)
        if train.overflow:
            return
        scale = 1.0 / train.gradient_factor
        if train.clip_norm is not None:
            scale *= clip_factor(norm, train.clip_norm)
        with train.poison.watch():
            self._renew()
            self._scheduler.guarded(partial(self._update, scale))
            check_error(parts.comm)
            parts.store.count_change()
        self._edits = parts.store.edits
        self._check_weights()

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
        return super()._end_norm(edited or (self._is_local and (self._replicas.stale or self._has_edits)))

    @property
    def _has_edits(self) -> bool:
        return self._parts.store.edits != self._edits

    def _renew(self) -> None:
        """Continue with each shard of its owner, if weights or state of some rank have changed. Collective."""
        parts = self._parts
        if not parts.norm.edited:
            return
        changed = torch.tensor([self._has_edits, self._replicas.stale], dtype=torch.int32)
        parts.comm.all_reduce(changed, op="max", name="weights and state that were changed")
        if bool(changed[0]):
            parts.store.spread()
        if bool(changed[1]):
            still = [parts.names[index] for index in self._replicas.gather()]
            if still and parts.comm.rank == 0:
                logging.getLogger("zcomm").warning(
                    "%s: the second moment of %s is zero at freeze_step, so these parameters never move again: freeze "
                    "later, or exclude parameters that are not trained",
                    self._train.rule.name,
                    format_names(still),
                )

    # --- the update ---------------------------------------------------------------------------------------------

    def _update(self, scale: float) -> None:
        """Update all weights with this rank's gradients times ``scale``. Collective."""
        parts, train = self._parts, self._train
        skipped = parts.reducer.consensus.skipped
        train.counters.prepare(train.param_groups, scale, skipped)  # counts the step
        numbers: dict[int, AdamNumbers] = {}
        for index in range(parts.geometry.trained_count):
            if index not in skipped:
                group = train.param_groups[parts.group_of[index]]
                steps = train.counters.steps(index, train.param_groups)
                numbers[index] = train.rule.local_numbers(group, steps, scale)
        for bucket in parts.geometry.buckets:
            params = [index for index in bucket.params if index in numbers]
            if params:
                self._update_bucket(bucket, params, numbers)

    def _update_bucket(self, bucket: FlatBucket, params: list[int], numbers: dict[int, AdamNumbers]) -> None:
        replicas, sums = self._replicas, self._parts.reducer.local.sums
        mine = replicas[bucket.index]
        for index in params:
            moment = mine.exp_avg[replicas.inside(index)].mul_(numbers[index].beta)
            if index in sums:
                moment.add_(sums[index].view(-1).mul(numbers[index].grad))
        name = f"moments of bucket {bucket.index}"
        replicas.moved_nbytes += average_signs(self._parts.comm, replicas.signed(bucket, params), name)
        master = replicas.master(bucket)
        for index in params:
            inside = replicas.inside(index)
            step_weight(master[inside], mine.exp_avg[inside], mine.root[inside], numbers[index])
        replicas.set_master(bucket, master)

    def _check_weights(self) -> None:
        """Compare the ranks' weights every CHECK_STEPS steps. Collective."""
        parts = self._parts
        self._since_check += 1
        if self._since_check < self.check_steps or parts.comm.world_size == 1:
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
            logging.getLogger("zcomm").warning(
                "the ranks' weights differ, in a way that torch does not count (p.data edited on some ranks?): each "
                "shard continues with the weights of its owner"
            )
        with self._train.poison.watch():
            parts.store.spread()
            parts.store.count_change()
        self._edits = parts.store.edits
