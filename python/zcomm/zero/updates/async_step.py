"""AsyncStep: the update runs behind the next forward on a thread of its own, and each module waits for its own weights.

[Note: async step] ``step()`` ends when the update has been given to the thread, with the hyperparameters of
that moment. A bucket's new weights go to the device as soon as they are there. A thread waits when it reads a parameter
as a module's attribute (all modules do), or runs the forward of a module that has some. It waits until their buckets
are on their way, and makes torch's stream wait until they have come: the same bits as without. Whatever else touches
the optimizer, and the first gradient of the next backward pass, waits for the whole step.
Not covered: parameters that a program has kept aside (a list of them) and reads between ``step()`` and the end of the
next forward. ``opt.join()`` is for these.
Thread rule: ``start``, ``need`` and ``join`` on the main thread (autograd's threads while that is in backward);
``_run`` on the thread. Each call that waits raises an error of the thread, until ``close``.
Source: the overlap of the CPU step with the next forward as in SuperOffload (arXiv:2509.21271), without its rollback.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from zcomm.zero.module_hook import Hook
from zcomm.zero.params.device import DeviceStore
from zcomm.zero.worker import Call, Worker


class AsyncStep:
    """The updates that run behind the next forward. bucket_of: of each parameter of the store, by id()."""

    def __init__(self, model: nn.Module, store: DeviceStore, bucket_of: dict[int, int], buckets: int) -> None:
        self._store = store
        self._thread = Worker("zcomm-step")
        self._running: Call[None] | None = None
        self._sent = [threading.Event() for _ in range(buckets)]
        self._waiting: set[int] = set()  # buckets with new weights that torch's stream does not wait for yet
        self._modules: list[nn.Module] = []
        self._handles: list[Any] = []
        store.on_sent = lambda bucket: self._sent[bucket].set()
        for module in model.modules():
            needs = {name: bucket_of[id(p)] for name, p in module._parameters.items() if id(p) in bucket_of}
            if needs:
                self._watch(module, needs)

    def _watch(self, module: nn.Module, needs: dict[str, int]) -> None:
        every = tuple(set(needs.values()))
        module._parameters = LateParameters(module._parameters, self, needs)
        self._modules.append(module)
        self._handles.append(module.register_forward_pre_hook(Hook(lambda module, args: self.need(every))))

    def start(self, update: Callable[[], None]) -> None:
        """Run ``update`` on the thread. What torch's stream has been given so far uses the old weights."""
        self.join()
        for event in self._sent:
            event.clear()
        self._waiting = set(range(len(self._sent))).difference(self._store.on_device)  # these are torch's stream's own
        self._running = self._thread.submit(self._run, update)

    def _run(self, update: Callable[[], None]) -> None:
        try:
            with torch.no_grad():
                update()
        finally:
            for event in self._sent:
                event.set()

    def need(self, buckets: Iterable[int]) -> None:
        """Let torch's stream use the new weights of these buckets from here on."""
        if not self._waiting:
            return
        for bucket in buckets:
            if bucket in self._waiting:
                self._sent[bucket].wait()
                if self._running is not None and self._running.done():
                    self._running.result()  # raises the thread's error, if it has ended with one
                self._store.arrive_bucket(bucket)
                self._waiting.discard(bucket)

    def join(self) -> None:
        """Wait for the step, and make torch's stream wait for all new weights."""
        if self._running is not None:
            self._running.result()
            self._running = None
            self._waiting.clear()
            self._store.arrive()

    def forget(self) -> None:
        """End a step that failed: all weights are to be loaded."""
        if self._running is not None:
            self._running.wait()
            self._running = None
            self._waiting.clear()

    def is_running(self) -> bool:
        return self._running is not None and not self._running.done()

    def close(self) -> None:
        """After failures too."""
        self._thread.close()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for module in self._modules:
            module._parameters = dict(dict.items(module._parameters))
        self._modules.clear()


class LateParameters(dict[str, Any]):
    """A module's ``_parameters``: a read waits for the weights."""

    def __init__(self, plain: dict[str, Any], async_step: AsyncStep, needs: dict[str, int]) -> None:
        super().__init__(plain)
        self._async_step, self._needs = async_step, needs

    def __getitem__(self, name: str) -> Any:
        if name in self._needs:
            self._async_step.need((self._needs[name],))
        return super().__getitem__(name)

    def items(self) -> Any:
        self._async_step.need(self._needs.values())
        return super().items()

    def values(self) -> Any:
        self._async_step.need(self._needs.values())
        return super().values()

    def __reduce__(self) -> Any:  # copies of the model are ordinary
        return dict, (dict(self.items()),)
