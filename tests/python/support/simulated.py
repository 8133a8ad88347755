"""A simulated device under ZeroOptimizer: streams are threads with random delays, CPU tensors act as device tensors.

After ``play(max_delay_s)`` every new optimizer treats a model of CPU tensors as a model on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import zcomm_testing
from zcomm import _core
from zcomm.backends import cuda_ipc
from zcomm.backends.nccl import made_by
from zcomm.bootstrap.join import Joined
from zcomm.comm import Communicator
from zcomm.memory import device_streams
from zcomm.memory.device_streams import DeviceLane


class SimulatedLane(DeviceLane):
    """Torch's current stream is the host itself: its work has run when a call returns.

    joins: the devices of several ranks reach each other. nccl: NCCL joins them, if they do not. With both,
    the devices of the lane's first communicator reach each other, and NCCL joins the others."""

    joins = False
    joined = 0  # calls of reach()
    nccl: zcomm_testing.FakeNccl | None = None

    def _native(self) -> int:
        return 0

    def reach(self, job: Communicator) -> Communicator | None:
        """Return the communicator between the devices of ranks that are threads: processes cannot open each other's
        simulated memory."""
        self.joined += 1
        if self.nccl is not None and not (self.joins and self.joined == 1):
            return Communicator(over_nccl(self.nccl, job.duplicate()._joined, self.core))
        if not self.joins:
            return None
        return Communicator(cuda_ipc.over(job.duplicate()._joined, self.core, "cpu"))

    def empty(self, count: int, dtype: torch.dtype, what: str) -> torch.Tensor:
        memory = super().empty(count, dtype, what)
        return memory.fill_(float("nan")) if dtype.is_floating_point else memory  # shows reads of unwritten memory

    def free_nbytes(self) -> int:
        return self.core.memory()[0]

    def _lock(self, tensor: torch.Tensor) -> None:
        """Lock whole pages, as a driver does, and no page twice."""
        page = _core.page_nbytes()
        assert tensor.data_ptr() % page == 0, "the page has other memory, too"
        taken = {at for other in self._locked for at in range(other.data_ptr(), other.data_ptr() + other.nbytes, page)}
        assert not taken & set(range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, page))

    def _unlock(self, tensor: torch.Tensor) -> None:
        pass


lanes: list[SimulatedLane] = []  # all opened lanes


def device(seed: int, max_delay_s: float) -> Any:
    return zcomm_testing.simulated_device(seed=seed, max_delay_s=max_delay_s)


def over_nccl(nccl: zcomm_testing.FakeNccl, control: Joined, core: _core.Device, messages: bool = False) -> Joined:
    """Open backend nccl over ``control``, for ranks that are threads. Collective."""

    def make(
        hosts: _core.Communicator,
        guard: _core.Communicator,
        matcher: _core.Communicator | None,
        mesh: _core.Mesh,
        limit_s: float,
        joined: _core.NcclPart | None,
    ) -> Any:
        return nccl.join(hosts, guard, matcher, mesh, core, limit_s, joined)

    return made_by(make, control, "cpu", messages)


def play(
    max_delay_s: float = 0.0, seed: int = 1, joins: bool = False, nccl: zcomm_testing.FakeNccl | None = None
) -> None:
    """Simulate from now on, in this process; its threads may be the ranks (``joins``, ``nccl``)."""

    def open_lane(where: torch.device) -> DeviceLane:
        lane = SimulatedLane(torch.device("cpu"), device(seed + len(lanes), max_delay_s))
        lane.joins, lane.nccl = joins, nccl
        lanes.append(lane)
        return lane

    device_streams.open_lane = open_lane


def on_device(seed: int, function: Callable[..., Any], *args: Any) -> Any:
    """Return ``function(*args)``, run with late streams. A job for ranks."""
    play(0.0005, seed)
    try:
        return function(*args)
    finally:
        stop()


def playing() -> bool:
    return device_streams.open_lane is not _ordinary


def stop() -> None:
    """End the simulation: later models are ordinary."""
    device_streams.open_lane = _ordinary
    lanes.clear()


_ordinary = device_streams.open_lane
