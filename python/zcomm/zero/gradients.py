"""Gradients: from autograd's hands into averaged fp32 accumulators, bucket by bucket, while backward runs.

[Note: bucket life] A post-accumulate hook copies a parameter's gradient into its place in the bucket's slot and drops
it; or keeps it until it is reduced, where no other rank reads it (own_gradients.py). When a bucket is complete and all
buckets before it in the launch order have been launched, its reduce_scatter starts on the communicator's own thread and
adds this rank's shard of the average to the accumulator. Slots form a fixed ring: bucket number i of the order uses
slot i % slot_count once bucket i - slot_count has been reduced. A gradient whose bucket has no slot yet stays where
autograd put it until the bucket's turn comes. The launch order (last bucket first) is the same on all ranks, whatever
order autograd finishes in; parameters that backward did not reach count as zero.

[Note: arrivals] One pass can reach a parameter several times, where backward passes run inside of it (reentrant
checkpoints with a weight in common). A bucket takes the first arrival. Later ones stay in ``param.grad``, where
autograd adds them up, and go with the next pass, or at the step by themselves (``reduce_rest``). Arrival alone decides,
whatever slot was free when: the bits do not depend on it.

The average is taken over ranks per micro-step and summed over micro-steps in fp32, in every stage: this is what makes
the bits independent of stage, bucket size and overlap (decision D3).
Thread rule: hooks and methods run on the thread that runs backward and step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

import torch

from zcomm._work import Work
from zcomm.comm import Communicator
from zcomm.zero.bucket_calls import BucketCalls
from zcomm.zero.geometry import FlatBucket, Geometry
from zcomm.zero.listed import listed
from zcomm.zero.norm import GradientNorm
from zcomm.zero.own_gradients import OwnGradients

SLOTS = 3


class GradientReducer:
    """Owns the slots and the accumulators of one optimizer.

    params: in the numbering of ``geometry``. dtype: of gradients on their way.
    replicated: keep accumulators of all gradients (stage 0) or of this rank's shards.
    overlap: reduce while backward runs, or after it.
    on_host: whether buckets are reduced from the slots that hooks write to, in host memory.
    Memory: slots: min(SLOTS, buckets) x largest bucket x itemsize; accumulators: 4 bytes per element kept.
    """

    on_host = True

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        geometry: Geometry,
        comm: Communicator,
        dtype: torch.dtype,
        replicated: bool,
        overlap: bool,
        names: Sequence[str],
    ) -> None:
        self._params = params
        self._names = names
        self._seen: set[int] = set()  # parameters that some pass of this step reached
        self._said: set[str] = set()
        self._geometry = geometry
        self._comm = comm
        self._dtype = dtype
        self._overlap = overlap
        self.replicated = replicated
        self.waited_s = 0.0
        self.sync = True
        self.passes = 1  # that a step is expected to have
        self.reached = 0  # backward passes whose gradients are in the accumulators or on their way
        self._used = 0  # of these
        buckets = geometry.buckets
        self._slot_count = min(SLOTS, len(buckets))
        self._works: list[Work | None] = [None] * self._slot_count
        self._slots = self._make_slots(max((bucket.count for bucket in buckets), default=0))
        self._views: dict[int, torch.Tensor] = {}  # of parameters, in their slots
        self._calls = BucketCalls(geometry, comm, dtype)
        reads = self.on_host and comm._core.reads_own_parts
        self._own = OwnGradients(geometry, comm.rank, dtype) if reads else None
        self.accumulators = self._make_accumulators()
        self._order = list(reversed(buckets))
        self._position = {bucket.index: i for i, bucket in enumerate(self._order)}
        self._fresh = True
        self._begin_pass()
        self._handles = [
            param.register_post_accumulate_grad_hook(self._hook(index)) for index, param in enumerate(params)
        ]

    def _make_slots(self, largest: int) -> list[torch.Tensor]:
        return [self._comm.empty(largest, self._dtype) for _ in range(self._slot_count)]

    def _make_accumulators(self) -> torch.Tensor:
        if self.replicated:
            return self._comm.empty(self._geometry.count, torch.float32)
        return torch.zeros(self._geometry.shard_count)

    # --- where things lie -------------------------------------------------------------------------------------

    def bucket_view(self, bucket: FlatBucket) -> torch.Tensor:
        """The accumulator of a whole bucket (replicated gradients only), fp32 [bucket.count]."""
        return self.accumulators[bucket.begin : bucket.begin + bucket.count]

    def shard_view(self, bucket: FlatBucket) -> torch.Tensor:
        """The accumulator of this rank's shard of ``bucket``, fp32 [bucket.shard_count]."""
        if self.replicated:
            return self.bucket_view(bucket)[bucket.shard(self._comm.rank)]
        return self.accumulators[bucket.shard_begin : bucket.shard_begin + bucket.shard_count]

    @property
    def nbytes_by_tier(self) -> dict[str, dict[str, int]]:
        """By tier and purpose. On the CPU the device is host memory."""
        slots = sum(slot.nbytes for slot in self._slots)
        return {"device": {"gradients": self.accumulators.nbytes, "slots": slots}}

    # --- one backward pass ------------------------------------------------------------------------------------

    def _begin_pass(self) -> None:
        self._armed = False
        self._touched = False
        self._launched = 0
        self._missing = [set(bucket.params) for bucket in self._geometry.buckets]
        self._early: dict[int, torch.Tensor] = {}  # first arrivals that wait for a slot

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        place = self._geometry.places[index]

        def on_grad(param: torch.Tensor) -> None:
            self._seen.add(index)
            if not self.sync:
                return
            self.arm()
            self._touched = True
            missing = self._missing[place.bucket]
            if index not in missing:
                return  # [Note: arrivals]
            missing.discard(index)
            if self._own is not None:
                self._release_reduced()
            if param.grad is not None:
                self._early[index], param.grad = param.grad, None
            if self._has_slot(place.bucket):
                self._collect(index)
            if self._overlap:
                self._launch_complete()

        return on_grad

    def arm(self) -> None:
        """A backward pass runs now: all that is reached until it ends is one pass, also what backward passes inside of
        it reach (activation checkpointing runs them). Known from its first tensor, if that says so."""
        if self.sync and not self._armed:
            self._armed = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_pass)

    def _has_slot(self, bucket: int) -> bool:
        return self._position[bucket] < self._launched + self._slot_count

    def _number(self, bucket: int) -> int:
        """Of the slot that the bucket is reduced from."""
        return self._position[bucket] % len(self._works)

    def _slot(self, bucket: int) -> torch.Tensor:
        number = self._position[bucket] % self._slot_count
        return self._slots[number][: self._geometry.buckets[bucket].count]

    def _enter(self, bucket: int) -> None:
        """Make the bucket's slot free for writing: the previous bucket in it has been reduced."""
        self._wait(self._number(bucket))

    def _view(self, index: int) -> torch.Tensor:
        """The place of parameter ``index`` in its slot."""
        view = self._views.get(index)
        if view is None:
            slot = self._slot(self._geometry.places[index].bucket)
            view = self._views[index] = self._geometry.view(slot, index)
        return view

    def _wait(self, number: int) -> None:
        work = self._works[number]
        if work is not None:
            start = time.perf_counter()
            work.wait()
            self.waited_s += time.perf_counter() - start
            self._works[number] = None

    def _release_reduced(self) -> None:
        """Give back the gradients of buckets that have been reduced: autograd's next ones take their memory, which the
        caches hold, and which an allocator would otherwise give back to the system."""
        for number, work in enumerate(self._works):
            if work is not None and work.done():
                self._wait(number)

    def _wait_for(self, bucket: FlatBucket) -> None:
        """That was launched last."""
        self._wait(self._number(bucket.index))

    def _collect(self, index: int) -> None:
        """Copy the gradient of parameter ``index`` into its slot and drop it; a missing one counts as zero."""
        self._enter(self._geometry.places[index].bucket)
        view, grad = self._view(index), self._early.pop(index, None)
        if grad is None:
            param = self._params[index]
            grad, param.grad = param.grad, None
        if grad is None:
            view.zero_()
            return
        if grad.layout is not torch.strided:
            self._say("sparse", f"the gradient of {self._names[index]} is sparse; it is made dense here")
            grad = grad.to_dense()
        if self._own is None or not self._own.keep(index, grad, view):
            view.copy_(grad)

    def _launch_complete(self) -> None:
        while self._launched < len(self._order) and not self._missing[self._order[self._launched].index]:
            self._launch(self._order[self._launched])
            entering = self._launched + self._slot_count - 1
            if entering < len(self._order):
                self._collect_early(self._order[entering])

    def _collect_early(self, bucket: FlatBucket) -> None:
        """``bucket`` has just got its slot: take in what autograd had finished before."""
        for index in bucket.params:
            if index in self._early:
                self._collect(index)

    def _launch(self, bucket: FlatBucket) -> None:
        self._send(bucket)
        self._launched += 1
        if not self._overlap:
            self._wait_for(bucket)

    def _send(self, bucket: FlatBucket) -> None:
        """Reduce what is in the bucket's slot."""
        self._enter(bucket.index)
        slot = self._slot(bucket.index)
        self._calls.pad(bucket, slot)
        self._reduce(bucket, slot)

    def _reduce(self, bucket: FlatBucket, slot: torch.Tensor) -> None:
        """Start to add the bucket in ``slot`` (symmetric memory) to the accumulators."""
        work = self._calls.start(bucket, slot, self.shard_view, not self._fresh, self._own)
        self._works[self._number(bucket.index)] = work

    def _end_pass(self) -> None:
        """Backward has ended: what it did not reach is zero. One that reached nothing (``autograd.grad``) is none."""
        if not self._touched:
            self._armed = False
            return
        for bucket in self._order[self._launched :]:
            missing = self._missing[bucket.index]
            for index in bucket.params:
                if index in missing or index in self._early:
                    self._collect(index)
            self._launch(bucket)
        self._fresh = False
        self.reached += 1
        self._begin_pass()

    # --- between passes ---------------------------------------------------------------------------------------

    @property
    def broken(self) -> bool:
        """Whether the last backward pass began, but ended with an exception: its callback at the end never came."""
        return self._armed and torch._C._current_graph_task_id() < 0

    def _say(self, key: str, text: str) -> None:
        """Once, as a warning on rank 0."""
        if key not in self._said:
            self._said.add(key)
            level = logging.WARNING if self._comm.rank == 0 else logging.INFO
            logging.getLogger("zcomm").log(level, "%s", text)

    def say_unused(self) -> None:
        """Name the parameters that no pass of this step has reached, once."""
        if len(self._seen) < len(self._params) and "unused" not in self._said:
            unused = [name for index, name in enumerate(self._names) if index not in self._seen]
            self._say(
                "unused",
                f"no gradient has reached {listed(unused)} in this step: it counts as zero (weight decay "
                "and momentum go on); exclude what is never used by requires_grad_(False)",
            )

    def finish(self, bucket: FlatBucket | None = None) -> None:
        """Wait until all gradients, or those of one bucket, are in the accumulators."""
        if bucket is not None:
            self._finish_one(bucket)
            return
        for number in range(len(self._works)):
            self._wait(number)

    def _finish_one(self, bucket: FlatBucket) -> None:
        """Slots are used in the launch order: only the last buckets, one for each, can be on their way."""
        if self._position[bucket.index] >= len(self._order) - len(self._works):
            self._wait(self._number(bucket.index))

    @property
    def knows_squares(self) -> bool:
        """Whether ``add_squares`` need not look at the accumulators, nor wait for them."""
        return False

    def send_squares(self) -> None:
        """They are wanted soon, by ``add_squares``; nobody waits."""

    def add_squares(self, norm: GradientNorm, buckets: Iterable[FlatBucket]) -> None:
        """Add this rank's shards of ``buckets``, all that are on the host, to ``norm``."""
        for bucket in buckets:
            norm.add(self.shard_view(bucket))

    def changed(self) -> None:
        """Accumulators have been written from outside."""

    def gather(self) -> None:
        """Give every rank the whole averaged gradients (replicated only). Collective."""
        self._gather(self._comm, self._geometry.buckets)

    def _gather(self, comm: Communicator, buckets: Sequence[FlatBucket]) -> None:
        if not buckets:
            return
        start = time.perf_counter()
        wholes, shards = [self.bucket_view(b) for b in buckets], [self.shard_view(b) for b in buckets]
        comm.all_gather(shards, out=wholes, name="gradients")
        self.waited_s += time.perf_counter() - start

    @property
    def waiting_passes(self) -> int:
        """How many passes no step has used; those without sync count as one."""
        return self.reached - self._used + self.has_rest

    def step_has_used(self) -> None:
        self._used = self.reached

    @property
    def has_rest(self) -> bool:
        """Whether gradients wait in ``param.grad``: of passes without sync, and later arrivals of passes with it."""
        return any(param.grad is not None for param in self._params)

    def reduce_rest(self) -> None:
        """Add what waits in ``param.grad`` on any rank, and wait for all gradients. It is no pass. Collective."""
        has = [any(self._params[index].grad is not None for index in bucket.params) for bucket in self._order]
        wanted = torch.tensor(has, dtype=torch.int32)
        self._comm.all_reduce(wanted, op="max", name="buckets whose gradients came again")
        for bucket, some in zip(self._order, wanted.tolist(), strict=True):
            if some:
                for index in bucket.params:
                    self._collect(index)
                self._send(bucket)
        self.finish()

    def zero(self) -> None:
        """Forget the accumulated gradients; the next pass overwrites them."""
        if self.broken:
            self._forget_own()  # it was not launched
            self.finish()
            self._begin_pass()
        self._fresh = True
        self.reached = self._used = 0
        self._seen.clear()
        for param in self._params:
            param.grad = None

    def _forget_own(self) -> None:
        if self._own is not None:
            self._own.forget()

    def close(self) -> None:
        self._forget_own()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._works = [None] * len(self._works)
        self._views.clear()
        self._calls.forget()
        self._slots.clear()
        self.accumulators = torch.empty(0)
