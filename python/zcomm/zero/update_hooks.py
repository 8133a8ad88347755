"""UpdateHooks: the moments at which a bucket's update may run, or must have run.

The reducer, the ring of sums, gathers, module hooks and stores get one of these by constructor, and call it. Other
callers (save, looks, ``close``) find it as ``Parts.updates``. The class itself is the null object: no update ever
waits, and none runs outside of ``step()``. UpdateScheduler (schedule/scheduler.py) is the one that trains.
Thread rule: ``run`` and ``run_part`` on the gathering thread, ``sent`` on the thread of the update; the rest on the
main thread, or autograd's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import nn

from zcomm.comm.communicator import Communicator
from zcomm.zero.layout.flat import FlatBucket
from zcomm.zero.worker import Pollable

Shards = list[tuple[FlatBucket, torch.Tensor]]


class UpdateHooks:
    """Null object: no update waits.

    in_gathers: gathers run pending updates by ``run`` and ``run_part``. sees_gathers: all gathers go through these,
    also if no update is pending. waits: an update waits for a read of its weights. pending: backward has run updates
    that no ``step()`` has ended.
    """

    in_gathers = False
    sees_gathers = False
    waits = False
    pending = False

    # --- a backward pass --------------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        """Prepare for a pass that begins. Raises: RuntimeError if it may not, before anything has changed."""

    def before_launch(self, bucket: int) -> None:
        """Prepare for the launch of a bucket's reduction, on all ranks."""

    def reached_again(self, name: str, bucket: int) -> None:
        """Note that the pass has reached parameter ``name`` of ``bucket`` for a second time."""

    def on_sum(self, bucket: int, sum_: torch.Tensor) -> Pollable | None:
        """Use up a complete sum that is not stored. Returns: the use, which must end before its memory is reused."""
        raise NotImplementedError("no update uses sums up")

    def before_sums(self) -> None:
        """Prepare for a read or a change of sums by other means than a pass."""

    # --- reads of weights -------------------------------------------------------------------------------------

    def before_use(self) -> None:
        """Prepare for a use of a unit, or of rows of one."""

    def check_use(self, unit: int) -> None:
        """Check a use of a unit that is whole, is about to be, or has rows gathered."""

    def rows_asked(self, unit: int, buckets: Collection[int]) -> None:
        """Note that rows of these buckets are about to be gathered."""

    def used_in_part(self, unit: int) -> None:
        """Note that a forward is about to read rows of a unit."""

    def after_use(self) -> None:
        """Note that a unit is in use, and that gathers of the following ones have been submitted."""

    def gather_failed(self, error: BaseException) -> None:
        """Note that a gather has ended with ``error``."""

    def run(self, comm: Communicator, shards: Shards, bring: Callable[[], None]) -> None:
        """Read this rank's shards of a unit by ``bring``, and update them. shards: buckets with memory of their shards.
        Collective."""
        raise NotImplementedError("no update runs in a gather")

    def run_part(self, comm: Communicator, bucket: FlatBucket, bring: Callable[[torch.Tensor | None], None]) -> None:
        """Update this rank's shard of a bucket in its source; then call ``bring``, which reads rows. Collective.

        bring: receives the shard if RAM has it; None: it reads the source.
        """
        raise NotImplementedError("no update runs in a gather")

    def hook_modules(self, model: nn.Module, bucket_of: dict[int, int]) -> None:
        """Watch the modules that read weights. bucket_of: of each trained parameter, by id()."""

    def sent(self, bucket: int) -> None:
        """Note that copies of all new weights of a bucket to the device have been issued."""

    # --- calls of the program ---------------------------------------------------------------------------------

    def check(self, what: str) -> None:
        """Raise RuntimeError for the named call, if weights, state and gradients are not of one step."""

    def settle(self) -> None:
        """Run pending updates. Local. Raises: the error of an update."""

    def before_shards(self) -> None:
        """Prepare for a read or a change of shards of weights or state: check, and settle."""
        self.check("a look at weights or state, or a change of them,")
        self.settle()

    def join(self) -> None:
        """Wait for an update that runs on another thread; others may still wait. Raises: its error."""

    def wait(self) -> None:
        """Join, check, and run pending updates. Local. Raises: the error of an update, which ``drain`` reports."""

    def drain(self, what: str) -> None:
        """Run pending updates, for the named call. Collective if updates can wait.

        Raises: an error of one rank on all, also an earlier one that the others do not know of; it poisons all. If all
        know of an error: the poison's error for the call.
        """

    def begin_zero(self) -> None:
        """Prepare for ``zero_grad()``. Raises: RuntimeError while backward has made updates, and cannot undo them."""

    def reset(self) -> None:
        """Note that the gradients of the last pass are forgotten."""

    def begin_load(self, whole: bool) -> None:
        """Prepare for a load. whole: of weights and state, which repairs all failures. Collective."""

    def loaded(self, whole: bool) -> None:
        """Note that a load has succeeded. whole: of weights and state."""

    def state_grew(self) -> None:
        """Note that the optimizer's arrays have new memory."""

    def version_nbytes(self) -> tuple[int, int] | None:
        """Return the bytes of second versions on the drive and in RAM; None: there are none."""
        return None

    def is_running(self) -> bool:
        """Return True if an update runs on another thread now."""
        return False

    def end(self) -> bool:
        """Run pending updates, before ``close``; log failures. Returns: whether weights are of one step."""
        return True

    def close(self) -> None:
        """End threads and hooks, also after failures."""
