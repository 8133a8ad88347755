"""Accumulators: fp32 sums of the gradients of a step, as its passes have left them in the buckets' transports.

Thread rule: as GradientReducer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch

from zcomm.comm.communicator import Communicator
from zcomm.zero.gradients.device_norm import PassSquares
from zcomm.zero.gradients.device_slots import DeviceSlots
from zcomm.zero.gradients.norm import GradientNorm
from zcomm.zero.gradients.sum_ring import SumRing
from zcomm.zero.gradients.transport import Nbytes, Transport
from zcomm.zero.layout.flat import FlatBucket, Geometry
from zcomm.zero.poison import broadcast_error, check_error

T = TypeVar("T")


class Accumulators:
    """The sums of all trained buckets. transports: by number of the bucket.

    device_slots: the ring that the transports of a device share. squares: see PassSquares. ring: sums that are on a
    drive. None: without.
    fresh: they hold no gradients: the next pass overwrites them.
    """

    def __init__(
        self,
        geometry: Geometry,
        comm: Communicator,
        transports: Sequence[Transport],
        device_slots: DeviceSlots | None = None,
        squares: PassSquares | None = None,
        ring: SumRing | None = None,
    ) -> None:
        self._geometry, self._comm = geometry, comm
        self.transports = list(transports)
        self.kinds = list(dict.fromkeys(transports))  # each one once
        self.device_slots, self.squares, self.ring = device_slots, squares, ring
        self.fresh = True

    def shard(self, bucket: FlatBucket, change: bool = False) -> torch.Tensor:
        """Return the accumulator of this rank's shard of ``bucket``, fp32 [bucket.shard_count]. change: the caller may
        change it. One on a drive is valid until the next call. Raises: OSError."""
        return self.transports[bucket.index].open(bucket, change)

    def expect(self, index: int) -> None:
        """Let the shard of bucket ``index`` come from the drive while another is used."""
        if self.ring is not None:
            self.ring.expect(index)

    def guarded(self, read: Callable[[], T]) -> T:
        """Return what ``read`` returns. Where sums are on a drive and it fails on one rank, all raise. Collective
        then."""
        if self.ring is None:
            return read()
        try:
            value = read()
        except BaseException as error:
            self.ring.lose(error)
            broadcast_error(self._comm, error)
            raise
        check_error(self._comm)
        return value

    def finish(self, bucket: FlatBucket | None = None) -> None:
        """Wait until all gradients, or those of one bucket, are in the accumulators."""
        if bucket is not None:
            self.transports[bucket.index].finish(bucket)
            return
        for transport in self.kinds:
            transport.finish_all()

    def arrange(self, order: Sequence[FlatBucket]) -> None:
        """Take another launch order, between passes. Waits until nothing is in flight."""
        if self.device_slots is not None:
            self.device_slots.arrange(order)
        for transport in self.kinds:
            transport.arrange(order)

    def fill(self) -> None:
        """Make the accumulators zero, where they hold no gradients."""
        if self.fresh:
            self.finish()
            self.fresh = False
            for transport in self.kinds:
                transport.fill()

    # --- one pass ---------------------------------------------------------------------------------------------

    def begin_pass(self, reached: int, passes: int) -> None:
        """Begin a pass. reached: those of this step before it. passes: that are expected."""
        if self.squares is not None:
            self.squares.begin_pass(only=self.fresh and passes == 1)
        if self.ring is not None:
            self.ring.begin_pass(last=reached + 1 >= passes)

    def end_pass(self) -> None:
        """End it: all buckets have been started."""
        for each in (self.squares, self.ring):
            if each is not None:
                each.end_pass()
        self.fresh = False

    # --- the norm ---------------------------------------------------------------------------------------------

    @property
    def knows_squares(self) -> bool:
        """Return True if ``add_squares`` need not look at the accumulators, nor wait for them."""
        return self.squares is not None and self.squares.known

    def send_squares(self) -> None:
        """Start what ``add_squares`` will want soon. Does not wait."""
        if self.squares is not None:
            self.squares.send()

    def add_squares(self, norm: GradientNorm, buckets: Iterable[FlatBucket]) -> None:
        """Add this rank's shards of ``buckets``, all that are on the host, to ``norm``."""
        if self.squares is not None and self.squares.known:
            self.squares.end(norm)
            return
        if self.ring is not None:
            self.ring.add_squares(norm, list(buckets))
            return
        for bucket in buckets:
            norm.add(self.shard(bucket))

    def edited(self) -> None:
        """Take the program's change of a gradient into account."""
        if self.squares is not None:
            self.squares.forget()
        if self.ring is not None:
            self.ring.knows_squares = False

    # --- while updates wait (schedule/forward.py) --------------------------------------------------------------

    def hold(self) -> None:
        """Keep what the sums are, also where they are forgotten, until ``release``. A pass comes after that."""
        if self.ring is not None:
            self.ring.held = True

    def release(self) -> None:
        if self.ring is not None:
            self.ring.release()

    @property
    def held(self) -> bool:
        return self.ring is not None and self.ring.held

    # --- life -------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Let the next pass overwrite the sums."""
        self.fresh = True
        self.edited()
        if self.ring is not None:
            self.ring.forget()

    @property
    def waited_s(self) -> float:
        """Seconds of waiting for other ranks."""
        ours = sum(transport.waited_s for transport in self.kinds)
        return ours if self.device_slots is None else ours + self.device_slots.waited_s

    @property
    def moved_nbytes(self) -> int:
        """Bytes of the buckets that were reduced between ranks."""
        return sum(transport.moved_nbytes for transport in self.kinds)

    @property
    def nbytes(self) -> list[Nbytes]:
        """Bytes by tier and purpose, with slots."""
        shared = [] if self.device_slots is None else [("device", "slots", self.device_slots.nbytes)]
        return [*shared, *(each for transport in self.kinds for each in transport.nbytes)]

    def close(self) -> None:
        for transport in self.kinds:
            transport.close()
        if self.device_slots is not None:
            self.device_slots.close()
