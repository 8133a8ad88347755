"""Shards of stage 3 between gathers, if all or some of this rank's stay on its device.

A bucket's shard is only on the device (if it is stepped there, or frozen), only on the host (offloaded weights), or on
both: if only its optimizer state is offloaded, the host steps its own copy, which then renews the device's. Units read
the shards that stay from devices. Copies to the device run on the lane's ``h2d`` stream, behind the last use of the old
weights (``used``). ``arrive`` makes torch's stream wait for them.
Thread rule: as ShardSource.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from zcomm.memory.device_streams import DeviceLane, Peers
from zcomm.zero.layout.flat import WHOLE_SHARD, FlatBucket
from zcomm.zero.params.shards import ShardSource


class DeviceShards:
    """Shards that stay on this rank's device.

    stay: their buckets. followed: numbers of those that the host steps in a copy. peers: joins the ranks' devices,
    which keep these shards in memory that they reach.
    """

    def __init__(
        self,
        stay: Sequence[FlatBucket],
        followed: Collection[int],
        dtype: torch.dtype,
        peers: Peers,
        lane: DeviceLane,
    ) -> None:
        sizes = [bucket.shard_count for bucket in stay]
        flat = lane.buffer(peers, sum(sizes), dtype, "shards of parameters")
        self._shards: dict[int, torch.Tensor] = {
            bucket.index: shard for bucket, shard in zip(stay, flat.split(sizes), strict=True)
        }
        self._lane = lane
        self._used, self._ready = lane.event(), lane.event()
        self.followed_nbytes = sum(self._shards[index].nbytes for index in followed)  # of the host's copies

    def stays(self, bucket: FlatBucket) -> bool:
        """Return True if the shard stays on the device."""
        return bucket.index in self._shards

    def device_shard(self, bucket: FlatBucket) -> torch.Tensor:
        """Return the shard on the device."""
        return self._shards[bucket.index]

    def used(self) -> None:
        """Record that torch's stream so far uses the old weights; an update follows."""
        self._lane.recorded(self._used)

    def follow(self, bucket: FlatBucket, weight: torch.Tensor) -> None:
        """Renew the device's shard from the host's, behind the work that ``used`` has recorded."""
        self._lane.h2d.copy([(self.device_shard(bucket), weight)], [self._used], self._ready)

    def arrive(self) -> None:
        """Let torch's stream see the new weights from now on."""
        self._lane.current().wait(self._ready)

    def close(self) -> None:
        self._shards.clear()


class DeviceSource(ShardSource):
    """The shards that only the device has."""

    def __init__(self, shards: DeviceShards) -> None:
        self._shards = shards

    def begin(self, bucket: FlatBucket) -> torch.Tensor:
        return torch.empty_like(self._shards.device_shard(bucket), device="cpu")

    def commit(self, bucket: FlatBucket, weight: torch.Tensor) -> None:
        self._shards.device_shard(bucket).copy_(weight)

    def load(self, bucket: FlatBucket) -> torch.Tensor:
        return self._shards.device_shard(bucket).to("cpu", copy=True)

    def read(self, bucket: FlatBucket, part: slice = WHOLE_SHARD) -> torch.Tensor:
        return self._shards.device_shard(bucket)[part].to("cpu", copy=True)

    def close(self) -> None:
        self._shards.close()


class FollowedSource(ShardSource):
    """The shards that ``host`` has, and that the device follows. ``commit`` must follow ``DeviceShards.used``."""

    def __init__(self, host: ShardSource, shards: DeviceShards) -> None:
        self._host, self._shards = host, shards

    def begin(self, bucket: FlatBucket) -> torch.Tensor:
        return self._host.begin(bucket)

    def commit(self, bucket: FlatBucket, weight: torch.Tensor) -> None:
        self._host.commit(bucket, weight)
        self._shards.follow(bucket, weight)

    def load(self, bucket: FlatBucket) -> torch.Tensor:
        return self._host.load(bucket)

    def read(self, bucket: FlatBucket, part: slice = WHOLE_SHARD) -> torch.Tensor:
        return self._host.read(bucket, part)

    def close(self) -> None:
        self._host.close()
        self._shards.close()
