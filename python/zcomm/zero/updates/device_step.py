"""DeviceStep: the step of buckets with weights, gradient and optimizer state on the devices alone.

[Note: buckets on devices] What need not be offloaded does not come to the host, where a rank is alone or the ranks'
devices reach each other (``peers``). Gradients add up on the device, and the step is kernels on torch's stream behind
them. The weights are changed in place, each rank's part. The others' parts are gathered then, in stage 3 when a unit is
used. What is given to that stream next sees the new weights. The host waits for other ranks' calls alone, and steps the
other buckets meanwhile. Of the norm the words of an exact sum come to the host.
Thread rule: the main thread: torch's stream is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from zcomm.zero.gradients.device_norm import DeviceSquares
from zcomm.zero.gradients.norm import GradientNorm
from zcomm.zero.gradients.peers import PeersTransport
from zcomm.zero.layout.flat import FlatBucket
from zcomm.zero.optim_state.device import DeviceState
from zcomm.zero.optim_state.ram import Run, ShardStep, Sums
from zcomm.zero.params.stores import ParameterStore


class DeviceStep:
    """The buckets, and where their parts are."""

    def __init__(
        self,
        buckets: Sequence[FlatBucket],
        state: DeviceState,
        store: ParameterStore,
        gradients: PeersTransport,
        squares: DeviceSquares,
    ) -> None:
        self._buckets = buckets
        self.numbers: Collection[int] = {bucket.index for bucket in buckets}
        self._state, self._store, self._gradients, self._squares = state, store, gradients, squares

    def measure(self, runs: Callable[[FlatBucket], list[Run]], sums: Sums) -> None:
        """Add to ``sums`` what the rule needs of whole parameters."""
        grads = self._gradients.sums
        for bucket in self._buckets:
            self._gradients.finish(bucket)
            weight = self._store.there(bucket)
            self._state.measure(ShardStep(bucket.index, weight, grads[bucket.index], runs(bucket)), sums)

    def step(self, runs: Callable[[FlatBucket], list[Run]]) -> None:
        """Put the step of all of them on torch's stream, behind their gradients. An error on one rank is raised when
        no other waits for this one."""
        grads = self._gradients.sums
        failed: BaseException | None = None
        for bucket in self._buckets:
            self._gradients.finish(bucket)
            grad = grads[bucket.index]
            try:
                if failed is None:
                    if self._store.edited(bucket):
                        self._state.take_edits(bucket.index, self._store.there(bucket))
                    self._state.step_shard(ShardStep(bucket.index, self._store.there(bucket), grad, runs(bucket)))
            except BaseException as error:
                failed = error
            self._store.spread_on_device(bucket)
        self._store.arrive_on_device()
        if failed is not None:
            raise failed

    def start_norm(self) -> None:
        """Put the squares of their gradients, stepped or not, on torch's stream."""
        self._squares.begin()
        for bucket in self._buckets:
            self._gradients.finish(bucket)
            self._squares.add(self._gradients.sums[bucket.index])
        self._squares.send()

    def end_norm(self, norm: GradientNorm) -> None:
        """Add them to ``norm``. Waits for the device."""
        self._squares.end(norm)
