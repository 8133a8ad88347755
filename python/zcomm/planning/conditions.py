"""Conditions on values of tensors, which a trace on the meta device cannot compute."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class TrueConditions(TorchDispatchMode):
    """Context in which a condition on a tensor of the meta device is true. count: of such conditions.

    Models of transformers ask a mask whether it has no padding. A number cannot be assumed: that is torch's error.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_read = func is torch.ops.aten._local_scalar_dense.default
        if is_read and args[0].is_meta and args[0].dtype == torch.bool:
            self.count += 1
            return True
        return func(*args, **(kwargs or {}))
