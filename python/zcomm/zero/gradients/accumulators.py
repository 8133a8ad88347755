"""Accumulators: fp32 sums of the gradients of a step, as its passes have left them in the buckets' transports.

SwappedAccumulators has sums on a drive: an error of one rank must reach all, and pending updates hold the sums.
Thread rule: as GradientReducer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch

from zcomm.zero.gradients.device_slots import DeviceSlots
from zcomm.zero.gradients.norm import GradientNorm, NoSquares
from zcomm.zero.gradients.sum_ring import SumRing
from zcomm.zero.gradients.transport import Nbytes, ReducePlan, Transport
from zcomm.zero.layout.flat import FlatBucket
from zcomm.zero.poison import broadcast_error, check_error

T = TypeVar("T")


class Accumulators:
    """The sums of all trained buckets, in memory. transports: by number of the bucket.

    device_slots: the ring that the transports of a device share, if there is one. squares: see PassSquares.
    on_drive: some sums are on a drive.
    fresh: they hold no gradients: the next pass overwrites them.
    """

    on_drive = False

    def __init__(
        self,
        plan: ReducePlan,
        transports: Sequence[Transport],
        device_slots: Sequence[DeviceSlots] = (),
        squares: NoSquares | None = None,
    ) -> None:
        self._geometry, self._comm = plan.geometry, plan.comms.world
        self.transports = list(transports)
        self.kinds = list(dict.fromkeys(transports))  # each one once
        self.device_slots, self.squares = device_slots, squares or NoSquares()
        self._across = [kind.across for kind in self.kinds if kind.across.hops]
        self._each_pass = plan.comms.each_pass
        self._errors = [errors for kind in self.kinds for errors in kind.errors]
        self.fresh, self._of_groups = True, False

    def shard(self, bucket: FlatBucket, change: bool = False) -> torch.Tensor:
        """Return the accumulator of this rank's shard of ``bucket``, fp32 [bucket.shard_count]. change: the caller may
        change it. One on a drive is valid until the next call. Raises: OSError."""
        return self.transports[bucket.index].open(bucket, change)

    def held_sum(self, bucket: FlatBucket) -> torch.Tensor:
        """Return the accumulator of ``bucket.held``, to be changed. Between passes it may be a sum of this rank's shard
        group."""
        return self.transports[bucket.index].sum_of_group(bucket)

    def terms(self, bucket: FlatBucket) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the gradient of this rank's shard of ``bucket`` for an update, as a sum and a second term: see
        ``ShardStep.addend``. Raises: as ``shard``."""
        return self.transports[bucket.index].terms(bucket)

    def expect(self, index: int) -> None:
        """Start to read the shard of bucket ``index``, if there is one, while another is used."""
        if 0 <= index < len(self.transports):
            self.transports[index].expect(self._geometry.buckets[index])

    def guarded(self, read: Callable[[], T]) -> T:
        """Return the value of ``read``. Collective if sums are on a drive: all ranks raise the error of one."""
        return read()

    def finish(self, bucket: FlatBucket | None = None) -> None:
        """Wait until all gradients, or one bucket's, are in the accumulators."""
        if bucket is not None:
            self.transports[bucket.index].finish(bucket)
            return
        for transport in self.kinds:
            transport.finish_all()

    def arrange(self, order: Sequence[FlatBucket]) -> None:
        """Change the launch order, between passes. Waits until nothing is in flight."""
        for slots in self.device_slots:
            slots.arrange(order)
        for transport in self.kinds:
            transport.arrange(order)

    @property
    def torn(self) -> bool:
        """Return True if an interrupt has left a sum with unknown values."""
        return any(transport.torn for transport in self.kinds) or any(across.torn for across in self._across)

    def fill(self) -> None:
        """Make the accumulators zero, if they hold no gradients."""
        if self.fresh:
            self.finish()
            self.fresh = False
            for transport in self.kinds:
                transport.fill()

    # --- one pass ---------------------------------------------------------------------------------------------

    def begin_pass(self, reached: int, passes: int) -> None:
        """Begin a pass. reached: earlier ones of this step. passes: the expected number."""
        if reached == 0:
            for errors in self._errors:
                errors.begin_step(self.finish)
        last, means = reached + 1 >= passes, not self.fresh and not self._of_groups
        follows = last or self._each_pass
        for across in self._across:
            across.begin_pass(follows, means)
        self._of_groups = bool(self._across) and not follows and not means
        self.squares.begin_pass(self.fresh, last)
        for transport in self.kinds:
            transport.begin_pass(last)

    def end_pass(self) -> None:
        """End the pass: all buckets have been started."""
        self.squares.end_pass()
        self.fresh = False

    def complete(self) -> None:
        """Make means of all sums that are of this rank's shard group yet ([Note: sums of groups]). Collective then: all
        ranks have had the same passes. Raises: OSError on all ranks."""
        for errors in self._errors:
            errors.check(self._comm)
        if not self._of_groups:
            return
        failed: BaseException | None = None
        for bucket in self._geometry.buckets:
            transport = self.transports[bucket.index]
            if not transport.across.hops:
                continue  # its ranks are one shard group: the sums are means
            transport.finish(bucket)
            try:
                sum_ = torch.zeros(bucket.held_count) if failed is not None else transport.sum_of_group(bucket)
            except OSError as error:  # the other ranks wait for this one
                failed, sum_ = error, torch.zeros(bucket.held_count)
            transport.across.mean(bucket, sum_, f"gradients of bucket {bucket.index}")
        self._of_groups = False
        if failed is not None:
            broadcast_error(self._comm, failed)
            raise failed
        check_error(self._comm)

    # --- the norm ---------------------------------------------------------------------------------------------

    @property
    def knows_squares(self) -> bool:
        """Return True if ``add_squares`` need not look at the accumulators, nor wait for them."""
        return self.squares.known

    def want_squares(self, wanted: bool) -> None:
        """Note whether steps compute the norm before they update."""

    def send_squares(self) -> None:
        """Start the copy that ``add_squares`` will wait for. Does not wait."""
        self.squares.send()

    def add_squares(self, norm: GradientNorm, buckets: Iterable[FlatBucket]) -> None:
        """Add this rank's shards of ``buckets``, all that are on the host, to ``norm``."""
        if self.squares.known:
            self.squares.end(norm)
            return
        for bucket in buckets:
            norm.squares.add(bucket, self.shard(bucket))

    def edited(self) -> None:
        """Account for the program's change of a gradient."""
        self.squares.forget()

    # --- while updates wait (schedule/forward.py) --------------------------------------------------------------

    def hold(self) -> None:
        """Keep the values of the sums, also if they are forgotten, until ``release``. A pass comes after that."""

    def release(self) -> None:
        """End ``hold``."""

    @property
    def held(self) -> bool:
        """True between ``hold`` and ``release``, if sums are on a drive."""
        return False

    # --- life -------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Let the next pass overwrite the sums."""
        self.fresh, self._of_groups = True, False
        self.edited()

    @property
    def waited_s(self) -> float:
        """Seconds of waiting for other ranks."""
        return sum(kind.waited_s for kind in self.kinds) + sum(slots.waited_s for slots in self.device_slots)

    @property
    def swap_waited_s(self) -> float:
        """Seconds of waiting for the drive."""
        return 0.0

    @property
    def moved_nbytes(self) -> int:
        """Bytes of the buckets that were reduced between ranks."""
        return sum(transport.moved_nbytes for transport in self.kinds)

    @property
    def nbytes(self) -> list[Nbytes]:
        """Bytes by tier and purpose, with slots."""
        shared = [("device", "slots", slots.nbytes) for slots in self.device_slots]
        return [*shared, *(each for transport in self.kinds for each in transport.nbytes)]

    def close(self) -> None:
        for transport in self.kinds:
            transport.close()
        for slots in self.device_slots:
            slots.close()


