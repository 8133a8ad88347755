"""Fillers of a unit's slot on a device: FromHost copies from host memory or a swap file, FromDevices gathers.

FromHost. If host memory holds the whole unit (a world of one, or a copy that the host's ranks share), it is copied. No
gather is needed then, so ranks may use their units in any order. An update of the unit waits for its last copy.
Otherwise the gathering thread of each rank reads its shard into a host slot, as on the CPU. The gathered slot is
copied. If gathers run updates (schedule/forward.py), the gathering thread updates the shard first: of a whole unit in
its source, otherwise in the host slot.

FromDevices. Gathering a unit's resident buckets is one all_gather of ``peers``, issued in the order of the calls. All
ranks must use their units in the same order, as on the CPU. Gradients use another communicator, because ranks may issue
them in another order concurrently. A gather is ordered after all work submitted to torch's stream before the call,
which includes the last use of the slot. On the unit's use the host waits until all ranks have called the gather, and
torch's stream waits for the weights. A slot from ``add`` is torch's memory, which no other rank has mapped. In a world
of one, a copy on the ``h2d`` stream, as for offloaded units, takes the gather's place.
Thread rule: as UnitManager; ``_gather_to`` on the gathering thread.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

import torch

from zcomm.comm.communicator import Communicator
from zcomm.comm.tensors import tensor_of
from zcomm.comm.work import Work
from zcomm.memory.device_streams import DeviceLane, Peers
from zcomm.zero.layout.flat import FlatBucket
from zcomm.zero.params.device_shards import DeviceShards
from zcomm.zero.units.device import DeviceSlot, Filler
from zcomm.zero.units.gather import ShardGather
from zcomm.zero.units.memory import add_remedy
from zcomm.zero.units.unit import Unit

HOST_SLOTS = 2  # units in flight from a swap file or from other ranks' memory


def plan_nbytes(whole_nbytes: Collection[int]) -> int:
    """Return the bytes of the host slots for units of these bytes."""
    return HOST_SLOTS * max(whole_nbytes, default=0)


class FromHost(Filler):
    """Filler of the buckets resident on no device. always_gathers: gather also units that host memory has whole.

    Memory: host slots of the largest unit, if units are gathered.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        gather: ShardGather,
        dtype: torch.dtype,
        lane: DeviceLane,
        always_gathers: bool = False,
    ) -> None:
        self._gather, self._lane = gather, lane
        self._buckets = {unit.index: self._of(unit) for unit in units if not unit.by_rows}
        here = [bucket for buckets in self._buckets.values() for bucket, _ in buckets]
        self.shared_whole = (
            bool(here) and not always_gathers and all(gather.source.whole(bucket) is not None for bucket in here)
        )
        self._copied = {unit.index: lane.event() for unit in units if self.shared_whole}  # its last copy has ended
        self.slots: list[tuple[torch.Tensor, Any]] = []  # each with the event recorded after the copy from it
        self._memories: list[Any] = []
        if here and not self.shared_whole:
            sizes = [sum(b.count for b, _ in buckets) * dtype.itemsize for buckets in self._buckets.values()]
            self._memories = [gather.allocate(plan_nbytes(sizes) // HOST_SLOTS) for _ in range(HOST_SLOTS)]
            flats = [tensor_of(memory, dtype) for memory in self._memories]
            self.slots = [(lane.lock(flat), lane.event()) for flat in flats]
        self.gathers = 0

    def _of(self, unit: Unit) -> list[tuple[FlatBucket, int]]:
        """Return the unit's buckets that are copied from the host, and their begins in its slot (elements)."""
        on_host = self._gather.source.on_host
        return [(bucket, begin) for bucket, begin in unit.bucket_begins() if bucket.index in on_host]

    def start(self, unit: Unit, slot: DeviceSlot) -> None:
        if not self._buckets[unit.index]:
            return
        if not self.shared_whole:
            unit.gathering = self._gather.submit(self._gather_to, unit, slot)
        elif self._gather.updates.waits:
            unit.gathering = self._gather.submit(self._update_and_copy, unit, slot)
        else:
            self._copy_whole(unit, slot)

    def _wholes(self, unit: Unit) -> list[torch.Tensor]:
        wholes = [self._gather.source.whole(bucket) for bucket, _ in self._buckets[unit.index]]
        return [whole for whole in wholes if whole is not None]

    def _copy_whole(self, unit: Unit, slot: DeviceSlot) -> None:
        self._copy(unit, self._wholes(unit), slot, self._copied[unit.index])

    def _update_and_copy(self, unit: Unit, slot: DeviceSlot) -> None:
        """Run the unit's pending updates, and copy it to the device. Runs on the gathering thread."""
        self._lane.wait(self._copied[unit.index])
        self._gather.update([bucket for bucket, _ in self._buckets[unit.index]])
        self._copy_whole(unit, slot)

    def _copy(self, unit: Unit, wholes: Sequence[torch.Tensor], slot: DeviceSlot, *done: Any) -> None:
        """Copy from host to device as soon as the slot is free."""
        begins = [begin for _, begin in self._buckets[unit.index]]
        copies = [(slot.flat[at : at + w.numel()], w) for at, w in zip(begins, wholes, strict=True)]
        self._lane.h2d.copy(copies, [slot.freed], slot.ready, *done)

    def _gather_to(self, unit: Unit, slot: DeviceSlot) -> None:
        """Fill a host slot (collective) and copy it to the device. Runs on the gathering thread."""
        number = self.gathers % HOST_SLOTS
        self.gathers += 1
        flat, copied = self.slots[number]
        self._lane.wait(copied)  # before the barrier that allows other ranks to overwrite the host slot
        buckets = [bucket for bucket, _ in self._buckets[unit.index]]
        wholes = flat[: sum(bucket.count for bucket in buckets)].split([bucket.count for bucket in buckets])
        self._gather.fill(unit, buckets, wholes)
        self._copy(unit, wholes, slot, copied)

    def wait_copied(self, unit: Unit) -> None:
        if self.shared_whole:
            self._lane.wait(self._copied[unit.index])

    @property
    def window_nbytes(self) -> int:
        host = sum(flat.nbytes for flat, _ in self.slots)
        return host // self._gather.comm.local_world_size if self._gather.shared else host

    def close(self) -> None:
        self._memories.clear()
        self.slots.clear()


class FromDevices(Filler):
    """Filler of the buckets resident on devices. peers: communicator of the ranks' devices, not shared."""

    def __init__(self, shards: DeviceShards, peers: Peers, lane: DeviceLane) -> None:
        self._shards, self._peers, self._lane = shards, peers, lane
        self._works: dict[int, Work] = {}  # by number of the unit: pending gathers
        self._asked = lane.event()  # torch's stream at the submission of a copy: earlier updates of shards come first

    def start(self, unit: Unit, slot: DeviceSlot) -> None:
        stay = [(bucket, begin) for bucket, begin in unit.bucket_begins() if self._shards.stays(bucket)]
        if not stay:
            return
        shards = [self._shards.device_shard(bucket) for bucket, _ in stay]
        wholes = [slot.flat[begin : begin + bucket.count] for bucket, begin in stay]
        if isinstance(self._peers, Communicator):
            self._lane.current().wait(slot.freed)
            _, work = self._peers.all_gather(shards, out=wholes, async_op=True, name=unit.gather_name)
            assert isinstance(work, Work)
            self._works[unit.index] = work
        else:
            after = [slot.freed, self._lane.recorded(self._asked)]
            self._lane.h2d.copy(zip(wholes, shards, strict=True), after, slot.ready)

    def wait(self, unit: Unit) -> None:
        work = self._works.get(unit.index)
        if work is None:
            return
        start = time.perf_counter()
        try:
            work.wait()
        except Exception as error:
            add_remedy(error)
            del self._works[unit.index]
            raise
        finally:
            self.waited_s += time.perf_counter() - start
        del self._works[unit.index]

    def cancel(self, unit: Unit) -> None:
        work = self._works.get(unit.index)
        if work is not None:  # the gather of the unit's other buckets failed
            with suppress(Exception):
                work.wait()
            del self._works[unit.index]

    def is_waiting(self) -> bool:
        return not all(work.done() for work in self._works.values())

    def give_up(self) -> None:
        self._peers.close()

    @property
    def allocation_count(self) -> int:
        return self._peers.memory()["allocation_count"]

    def close(self) -> None:
        self._works.clear()
        self._peers.close()
