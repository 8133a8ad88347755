"""Behind: updates on a thread behind the next forward, for weights that are whole on a device (stages 0 to 2).

[Note: async step] ``step()`` ends after it has given the updates, with the facts of that moment, to the thread. A
bucket's new weights are copied to the device as soon as they are updated. The main thread waits when it reads a
parameter as a module's attribute (all modules do), and before the forward of a module with parameters. It waits until
copies of their buckets have been issued, and makes torch's stream wait for these copies. All other calls of the
optimizer wait for the whole step, and the first gradient of the next backward pass does, too.
If nothing needs the norm first, a bucket is updated once its sum is complete, while backward runs on the device. Of the
buckets with complete sums the thread takes the one that the next forward reads first. So the thread works through the
whole step if updates take longer than the device. ``step()`` only waits for the norm. Several ranks copy weights to
each other in one order: they update after the norm, first bucket first.
Not covered: parameters that a program keeps in a list, and reads between ``step()`` and the end of the next forward.
``opt.join()`` is for these.
Thread rule: ``_run`` and ``sent`` on the thread; the rest on the main thread (autograd's threads in backward). Each
call that waits raises an error of the thread, until ``close``.
Source: the overlap of the CPU step with the next forward as in SuperOffload (arXiv:2509.21271), without its rollback.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from heapq import heappop, heappush
from itertools import chain, pairwise
from typing import Any

import torch
from torch import nn

from zcomm import _core
from zcomm.zero.gradients.norm import GradientNorm
from zcomm.zero.layout.flat import FlatBucket
from zcomm.zero.module_hook import Hook
from zcomm.zero.optim_state.ram import ShardStep
from zcomm.zero.params.device import DeviceStore
from zcomm.zero.parts import Parts, TrainState
from zcomm.zero.poison import check_error
from zcomm.zero.schedule.facts import Facts
from zcomm.zero.schedule.scheduler import UpdateScheduler
from zcomm.zero.schedule.transaction import NoTransaction
from zcomm.zero.worker import Call, Moment, Worker


class Behind(UpdateScheduler):
    """Updates that run behind the next forward."""

    in_step = False

    def __init__(self, train: TrainState) -> None:
        super().__init__(train)
        self._thread = Worker("zcomm-step")
        self._running: Call[None] | None = None
        self._summed: list[Moment] = []  # by bucket: its sum is complete
        self._sent: list[Moment] = []  # by bucket: copies of its new weights are issued
        self._is_broken = False  # an error has ended the running step, on either thread
        self._waiting: set[int] = set()  # buckets with new weights that torch's stream does not wait for yet
        self._modules: list[nn.Module] = []
        self._handles: list[Any] = []

    @property
    def needs_norm(self) -> bool:  # type: ignore[override]
        return self.comm.world_size > 1

    def start(self, parts: Parts, arena: _core.PinnedArena, transaction: NoTransaction) -> None:
        super().start(parts, arena, transaction)
        assert isinstance(parts.store, DeviceStore)
        self._store = parts.store

    def hook_modules(self, model: nn.Module, bucket_of: dict[int, int]) -> None:
        for module in model.modules():
            needs = {name: bucket_of[id(p)] for name, p in module._parameters.items() if id(p) in bucket_of}
            if needs:
                module._parameters = LateParameters(module._parameters, self, needs)
                self._modules.append(module)
                every = tuple(set(needs.values()))
                before = Hook(lambda module, args, every=every: self.need(every))
                self._handles.append(module.register_forward_pre_hook(before))

    # --- a step -----------------------------------------------------------------------------------------------

    def update(self, scale: float) -> None:
        facts = self.prepare(scale)
        self._begin()
        self._hand_over()
        self._running = self._thread.submit(self._run, facts)

    def run_as_ready(self, facts: Facts, norm: GradientNorm | None) -> None:
        self._begin()
        self._running = self._thread.submit(self._run, facts)
        self._hand_over(norm)

    def _begin(self) -> None:
        """Begin a step. Earlier work of torch's stream uses the old weights."""
        self.settle()
        self._summed = self._moments()
        self._expect_weights()

    def _moments(self) -> list[Moment]:
        return [self._thread.moment() for _ in self.parts.geometry.buckets]

    def _expect_weights(self) -> None:
        """Let reads of weights wait for the thread from now on."""
        self._sent = self._moments()
        self._waiting = {bucket.index for bucket in self.on_host}  # torch's stream updates the others
        self._is_broken = False

    def _hand_over(self, norm: GradientNorm | None = None) -> None:
        """Give buckets to the thread, in the order in which their sums are complete."""
        try:
            for bucket in self._in_launch_order():
                self.accumulators.finish(bucket)
                if norm is not None:
                    norm.squares.add(bucket, self.accumulators.shard(bucket))
                self._summed[bucket.index].reach()
        except BaseException:
            self._is_broken = True
            self._waiting.clear()  # no thread will send these weights
            raise
        finally:
            reach_all(self._summed)

    def _in_launch_order(self) -> list[FlatBucket]:
        own = {bucket.index: bucket for bucket in self.on_host}
        return [own[bucket.index] for bucket in self.reducer.order if bucket.index in own]

    def _run(self, facts: Facts) -> None:
        try:
            with torch.no_grad():
                self.guarded(partial(self._update_in_turn, facts))
                if not self._is_broken:
                    check_error(self.comm)
                    self._store.spread()
        except BaseException:
            self._is_broken = True
            raise
        finally:
            reach_all(self._sent)

    def _update_in_turn(self, facts: Facts) -> None:
        """Update all buckets on the host. Copies to the device can only begin when backward has ended there. They are
        issued then, so that the first bucket's copy, which the next forward needs first, waits for no other."""
        order, updated = self._in_launch_order(), []
        for index, following in pairwise(chain(self._turns(order), (-1,))):
            self._summed[index].wait()
            if self._is_broken:
                return
            bucket = self.parts.geometry.buckets[index]
            self.accumulators.expect(following)
            self.parts.state.expect([following] if following >= 0 else [])
            weight, (grad, addend) = self._store.load(bucket), self.accumulators.terms(bucket)
            self.apply(iter([ShardStep(index, weight, grad, facts.runs(bucket), addend=addend)]), buckets={index})
            updated.append(bucket)
            if self._summed[order[-1].index].done() and not 0 <= following < index:
                for each in sorted(updated, key=lambda bucket: bucket.index):
                    self._store.updated(each)
                updated.clear()

    def _turns(self, order: Iterable[FlatBucket]) -> Iterator[int]:
        """Yield the numbers of buckets: of the first one with a complete sum, or of the one that will have it next.
        order: in which sums are completed."""
        coming = deque(bucket.index for bucket in order)
        legal: list[int] = []
        while coming or legal:
            while coming and (not legal or self._summed[coming[0]].done()):
                heappush(legal, coming.popleft())
            yield heappop(legal)

    def sent(self, bucket: int) -> None:
        self._sent[bucket].reach()

    # --- reads of weights -------------------------------------------------------------------------------------

    def need(self, buckets: Iterable[int]) -> None:
        """Let torch's stream use the new weights of these buckets from now on."""
        if not self._waiting:
            return
        for bucket in buckets:
            if bucket in self._waiting:
                self._sent[bucket].wait()
                if self._is_broken and self._running is not None:
                    self._running.result()
                self._store.arrive_bucket(bucket)
                self._waiting.discard(bucket)

    def settle(self) -> None:
        """Wait for the step, and make torch's stream wait for all new weights."""
        if self._running is not None:
            self._running.result()
            self._running = None
            self._waiting.clear()
            self._store.arrive()

    def join(self) -> None:
        with self.poison.watch():
            self.settle()

    def begin_pass(self) -> None:
        self.settle()
        super().begin_pass()

    def before_sums(self) -> None:
        self.settle()

    def before_launch(self, bucket: int) -> None:
        self.settle()

    def end_updates(self) -> None:
        try:
            self.parts.join()
        except Exception:
            self.forget()

    def forget(self) -> None:
        if self._running is not None:
            self._running.wait()
            self._running = None
            self._waiting.clear()

    def is_running(self) -> bool:
        return self._running is not None and not self._running.done()

    def close(self) -> None:
        self._thread.close()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for module in self._modules:
            module._parameters = dict(dict.items(module._parameters))
        self._modules.clear()


def reach_all(moments: Iterable[Moment]) -> None:
    """Reach those that are not reached yet."""
    for moment in moments:
        if not moment.done():
            moment.reach()


class LateParameters(dict[str, Any]):
    """A module's ``_parameters``: a read waits for the weights."""

    def __init__(self, plain: dict[str, Any], updates: Behind, needs: dict[str, int]) -> None:
        super().__init__(plain)
        self._updates, self._needs = updates, needs

    def __getitem__(self, name: str) -> Any:
        if name in self._needs:
            self._updates.need((self._needs[name],))
        return super().__getitem__(name)

    def items(self) -> Any:
        self._updates.need(self._needs.values())
        return super().items()

    def values(self) -> Any:
        self._updates.need(self._needs.values())
        return super().values()

    def __reduce__(self) -> Any:  # copies of the model are ordinary
        return dict, (dict(self.items()),)