class SwappedAccumulators(Accumulators):
    """Accumulators with sums on a drive, in ``ring``."""

    on_drive = True

    def __init__(
        self,
        plan: ReducePlan,
        transports: Sequence[Transport],
        ring: SumRing,
        device_slots: Sequence[DeviceSlots] = (),
    ) -> None:
        super().__init__(plan, transports, device_slots)
        self.ring = ring

    def expect(self, index: int) -> None:
        self.ring.expect(index)

    def guarded(self, read: Callable[[], T]) -> T:
        try:
            value = read()
        except BaseException as error:
            self.ring.lose(error)
            broadcast_error(self._comm, error)
            raise
        check_error(self._comm)
        return value

    def begin_pass(self, reached: int, passes: int) -> None:
        super().begin_pass(reached, passes)
        self.ring.begin_pass(last=reached + 1 >= passes)

    def end_pass(self) -> None:
        super().end_pass()
        self.ring.end_pass()

    def want_squares(self, wanted: bool) -> None:
        self.ring.wants_squares = wanted

    def add_squares(self, norm: GradientNorm, buckets: Iterable[FlatBucket]) -> None:
        self.ring.add_squares(norm, list(buckets))

    def edited(self) -> None:
        super().edited()
        self.ring.knows_squares = False

    def hold(self) -> None:
        self.ring.held = True

    def release(self) -> None:
        self.ring.release()

    @property
    def held(self) -> bool:
        return self.ring.held

    def forget(self) -> None:
        super().forget()
        self.ring.forget()

    @property
    def swap_waited_s(self) -> float:
        return self.ring.waited_s
