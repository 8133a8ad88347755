"""Behind: updates on a thread behind the next forward, for weights that are whole on a device (stages 0 to 2).

[Note: async step] ``step()`` ends after it has given the updates, with the facts of that moment, to the thread. A
bucket's new weights are copied to the device as soon as they are updated. The main thread waits when it reads a
parameter as a module's attribute (all modules do), and before the forward of a module with parameters. It waits until
copies of their buckets have been issued, and makes torch's stream wait for these copies. All other calls of the
optimizer wait for the whole step, and the first gradient of the next backward pass does, too.
Not covered: parameters that a program keeps in a list, and reads between ``step()`` and the end of the next forward.
``opt.join()`` is for these.
Thread rule: ``_run`` and ``sent`` on the thread; the rest on the main thread (autograd's threads in backward). Each
call that waits raises an error of the thread, until ``close``.
Source: the overlap of the CPU step with the next forward as in SuperOffload (arXiv:2509.21271), without its rollback.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from zcomm import _core
from zcomm.zero.module_hook import Hook
from zcomm.zero.params.device import DeviceStore
from zcomm.zero.parts import Parts, TrainState
from zcomm.zero.schedule.facts import Facts
from zcomm.zero.schedule.scheduler import UpdateScheduler
from zcomm.zero.schedule.transaction import NoTransaction
from zcomm.zero.worker import Call, Worker


class Behind(UpdateScheduler):
    """Updates that run behind the next forward."""

    needs_norm = True

    def __init__(self, train: TrainState) -> None:
        super().__init__(train)
        self._thread = Worker("zcomm-step")
        self._running: Call[None] | None = None
        self._sent: list[threading.Event] = []  # by bucket: copies of its new weights are issued
        self._waiting: set[int] = set()  # buckets with new weights that torch's stream does not wait for yet
        self._modules: list[nn.Module] = []
        self._handles: list[Any] = []

    def start(self, parts: Parts, arena: _core.PinnedArena, transaction: NoTransaction) -> None:
        super().start(parts, arena, transaction)
        assert isinstance(parts.store, DeviceStore)
        self._store = parts.store
        self._sent = [threading.Event() for _ in parts.geometry.buckets]

    def hook_modules(self, model: nn.Module, bucket_of: dict[int, int]) -> None:
        for module in model.modules():
            needs = {name: bucket_of[id(p)] for name, p in module._parameters.items() if id(p) in bucket_of}
            if needs:
                module._parameters = LateParameters(module._parameters, self, needs)
                self._modules.append(module)
                every = tuple(set(needs.values()))
                before = Hook(lambda module, args, every=every: self.need(every))
                self._handles.append(module.register_forward_pre_hook(before))

    def update(self, scale: float) -> None:
        self._start(self.prepare(scale))

    def _start(self, facts: Facts) -> None:
        """Run the updates on the thread. Earlier work of torch's stream uses the old weights."""
        self.settle()
        for event in self._sent:
            event.clear()
        self._waiting = set(range(len(self._sent))).difference(self._store.on_device)  # torch's stream updates these
        self._running = self._thread.submit(self._run, facts, self.reverse and self.parts.state.turns)

    def _run(self, facts: Facts, reverse: bool) -> None:
        try:
            with torch.no_grad():
                self.run_all(facts, reverse)
        finally:
            for event in self._sent:
                event.set()

    def sent(self, bucket: int) -> None:
        self._sent[bucket].set()

    def need(self, buckets: Iterable[int]) -> None:
        """Let torch's stream use the new weights of these buckets from now on."""
        if not self._waiting:
            return
        for bucket in buckets:
            if bucket in self._waiting:
                self._sent[bucket].wait()
                if self._running is not None and self._running.done():
                    self._running.result()  # raises the thread's error, if it has ended with one
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
