"""Gradients: from autograd's hands into averaged fp32 accumulators, bucket by bucket, while backward runs.

[Note: bucket life] A post-accumulate hook gives a parameter's gradient to its bucket's transport (transport.py), and
leaves a stand-in ([Note: p.grad]). The transport copies it into the bucket's slot. When a bucket is complete and all
buckets before it in the launch order have been launched, its transport starts. It adds this rank's shard of the ranks'
average to the accumulator. Slots form a fixed ring ([Note: slots]): a gradient of a bucket without a slot is kept until
the bucket's turn comes. The launch order ([Note: launch order]) is the same on all ranks, whatever order autograd
finishes in. Parameters that backward did not reach count as zero ([Note: absent]). The path, file by file:
- here ``_hook``, ``_arrived``: from torch's hook to the bucket; user_grads.py: collects p.grad, leaves the stand-in
- a transport (host.py, pinned.py, peers.py) ``put``: into the slot, or kept in autograd's memory
- here ``_launch_complete``, in the order of launch_order.py; the transport's ``start``: an asynchronous reduce_scatter
  adds to its accumulators
- accumulators.py: sums that a step reads; unsynced.py: unreduced gradients; values.py: reads and changes of both

[Note: arrivals] One pass can reach a parameter several times, if backward passes run inside of it (reentrant
checkpoints with a weight in common). A bucket takes the first arrival. Later ones are added up in fp32 (``local``), as
gradients of passes without sync. They are reduced with the next pass (if slots are fp32), or separately at the step
(``GradientValues.reduce_rest``). Only arrival decides, not which slot was free: the bits do not depend on it.

[Note: local gradients] A rule that exchanges arrays of its own (zero/onebit) needs no averaged gradients from some step
on. All passes are then as in no_sync(): sums of whole gradients stay on their rank (``local``), in fp32. A step uses
them without reducing them.

The average is taken over ranks per micro-step and summed over micro-steps in fp32, in every stage. So the bits do not
depend on stage, bucket size and overlap (decision D3).
Thread rule: hooks and methods run on the thread that runs backward and step.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from zcomm.zero.format_names import format_names
from zcomm.zero.gradients.accumulators import Accumulators
from zcomm.zero.gradients.consensus import GradConsensus
from zcomm.zero.gradients.launch_order import LaunchOrder
from zcomm.zero.gradients.transport import Nbytes, ReducePlan
from zcomm.zero.gradients.unsynced import UnsyncedGradients
from zcomm.zero.gradients.unused import UnusedParams
from zcomm.zero.gradients.user_grads import UserGrads
from zcomm.zero.gradients.values import GradientValues
from zcomm.zero.layout.flat import FlatBucket
from zcomm.zero.rows.grads import Lazy, RowGrads
from zcomm.zero.sharded.grad import GradStandIn
from zcomm.zero.update_hooks import UpdateHooks

_FUNCTION = torch.autograd.function.__file__


class GradientReducer:
    """Hooks of the parameters, and the order in which buckets are launched.

    params, names: in the numbering of the plan's geometry; buckets are of its blocks ([Note: blocks]). overlap:
    reduce while backward runs, or after it.
    updates: notified of passes, launches and reads of sums. factor: of GradientValues. accumulators: sums of the
    passes. local: unreduced gradients. grads: ``p.grad``. consensus: before a step. stays_local: whether gradients stay
    on their rank now ([Note: local gradients]); None: never.
    """

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        plan: ReducePlan,
        accumulators: Accumulators,
        overlap: bool,
        updates: UpdateHooks,
        factor: Callable[[], float],
        stays_local: Callable[[], bool] | None = None,
    ) -> None:
        self._params = params
        self._names = names
        self._updates = updates
        self._seen: set[int] = set()  # parameters that some pass of this step reached
        self._warned_unused = False
        self._plan = plan
        self._overlap = overlap
        self.sync = True
        self.refuses = ""  # the call, if gradients are refused inside of its block
        self.passes = 1  # expected passes of a step
        self.reached = 0  # backward passes with gradients in the accumulators or in flight
        self._used = 0  # of these, used by a step
        self.backwards = 0  # calls of backward() that have reached a parameter, with or without sync
        self._local_task = -1  # the graph task of the last pass without sync
        self._stays_local = stays_local
        self.local_passes = 0  # passes of this step with gradients that stay on this rank
        self._open_task = -1  # the graph task of such a pass that has not ended
        geometry, by_block, comms = plan.geometry.by_param, plan.geometry.by_block, plan.comms
        self._geometry = geometry
        self.accumulators = accumulators
        self._transports = accumulators.transports
        self._bucket_of = [place.bucket for place in by_block.places]
        self._set_order(plan.order)
        self._launch_order = LaunchOrder(by_block.buckets, comms.data)
        self._unused_params = UnusedParams(params)
        self._slot_count = plan.slot_count
        self._adds_local = plan.dtype == torch.float32  # slots lose nothing of fp32 sums
        self.local = UnsyncedGradients(plan, accumulators)
        self.values = GradientValues(self, accumulators, self.local, geometry, comms, names, factor)
        self.grads = UserGrads(params, self.values)
        self.consensus = GradConsensus(self, params, geometry, comms, self.grads, self.values, self.local, accumulators)
        self.row_grads = RowGrads(self, params, {i: b for i, b in geometry.blocks.items() if i < len(params)})
        self._begin_pass()
        self._handles = [self._hook(index, param) for index, param in enumerate(params)]

    @property
    def stays_local(self) -> bool:
        """Return True if gradients stay on their rank, also outside of no_sync()."""
        return self._stays_local is not None and self._stays_local()

    @property
    def syncs(self) -> bool:
        """Return True if a pass that begins now reduces its gradients."""
        return self.sync and not self.stays_local

    def refuse_inside(self, call: str) -> None:
        """Raise RuntimeError for a ``call`` inside of a block that excludes it."""
        if self.refuses:
            raise RuntimeError(f"{call} inside of {self.refuses}: call it after the block")

    def before_sums(self) -> None:
        """Prepare for a read or a change of sums by other means than a pass."""
        self._updates.before_sums()

    # --- one backward pass ------------------------------------------------------------------------------------

    def _set_order(self, order: Sequence[FlatBucket]) -> None:
        self._order = list(order)
        self._position = {bucket.index: i for i, bucket in enumerate(self._order)}

    def _begin_pass(self) -> None:
        self._touched = False
        self._launched = 0
        self._missing = [set(bucket.params) for bucket in self._geometry.by_block.buckets]
        self._absent: dict[int, list[int]] = {}  # by bucket: parameters that this pass does not reach
        self._early: dict[int, torch.Tensor | Lazy] = {}  # first arrivals that wait for a slot
        self._armed = False  # last: a pass that an interrupt has ended here counts as broken

    def _hook(self, index: int, param: torch.nn.Parameter) -> tuple[Any, Any]:
        grads, rows = self.grads, self.row_grads

        def on_grad(param: torch.Tensor) -> None:
            if not rows.came(index) or param.grad is None or self.is_assigned(index):
                self._arrived(index, grads.collect(index))

        last = param.register_post_accumulate_grad_hook(on_grad)

        def before(grad: torch.Tensor | None) -> None:
            self.refuse_inside("backward")
            hooks: Any = param._post_accumulate_grad_hooks
            if next(reversed(hooks)) != last.id:  # hooks of the program come first, as under DDP
                hooks[last.id] = hooks.pop(last.id)
            had = param.grad
            if grad is None and rows.came(index):
                return
            if had is not None:
                grads.detach_stand_in(index, had)
            if grad is None and rows.comes(index):  # otherwise autograd's gradient joins them
                rows.begin(index)
                grads.collect_rows(index)
                self._arrived(index, None)

        return param.register_hook(before), last

    def arm(self) -> None:
        """Begin a backward pass.

        All gradients until it ends belong to one pass, also gradients of backward passes inside of it (activation
        checkpointing runs them). Called at its first tensor, if that is known.
        """
        if self.syncs and not self._armed:
            self._updates.begin_pass()
            self._armed = True
            order = self._launch_order.take()
            if order is not None:
                self.accumulators.arrange(order)
                self._set_order(order)
            for index in self._unused_params.begin_pass(_is_nested()):
                for number in self._geometry.numbers_of(index):
                    bucket = self._bucket_of[number]
                    self._missing[bucket].discard(number)
                    self._absent.setdefault(bucket, []).append(number)
            self.accumulators.begin_pass(self.reached, self.passes)
            torch.autograd.Variable._execution_engine.queue_callback(self._end_pass)

    def is_assigned(self, index: int) -> bool:
        grad = self._params[index].grad
        return grad is not None and not isinstance(grad, GradStandIn)

    def begin_rows(self, index: int) -> None:
        had = self._params[index].grad
        if had is not None:
            self.grads.detach_stand_in(index, had)
        self.grads.collect_rows(index)
        self._begin_arrival(index)

    def _arrived(self, index: int, grad: torch.Tensor | None) -> None:
        """Handle a gradient of parameter ``index``. None: it stays the program's, or arrives by blocks."""
        self._begin_arrival(index)
        if index not in self._geometry.blocks:
            self.take_block(index, grad)
            return
        dense = grad if grad is None else self.values.dense(index, grad)
        self.row_grads.hand_over(index, dense)

    def _begin_arrival(self, index: int) -> None:
        self._seen.add(index)
        if self.grads.dropped:
            self._forget_dropped(index)
        if not self.syncs:
            task = torch._C._current_graph_task_id()
            if task != self._local_task and self._count_backward():
                self._local_task = task
            if task != self._open_task and self.stays_local:
                self._begin_local(task)
            return
        self.arm()
        if not self._touched:
            self._touched = True
            self._count_backward()
        self._unused_params.arrived(index)

    def _begin_local(self, task: int) -> None:
        """Begin a pass with gradients that stay on this rank. One inside of another is a part of that."""
        self._open_task = task
        self.local_passes += not _is_nested()
        torch.autograd.Variable._execution_engine.queue_callback(self._end_local)

    def _end_local(self) -> None:
        self._open_task = -1

    def count_unreached(self) -> None:
        """Let parameters that no local pass of this step has reached count as zero on this rank, before a step."""
        for index in range(len(self._params)) if self.local_passes else ():
            if index not in self._seen:
                self.grads.attach_stand_in(index)

    def take_block(self, number: int, grad: torch.Tensor | Lazy | None) -> None:
        """Handle the gradient of a parameter, or of one of its blocks, after the arrival has begun."""
        if not self.syncs:
            if grad is not None:
                self._add_locally(number, _made(grad))
            return
        bucket = self._bucket_of[number]
        missing = self._missing[bucket]
        if number not in missing:
            self._updates.reached_again(self._names[self._geometry.param_of(number)], bucket)
            if grad is not None:
                self._add_locally(number, _made(grad))  # [Note: arrivals]
            return
        missing.discard(number)
        self._launch_order.arrived(bucket)
        transport = self._transports[bucket]
        if transport.keeps:
            transport.release()
        if self._adds_local and number in self.local.sums:  # now: gradients from before this arrival
            grad = self.local.take(number, grad if grad is None else self._dense(number, _made(grad)))
        if grad is not None:
            self._early[number], grad = grad, None  # the only reference: it is freed as soon as it is in the slot
        if self._position[bucket] < self._launched + self._slot_count:  # it has a slot
            self._collect(number)
        if self._overlap:
            self._launch_complete()

    def _count_backward(self) -> bool:
        """Count a pass that has begun; return False for one inside of another (reentrant checkpoints)."""
        counts = self.passes > 1 and not _is_nested()
        self.backwards += counts
        return counts

    def _dense(self, number: int, grad: torch.Tensor) -> torch.Tensor:
        return self.values.dense(self._geometry.param_of(number), grad)

    def _add_locally(self, number: int, grad: torch.Tensor) -> None:
        self.local.add(number, self._dense(number, grad).detach())
        self.values.changed()

    def _forget_dropped(self, index: int) -> None:
        """Make the accumulated gradient of a parameter zero, if the program has dropped it."""
        if index in self.grads.dropped:
            self.grads.dropped.discard(index)
            self.values.zero(index)

    def _collect(self, number: int) -> None:
        """Pass the gradient of a parameter or block to its bucket's transport; a missing one counts as zero."""
        grad = self._early.pop(number, None)
        transport = self._transports[self._bucket_of[number]]
        made = None if grad is None else _made(grad)
        del grad
        transport.put(number, made if made is None or transport.takes_sparse else self._dense(number, made))

    def _count_as_zero(self, numbers: Iterable[int]) -> None:
        """Put parameters that the pass does not reach into their bucket, before its launch."""
        for number in numbers:
            index = self._geometry.param_of(number)
            self.grads.attach_stand_in(index)
            self._forget_dropped(index)
            local = self.local.take(number, None) if self._adds_local else None
            if local is not None:
                self._early[number] = local
            self._collect(number)

    def _launch_complete(self) -> None:
        while self._launched < len(self._order) and not self._missing[self._order[self._launched].index]:
            bucket = self._order[self._launched]
            self._count_as_zero(self._absent.pop(bucket.index, ()))
            self._launch(bucket)
            entering = self._launched + self._slot_count - 1
            for index in self._order[entering].params if entering < len(self._order) else ():
                if index in self._early:  # autograd had finished it before its bucket got a slot
                    self._collect(index)

    def _launch(self, bucket: FlatBucket) -> None:
        self._updates.before_launch(bucket.index)
        transport = self._transports[bucket.index]
        transport.start(bucket, not self.accumulators.fresh)
        self._launched += 1
        if not self._overlap:
            transport.finish(bucket)

    def _end_pass(self) -> None:
        """End the pass: missing gradients are zero. One that reached nothing (``autograd.grad``) does not count."""
        if not self._touched:
            self._begin_pass()
            return
        for bucket in self._order[self._launched :]:
            missing = self._missing[bucket.index]
            self._unused_params.missed({self._geometry.param_of(number) for number in missing})
            self._count_as_zero((*missing, *self._absent.pop(bucket.index, ())))
            for index in bucket.params:
                if index in self._early:
                    self._collect(index)
            self._launch(bucket)
        self._launch_order.end_pass()
        self.accumulators.end_pass()
        self.reached += 1
        self.values.changed()
        self._begin_pass()

    # --- parameters that were replaced -------------------------------------------------------------------------

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
        grad = self.values.dense(index, grad)
        for number in self._geometry.numbers_of(index):
            self._add_locally(number, grad[self._geometry.rows_of(number)] if grad.dim() else grad)
        self._seen.add(index)
        self.consensus.taken_over = True
        param.grad = None
        self.grads.attach_stand_in(index)

    def hook_again(self, index: int) -> None:
        """Set the hooks again of a parameter that has lost all hooks, also the program's (``swap_tensors``)."""
        param: Any = self._params[index]
        for handle in self._handles[index]:
            handle.remove()
        param._backward_hooks = param._post_accumulate_grad_hooks = None  # autograd no longer knows these dicts
        self._handles[index] = self._hook(index, param)
        self.take_over(index, param.grad)

    @property
    def order(self) -> Sequence[FlatBucket]:
        """The launch order of the last pass."""
        return self._order

    # --- between passes ---------------------------------------------------------------------------------------

    @property
    def broken(self) -> bool:
        """Return True if the last backward pass began, but ended with an exception: its end was never called. Also if
        an interrupt has ended an addition to its sums."""
        began = self._armed or self._open_task >= 0
        return (began and torch._C._current_graph_task_id() < 0) or self.accumulators.torn

    @property
    def running(self) -> bool:
        """Return True if a backward pass reduces gradients now."""
        return self._armed and torch._C._current_graph_task_id() >= 0

    def log_unused(self) -> None:
        """Log the parameters that no pass of this step has reached, once."""
        if len(self._seen) < len(self._params) and not self._warned_unused:
            skipped = set(self.consensus.absent)
            unused = [n for index, n in enumerate(self._names) if index not in self._seen and index not in skipped]
            if not unused or not (self.reached or self.local_passes):
                return
            self._warned_unused = True
            text = (
                f"no gradient has reached {format_names(unused)} in this step: it counts as zero (weight decay "
                "and momentum go on); exclude parameters that are never used by requires_grad_(False)"
            )
            logging.getLogger("zcomm").log(self.values.warning, "%s", text)

    @property
    def waiting_passes(self) -> int:
        """Number of passes that no step has used; those without sync count as one."""
        return self.reached - self._used + bool(self.local)

    def step_has_used(self) -> None:
        self._used = self.reached

    @property
    def scaled_passes(self) -> int:
        """Passes of this step with gradients: at least one if autograd left some to ``take_over``."""
        return max(self.reached + self.local_passes, int(self.consensus.taken_over))

    @property
    def nbytes(self) -> list[Nbytes]:
        """Bytes by tier and purpose. On the CPU the device is host memory."""
        purpose = "slots" if self.accumulators.device_slots else "gradients"
        return [*self.accumulators.nbytes, ("device", purpose, self.local.nbytes)]

    def zero(self, set_to_none: bool = True) -> None:
        """Forget the accumulated gradients; the next pass overwrites them. set_to_none: as torch's zero_grad."""
        if self.broken:
            for transport in self.accumulators.kinds:
                transport.forget()  # it was not launched
                transport.wait_all()
            self._launch_order.forget()
            self._begin_pass()
        self.accumulators.forget()
        self.consensus.taken_over = False
        self.reached = self._used = self.local_passes = 0
        self._open_task = -1
        self._seen.clear()
        self.row_grads.clear()
        self.local.clear()
        self.grads.clear(set_to_none)
        if set_to_none:
            self.values.forget()
        else:
            self.values.changed()

    def is_waiting(self) -> bool:
        """Return True if close() would wait for other ranks."""
        return self._launch_order.is_waiting() or any(each.is_waiting() for each in self.accumulators.kinds)

    def close(self) -> None:
        for handles in self._handles:
            for handle in handles:
                handle.remove()
        self._handles.clear()
        self.row_grads.clear()
        self.values.closed = True
        self.grads.close()
        self.local.close()
        self._launch_order.close()
        self.accumulators.close()


def _made(grad: torch.Tensor | Lazy) -> torch.Tensor:
    """Return a gradient, which backward may have left to be made now ([Note: gradients by blocks])."""
    return grad if isinstance(grad, torch.Tensor) else grad()


def _is_nested() -> bool:
    """Return True if an ``autograd.Function`` has called the backward pass that runs.

    torch has no query for this: names of its frames are compared. With a torch of other names each reentrant checkpoint
    would count as a pass, and ``step()`` with grad_accum > 1 would raise.
    """
    frame, in_backward = sys._getframe(1), False
    while (up := frame.f_back) is not None:
        frame = up
        in_backward = in_backward or frame.f_code.co_name == "_engine_run_backward"
        if in_backward and frame.f_code.co_name == "apply" and frame.f_code.co_filename == _FUNCTION:
            return True
    return False
