"""Shards of stage 3 between gathers, if all or some of this rank's stay on its device.

A bucket's shard is on the device alone (what is stepped there, or frozen), on the host alone (offloaded weights), or on
both: where its optimizer state alone is offloaded, the host steps its own copy, from which the device's is renewed.
Units take what stays from devices. Copies to the device run on the lane's ``h2d`` stream, behind what used the old
weights (``used``); ``arrive`` makes torch's stream wait for them.
Thread rule: as ShardSource.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from zcomm.comm.communicator import Communicator
from zcomm.memory.device_streams import DeviceLane
from zcomm.zero.layout.flat import ALL, FlatBucket
from zcomm.zero.params.shards import ShardSource, Works


class DeviceSource(ShardSource):
    """Shards on devices, beside a source on the host.

    stay: buckets with shards that stay. host: of all others, and of those of ``stay`` with offloaded state
    (``followed``, by number); None: there are none. peers: between the ranks' devices, which have what stays in memory
    that they reach; None: world_size is 1.
    """

    def __init__(
        self,
        stay: Sequence[FlatBucket],
        host: ShardSource | None,
        followed: Collection[int],
        dtype: torch.dtype,
        peers: Communicator | None,
        lane: DeviceLane,
    ) -> None:
        sizes, what = [bucket.shard_count for bucket in stay], "shards of parameters"
        if peers is None:
            flat = lane.empty(sum(sizes), dtype, what)
        else:
            flat = lane.symmetric(peers, sum(sizes), dtype, what)
        self._shards: dict[int, torch.Tensor] = {
            bucket.index: shard for bucket, shard in zip(stay, flat.split(sizes), strict=True)
        }
        self._host, self._followed, self._lane = host, frozenset(followed), lane
        self._used, self._ready = lane.event(), lane.event()

    def stays(self, bucket: FlatBucket) -> bool:
        return bucket.index in self._shards

    def there(self, bucket: FlatBucket) -> torch.Tensor:
        """Return the shard on the device."""
        return self._shards[bucket.index]

    def _on_host(self, bucket: FlatBucket) -> ShardSource | None:
        return None if self.stays(bucket) and bucket.index not in self._followed else self._host

    def begin(self, bucket: FlatBucket) -> torch.Tensor:
        host = self._on_host(bucket)
        return torch.empty_like(self.there(bucket), device="cpu") if host is None else host.begin(bucket)

    def commit(self, bucket: FlatBucket, weight: torch.Tensor) -> None:
        host = self._on_host(bucket)
        if host is None:
            self.there(bucket).copy_(weight)
            return
        host.commit(bucket, weight)
        self.used()
        self._follow(bucket, weight)

    def fetch(self, bucket: FlatBucket, out: torch.Tensor) -> Works | None:
        assert self._host is not None and not self.stays(bucket)
        return self._host.fetch(bucket, out)

    def fetch_part(self, bucket: FlatBucket, part: slice, out: torch.Tensor) -> None:
        assert self._host is not None and not self.stays(bucket)
        self._host.fetch_part(bucket, part, out)

    def iter_shards(
        self, reverse: bool, only: Collection[int] | None = None
    ) -> Iterator[tuple[FlatBucket, torch.Tensor]]:
        """Iterate over those with weights on the host."""
        assert only is None
        for bucket, weight in self._host.iter_shards(reverse) if self._host is not None else ():
            yield bucket, weight
            self._follow(bucket, weight)

    def load(self, bucket: FlatBucket) -> torch.Tensor:
        host = self._on_host(bucket)
        return self.there(bucket).to("cpu", copy=True) if host is None else host.load(bucket)

    def read(self, bucket: FlatBucket, part: slice = ALL) -> torch.Tensor:
        host = self._on_host(bucket)
        return self.there(bucket)[part].to("cpu", copy=True) if host is None else host.read(bucket, part)

    def whole(self, bucket: FlatBucket) -> torch.Tensor | None:
        return None if self.stays(bucket) or self._host is None else self._host.whole(bucket)

    def renew(self) -> None:
        if self._host is not None:
            self._host.renew()

    # --- what follows the host ----------------------------------------------------------------------------------

    def used(self) -> None:
        """Record that torch's stream so far uses the old weights; an update follows."""
        self._lane.recorded(self._used)

    def _follow(self, bucket: FlatBucket, weight: torch.Tensor) -> None:
        if bucket.index in self._followed:
            self._lane.h2d.copy([(self.there(bucket), weight)], [self._used], self._ready)

    def arrive(self) -> None:
        """Let torch's stream see the new weights from here on."""
        self._lane.current().wait(self._ready)

    @property
    def waited_s(self) -> float:
        return 0.0 if self._host is None else self._host.waited_s

    @property
    def window_nbytes(self) -> int:
        return 0 if self._host is None else self._host.window_nbytes

    @property
    def followed_nbytes(self) -> int:
        """Bytes of the host's copies of what stays."""
        return sum(self._shards[index].nbytes for index in self._followed)

    def close(self) -> None:
        if self._host is not None:
            self._host.close()
        self._shards.clear()
