"""``deepspeed.utils.nvtx``: functions that show as ranges in a profiler's trace."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import torch
from typing_extensions import ParamSpec

P = ParamSpec("P")
T = TypeVar("T")


def instrument_w_nvtx(func: Callable[P, T]) -> Callable[P, T]:
    """Make calls of ``func`` a range under its name, for NVTX on a CUDA device and for torch.profiler."""

    @functools.wraps(func)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        name = f"DeepSpeed:{func.__qualname__}"
        on_device = torch.cuda.is_available() and torch.cuda.is_initialized()
        if on_device:
            torch.cuda.nvtx.range_push(name)
        try:
            with torch.profiler.record_function(name):
                return func(*args, **kwargs)
        finally:
            if on_device:
                torch.cuda.nvtx.range_pop()

    return wrapped
