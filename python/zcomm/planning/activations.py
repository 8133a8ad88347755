"""Memory that autograd keeps between forward and backward of one micro-batch, found by tracing it.

On the meta device nothing is computed or allocated, and conditions on values of tensors count as true. Each storage
counts once; the model's own parameters and buffers and the working space inside operators do not count.
Source: torch.autograd.graph's saved_tensors_hooks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from zcomm.planning.work import storage


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


def saved_nbytes(model: nn.Module, *args: Any, **kwargs: Any) -> int:
    """Return the bytes that ``model(*args, **kwargs)`` saves for backward, on the device of model and arguments.

    Of a checkpointed block only the inputs count. Raises: as the model.
    """
    own = {storage(tensor) for tensor in [*model.parameters(), *model.buffers()]}
    sizes: dict[int, int] = {}
    held = []  # a storage that is freed could lend its identity to another

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        key = storage(tensor)
        if key not in own:
            held.append(tensor)
            sizes[key] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(*args, **kwargs)
    del output
    return sum(sizes.values())
