"""Transport: the path of a bucket from this rank's gradients to the ranks' average in an accumulator.

Each bucket is given one at assembly (choose_transport.py): ``host`` or ``swapped`` on the CPU, and on a device one of
five. ``pinned``, ``last_pass``, ``used_up`` and ``device_sums`` copy to page-locked host memory, ``peers`` reduces
between the devices.
The reducer decides when a bucket starts.
Thread rule: as GradientReducer.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Protocol

import torch

from zcomm import _core
from zcomm.comm.codec import Compression
from zcomm.comm.communicator import Communicator
from zcomm.comm.work import Work
from zcomm.zero.cache.swap import AnySwap, NoSwap, Swap
from zcomm.zero.gradients.across import AcrossGroups
from zcomm.zero.gradients.coded import AcrossCodec, GradientErrors, ShardCodec
from zcomm.zero.gradients.error_ring import ErrorDrive
from zcomm.zero.groups.compression import EXACT, encodes_across, encodes_shard
from zcomm.zero.groups.mesh_comms import MeshComms
from zcomm.zero.layout.flat import FlatBucket, Geometry

Nbytes = tuple[str, str, int]  # tier, purpose, bytes


class SparseParams(Protocol):
    """Parameters with buckets of their own, and their transport (zcomm.sparse_gradients). names: in the model."""

    names: list[str]

    def __contains__(self, param: object) -> bool: ...
    def check(self, model: Any, train: Any, comms: MeshComms, lane: Any) -> None: ...
    def transports(self, plan: ReducePlan, params: Sequence[Any]) -> dict[int, Transport]: ...


SLOTS = 3  # buckets that hooks may fill, or that are being reduced, at the same time


@dataclass(frozen=True)
class ReducePlan:
    """A reduction: the trained buckets of ``geometry`` over the ranks of ``comms``.

    dtype: of gradients in flight. compression: their codec. factor: of accumulated gradients over their mean. swap,
    arena: of errors on a drive, and of their windows.
    """

    geometry: Geometry
    comms: MeshComms
    dtype: torch.dtype
    compression: Compression = EXACT
    factor: Callable[[], float] = lambda: 1.0
    swap: AnySwap = field(default_factory=NoSwap)
    arena: _core.PinnedArena | None = None

    @property
    def comm(self) -> Communicator:
        """The shard group: its ranks divide the sums."""
        return self.comms.shard

    @property
    def order(self) -> list[FlatBucket]:
        """Launch order of the first pass, the same on all ranks: last bucket first ([Note: launch order]).

        Buckets of one weight in blocks are in the order of its rows, in which backward makes its gradient.
        """
        found: list[FlatBucket] = []
        for section, group in groupby(reversed(self.geometry.buckets), key=lambda bucket: bucket.section):
            buckets = list(group)
            found += reversed(buckets) if section in self.geometry.in_blocks else buckets
        return found

    @property
    def by_placement(self) -> list[tuple[ReducePlan, list[FlatBucket]]]:
        """The buckets of each placement in launch order, with the plan of their ranks ([Note: experts])."""
        found: dict[int, tuple[ReducePlan, list[FlatBucket]]] = {}
        for bucket in self.order:
            comms = self.comms.of(bucket)
            found.setdefault(id(comms), (replace(self, comms=comms), []))[1].append(bucket)
        return list(found.values())

    @property
    def slot_count(self) -> int:
        return slot_count(len(self.geometry.buckets))

    def _drive(self, finish: Callable[[int], None]) -> ErrorDrive | None:
        if self.compression.error_tier != "nvme" or not isinstance(self.swap, Swap) or self.arena is None:
            return None
        return ErrorDrive(self.swap, self.arena, finish)

    def shard_codec(self, buckets: Sequence[FlatBucket], finish: Callable[[int], None]) -> ShardCodec | None:
        """Make the codec of sums in the shard group; None: they are exact. finish: see ErrorDrive."""
        given = (self.compression, self.comm, buckets, self.factor, self._drive(finish))
        return ShardCodec(*given) if encodes_shard(self.compression, self.comms) else None

    def across_codec(self, buckets: Sequence[FlatBucket], finish: Callable[[int], None]) -> AcrossCodec | None:
        """Make the codec of sums across groups; None: they are exact. finish: see ErrorDrive."""
        if self.comms.across is None or not encodes_across(self.compression, self.comms):
            return None
        return AcrossCodec(self.compression, self.comms.across, buckets, self.factor, self._drive(finish))


def slot_count(buckets: int) -> int:
    """Return the number of slots for so many buckets."""
    return min(SLOTS, buckets)


class Transport(ABC):
    """The path of ``buckets``, in launch order. Every rank starts the same buckets in the same order.

    across: of sums that are added in two hops. codec: of sums in the shard group. on_device: the accumulators are on
    the device. keeps: gradients may stay alive until their bucket is reduced; ``release`` frees them.
    sums: accumulators of this rank's shards, fp32, by bucket; of ``FlatBucket.held``, which is the shard unless several
    groups divide it ([Note: hpZ]).
    torn: an interrupt has ended an addition outside of a pass: gradients are lost until ``forget``.
    waited_s: seconds of waiting for other ranks. moved_nbytes: of the buckets that were reduced between ranks.
    Invariant: ``start`` comes after ``put`` of all of the bucket's parameters, and ``finish`` after ``start``.
    """

    on_device = False
    keeps = False
    takes_sparse = False  # ``put`` takes sparse gradients
    codec: ShardCodec | None = None
    torn = False
    sums: dict[int, torch.Tensor]

    def __init__(
        self,
        plan: ReducePlan,
        buckets: Sequence[FlatBucket],
        flat: torch.Tensor,
        sums: dict[int, torch.Tensor] | None = None,
    ) -> None:
        """Set the memory of the accumulators, ``flat``: first bucket first. sums: accumulators to use instead."""
        self.plan = plan
        self.buckets = list(buckets)
        self.across = AcrossGroups(plan.comms, self.buckets, 0)
        self.waited_s = 0.0
        self.moved_nbytes = 0
        self.flat = flat
        if sums is None:
            self.set_sums(flat)
        else:
            self.sums = dict(sums)

    def set_sums(self, flat: torch.Tensor) -> None:
        """Set the memory of the accumulators: see the constructor."""
        ascending = sorted(self.buckets, key=lambda bucket: bucket.index)
        parts = flat.split([bucket.held_count for bucket in ascending])
        self.flat = flat
        self.sums = {bucket.index: part for bucket, part in zip(ascending, parts, strict=True)}

    @property
    def errors(self) -> list[GradientErrors]:
        """Errors of the codecs, if there are any ([Note: coded sums])."""
        return [codec for codec in (self.codec, self.across.codec) if codec is not None]

    def begin_pass(self, last: bool) -> None:  # noqa: B027
        """Begin a pass. last: the step expects no other one after it."""

    @abstractmethod
    def put(self, index: int, grad: torch.Tensor | None) -> None:
        """Copy the gradient of parameter ``index`` into its slot; None counts as zero."""

    @abstractmethod
    def start(self, bucket: FlatBucket, accumulate: bool) -> None:
        """Start to add the ranks' average of the bucket's slot to the accumulator. Collective.

        accumulate: False overwrites the accumulator.
        """

    def is_waiting(self) -> bool:
        """Return True if ``close`` would wait for other ranks."""
        return False

    @abstractmethod
    def finish(self, bucket: FlatBucket) -> None:
        """Wait until the accumulator has all started terms; on a device torch's stream waits."""

    def finish_all(self) -> None:
        for bucket in self.buckets:
            self.finish(bucket)

    def expect(self, bucket: FlatBucket) -> None:  # noqa: B027
        """Start a copy of the accumulator to the memory that ``open`` returns, if it needs one. Does not wait."""

    def open(self, bucket: FlatBucket, change: bool = False) -> torch.Tensor:
        """Return the accumulator of this rank's shard of ``bucket``. change: the caller may change it."""
        sum_ = self.sums[bucket.index]
        return sum_ if bucket.groups == 1 else sum_[bucket.of_held]

    def sum_of_group(self, bucket: FlatBucket) -> torch.Tensor:
        """Return the accumulator of the sum over the shard group, to be changed."""
        return self.open(bucket, change=True) if bucket.groups == 1 else self.sums[bucket.index]

    def terms(self, bucket: FlatBucket) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the accumulator of this rank's shard of ``bucket``, and a gradient that an update adds to it, if
        any."""
        return self.open(bucket), None

    def fill(self) -> None:
        """Make this rank's shards zero."""
        for shard in self.sums.values():
            shard.zero_()

    def wait_all(self) -> None:
        """Wait until nothing is being reduced. Raises no error of a drive."""
        self.finish_all()

    def arrange(self, order: Sequence[FlatBucket]) -> None:
        """Change the launch order, between passes. Waits until nothing is in flight."""
        self.wait_all()
        own = {bucket.index for bucket in self.buckets}
        self.buckets = [bucket for bucket in order if bucket.index in own]

    def release(self) -> None:  # noqa: B027
        """Free the gradients of buckets that have been reduced, if ``keeps``. Does not wait."""

    def forget(self) -> None:  # noqa: B027
        """Forget gradients of a pass that failed: their bucket was not started. Ends ``torn``."""

    @property
    @abstractmethod
    def nbytes(self) -> list[Nbytes]: ...

    def close(self) -> None:
        self.sums.clear()
        self.flat = torch.empty(0)


