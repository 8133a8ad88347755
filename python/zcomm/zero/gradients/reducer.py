"""Gradients: from autograd's hands into averaged fp32 accumulators, bucket by bucket, while backward runs.

[Note: bucket life] A post-accumulate hook copies a parameter's gradient into its place in the bucket's slot and leaves
a stand-in ([Note: p.grad]); or keeps it until it is reduced, where no other rank reads it (kept.py). When a
bucket is complete and all buckets before it in the launch order have been launched, its reduce_scatter starts on the
communicator's own thread and adds this rank's shard of the average to the accumulator. Slots form a fixed ring: bucket
number i of the order uses slot i % slot_count once bucket i - slot_count has been reduced. A gradient whose bucket has
no slot yet is kept until the bucket's turn comes. The launch order (last bucket first) is the same on all ranks,
whatever order autograd finishes in; parameters that backward did not reach count as zero.

[Note: arrivals] One pass can reach a parameter several times, where backward passes run inside of it (reentrant
checkpoints with a weight in common). A bucket takes the first arrival. Later ones are added up in fp32 (``local``), as
those of passes without sync, and go with the next pass (where slots are fp32), or at the step by themselves
(``reduce_rest``). Arrival alone decides, whatever slot was free when: the bits do not depend on it.

The average is taken over ranks per micro-step and summed over micro-steps in fp32, in every stage: this is what makes
the bits independent of stage, bucket size and overlap (decision D3).
Thread rule: hooks and methods run on the thread that runs backward and step.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from zcomm.comm.communicator import Communicator
from zcomm.comm.work import Work
from zcomm.zero.format_names import format_names
from zcomm.zero.gradients.bucket_calls import BucketCalls
from zcomm.zero.gradients.kept import OwnGradients, is_plain
from zcomm.zero.gradients.norm import GradientNorm
from zcomm.zero.gradients.program_grads import ProgramGrads
from zcomm.zero.gradients.stand_in import GradStandIn
from zcomm.zero.gradients.values import GradientValues
from zcomm.zero.layout.flat import FlatBucket, Geometry

SLOTS = 3
_FUNCTION = torch.autograd.function.__file__


class GradientReducer:
    """Owns the slots and the accumulators of one optimizer.

    params: in the numbering of ``geometry``. dtype: of gradients on their way.
    replicated: keep accumulators of all gradients (stage 0) or of this rank's shards.
    overlap: reduce while backward runs, or after it.
    on_host: whether buckets are reduced from the slots that hooks write to, in host memory.
    local: fp32 sums of gradients that wait on this rank, by parameter. skipped: parameters that the step leaves alone.
    Memory: slots: min(SLOTS, buckets) x largest bucket x itemsize; accumulators: 4 bytes per element kept; local: 4
    bytes per element.
    """

    on_host = True
    before_reduce: Callable[[], None] = staticmethod(lambda: None)  # before accumulators are written

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
        self.values = GradientValues(self, geometry, comm, names)
        self.grads = ProgramGrads(params, self.values)
        self.local: dict[int, torch.Tensor] = {}
        self.backwards = 0  # calls of backward() that have reached a parameter, with or without sync
        self._local_task = -1  # the graph task of the last pass without sync
        self._rest_slot = torch.empty(0)
        self._asked: tuple[list[int], list[int]] = [], []
        self.skipped: frozenset[int] = frozenset()
        self._begin_pass()
        self._taken_over = False  # whether autograd left gradients on tensors without hooks, of this step
        self._handles = [self._hook(index, param) for index, param in enumerate(params)]

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
        return {"device": {"gradients": self.accumulators.nbytes + self._local_nbytes, "slots": slots}}

    @property
    def _local_nbytes(self) -> int:
        return sum(sum_.nbytes for sum_ in self.local.values())

    # --- one backward pass ------------------------------------------------------------------------------------

    def _begin_pass(self) -> None:
        self._armed = False
        self._touched = False
        self._launched = 0
        self._missing = [set(bucket.params) for bucket in self._geometry.buckets]
        self._early: dict[int, torch.Tensor] = {}  # first arrivals that wait for a slot

    def _hook(self, index: int, param: torch.nn.Parameter) -> tuple[Any, Any]:
        grads = self.grads

        def on_grad(param: torch.Tensor) -> None:
            self._arrived(index, grads.take(index))

        last = param.register_post_accumulate_grad_hook(on_grad)

        def before(_: torch.Tensor) -> None:
            hooks: Any = param._post_accumulate_grad_hooks
            if next(reversed(hooks)) != last.id:  # hooks of the program come first, as under DDP
                hooks[last.id] = hooks.pop(last.id)
            had = param.grad
            if had is not None:
                grads.lift(index, had)

        return param.register_hook(before), last

    def take_over(self, index: int, grad: torch.Tensor | None) -> None:
        """Count ``grad``, which autograd left on a tensor that has no hooks (``load_state_dict(assign=True)``). Raises:
        RuntimeError."""
        param = self._params[index]
        if grad is None or isinstance(grad, GradStandIn) or self.values.factor() == 1.0:
            param.grad = grad  # a tensor counts as one that the program has assigned
            return
        if grad._version:
            raise RuntimeError(
                f"parameter {self._names[index]} was replaced after ZeroOptimizer was built, and its gradient, which "
                f"is scaled by {self.values.factor():g} (loss scale, micro-steps), was changed by the program: replace "
                "parameters before ZeroOptimizer is built, or load them without assign=True"
            )
        self._add_locally(index, grad)
        self._seen.add(index)
        self._taken_over = True
        param.grad = None
        self.grads.give(index)

    def hook_again(self, index: int) -> None:
        """Hook a parameter that has lost its hooks, those of the program too (``swap_tensors``)."""
        param: Any = self._params[index]
        for handle in self._handles[index]:
            handle.remove()
        param._backward_hooks = param._post_accumulate_grad_hooks = None  # autograd no longer knows these dicts
        self._handles[index] = self._hook(index, param)
        self.take_over(index, param.grad)

    def _arrived(self, index: int, grad: torch.Tensor | None) -> None:
        """Take a gradient of parameter ``index``. None: it stays the program's."""
        self._seen.add(index)
        if self.grads.dropped:
            self._forget_dropped(index)
        if not self.sync:
            self._arrived_locally(index, grad)
            return
        self.arm()
        if not self._touched:
            self._touched = True
            self._count_backward()
        bucket = self._geometry.places[index].bucket
        missing = self._missing[bucket]
        if index not in missing:
            if grad is not None:
                self._add_locally(index, grad)  # [Note: arrivals]
            return
        missing.discard(index)
        if self._own is not None:
            self._release_reduced()
        grad = self._with_local(index, grad)  # now: what waited before this arrival
        if grad is not None:
            self._early[index], grad = grad, None
        if self._has_slot(bucket):
            self._collect(index)
        if self._overlap:
            self._launch_complete()

    def _arrived_locally(self, index: int, grad: torch.Tensor | None) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._local_task and self._count_backward():
            self._local_task = task
        if grad is not None:
            self._add_locally(index, grad)

    def _count_backward(self) -> bool:
        """Count a pass that has begun; return False for one inside of another (reentrant checkpoints)."""
        counts = self.passes > 1 and not _is_nested()
        self.backwards += counts
        return counts

    def _add_locally(self, index: int, grad: torch.Tensor) -> None:
        dense = self._dense(index, grad).detach()
        sum_ = self.local.get(index)
        if sum_ is not None:
            sum_ += dense
        elif dense.dtype == torch.float32 and is_plain(dense):
            self.local[index] = dense
        else:
            self.local[index] = dense.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        self.values.changed()

    def _dense(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        if grad.layout is torch.strided:
            return grad
        self._say("sparse", f"the gradient of {self._names[index]} is sparse; it is made dense here")
        return grad.to_dense()

    def _forget_dropped(self, index: int) -> None:
        """Forget what was accumulated of the parameter, where the program has dropped it."""
        if index in self.grads.dropped:
            self.grads.dropped.discard(index)
            self.forget_part(index)

    def forget_part(self, index: int) -> None:
        """Make a gradient zero here."""
        self.local.pop(index, None)
        if self._fresh:
            return
        self._finish_one(self._geometry.bucket_of(index))
        mine = self.values.own(index)
        if mine is not None:
            with torch.no_grad():
                mine[0].zero_()

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
        if grad is not None:
            grad = self._dense(index, grad)
        if grad is None:
            view.zero_()
            return
        if self._own is None or not self._own.keep(index, grad, view):
            view.copy_(grad)

    def _with_local(self, index: int, grad: torch.Tensor | None) -> torch.Tensor | None:
        """The gradient, and what waits here, where slots lose nothing of it."""
        if not self.local or self._dtype != torch.float32:
            return grad
        local = self.local.pop(index, None)
        if local is None or grad is None:
            return grad if local is None else local
        return local.add_(self._dense(index, grad))

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
            for index in missing:
                self.grads.give(index)
                self._forget_dropped(index)
                local = self._with_local(index, None)
                if local is not None:
                    self._early[index] = local
            for index in bucket.params:
                if index in missing or index in self._early:
                    self._collect(index)
            self._launch(bucket)
        self._fresh = False
        self.reached += 1
        self.values.changed()
        self._begin_pass()

    # --- between passes ---------------------------------------------------------------------------------------

    @property
    def broken(self) -> bool:
        """Whether the last backward pass began, but ended with an exception: its callback at the end never came."""
        return self._armed and torch._C._current_graph_task_id() < 0

    @property
    def running(self) -> bool:
        """Return True if a backward pass reduces gradients now."""
        return self._armed and torch._C._current_graph_task_id() >= 0

    @property
    def reduced(self) -> bool:
        """Return True if the accumulators hold gradients; otherwise the next pass overwrites them."""
        return not self._fresh

    def fill(self) -> None:
        """Make the accumulators zero, where they hold no gradients."""
        if self._fresh:
            self.finish()
            self._fresh = False
            for bucket in self._geometry.buckets:
                self.finish(bucket)
                self.shard_view(bucket).zero_()

    def _say(self, key: str, text: str) -> None:
        """Once, as a warning on rank 0."""
        if key not in self._said:
            self._said.add(key)
            level = logging.WARNING if self._comm.rank == 0 else logging.INFO
            logging.getLogger("zcomm").log(level, "%s", text)

    def say_unused(self) -> None:
        """Name the parameters that no pass of this step has reached, once."""
        if len(self._seen) < len(self._params) and "unused" not in self._said:
            skipped = set(self._asked[0])
            unused = [n for index, n in enumerate(self._names) if index not in self._seen and index not in skipped]
            if not unused or not self.reached:
                return
            self._say(
                "unused",
                f"no gradient has reached {format_names(unused)} in this step: it counts as zero (weight decay "
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
        """Start what ``add_squares`` will want soon. Does not wait."""

    def add_squares(self, norm: GradientNorm, buckets: Iterable[FlatBucket]) -> None:
        """Add this rank's shards of ``buckets``, all that are on the host, to ``norm``."""
        for bucket in buckets:
            norm.add(self.shard_view(bucket))

    def changed(self) -> None:
        """Accumulators have been written from outside."""
        self.edited()
        self.values.changed()

    def edited(self) -> None:
        """The program has changed a gradient."""

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
    def scaled_passes(self) -> int:
        """Passes of this step whose gradients are here: one at least where autograd left them to ``take_over``."""
        return max(self.reached, int(self._taken_over))

    @property
    def has_rest(self) -> bool:
        """Return True if gradients wait on this rank: of passes without sync, or later arrivals of passes with it."""
        return bool(self.local)

    def reduce_rest(self) -> None:
        """Add what waits on any rank, in fp32, and wait for all gradients. It is no pass. Collective."""
        has = [any(index in self.local for index in bucket.params) for bucket in self._order]
        wanted = torch.tensor(has, dtype=torch.int32)
        self._comm.all_reduce(wanted, op="max", name="buckets whose gradients came again")
        self.finish()
        chosen = [bucket for bucket, some in zip(self._order, wanted.tolist(), strict=True) if some]
        if chosen:
            self.fill()
            with torch.no_grad():
                self._reduce_local(chosen, lambda index: self.local.get(index))
            self.local.clear()
            self.changed()

    # --- what the program has done to p.grad ------------------------------------------------------------------

    def ask(self) -> bool:
        """Look at each ``p.grad`` before a step. False: none is there, on any rank. Raises: RuntimeError."""
        absent, assigned = self._asked = self.grads.held()
        self.skipped = frozenset()
        if len(absent) == len(self._params):
            self.fill()
            return self._comm.world_size > 1  # others may have some
        if not self.reduced and self.has_rest and not assigned and not self._taken_over:
            raise RuntimeError("step(): all gradients are from no_sync(); the last backward pass must be outside")
        self.fill()
        return True

    @property
    def has_nothing(self) -> bool:
        """Return True if no rank has a gradient, as ``agree`` has found."""
        return len(self.skipped) == len(self._params)

    @property
    def note(self) -> bool:
        """Return True if the ranks must agree (``agree``) before a step: gradients wait here, or the program has
        dropped or assigned some."""
        return self.has_rest or self.is_special

    @property
    def is_special(self) -> bool:
        """Return True if the program has dropped or assigned gradients, as far as this rank has asked."""
        return bool(self._asked[0] or self._asked[1])

    def agree(self) -> None:
        """Do as the programs of all ranks have done: skip what was dropped, take what was assigned. Collective.

        Raises: RuntimeError naming a parameter with which ranks have done differently."""
        codes = torch.zeros(len(self._params) + 1, dtype=torch.uint8)  # 1: None, 2: the program's
        codes[-1] = self.has_rest
        for code, numbers in enumerate(self._asked, 1):
            codes[numbers] = code
        every = self._comm.all_gather(codes, name="p.grad of each parameter")
        assert isinstance(every, torch.Tensor)
        every = every.view(self._comm.world_size, -1)
        reduced, assigned = (every[:, :-1] == 0).any(0), (every[:, :-1] == 2).any(0)
        dropped = (every[:, :-1] == 1).any(0)
        differs = reduced & (assigned | dropped)
        if bool(differs.any()):
            index = int(differs.nonzero()[0])
            words = ("the optimizer's", "None", "set by the program")
            said = ", ".join(f"{words[code]} on rank {rank}" for rank, code in enumerate(every[:, index].tolist()))
            raise RuntimeError(
                f"step(): p.grad of {self._names[index]} is {said}: drop, freeze or assign it on all ranks, or on none"
            )
        if bool(every[:, -1].any()):
            self.reduce_rest()
        self.finish()
        self.skipped = frozenset((dropped & ~assigned).nonzero().flatten().tolist())
        taken = set(assigned.nonzero().flatten().tolist())
        for index in (*self.skipped, *taken):
            self.forget_part(index)
        if taken:
            self._take_assigned(taken)
        self.changed()

    def _take_assigned(self, taken: set[int]) -> None:
        """Put the ranks' average of the program's own gradients into the accumulators. Collective."""
        factor = self.values.factor()

        def local(index: int) -> torch.Tensor | None:
            grad = self._params[index].grad
            if index not in taken or grad is None:
                return None
            value = self._dense(index, grad.detach()).to(torch.float32)
            own = self.grads.values_in(index)
            if own is None:
                return value * factor
            return value + self._dense(index, own).to(torch.float32) * (factor - 1.0)

        with torch.no_grad():
            self._reduce_local([b for b in self._order if not taken.isdisjoint(b.params)], local)

    def _reduce_local(self, buckets: Sequence[FlatBucket], local: Callable[[int], torch.Tensor | None]) -> None:
        """Add the ranks' average of ``local(index)``, fp32, to the accumulators of ``buckets``. Collective."""
        most = max(bucket.count for bucket in buckets)
        if self._rest_slot.numel() < most:
            self._rest_slot = self._comm.empty(most, torch.float32)
        for bucket in buckets:
            slot = self._rest_slot[: bucket.count].zero_()
            for index in bucket.params:
                value = local(index)
                if value is not None:
                    self._geometry.view(slot, index).copy_(value)
            sum_ = torch.empty(bucket.shard_count)
            self._comm.reduce_scatter([slot], "avg", out=[sum_], name=f"rest of gradients of bucket {bucket.index}")
            shard = self.shard_view(bucket)
            shard.add_(sum_.to(shard.device))

    def zero(self, set_to_none: bool = True) -> None:
        """Forget the accumulated gradients; the next pass overwrites them. set_to_none: as torch's zero_grad."""
        if self.broken:
            self._forget_own()  # it was not launched
            self.finish()
            self._begin_pass()
        self._fresh = True
        self._taken_over = False
        self.reached = self._used = 0
        self._seen.clear()
        self.local.clear()
        self.grads.clear(set_to_none)
        if set_to_none:
            self.values.forget()
        else:
            self.values.changed()

    def _forget_own(self) -> None:
        if self._own is not None:
            self._own.forget()

    def is_waiting(self) -> bool:
        """Return True if close() would wait for other ranks."""
        return any(work is not None and not work.done() for work in self._works)

    def close(self) -> None:
        self._forget_own()
        for handles in self._handles:
            for handle in handles:
                handle.remove()
        self._handles.clear()
        self.values.closed = True
        self.grads.close()
        self.local.clear()
        self._rest_slot = torch.empty(0)
        self._works = [None] * len(self._works)
        self._views.clear()
        self._calls.forget()
        self._slots.clear()
        self.accumulators = torch.empty(0)


def _is_nested() -> bool:
    """Return True if an ``autograd.Function`` has called the backward pass that runs."""
    frame, in_backward = sys._getframe(1), False
    while (up := frame.f_back) is not None:
        frame = up
        in_backward = in_backward or frame.f_code.co_name == "_engine_run_backward"
        if in_backward and frame.f_code.co_name == "apply" and frame.f_code.co_filename == _FUNCTION:
            return True
    return False
