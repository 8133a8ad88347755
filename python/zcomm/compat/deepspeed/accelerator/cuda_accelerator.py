"""torch.cuda under DeepSpeed's names; no index: the current device."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

import torch

from zcomm.compat.deepspeed.accelerator import DeepSpeedAccelerator


class _Memory:
    """Bytes of torch's allocator on a device."""

    memory_allocated = staticmethod(torch.cuda.memory_allocated)
    max_memory_allocated = staticmethod(torch.cuda.max_memory_allocated)
    memory_cached = memory_reserved = staticmethod(torch.cuda.memory_reserved)
    max_memory_cached = max_memory_reserved = staticmethod(torch.cuda.max_memory_reserved)
    memory_stats = staticmethod(torch.cuda.memory_stats)
    reset_peak_memory_stats = staticmethod(torch.cuda.reset_peak_memory_stats)
    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats
    empty_cache = staticmethod(torch.cuda.empty_cache)

    def total_memory(self, device_index: int | None = None) -> int:
        """Return the bytes of a device."""
        index = torch.cuda.current_device() if device_index is None else device_index
        return int(torch.cuda.get_device_properties(index).total_memory)

    def available_memory(self, device_index: int | None = None) -> int:
        """Return the bytes of a device that are free, or that torch's allocator has and does not use."""
        free = torch.cuda.mem_get_info(device_index)[0]
        idle = torch.cuda.memory_reserved(device_index) - torch.cuda.memory_allocated(device_index)
        return int(free + idle)


class _Random:
    """torch's generators of the devices."""

    manual_seed = staticmethod(torch.cuda.manual_seed)
    manual_seed_all = staticmethod(torch.cuda.manual_seed_all)
    initial_seed = staticmethod(torch.cuda.initial_seed)

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        torch.cuda.set_rng_state(new_state, "cuda" if device_index is None else device_index)

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        return torch.cuda.get_rng_state("cuda" if device_index is None else device_index)

    def default_generator(self, device_index: int) -> torch.Generator:
        torch.cuda.init()  # the generators are made then
        return torch.cuda.default_generators[device_index]


class _Streams:
    """torch's streams, events, graphs and ranges."""

    Stream: Any = torch.cuda.Stream
    Event: Any = torch.cuda.Event
    stream = staticmethod(torch.cuda.stream)
    current_stream = staticmethod(torch.cuda.current_stream)
    default_stream = staticmethod(torch.cuda.default_stream)
    synchronize = staticmethod(torch.cuda.synchronize)

    def create_graph(self) -> Any:
        return torch.cuda.CUDAGraph()

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> AbstractContextManager[Any]:
        """Return a context that keeps its operations in ``graph``."""
        return torch.cuda.graph(graph, pool, stream)

    def replay_graph(self, graph: Any) -> None:
        graph.replay()

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> Any:
        """Open a range of NVTX."""
        return torch.cuda.nvtx.range_push(msg)

    def range_pop(self, domain: Any = None) -> Any:
        """Close the innermost range of NVTX."""
        return torch.cuda.nvtx.range_pop()


def _tensor(dtype: torch.dtype) -> Any:
    return functools.partial(torch.tensor, dtype=dtype, device="cuda")


class CudaAccelerator(_Memory, _Random, _Streams, DeepSpeedAccelerator):
    """torch.cuda under DeepSpeed's names; no index: the current device."""

    _name = "cuda"
    BFloat16Tensor = _tensor(torch.bfloat16)
    ByteTensor = _tensor(torch.uint8)
    DoubleTensor = _tensor(torch.double)
    FloatTensor = _tensor(torch.float)
    HalfTensor = _tensor(torch.half)
    IntTensor = _tensor(torch.int)
    LongTensor = _tensor(torch.long)

    def is_synchronized_device(self) -> bool:
        return False

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def current_device_name(self) -> str:
        return f"cuda:{torch.cuda.current_device()}"

    def set_device(self, device_index: int) -> None:
        torch.cuda.set_device(device_index)

    def current_device(self) -> int:
        return torch.cuda.current_device()

    def device_count(self) -> int:
        return torch.cuda.device_count()

    def is_available(self) -> bool:
        return torch.cuda.is_available()

    def is_bf16_supported(self) -> bool:
        return bool(torch.cuda.is_bf16_supported())

    def is_triton_supported(self) -> bool:
        return torch.cuda.get_device_capability()[0] >= 8

    def export_envs(self) -> list[str]:
        """Return the beginnings of variables that a launcher passes on to other hosts."""
        return ["NCCL", "LD_LIBRARY", "PATH"]