class SlotTransport(Transport):
    """A transport with a ring of slots, and a reduction in each at most."""

    def open_slots(self, count: int) -> None:
        """Begin with ``count`` slots without a reduction."""
        self._works: list[Work | None] = [None] * count
        self._holder = [-1] * count  # the bucket that was started last, by slot

    @property
    @abstractmethod
    def number(self) -> Mapping[int, int]:
        """The slot of each bucket."""

    def wait(self, number: int) -> None:
        """Wait until the bucket in slot ``number`` has been reduced."""
        work = self._works[number]
        if work is not None:
            start = time.perf_counter()
            work.wait()
            self.waited_s += time.perf_counter() - start
            self._ended(number)

    def _ended(self, number: int) -> None:
        """Note that the reduction in slot ``number`` has ended."""
        self._works[number] = None

    def is_waiting(self) -> bool:
        return any(work is not None and not work.done() for work in self._works)

    def finish(self, bucket: FlatBucket) -> None:
        number = self.number[bucket.index]
        if self._holder[number] == bucket.index:
            self.wait(number)

    def finish_all(self) -> None:
        for number in range(len(self._works)):
            self.wait(number)

    def release(self) -> None:
        """Let autograd's next gradients take memory that the caches hold; an allocator gives it back to the system."""
        for number, work in enumerate(self._works):
            if work is not None and work.done():
                self.wait(number)

    def close(self) -> None:
        self.forget()
        self._works = [None] * len(self._works)
        super().close()
