"""``deepspeed.compression.helper``: which layers can be compressed, and layers of GPT-2 as Linear."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zcomm.compat.deepspeed.modules import names_of
from zcomm.compat.deepspeed.runtime.utils import recursive_getattr, recursive_setattr
from zcomm.compression.plan import inner_model

__all__ = ["convert_conv1d_to_linear", "is_module_compressible", "recursive_getattr", "recursive_setattr"]


def is_module_compressible(module: nn.Module, mpu: Any = None) -> bool:
    """Return True for Linear, Conv2d, Embedding and BatchNorm2d. mpu: without effect."""
    return isinstance(module, (nn.Linear, nn.Conv2d, nn.Embedding, nn.BatchNorm2d))


@torch.no_grad()
def convert_conv1d_to_linear(model: nn.Module, convert_type: type[nn.Module]) -> nn.Module:
    """Replace each ``convert_type``, with a weight of [inputs, outputs], by a Linear of the same function.

    convert_type: transformers' Conv1D. In place; dtype, device, mode and requires_grad remain. Returns: the model.
    """
    inner = inner_model(model)
    for name, module in list(inner.named_modules()):
        if isinstance(module, convert_type) and name:
            old: Any = module
            inputs, outputs = old.weight.shape
            linear = nn.Linear(inputs, outputs, old.bias is not None, "meta", old.weight.dtype)
            linear.weight = nn.Parameter(old.weight.detach().t().contiguous(), old.weight.requires_grad)
            if old.bias is not None:
                linear.bias = nn.Parameter(old.bias.detach().clone().view(-1), old.bias.requires_grad)
            recursive_setattr(inner, name, linear.train(old.training))
    return model


__getattr__ = names_of(__name__)
