"""OptimState: the optimizer state of all trained buckets, each in one place: RAM, a drive, or a device.

Thread rule: as ShardState.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch

from zcomm.zero.cache.swap import SwapCopy
from zcomm.zero.layout.tiles import TileForm
from zcomm.zero.optim_state.device import DeviceState
from zcomm.zero.optim_state.nvme import SwappedState
from zcomm.zero.optim_state.ram import Held, RamState, Run, ShardState, ShardStep, StateSnapshot, Sums


class OptimState:
    """The state of each trained bucket in its place.

    host: the state in RAM or on a drive, without elements of the buckets ``on_device``, by number.
    of: by number of the bucket. kinds: each place once, the host first. drives: the places on a drive. writes: calls of
    ``tile`` that may have changed it; steps are not counted.
    """

    writes = 0

    def __init__(self, host: RamState | SwappedState, on_device: Mapping[int, DeviceState]) -> None:
        self._host = host
        self.of: list[ShardState] = [on_device.get(number, host) for number in range(len(host.counts))]
        self.kinds: list[ShardState] = [host, *dict.fromkeys(on_device.values())]
        self._devices = list(dict.fromkeys(on_device.values()))
        self.drives = [host] if isinstance(host, SwappedState) else []

    @property
    def form(self) -> TileForm:
        return self._host.form

    @property
    def is_on_host(self) -> bool:
        """True if no state is on a device."""
        return not self._devices

    # --- one bucket -------------------------------------------------------------------------------------------

    def tile(self, bucket: int, part: slice, *, load: bool = True, store: bool = False) -> Held:
        """See ShardState.tile."""
        self.writes += store
        return self.of[bucket].tile(bucket, part, load=load, store=store)

    def start(
        self, bucket: int, part: slice, weight: torch.Tensor, master: torch.Tensor, initial: Sequence[Run]
    ) -> None:
        """See ShardState.start."""
        self.of[bucket].start(bucket, part, weight, master, initial)

    def measure(self, shard: ShardStep, sums: Sums) -> None:
        """See ShardState.measure."""
        self.of[shard.bucket].measure(shard, sums)

    # --- a step -----------------------------------------------------------------------------------------------

    def adds_squares(self, bucket: int) -> bool:
        """Return True if a step of the bucket's shard can add the squares of its gradient in the same pass."""
        return self.of[bucket].adds_squares

    @property
    def turns(self) -> bool:
        """True if a step saves reads by alternating its direction."""
        return bool(self.drives)

    def step(self, shards: Iterator[ShardStep], reverse: bool = False, buckets: Collection[int] | None = None) -> None:
        """Run one optimizer step over all shards. reverse: buckets and tiles are in descending order. buckets: over the
        shards of only these buckets, which follow each other."""
        self._host.step(self._of_host(shards), reverse, buckets)

    def _of_host(self, shards: Iterator[ShardStep]) -> Iterator[ShardStep]:
        """Yield the host's shards; step the devices' as they come."""
        for shard in shards:
            place = self.of[shard.bucket]
            if isinstance(place, DeviceState):
                place.step_shard(shard)
            else:
                yield shard

    def expect(self, buckets: Sequence[int], reverse: bool = False) -> None:
        """Start to read the state of ``buckets`` when the next step ends: later steps need it, in this order. reverse:
        each from its end, as these steps go."""
        for drive in self.drives:
            drive.expect(buckets, reverse)

    # --- all --------------------------------------------------------------------------------------------------

    def check_grows(self) -> None:
        """Raise ValueError if ``grow`` cannot add arrays."""
        for place in self.kinds:
            place.check_grows()

    def grow(self, arrays: tuple[str, ...]) -> None:
        """Extend the state to ``arrays``, which begin with the present ones; others are zeros. Nothing is in flight."""
        self.check_grows()
        for place in self.kinds:
            place.grow(arrays)

    def renew(self) -> None:
        """See ShardState.renew."""
        for place in self.kinds:
            place.renew()

    def flush(self) -> None:
        """Start the writes of state that belongs on a drive."""
        for drive in self.drives:
            drive.flush()

    def finish_writes(self) -> None:
        """Wait until the drives have all state that belongs on them. Raises: OSError."""
        for drive in self.drives:
            drive.finish_writes()

    def forget(self) -> None:
        """Wait until nothing is in flight, empty all windows, and drop errors."""
        for drive in self.drives:
            drive.forget()

    def resident(self) -> list[torch.Tensor]:
        """Return the state that is only in memory."""
        return [memory for place in self.kinds for memory in place.resident()]

    def snapshot(self, copy: SwapCopy) -> StateSnapshot:
        """Return a copy of the present state, for reading on another thread. copy: of the swap file, after
        ``flush``."""
        return _Snapshot(self, copy)

    @property
    def waited_s(self) -> float:
        """Seconds that threads which train have waited for the drive."""
        return sum((drive.waited_s for drive in self.drives), 0.0)

    @property
    def nbytes_by_tier(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for place in self.kinds:
            for tier, nbytes in place.nbytes_by_tier.items():
                counts[tier] = counts.get(tier, 0) + nbytes
        return counts

    @property
    def window_nbytes(self) -> int:
        """Bytes of staging in RAM."""
        return sum(drive.window_nbytes for drive in self.drives)

    @property
    def slot_nbytes(self) -> int:
        """Bytes of staging on devices."""
        return sum(device.slot_nbytes for device in self._devices)

    def close(self) -> None:
        for place in self.kinds:
            place.close()


class _Snapshot:
    """A StateSnapshot of each place, by bucket."""

    def __init__(self, state: OptimState, copy: SwapCopy) -> None:
        self.form = state.form
        twins = {place: place.snapshot(copy) for place in state.kinds}
        self._of = [twins[place] for place in state.of]

    def tile(self, bucket: int, part: slice, *, load: bool = True, store: bool = False) -> Held:
        return self._of[bucket].tile(bucket, part, load=load, store=store)
