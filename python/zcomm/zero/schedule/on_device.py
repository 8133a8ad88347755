"""DeviceUpdates: updates of buckets that have weights, gradient and optimizer state only on the devices.

[Note: buckets on devices] Buckets that need not be offloaded are never copied to the host, if there is one rank or the
ranks' devices reach each other (``peers``). Gradients add up on the device. The update is a row of kernels on torch's
stream behind them. Each rank's part of the weights is changed in place. The other parts are gathered next, in stage 3
when a unit is used. Later work of that stream sees the new weights. The host only waits for other ranks' calls, and
steps the other buckets meanwhile. The words of an exact sum are copied to the host for the norm.
Without such buckets every method does nothing.
Thread rule: the main thread: torch's stream is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from zcomm import _core
from zcomm.memory.device_streams import DeviceLane
from zcomm.zero.gradients.norm import DeviceSquares, GradientNorm
from zcomm.zero.gradients.peers import DeviceTransport
from zcomm.zero.layout.flat import FlatBucket
from zcomm.zero.optim_state.device import DeviceState
from zcomm.zero.optim_state.ram import Run, ShardStep, Sums
from zcomm.zero.parts import Parts

RunsOf = Callable[[FlatBucket], Sequence[Run]]


class DeviceUpdates:
    """The buckets of ``parts`` on the devices. arena: of page-locked memory."""

    def __init__(self, parts: Parts, arena: _core.PinnedArena) -> None:
        self._store = parts.store
        self._buckets = [bucket for bucket in parts.geometry.buckets if bucket.index in parts.store.on_device]
        self.numbers = {bucket.index for bucket in self._buckets}
        if self._buckets:
            transport = parts.reducer.accumulators.transports[self._buckets[0].index]
            place = parts.state.of[self._buckets[0].index]
            assert isinstance(transport, DeviceTransport) and isinstance(place, DeviceState)
            self._gradients, self._state = transport, place
        kinds = {bucket.counted for bucket in self._buckets}
        self._squares = {kind: DeviceSquares(cast(DeviceLane, parts.lane), arena, kind) for kind in kinds}

    def measure(self, runs: RunsOf, sums: Sums) -> None:
        """Add the rule's terms of whole parameters to ``sums``."""
        for bucket in self._buckets:
            self._gradients.finish(bucket)
            weight = self._store.device_shard(bucket)
            self._state.measure(ShardStep(bucket.index, weight, self._gradients.sums[bucket.index], runs(bucket)), sums)

    def step(self, runs: RunsOf) -> None:
        """Queue the step of all buckets on torch's stream, behind their gradients. An error on one rank is raised when
        no other waits for this one."""
        failed: BaseException | None = None
        for bucket in self._buckets:
            self._gradients.finish(bucket)
            grad = self._gradients.sums[bucket.index]
            try:
                if failed is None:
                    if self._store.edited(bucket):
                        self._state.take_edits(bucket.index, self._store.device_shard(bucket))
                    self._state.step_shard(
                        ShardStep(bucket.index, self._store.device_shard(bucket), grad, runs(bucket))
                    )
            except BaseException as error:
                failed = error
            self._store.spread_on_device(bucket)
        if self._buckets:
            self._store.arrive_on_device()
        if failed is not None:
            raise failed

    def start_norm(self) -> None:
        """Queue the squares of their gradients, stepped or not, on torch's stream."""
        for squares in self._squares.values():
            squares.begin()
        for bucket in self._buckets:
            self._gradients.finish(bucket)
            self._squares[bucket.counted].add(self._gradients.sums[bucket.index])
        for squares in self._squares.values():
            squares.send()

    def end_norm(self, norm: GradientNorm) -> None:
        """Add them to ``norm``. Waits for the device."""
        for squares in self._squares.values():
            squares.end(norm)
