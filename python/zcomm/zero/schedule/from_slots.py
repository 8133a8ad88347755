"""FromSlots: updates in backward of gradients in their host slots, for one rank with weights whole on a device.

[Note: update from slots] An update in ``step()`` needs memory for all gradients. Here the update thread reads each
gradient in its slot ([Note: gradients that are used up]), behind its copy from the device. The slot is free then.
The host's copy of the weights changes in backward. The device's weights do not change before ``step()``, so backward
and a forward before ``step()`` use the old ones. ``step()`` takes the norm, which the device has computed. Then new
weights go to the device as those of Behind do: in the order of the next forward, which waits module by module.
Options are read as the first bucket is launched ([Note: updates before the step]). Edits of weights before ``step()``
raise, too. An error poisons, unless nothing has been launched.
Buckets are updated in the order of launches, so that slots become free. Once ``step()`` was called, the first one with
a gradient on the host comes first.
Thread rule: ``_update_next``, ``_send_rest`` and ``sent`` on the thread; the rest on the main thread, in backward on
autograd's.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from itertools import pairwise

import torch

from zcomm import _core
from zcomm.zero.format_names import format_names
from zcomm.zero.gradients.used_up import UsedUpTransport
from zcomm.zero.layout.flat import FlatBucket
from zcomm.zero.optim_state.ram import ShardStep
from zcomm.zero.parts import Parts, TrainState
from zcomm.zero.schedule.before_step import GONE, BeforeStep
from zcomm.zero.schedule.behind import Behind, reach_all
from zcomm.zero.schedule.facts import Facts
from zcomm.zero.schedule.scheduler import EDITED_LATE, Counted
from zcomm.zero.schedule.transaction import NoTransaction
from zcomm.zero.step_options import StepOptions
from zcomm.zero.worker import Moment


class FromSlots(BeforeStep, Behind):
    """Updates of gradients in their slots."""

    def __init__(self, train: TrainState) -> None:
        super().__init__(train)
        self._coming: deque[int] = deque()  # launched buckets without an update, in the order of launches
        self._stepping = False  # step() was called: new weights may be sent
        self._updated: dict[int, Moment] = {}  # by launched bucket
        self._unsent: list[int] = []  # a heap of updated buckets
        self._next: dict[int, int] = {}  # by bucket: the one that is launched after it
        self._expected = -1  # the bucket that is updated next; -1: the first of ``_coming``

    def start(self, parts: Parts, arena: _core.PinnedArena, transaction: NoTransaction) -> None:
        super().start(parts, arena, transaction)
        (self._slots,) = (each for each in self.accumulators.kinds if isinstance(each, UsedUpTransport))

    # --- a pass -----------------------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        self._check_begin()
        self._refuse()
        self.settle()
        self.parts.rebinder.restore()
        super().begin_pass()
        self.accumulators.forget()  # a step without gradients has filled them with zeros
        self._facts, self._error, self._stepping, self._expected = None, None, False, -1
        self._coming.clear()
        self._updated.clear()
        self._unsent.clear()

    def reached_again(self, name: str, bucket: int) -> None:
        self.poison.check("backward()")
        raise self._fail(
            f"backward has reached {name} twice (by reentrant checkpoints that share it, or again after an error), and "
            "its weight was updated without the second gradient"
        )

    def on_sum(self, bucket: int, sum_: torch.Tensor) -> Moment:
        """Let the thread update a bucket. Returns: the moment at which its slot is free."""
        if self._facts is None:
            self.pending = True
            self._facts = self._fix_now()
        done = self._updated[bucket] = self._thread.moment()
        self._coming.append(bucket)
        self._thread.submit(self._update_next)
        return done

    def _fix_now(self) -> Facts:
        """Fix the facts of the step, with the program's edits as backward found them."""
        self.reducer.consensus.skipped = frozenset()
        self._note_options()
        self._next = dict(pairwise(bucket.index for bucket in self._in_launch_order()))
        start = time.perf_counter()
        self._store.take_edits()
        self.parts.rebinder.looked_s += time.perf_counter() - start
        return self.fix(1.0 / self._factor)

    # --- on the thread ----------------------------------------------------------------------------------------

    def _update_next(self) -> None:
        """Update a launched bucket, and send new weights if it is time."""
        index = self._take()
        try:
            if self._error is None:
                with torch.no_grad():
                    self._update(self.parts.geometry.buckets[index])
                    self._send(min(self._coming, default=math.inf) if self._stepping else -1)
        except BaseException as error:
            self._error = error
        finally:
            self._updated[index].reach()

    def _take(self) -> int:
        index = self._coming[0] if self._expected < 0 else self._expected
        self._coming.remove(index)
        self._expected = self._choose() if self._stepping and self._coming else self._next.get(index, -1)
        return index

    def _choose(self) -> int:
        """Return the first bucket that is on the host, else the one that will be there next."""
        buckets = self.parts.geometry.buckets
        landed = [index for index in self._coming if self._slots.has_landed(buckets[index])]
        return min(landed, default=self._coming[0])

    def _update(self, bucket: FlatBucket) -> None:
        assert self._facts is not None
        self.parts.state.expect([self._expected] if self._expected >= 0 else [], reverse=True)
        grad, weight = self._slots.land(bucket), self._store.load(bucket)
        shard = ShardStep(bucket.index, weight, grad, self._facts.runs(bucket))
        self.apply(iter([shard]), True, {bucket.index})
        heappush(self._unsent, bucket.index)

    def _send(self, end: float) -> None:
        """Send new weights of the buckets before ``end``: the first of them are not to wait for others."""
        while self._unsent and self._unsent[0] < end:
            self._store.updated(self.parts.geometry.buckets[heappop(self._unsent)])

    def _send_rest(self) -> None:
        """End the step, when all its updates have ended."""
        try:
            if self._error is not None:
                raise self._error
            self._send(math.inf)
            self._store.spread()
        except BaseException:
            self._is_broken = True
            raise
        finally:
            reach_all(self._sent)

    # --- step() -----------------------------------------------------------------------------------------------

    def has_updated(self, options: StepOptions) -> bool:
        self.break_off()
        self.poison.check("step()")
        self._check_left("step()")
        if not self.pending and (why := self._obstacle()):
            raise self._illegal(why, "nothing has been changed; ")
        return self.pending

    def _obstacle(self) -> str:
        """Name gradients that came by no pass, or return ""."""
        absent, assigned = self.reducer.grads.held()
        if self.reducer.local:
            return "gradients of no_sync() wait"
        if assigned:
            return "p.grad is a tensor of the program"
        return "" if len(absent) == self.parts.geometry.trained_count else "p.grad is zero, and no backward pass came"

    def end_updated(self, check: Callable[[], None], counted: Counted) -> None:
        norm = self.parts.norm
        with self.poison.watch():
            self._ends = True
            try:
                self._check(check)
                self.reducer.log_unused()
                norm.begin()
                self._hand_over_weights()
                self.accumulators.add_squares(norm, ())
                late = [self.parts.names[index] for index in self._store.edited_late()]
                if late:
                    raise RuntimeError(EDITED_LATE % format_names(late))
                self.on_device.end_norm(norm)
                counted(norm.end(), self._first_nonfinite)
                self._store.count_change()
                self.pending, self.gone = False, GONE
            finally:
                self._ends = False

    def _check(self, check: Callable[[], None]) -> None:
        """Raise for changes of the program since backward. check: of those that no step supports."""
        if self._error is not None:
            raise self._error
        self.parts.rebinder.put_back()
        if any(True for _ in self._store.detached()):
            raise self._fail("p.data was replaced after backward, which had updated the weights")
        self._check_unchanged()
        check()
        if not self.accumulators.knows_squares:
            raise self._fail("gradients were changed after backward, which had updated the weights")

    def _hand_over_weights(self) -> None:
        """Let the thread send new weights. Work of torch's stream so far uses the old ones."""
        assert self._facts is not None
        self._store.look_for_edits()
        self._store.used()
        self.guarded(partial(self.on_device.step, self._facts.runs))
        self.on_device.start_norm()
        self.accumulators.send_squares()
        self._expect_weights()
        self._stepping = True
        self._running = self._thread.submit(self._send_rest)

    def _first_nonfinite(self) -> str:
        """Name the first parameter with a gradient that was not finite: its new weight is not, either."""
        self.settle()
        for name, param in self.parts.model.named_parameters():
            if id(param) in self.parts.index_of and not bool(torch.isfinite(param.detach()).all()):
                return name
        return "none that is left"

    # --- reads between backward and step() -----------------------------------------------------------------------

    def drain(self, what: str) -> None:
        self.check(what)
        super().drain(what)

    # --- calls of the program ---------------------------------------------------------------------------------

    def reset(self) -> None:
        self.gone = ""

    def _forget_pass(self) -> None:
        self._error = self._error or RuntimeError("this pass was forgotten")  # so that no other update begins
        self._thread.submit(int).wait()
        self.pending = False
        self.gone = ""

    def close(self) -> None:
        if self.pending:
            self._error = self._error or RuntimeError("the optimizer was closed")
        super().close()
