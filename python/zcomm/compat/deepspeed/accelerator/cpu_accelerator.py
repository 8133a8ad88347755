"""The CPU as an accelerator. An index is accepted, and means the same. Memory is this process's (psutil)."""

from __future__ import annotations

import contextlib
import os
from contextlib import AbstractContextManager
from typing import Any

import psutil
import torch

from zcomm.compat.deepspeed.accelerator import DeepSpeedAccelerator


class _Memory:
    """Bytes that this process has in RAM. The peak is the largest that a call has seen: Linux cannot reset its own."""

    _peak = 0

    def _resident(self) -> int:
        nbytes = int(psutil.Process().memory_info().rss)
        self._peak = max(self._peak, nbytes)
        return nbytes

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Return the bytes that this process has in RAM."""
        return self._resident()

    memory_cached = memory_reserved = memory_allocated

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Return the largest value that any of these calls has seen since the last reset."""
        self._resident()
        return self._peak

    max_memory_cached = max_memory_reserved = max_memory_allocated

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Restart the peak."""
        self._peak = 0
        self._resident()

    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def memory_stats(self, device_index: int | None = None) -> dict[str, int]:
        """Return the two values by torch's names."""
        now = self._resident()
        return {"allocated_bytes.all.current": now, "allocated_bytes.all.peak": self._peak}

    def total_memory(self, device_index: int | None = None) -> int:
        """Return the bytes of RAM of the machine."""
        return int(psutil.virtual_memory().total)

    def available_memory(self, device_index: int | None = None) -> int:
        """Return the bytes of RAM that programs can still have."""
        return int(psutil.virtual_memory().available)

    def empty_cache(self) -> None:
        """Do nothing: there is no cache."""


class _Random:
    """torch's generator of the CPU."""

    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    initial_seed = staticmethod(torch.initial_seed)

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        torch.set_rng_state(new_state)

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        return torch.get_rng_state()

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.default_generator


class _Streams:
    """No streams: operations of the CPU have ended when they return. The classes are None, as in DeepSpeed."""

    Stream: Any = None
    Event: Any = None

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context that changes nothing."""
        return contextlib.nullcontext()

    def current_stream(self, device_index: int | None = None) -> Any:
        return None

    default_stream = current_stream

    def create_graph(self) -> Any:
        return None

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> AbstractContextManager[Any]:
        """Return a context that changes nothing: the operations inside run at once, and are not kept.

        Raises: nothing. ``replay_graph`` raises instead of doing nothing.
        """
        return contextlib.nullcontext()

    def replay_graph(self, graph: Any) -> None:
        """Raise NotImplementedError: nothing was captured, so the results would be old ones."""
        raise NotImplementedError("replay_graph(): the CPU has no graphs; run the operations again")

    def range_push(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: there is no profiler of ranges."""

    range_pop = range_push

    def synchronize(self, device_index: int | None = None) -> None:
        """Do nothing: no operation of the CPU is asynchronous."""


class CpuAccelerator(_Memory, _Random, _Streams, DeepSpeedAccelerator):
    """The CPU. An index is accepted, and means the same."""

    _name = "cpu"
    BFloat16Tensor = torch.BFloat16Tensor
    ByteTensor = torch.ByteTensor
    DoubleTensor = torch.DoubleTensor
    FloatTensor = torch.FloatTensor
    HalfTensor = torch.HalfTensor
    IntTensor = torch.IntTensor
    LongTensor = torch.LongTensor

    def is_available(self) -> bool:
        return True

    is_bf16_supported = is_synchronized_device = use_host_timers = is_available
    resolves_data_dependency = handles_memory_backpressure = is_available

    def device_name(self, device_index: int | None = None) -> str:
        """Return a name that ``tensor.to()`` takes."""
        return "cpu"

    def current_device_name(self) -> str:
        return "cpu"

    def set_device(self, device_index: int) -> None:
        """Do nothing: there is nothing to set."""

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        """Return LOCAL_SIZE, the ranks of this machine by some launchers: each is a device. Without it 1."""
        return max(1, int(os.environ.get("LOCAL_SIZE") or 1))

    def pin_memory(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        """Return ``tensor``: no device reads it, so that its pages need not be pinned."""
        return tensor

    def visible_devices_envs(self) -> list[str]:
        """Return DeepSpeed's variable for it, which zcomm does not read."""
        return ["CPU_VISIBLE_DEVICES"]
