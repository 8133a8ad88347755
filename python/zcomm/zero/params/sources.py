"""Sources: this rank's shards of stage 3 by units, each in one place: RAM, a drive, or a device.

Thread rule: as ShardSource.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain

import torch

from zcomm.zero.cache.span_cache import WorkGroup
from zcomm.zero.layout.flat import WHOLE_SHARD, FlatBucket
from zcomm.zero.params.shards import HostSource, ShardSource, SwapSource, ordered


class Sources:
    """The shards of all buckets, routed by bucket.

    of: by number of the bucket. on_host: the sources that units are gathered from by host memory. stepped: trained
    buckets with weights that the host changes. kinds: each place once. drives: the places on a drive.
    """

    def __init__(self, of: Mapping[int, ShardSource], stepped: Sequence[FlatBucket]) -> None:
        self.of = of
        self.on_host = {number: source for number, source in of.items() if isinstance(source, HostSource)}
        self.kinds = list(dict.fromkeys(of.values()))
        self.drives = [source for source in self.kinds if isinstance(source, SwapSource)]
        self._stepped = stepped

    @property
    def on_drive(self) -> bool:
        """True if shards are on a drive."""
        return any(source.on_drive for source in self.kinds)

    # --- one shard --------------------------------------------------------------------------------------------

    def begin(self, bucket: FlatBucket) -> torch.Tensor:
        """See ShardSource.begin."""
        return self.of[bucket.index].begin(bucket)

    def commit(self, bucket: FlatBucket, weight: torch.Tensor) -> None:
        """See ShardSource.commit."""
        self.of[bucket.index].commit(bucket, weight)

    def load(self, bucket: FlatBucket) -> torch.Tensor:
        """See ShardSource.load."""
        return self.of[bucket.index].load(bucket)

    def read(self, bucket: FlatBucket, part: slice = WHOLE_SHARD) -> torch.Tensor:
        """See ShardSource.read."""
        return self.of[bucket.index].read(bucket, part)

    def fetch(self, bucket: FlatBucket, out: torch.Tensor) -> WorkGroup | None:
        """See HostSource.fetch."""
        return self.on_host[bucket.index].fetch(bucket, out)

    def fetch_part(self, bucket: FlatBucket, part: slice, out: torch.Tensor) -> None:
        """See HostSource.fetch_part."""
        self.on_host[bucket.index].fetch_part(bucket, part, out)

    def keep(self, bucket: FlatBucket, weight: torch.Tensor) -> None:
        """Keep a copy of ``weight``, a shard that was fetched and changed. On the gathering thread."""
        source = self.of[bucket.index]
        copy = source.begin(bucket)
        copy.copy_(weight)
        source.commit(bucket, copy)

    def whole(self, bucket: FlatBucket) -> torch.Tensor | None:
        """Return the bucket with all ranks' shards, if this host's memory has it; else None."""
        source = self.on_host.get(bucket.index)
        return None if source is None else source.whole(bucket)

    def kept(self, bucket: FlatBucket) -> torch.Tensor | None:
        """Return a shard of a drive as ``commit`` left it, if it is in RAM. On the gathering thread, while no other
        thread changes shards."""
        source = self.of[bucket.index]
        return source.kept(bucket) if isinstance(source, SwapSource) else None

    # --- several ----------------------------------------------------------------------------------------------

    def iter_shards(
        self, reverse: bool, only: Collection[int] | None = None
    ) -> Iterator[tuple[FlatBucket, torch.Tensor]]:
        """Yield the shards that the host steps, of all or ``only`` some buckets; the caller's changes are kept."""
        from_drive = chain.from_iterable(drive.iter_shards(reverse, only) for drive in self.drives)
        for bucket in ordered(self._stepped, reverse, only):
            source = self.of[bucket.index]
            if isinstance(source, SwapSource):
                yield next(from_drive)
                continue
            weight = source.load(bucket)
            yield bucket, weight
            source.commit(bucket, weight)
        for _ in from_drive:  # keeps the last one
            pass

    def expect(self, bucket: FlatBucket, beside: FlatBucket) -> None:
        """Start to read the shard of ``bucket``, which ``load`` needs next, while the other one is changed."""
        source = self.of[bucket.index]
        if isinstance(source, SwapSource) and source is self.of[beside.index]:
            source.expect(bucket, beside)

    def renew(self) -> None:
        """Prepare a load of all trained shards after a failure: nothing is in flight, and no shard is lost to it."""
        for drive in self.drives:
            drive.renew()

    def finish_writes(self) -> None:
        """Wait until all shards are on the drive. Raises: OSError."""
        for drive in self.drives:
            drive.finish_writes()

    def forget(self) -> None:
        """Wait until nothing is in flight, empty all windows, and drop errors."""
        for drive in self.drives:
            drive.forget()

    def resident(self) -> list[torch.Tensor]:
        """Return the stepped shards that are only in memory."""
        in_memory = (bucket for bucket in self._stepped if self.of[bucket.index] not in self.drives)
        return [self.load(bucket) for bucket in in_memory]

    @property
    def waited_s(self) -> float:
        """Seconds that threads which train have waited for the drive."""
        return sum((drive.waited_s for drive in self.drives), 0.0)

    @property
    def window_nbytes(self) -> int:
        return sum(drive.window_nbytes for drive in self.drives)

    def close(self) -> None:
        for source in self.kinds:
            source.close()
