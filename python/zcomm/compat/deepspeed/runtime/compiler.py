"""``deepspeed.runtime.compiler``: torch.compile's switches under DeepSpeed's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T", bound=Callable[..., object])


def is_compile_supported() -> bool:
    """Return True: every torch that zcomm runs with has torch.compile."""
    return True


def is_compiling() -> bool:
    """Return True inside of a compilation."""
    return torch.compiler.is_compiling()


def disable(func: T) -> T:
    """Return ``func``, which torch.compile then leaves as it is."""
    return torch.compiler.disable(func)  # type: ignore[no-any-return]
