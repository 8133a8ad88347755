"""FromDevices: gathers units into their slots from shards that are resident on the ranks' devices.

Gathering a unit's resident buckets is one all_gather of ``peers``, issued in the order of the calls. All ranks must use
their units in the same order, as on the CPU. Gradients use another communicator, because ranks may issue them in
another order concurrently. A gather is ordered after all work submitted to torch's stream before the call, which
includes the last use of the slot. On the unit's use the host waits until all ranks have called the gather, and torch's
stream waits for the weights. A slot from ``add`` is torch's memory, which no other rank has mapped. In a world of one,
a copy on the ``h2d`` stream, as for offloaded units, takes the gather's place.
Thread rule: as UnitManager; on the main thread, or autograd's.
"""

from __future__ import annotations

import time
from contextlib import suppress

from zcomm.comm.communicator import Communicator
from zcomm.comm.work import Work
from zcomm.memory.device_streams import DeviceLane, Peers
from zcomm.zero.params.device_shards import DeviceShards
from zcomm.zero.units.device import DeviceSlot, Filler
from zcomm.zero.units.memory import add_remedy
from zcomm.zero.units.unit import Unit


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
