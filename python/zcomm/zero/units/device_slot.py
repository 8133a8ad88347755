"""DeviceSlot: memory on a device, with the events that order its uses.

``ready`` is recorded on the stream that fills the slot; torch's stream waits for it before it uses the slot. ``freed``
is recorded on torch's stream after the last use of the slot; the next copy into the slot waits for it.
Thread rule: as UnitManager.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from zcomm.memory.device_streams import DeviceLane

if TYPE_CHECKING:
    from zcomm.zero.units.unit import Unit


class DeviceSlot:
    """Device memory for one unit at a time."""

    def __init__(self, flat: torch.Tensor, lane: DeviceLane) -> None:
        self.flat = flat
        self.ready = lane.event()
        self.freed = lane.recorded(lane.event())  # the memory's last owner, in the order of torch's stream
        self.holder: Unit | None = None
