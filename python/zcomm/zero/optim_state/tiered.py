"""Optimizer state of which some buckets are on the device, and the others on the host: RAM or NVMe.

Both parts know all buckets, with no element in those of the other one.
Thread rule: as ShardState.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from copy import copy as shallow_copy
from typing import Any

from zcomm.zero.optim_state.device import DeviceState
from zcomm.zero.optim_state.ram import Held, ShardState, ShardStep, StateSnapshot, Sums
from zcomm.zero.optim_state.swap_file import AnyCopy


class TieredState(ShardState):
    """State on a device and elsewhere. ``there``: which buckets are ``device``'s. The others are ``host``'s, in RAM or
    on NVMe."""

    def __init__(self, host: ShardState, device: DeviceState, there: Sequence[bool]) -> None:
        counts = [device.counts[i] if at else host.counts[i] for i, at in enumerate(there)]
        super().__init__(counts, host.form.dtype, host.rule)
        self.host, self.device, self._there = host, device, there
        self.turns = host.turns
        self._count()

    def _count(self) -> None:
        self.form, self.nbytes_by_tier = self.host.form, dict(self.host.nbytes_by_tier)
        for tier, nbytes in self.device.nbytes_by_tier.items():
            self.nbytes_by_tier[tier] = self.nbytes_by_tier.get(tier, 0) + nbytes

    def check_grows(self) -> None:
        self.host.check_grows()
        self.device.check_grows()

    def grow(self, arrays: tuple[str, ...]) -> None:
        self.check_grows()
        for each in (self.host, self.device):
            each.grow(arrays)
        self._count()

    @property
    def waited_s(self) -> float:  # type: ignore[override]
        return self.host.waited_s

    def tile(self, bucket: int, part: slice, *, load: bool = True, store: bool = False) -> Held:
        return (self.device if self._there[bucket] else self.host).tile(bucket, part, load=load, store=store)

    def each(self) -> Sequence[ShardState]:
        return (*self.host.each(), self.device)

    def flush(self) -> None:
        self.host.flush()

    def renew(self) -> None:
        self.host.renew()
        self.device.renew()

    def snapshot(self, copy: AnyCopy | None) -> StateSnapshot:
        twin: Any = shallow_copy(self)
        twin.host, twin.device = self.host.snapshot(copy), self.device.snapshot(None)
        return twin  # type: ignore[no-any-return]

    def measure(self, shard: ShardStep, sums: Sums) -> None:
        (self.device if self._there[shard.bucket] else self.host).measure(shard, sums)

    def step(self, shards: Iterator[ShardStep], reverse: bool = False, buckets: Collection[int] | None = None) -> None:
        self.host.step(self._others(shards), reverse, buckets)

    def _others(self, shards: Iterator[ShardStep]) -> Iterator[ShardStep]:
        """Yield the host's shards; step the device's as they come."""
        for shard in shards:
            if self._there[shard.bucket]:
                self.device.step_shard(shard)
            else:
                yield shard

    @property
    def window_nbytes(self) -> int:
        return self.host.window_nbytes

    @property
    def slot_nbytes(self) -> int:
        return self.host.slot_nbytes + self.device.slot_nbytes

    def close(self) -> None:
        self.host.close()
        self.device.close()
