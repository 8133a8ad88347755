"""Checksums of weights on a device, which find edits that move no version counter.

[Note: edits on a device] ``p.data.mul_()``, DLPack and kernels of the program write to weights without a version
counter. So after each publish kernels on torch's stream compute a checksum of this rank's part of each bucket. They do
so again at the next step, or as a backward pass begins, and the host compares the two. The host only waits for the
words of a comparison, which follow only work that a step waits for.
Cost: each ``publish`` and ``look`` reads this rank's weights on the device once. 16 bytes per bucket are copied to the
host.
Thread rule: one thread at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from zcomm import _core
from zcomm.memory.device_streams import DeviceLane, own_pages


class Checksums:
    """The checksums of ``parts``: by number of the bucket, this rank's weights on the device."""

    def __init__(self, parts: Mapping[int, torch.Tensor], lane: DeviceLane) -> None:
        self._parts, self._lane = dict(parts), lane
        self._places = {bucket: place for place, bucket in enumerate(self._parts)}
        count = len(self._parts)
        self._words = lane.empty(2 * count, torch.int64, "checksums of parameters")  # published ones first
        self._here = lane.lock(own_pages(4 * count)).view(torch.int64)[: 2 * count]
        self._summed, self._ready = lane.event(), lane.event()

    def publish(self, buckets: Collection[int]) -> None:
        """Record the checksums of ``buckets``, on torch's stream. Does not wait."""
        self._sum(0, buckets)

    def look(self) -> None:
        """Start to compare all buckets with their published checksums. Does not wait."""
        if not self._parts:
            return
        self._sum(len(self._parts), self._parts)
        self._lane.h2d.copy([(self._here, self._words)], [self._summed], self._ready)

    def changed(self) -> set[int]:
        """Return the buckets that differed at the last ``look``. Waits until that has run. Raises: PeerLost."""
        self._wait()
        known, now = self._here.view(2, -1).tolist()
        return {bucket for bucket, place in self._places.items() if known[place] != now[place]}

    def looked(self) -> dict[int, int]:
        """Return the checksums of the last ``look``, by bucket. Waits as ``changed``."""
        self._wait()
        now = self._here.view(2, -1)[1].tolist()
        return {bucket: now[place] for bucket, place in self._places.items()}

    def differs(self, bucket: int) -> bool:
        """Return True if the bucket differs from its published checksum. Waits for torch's stream."""
        if bucket not in self._parts:
            return False
        place, count = self._places[bucket], len(self._parts)
        self._sum(count, [bucket])
        return self._words[place].item() != self._words[count + place].item()

    def _wait(self) -> None:
        self._lane.wait(self._ready)

    def _sum(self, begin: int, buckets: Collection[int]) -> None:
        stream, first = self._lane.current(), self._words.data_ptr() + 8 * begin
        for event in (self._summed, self._ready):
            stream.wait(event)
        words = {bucket: first + 8 * self._places[bucket] for bucket in buckets if bucket in self._parts}
        if words and len(words) == len(self._parts):
            stream.fill(first, 0, 8 * len(words))
        else:
            for word in words.values():
                stream.fill(word, 0, 8)
        for bucket, word in words.items():
            part = self._parts[bucket]
            _core.stream_checksum(stream, word, part.data_ptr(), part.nbytes)
        stream.record(self._summed)
