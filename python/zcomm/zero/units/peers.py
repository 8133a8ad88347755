"""Stage 3 whose shards stay on the ranks' devices, all or some: what stays comes to a unit's place from all of them.

Places, and when a unit is in which, are those of device.py, and so is how offloaded shards come there. A gather
of what stays is one all_gather of ``peers``, whose order is that of the calls, so all ranks must use their units in the
same order, as on the CPU; gradients, whose order beside them may differ between ranks, go by another communicator. A
gather comes after what torch's stream has been given when it is called, which includes what used the place before. Its
end is waited for where the unit is wanted: the host until all ranks have called it, torch's stream until the weights
are there. Places that a unit got for itself alone (``_move``) are torch's memory, which no other rank has open. A rank
that is alone copies, on the stream by which offloaded ones come.
Thread rule: as UnitStore; gathers of what stays are called on the main thread, or autograd's.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import suppress

import torch

from zcomm import _core
from zcomm.comm.communicator import Communicator
from zcomm.comm.work import Work
from zcomm.memory.device_streams import DeviceLane
from zcomm.zero.layout.flat import FlatBucket
from zcomm.zero.params.device_shards import DeviceSource
from zcomm.zero.units.device import DeviceUnitStore, Place
from zcomm.zero.units.store import IN_STEP
from zcomm.zero.units.unit import Unit


class ResidentUnitStore(DeviceUnitStore):
    """source: a DeviceSource of ``peers``, which is between the ranks' devices, and the store's own (None: the rank is
    alone). resident: numbers of the buckets whose weights, gradients and state are there.
    Memory: as DeviceUnitStore."""

    _source: DeviceSource
    _home = "device"

    def __init__(self, *how: object, lane: DeviceLane, peers: Communicator | None, resident: Collection[int]) -> None:
        self._peers = peers
        self._works: dict[int, Work] = {}  # by number of the unit: gathers that nobody has waited for
        self._asked = lane.event()  # the shards as torch's stream has them when a copy of them is asked for
        super().__init__(*how, lane=lane)  # type: ignore[arg-type]
        self.resident = frozenset(resident)

    def _ring_place(self, nbytes: int) -> Place:
        if self._peers is None:
            return self._add_place(nbytes)
        count = nbytes // self._dtype.itemsize
        return Place(self._lane.symmetric(self._peers, count, self._dtype, "a unit's parameters"), self._lane)

    def _from_host(self, unit: Unit) -> list[tuple[FlatBucket, int]]:
        return [(bucket, begin) for bucket, begin in self._bucket_begins(unit) if not self._source.stays(bucket)]

    def _stay(self, unit: Unit) -> list[tuple[FlatBucket, int]]:
        """As ``_from_host``, those that are on devices."""
        return [(bucket, begin) for bucket, begin in self._bucket_begins(unit) if self._source.stays(bucket)]

    def there(self, bucket: FlatBucket) -> torch.Tensor:
        return self._source.there(bucket)

    # --- gathering --------------------------------------------------------------------------------------------

    def _fill_place(self, unit: Unit, place: Place) -> None:
        if self._from_host(unit):
            super()._fill_place(unit, place)
        stay = self._stay(unit)
        shards = [self._source.there(bucket) for bucket, _ in stay]
        wholes = [place.flat[begin : begin + bucket.count] for bucket, begin in stay]
        if not stay:
            return
        if self._peers is None:
            after = [place.left, self._lane.recorded(self._asked)]
            self._lane.h2d.copy(zip(wholes, shards, strict=True), after, place.came)
        else:
            self._lane.current().wait(place.left)
            _, work = self._peers.all_gather(shards, out=wholes, async_op=True, name=f"unit {unit.name}")
            assert isinstance(work, Work)
            self._works[unit.index] = work

    def _await(self, unit: Unit) -> None:
        super()._await(unit)
        work = self._works.get(unit.index)
        if work is None:
            return
        start = time.perf_counter()
        try:
            work.wait()
        except Exception as error:  # after an interrupt the gather goes on, and is waited for again
            del self._works[unit.index]
            self._give_back(unit)
            if isinstance(error, (_core.CollectiveMismatch, TimeoutError)):
                error.args = (f"{error}; {IN_STEP}",)
            raise
        finally:
            self.waited_s += time.perf_counter() - start
        del self._works[unit.index]

    def _give_back(self, unit: Unit) -> None:
        unit.asked = False  # should this be interrupted, it is not taken for whole
        work = self._works.get(unit.index)
        if work is not None:  # of a unit whose other buckets did not come
            with suppress(Exception):
                work.wait()
            del self._works[unit.index]
        super()._give_back(unit)

    # --- ParameterStore ---------------------------------------------------------------------------------------

    def sweep(self, reverse: bool = False) -> Iterator[tuple[FlatBucket, torch.Tensor]]:
        sweep = super().sweep(reverse)
        self._source.used()
        return sweep

    def after_edit(self) -> None:
        self._source.arrive()

    def spread(self) -> None:
        super().spread()
        self._source.arrive()

    @property
    def nbytes_by_tier(self) -> dict[str, int]:
        tiers = super().nbytes_by_tier
        return {**tiers, "cpu": tiers.get("cpu", 0) + self._source.followed_nbytes}

    @property
    def allocation_count(self) -> int:
        return 0 if self._peers is None else int(self._peers.memory()["allocation_count"])

    def is_waiting(self) -> bool:
        return super().is_waiting() or not all(work.done() for work in self._works.values())

    def give_up(self) -> None:
        super().give_up()
        if self._peers is not None:
            self._peers.close()

    def close(self) -> None:
        self._works.clear()
        super().close()
        if self._peers is not None:
            self._peers.close()
