"""Optimizer state in a device's memory.

[Note: state on a device] The tiles are the same as in RAM ([Note: state tile]), back to back for each bucket. So a
kernel takes a shard in one call. The arithmetic and the bits are the CPU's. On the device fp16's master is the first of
a tile (the core's order). A reader of a tile sees it as in RAM. Outside of a step a tile is copied to the host to be
read or changed.
DeviceState steps on weights and gradients on the device (schedule/on_device.py); StagedState copies them there.
[Note: staged step] If ranks reduce gradients and publish weights through host memory, state on a device is stepped in
stages. A shard's gradient and weights are copied to the device (lane ``h2d``), and stepped behind these copies on the
same stream. The weights are copied back (lane ``d2h``). Pieces of PIECE_TILES tiles go through a ring of SLOTS slots.
The host waits for a shard's last weights before it continues. All later work (other ranks, copies to the device) is the
same as after a step on the host. torch's rules step on torch's stream, which waits for the slot; ``d2h`` waits for that
stream.
Thread rule: as ShardState; a step is put on torch's current stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from zcomm import _core
from zcomm.memory.device_streams import DeviceLane
from zcomm.zero.layout import tiles
from zcomm.zero.layout.tiles import TilePart, cut
from zcomm.zero.optim_state.ram import ShardStep, Sums, WholeState, runs_in
from zcomm.zero.rules.rule import Rule

PLACE_NBYTES = 256  # the state of a bucket begins at multiples of it


class DeviceState(WholeState):
    """State on a device. Raises: CudaError if the device has no room."""

    slot_nbytes = 0  # bytes of staging on the device
    adds_squares = False

    def __init__(self, counts: Sequence[int], dtype: torch.dtype, rule: Rule, lane: DeviceLane) -> None:
        super().__init__(counts, dtype, rule)
        self._lane = lane
        self._master_first = rule.master_first and dtype == torch.float16
        self._allocate()

    def _allocate(self) -> None:
        sizes = [self.form.nbytes(count) for count in self.counts]
        rooms = [-(-size // PLACE_NBYTES) * PLACE_NBYTES for size in sizes]
        self.nbytes_by_tier = {"device": sum(rooms)}
        memory = self._lane.empty(sum(rooms), torch.uint8, "optimizer state")
        self._states = [room[:size] for room, size in zip(memory.split(rooms), sizes, strict=True)]

    @contextmanager
    def tile(self, bucket: int, part: slice, *, load: bool = True, store: bool = False) -> Iterator[torch.Tensor]:
        there, count = self._part(bucket, part), part.stop - part.start
        host = there.to("cpu", copy=True) if load else torch.empty(there.numel(), dtype=torch.uint8)
        if load and self._master_first:
            host = self.form.reordered(host, count, False)
        yield host
        if store:
            there.copy_(self.form.reordered(host, count, True) if self._master_first else host)

    def step_shard(self, shard: ShardStep) -> None:
        """Launch the step of one shard; the host does not wait."""
        part = slice(0, self.counts[shard.bucket])
        self._put(self._lane.current(), shard, part, shard.weight, shard.grad)

    def measure(self, shard: ShardStep, sums: Sums) -> None:
        stream = self._lane.current()
        for tile in cut(self.counts[shard.bucket]):
            state = self._part(shard.bucket, tile)
            weight, grad = (each[tile].to(state.device) for each in (shard.weight, shard.grad))
            for begin, end, hyper in runs_in(shard.runs, tile):
                part = TilePart(weight, grad, state, begin, end, tile.start)
                sums.add_on(stream, hyper.param, self.rule.terms(self.form, part, hyper))

    def take_edits(self, bucket: int, weight: torch.Tensor) -> None:
        """Make fp16 weights that the program has changed the master. ``weight`` is on the device, as for a step. The
        host does not wait."""
        if self.form.dtype != torch.float16:
            return  # the weight is the master, or its upper half
        for part in cut(self.counts[bucket]):
            state, here = self._part(bucket, part), weight[part]
            size = 4 * here.numel()
            master = (state[:size] if self._master_first else state[-size:]).view(torch.float32)
            same = master.to(torch.float16).view(torch.int16) == here.view(torch.int16)
            torch.where(same, master, here.to(torch.float32), out=master)

    def _put(
        self, stream: _core.Stream, shard: ShardStep, part: slice, weight: torch.Tensor, grad: torch.Tensor
    ) -> None:
        """Step ``part`` of a shard with weight and gradient on the device."""
        whole = self.rule.on_device == "stream"  # torch's rules take the arrays of one tile
        for inside in [slice(0, part.stop - part.start)] if whole else cut(part.stop - part.start):
            tile = slice(part.start + inside.start, part.start + inside.stop)
            state = self._part(shard.bucket, tile)
            for begin, end, hyper in runs_in(shard.runs, tile):
                own = TilePart(weight[inside], grad[inside], state, begin, end, tile.start)
                self.rule.step_on(stream, self.form, own, hyper)


PIECE_TILES = 32  # 8 MiB of gradient
SLOTS = 3


class _Slot:
    """Memory for one piece. Events: ready: both are on the device; stepped; freed: the weights are on the host
    again."""

    def __init__(self, count: int, dtype: torch.dtype, lane: DeviceLane) -> None:
        self.grad = lane.empty(count, torch.float32, "gradients of a step")
        self.weight = lane.empty(count, dtype, "weights of a step")
        self.ready, self.stepped, self.freed = (lane.event() for _ in range(3))
        lane.recorded(self.freed)  # the memory's last owner, in the order of torch's stream


class StagedState(DeviceState):
    """See [Note: staged step]. Memory: SLOTS slots next to the state."""

    def __init__(self, counts: Sequence[int], dtype: torch.dtype, rule: Rule, lane: DeviceLane) -> None:
        super().__init__(counts, dtype, rule, lane)
        largest = min(max(self.counts), PIECE_TILES * tiles.TILE_COUNT)
        self._slots = [_Slot(largest, dtype, lane) for _ in range(SLOTS)]
        self.slot_nbytes = sum(slot.grad.nbytes + slot.weight.nbytes for slot in self._slots)
        self._next = 0

    def step_shard(self, shard: ShardStep) -> None:
        """Step one shard. When it returns, the weights are in host memory."""
        used: list[Any] = []
        for part in cut(self.counts[shard.bucket], PIECE_TILES):
            slot = self._slots[self._next % SLOTS]
            self._next += 1
            self._step_piece(shard, part, slot)
            used.append(slot.freed)
        self._await(used[-SLOTS:])

    def _await(self, events: Sequence[Any]) -> None:
        for event in events:
            self._lane.wait(event)

    def _step_piece(self, shard: ShardStep, part: slice, slot: _Slot) -> None:
        count = part.stop - part.start
        grad, weight = slot.grad[:count], slot.weight[:count]
        copies = [(grad, shard.grad[part]), (weight, shard.weight[part])]
        self._lane.h2d.copy(copies, [slot.freed], slot.ready)

        def step(stream: _core.Stream) -> None:
            self._put(stream, shard, part, weight, grad)

        if self.rule.on_device == "torch":
            stream = self._lane.current()
            stream.wait(slot.ready)
            step(stream)
            stream.record(slot.stepped)
        else:
            self._lane.h2d.run(step, slot.stepped)
        self._lane.d2h.copy([(shard.weight[part], weight)], [slot.stepped], slot.freed)

    def renew(self) -> None:
        """Wait until no weights of a failed step are in flight."""
        self._lane.wait(self._lane.recorded(self._lane.event()))
        self._lane.wait_for(self._lane.h2d, self._lane.d2h)

    def close(self) -> None:
        super().close()
        self._slots.clear()
