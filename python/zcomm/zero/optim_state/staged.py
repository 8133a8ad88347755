"""Optimizer state on a device, of shards with weights and gradients in host memory.

[Note: staged step] If ranks reduce gradients and publish weights through host memory, state on a device is stepped in
stages. A shard's gradient and weights are copied to the device (lane ``h2d``), and stepped behind these copies on the
same stream. The weights are copied back (lane ``d2h``). Pieces of PIECE_TILES tiles go through a ring of SLOTS slots.
The host waits for a shard's last weights before it continues. All later work (other ranks, copies to the device) is the
same as after a step on the host. torch's rules step on torch's stream, which waits for the slot; ``d2h`` waits for that
stream.
Thread rule: as ShardState.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from zcomm import _core
from zcomm.memory.device_streams import DeviceLane
from zcomm.zero.layout import tiles
from zcomm.zero.layout.tiles import cut
from zcomm.zero.optim_state.device import DeviceState
from zcomm.zero.optim_state.ram import ShardStep
from zcomm.zero.rules.rule import Rule

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
