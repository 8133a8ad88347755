"""A simulated device under ZeroOptimizer: streams are threads with random delays, tensors of the CPU play on it.

``play(max_delay_s)`` makes every optimizer from now on take a model of CPU tensors for one on the device.
"""

from __future__ import annotations

from typing import Any

import torch

from zcomm import _core, _lane
from zcomm._lane import DeviceLane


class SimulatedLane(DeviceLane):
    """Torch's current stream is the host itself: what it is given has run when the call returns."""

    def _native(self) -> int:
        return 0

    def empty(self, count: int, dtype: torch.dtype, what: str) -> torch.Tensor:
        memory = super().empty(count, dtype, what)
        return memory.fill_(float("nan")) if dtype.is_floating_point else memory  # what was never written shows

    def _lock(self, tensor: torch.Tensor) -> None:
        pass

    def _unlock(self, tensor: torch.Tensor) -> None:
        pass


lanes: list[SimulatedLane] = []  # that were opened


def device(seed: int, max_delay_s: float) -> Any:
    return _core.simulated_device(seed=seed, max_delay_s=max_delay_s)


def play(max_delay_s: float = 0.0, seed: int = 1) -> None:
    """From now on, in this process."""

    def open_lane(where: torch.device) -> DeviceLane:
        lanes.append(SimulatedLane(torch.device("cpu"), device(seed + len(lanes), max_delay_s)))
        return lanes[-1]

    _lane.open_lane = open_lane


def playing() -> bool:
    return _lane.open_lane is not _ordinary


def stop() -> None:
    """Ordinary models again."""
    _lane.open_lane = _ordinary
    lanes.clear()


_ordinary = _lane.open_lane
