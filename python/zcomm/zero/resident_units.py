"""Stage 3 whose shards stay on the ranks' devices: a unit comes to its place from all of them, and none from the host.

Places, and when a unit is in which, are those of device_units.py; a gather is one all_gather of ``peers``, whose order
is that of the calls, so all ranks must use their units in the same order, as on the CPU; gradients, whose order beside
them may differ between ranks, go by another communicator. A gather comes after what torch's stream has been given when
it is called, which includes what used the place before. Its end is waited for where the unit is wanted: the host until
all ranks have called it, torch's stream until the weights are there. Places that a unit got for itself alone
(``_move``) are torch's memory, which no other rank has open.
Thread rule: hooks and methods on the main thread, or autograd's; nothing runs on the gathering thread.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence

import torch

from zcomm import _core
from zcomm._lane import DeviceLane
from zcomm._work import Work
from zcomm.comm import Communicator
from zcomm.zero.device_units import DeviceUnitStore, Place
from zcomm.zero.geometry import FlatBucket
from zcomm.zero.sources import ShardSource
from zcomm.zero.unit import Unit
from zcomm.zero.units import IN_STEP


class DeviceSource(ShardSource):
    """This rank's shards of ``every`` bucket in symmetric memory of its device. What others see of them is copied."""

    def __init__(self, every: Sequence[FlatBucket], dtype: torch.dtype, peers: Communicator, lane: DeviceLane) -> None:
        sizes = [bucket.shard_count for bucket in every]
        shards = lane.symmetric(peers, sum(sizes), dtype, "shards of parameters").split(sizes)
        self._shards: dict[int, torch.Tensor] = {
            bucket.index: shard for bucket, shard in zip(every, shards, strict=True)
        }

    def there(self, bucket: FlatBucket) -> torch.Tensor:
        """The shard itself."""
        return self._shards[bucket.index]

    def begin(self, bucket: FlatBucket) -> torch.Tensor:
        return torch.empty_like(self.there(bucket), device="cpu")

    def commit(self, bucket: FlatBucket, weight: torch.Tensor) -> None:
        self.there(bucket).copy_(weight)

    def fetch(self, bucket: FlatBucket, out: torch.Tensor) -> None:
        raise AssertionError("shards on devices are gathered there")

    def sweep(self, reverse: bool) -> Iterator[tuple[FlatBucket, torch.Tensor]]:
        """The host steps none."""
        return iter(())

    def load(self, bucket: FlatBucket) -> torch.Tensor:
        return self.there(bucket).to("cpu", copy=True)

    def close(self) -> None:
        self._shards.clear()


class ResidentUnitStore(DeviceUnitStore):
    """source: a DeviceSource of ``peers``, which is between the ranks' devices, and the store's own. Memory: as
    DeviceUnitStore, without host slots."""

    _source: DeviceSource
    _home = "device"

    def __init__(self, *how: object, lane: DeviceLane, peers: Communicator, resident: Collection[int]) -> None:
        self._peers = peers
        self._works: dict[int, Work] = {}  # by number of the unit: gathers that nobody has waited for
        super().__init__(*how, lane=lane)  # type: ignore[arg-type]
        self.resident = frozenset(resident)

    def _ring_place(self, nbytes: int) -> Place:
        count = nbytes // self._dtype.itemsize
        return Place(self._lane.symmetric(self._peers, count, self._dtype, "a unit's parameters"), self._lane)

    def _make_host_slots(self) -> None:
        self._memories, self._host_slots = [], []

    def there(self, bucket: FlatBucket) -> torch.Tensor:
        return self._source.there(bucket)

    # --- gathering --------------------------------------------------------------------------------------------

    def _fill_place(self, unit: Unit, place: Place) -> None:
        self._lane.current().wait(place.left)
        shards = [self._source.there(bucket) for bucket in unit.buckets]
        begins = self._bucket_begins(unit)
        wholes = [place.flat[begin : begin + bucket.count] for bucket, begin in begins]
        if shards:
            _, work = self._peers.all_gather(shards, out=wholes, async_op=True, name=f"unit {unit.name}")
            assert isinstance(work, Work)
            self._works[unit.index] = work

    def _await(self, unit: Unit) -> None:
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

    @property
    def allocation_count(self) -> int:
        return int(self._peers.memory()["allocation_count"])

    def close(self) -> None:
        self._works.clear()
        super().close()
        self._peers.close()
