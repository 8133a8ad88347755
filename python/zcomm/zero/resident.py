"""Resident buckets: weights, gradient and optimizer state are on the device alone, where a world of one steps them.

[Note: resident buckets] In stages 0 to 2 a world of one has nobody to reduce with or to give weights to, so what need
not be offloaded crosses no bus: gradients add up on the device, the step is kernels on torch's stream behind them, the
weights are changed in place, and what is given to that stream next sees them. The host waits for none of it, and steps
the other buckets meanwhile. Of the norm the words of an exact sum come to the host.
Thread rule: the main thread: torch's stream is that of whoever calls.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from zcomm.zero.device_norm import DeviceSquares
from zcomm.zero.device_state import DeviceState
from zcomm.zero.device_weights import DeviceStore
from zcomm.zero.geometry import FlatBucket
from zcomm.zero.norm import GradientNorm
from zcomm.zero.resident_gradients import ResidentReducer
from zcomm.zero.state import Run, ShardStep


class Resident:
    """The buckets, and where their parts are."""

    def __init__(
        self,
        buckets: Sequence[FlatBucket],
        state: DeviceState,
        store: DeviceStore,
        reducer: ResidentReducer,
        squares: DeviceSquares,
    ) -> None:
        self._buckets = buckets
        self.numbers: Collection[int] = {bucket.index for bucket in buckets}
        self._state, self._store, self._reducer, self._squares = state, store, reducer, squares

    def step(self, runs: Callable[[FlatBucket], list[Run]]) -> None:
        """Put the step of all of them on torch's stream, behind their gradients."""
        for bucket in self._buckets:
            self._reducer.finish(bucket)
            grad, weight = self._reducer.shard_view(bucket), self._store.there(bucket)
            self._state.step_shard(ShardStep(bucket.index, weight, grad, runs(bucket)))

    def start_norm(self) -> None:
        """Put the squares of their gradients, stepped or not, on torch's stream."""
        self._squares.begin()
        for bucket in self._buckets:
            self._reducer.finish(bucket)
            self._squares.add(self._reducer.shard_view(bucket))
        self._squares.send()

    def end_norm(self, norm: GradientNorm) -> None:
        """Add them to ``norm``. Waits for the device."""
        self._squares.end(norm)
