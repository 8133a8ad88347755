"""Gradients of parameters that training keeps in autograd's memory, on the CPU, from their arrival to their reduction.

A model of GradientReducer and its transports on the host ([Note: own gradients], [Note: bucket life]). A gradient of
which most is in this rank's shard stays until its bucket has been reduced; others are copied into the bucket's slot.
The gradient of a bucket without a slot stays, too. Buckets are launched in the order in which they become complete. A
reduction is over when the next gradient comes, or at once if another bucket waits for its slot.
Pure arithmetic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

from torch import nn

from zcomm.zero.gradients.host import stays
from zcomm.zero.gradients.transport import slot_count
from zcomm.zero.memory.plan import Settings, lay_out


class Bucket(NamedTuple):
    """params: in it. kept: id() of those with gradients that stay until it has been reduced."""

    params: Sequence[nn.Parameter]
    kept: Collection[int]


def buckets_of(model: nn.Module, settings: Settings) -> list[Bucket]:
    """Return the buckets of rank 0. Weights by rows have none: their gradients come in blocks."""
    sections, geometry = lay_out(model, settings)
    found = []
    for bucket in geometry.buckets:
        if bucket.block:
            continue
        params, shard = [sections.params[index] for index in bucket.params], bucket.shard(0)
        found.append(
            Bucket(params, {id(sections.params[i]) for i in bucket.params if stays(geometry.places[i], shard)})
        )
    return found


class KeptGradients:
    """The gradients at a moment of backward. arrivals: all that will come, in their order."""

    def __init__(self, buckets: Sequence[Bucket], arrivals: Sequence[nn.Parameter]) -> None:
        self._kept = {each for bucket in buckets for each in bucket.kept}
        self._bucket_of = {id(param): number for number, bucket in enumerate(buckets) for param in bucket.params}
        coming = [self._bucket_of[id(param)] for param in arrivals if id(param) in self._bucket_of]
        self._missing = Counter(coming)
        self._came = [False] * len(buckets)
        self._order = list(dict.fromkeys(reversed(coming)))[::-1]  # by their last arrival
        self._position = {number: position for position, number in enumerate(self._order)}
        self._slots = slot_count(len(buckets))
        self._own = [0] * len(buckets)  # bytes of gradients that stay until the bucket has been reduced
        self._early = [0] * len(buckets)  # until it has a slot
        self._launched = self._reduced = 0  # a count, and bytes of buckets that have been launched

    def arrived(self, param: nn.Parameter) -> int:
        """Take the next gradient. Returns: the bytes that are kept from now on, without those that are freed."""
        number = self._bucket_of.get(id(param))
        if number is None:
            return 0
        change, self._reduced = -self._reduced, 0
        self._came[number] = True
        self._missing[number] -= 1
        if id(param) in self._kept:
            self._own[number] += param.nbytes
            change += param.nbytes
        elif self._position[number] >= self._launched + self._slots:
            self._early[number] += param.nbytes
            change += param.nbytes
        if self._missing[number]:
            return change
        self._launched += 1
        self._reduced = self._own[number]
        entering = self._order[self._launched + self._slots - 1 :][:1]
        for other in entering:  # it takes the slot
            if self._came[other]:
                change -= self._reduced + self._early[other]
                self._reduced = self._early[other] = 0
        return change
