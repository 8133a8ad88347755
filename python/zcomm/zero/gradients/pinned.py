"""Gradients of a model on a device: through slots there and pinned slots on the host into host accumulators.

[Note: gradients from a device] The hooks copy gradients into a device slot on torch's stream. A complete bucket is
copied, on the lane's ``out`` stream and once all streams that wrote into the slot have come there, into a pinned host
slot of the communicator's memory; its reduce_scatter begins when the copy has landed. Device slots form a ring: who
writes into one first makes its stream wait for the copy that left it, so backward is put on the device without
waiting. Host slots form a longer ring (HOST_SLOTS_NBYTES): only where all of them are full the host waits, for the
oldest reduce_scatter. What is added, and in which order, is as on the CPU: the same gradients give the same bits.
A copy of a bucket also comes after all copies of weights to the device that were begun before it: whoever has seen the
sum of a bucket knows that no rank reads the weights of the last step any more.

[Note: squares before the gradients] What a world of one adds up in a single pass is what is in the device slots, so its
squares are summed there, before each bucket's copy: the norm is known when backward ends on the device, while
gradients are still on their way, and the host does not read them twice. A second pass, or a gradient that was set from
outside, makes sums that only the host has; their squares are summed there.
Thread rule: as GradientReducer; autograd calls the hooks of a device on a thread of its own, one at a time.
Source: ZeRO-Offload (arXiv:2101.06840).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

from zcomm.comm.communicator import Communicator
from zcomm.memory.device_streams import DeviceLane, own_pages
from zcomm.zero.gradients.device_norm import DeviceSquares
from zcomm.zero.gradients.norm import GradientNorm
from zcomm.zero.gradients.reducer import SLOTS, GradientReducer
from zcomm.zero.layout.flat import FlatBucket, Geometry

HOST_SLOTS_NBYTES = 1 << 30  # so far may backward run ahead of the host; at least SLOTS slots, at most all buckets


def host_slots(buckets: int, slot_nbytes: int) -> int:
    """How many there are."""
    return min(buckets, max(SLOTS, HOST_SLOTS_NBYTES // max(slot_nbytes, 1)))


class DeviceReducer(GradientReducer):
    """resident: buckets that do not leave the device (peers.py).
    weights_came: the event after which no copy of older weights to the device is on its way.

    squares: of what leaves (None: more than one rank).
    before_reduce: called before the accumulators of a step are written (who still reads those of the last one ends).
    Memory: device: min(SLOTS, buckets) slots; host: host_slots() slots, and the accumulators.
    """

    on_host = False

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        geometry: Geometry,
        comm: Communicator,
        dtype: torch.dtype,
        replicated: bool,
        overlap: bool,
        names: Sequence[str],
        lane: DeviceLane,
        weights_came: Any,
        resident: Collection[int] = (),
        squares: DeviceSquares | None = None,
    ) -> None:
        self._lane = lane
        self._squares = squares
        self._squared = False  # all that has left since zero()
        self._weights_came = weights_came
        self._leaving = [bucket for bucket in reversed(geometry.buckets) if bucket.index not in resident]
        self._turns = {bucket.index: turn for turn, bucket in enumerate(self._leaving)}
        super().__init__(params, geometry, comm, dtype, replicated, overlap, names)

    def _make_slots(self, largest: int) -> list[torch.Tensor]:
        count, lane = self._slot_count, self._lane
        leaves = max((bucket.count for bucket in self._leaving), default=0)
        self._host_slots = [
            lane.lock(self._comm.empty(leaves, self._dtype))
            for _ in range(host_slots(len(self._leaving), leaves * self._dtype.itemsize))
        ]
        self._works = [None] * len(self._host_slots)
        self._left = [lane.event() for _ in range(count)]  # the copy that left the device slot is over
        self._writers: list[dict[int, Any]] = [{} for _ in range(count)]  # streams, by native handle
        self._filled = [lane.event() for _ in range(count)]
        self._landed = [lane.event() for _ in self._host_slots]
        self._afters: list[Any] = [None] * len(self._host_slots)
        return self._device_slots(count, largest)

    def _make_accumulators(self) -> torch.Tensor:
        return super()._make_accumulators() if self.replicated else own_pages(self._geometry.shard_count)

    def _device_slots(self, count: int, largest: int) -> list[torch.Tensor]:
        return [self._lane.empty(largest, self._dtype, "gradients in flight") for _ in range(count)]

    @property
    def nbytes_by_tier(self) -> dict[str, dict[str, int]]:
        slots = sum(slot.nbytes for slot in self._slots) + self._local_nbytes
        host = sum(slot.nbytes for slot in self._host_slots)
        return {"device": {"slots": slots}, "cpu": {"gradients": self.accumulators.nbytes, "slots": host}}

    def _number(self, bucket: int) -> int:
        return self._turns[bucket] % len(self._works)

    def _finish_one(self, bucket: FlatBucket) -> None:
        if self._turns[bucket.index] >= len(self._turns) - len(self._works):
            self._wait(self._number(bucket.index))

    def _enter(self, bucket: int) -> None:
        """torch's current stream may write into the slot on the device."""
        number = self._position[bucket] % self._slot_count
        stream, writers = self._lane.current(), self._writers[number]
        if id(stream) not in writers:
            stream.wait(self._left[number])
            writers[id(stream)] = stream

    def _reduce(self, bucket: FlatBucket, slot: torch.Tensor) -> None:
        self.before_reduce()
        place, number = self._position[bucket.index] % self._slot_count, self._number(bucket.index)
        self._wait(number)  # the bucket that was there before has been added
        host = self._host_slots[number][: bucket.count]
        after = [self._weights_came, *self._square(bucket, slot, self._written(place))]
        self._lane.out.carry([(host, slot)], after, self._landed[number], self._left[place])
        self._after(number)
        super()._reduce(bucket, host)

    def _square(self, bucket: FlatBucket, slot: torch.Tensor, filled: list[Any]) -> list[Any]:
        """Behind the events ``filled``; returns what the slot's copy waits for."""
        self._squared = False
        if self._squares is None or not self._fresh or self.passes > 1:
            return filled
        if self._turns[bucket.index] == 0:
            self._squares.begin()
        return [self._squares.add(slot, filled)]

    def _end_pass(self) -> None:
        first = self._touched and self._fresh
        super()._end_pass()
        self._squared = first and self.passes == 1 and bool(self._leaving) and self._squares is not None

    @property
    def knows_squares(self) -> bool:
        return self._squared

    def send_squares(self) -> None:
        if self._squared:
            assert self._squares is not None
            self._squares.send()

    def add_squares(self, norm: GradientNorm, buckets: Iterable[FlatBucket]) -> None:
        if self._squared:
            assert self._squares is not None
            self._squares.end(norm)
        else:
            super().add_squares(norm, buckets)

    def edited(self) -> None:
        self._squared = False

    def zero(self, set_to_none: bool = True) -> None:
        self._squared = False
        super().zero(set_to_none)

    def _after(self, number: int) -> None:
        """What the communicator is given next begins when the host slot is filled."""
        self._afters[number] = self._comm._core.after(self._landed[number], True)  # dropping it would wait

    def _written(self, place: int) -> list[Any]:
        """Events on the streams that have written into a device slot; what comes next into it waits anew."""
        events: list[Any] = []
        for stream in self._writers[place].values():
            event = self._filled[place] if not events else self._lane.event()
            stream.record(event)
            events.append(event)
        self._writers[place].clear()
        return events

    def close(self) -> None:
        super().close()
        self._host_slots.clear()
