"""Refusal of gradients of a model that is not trained: they would be neither averaged nor used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zcomm.zero.module_hook import Hook


def refuse_gradients(model: nn.Module, is_trained: Callable[[torch.Tensor], bool]) -> list[Any]:
    """Make a gradient that reaches a parameter of ``model`` an error that names it. Returns: the hooks' handles.

    is_trained: whether another optimizer has the parameter by now; its gradient is that optimizer's then.
    """
    return [
        param.register_post_accumulate_grad_hook(Hook(_Refusal(name, is_trained)))
        for name, param in model.named_parameters()
        if param.requires_grad
    ]


class _Refusal:
    """Raises RuntimeError for the gradient of the parameter ``name``."""

    def __init__(self, name: str, is_trained: Callable[[torch.Tensor], bool]) -> None:
        self._name, self._is_trained = name, is_trained

    def __call__(self, param: torch.Tensor) -> None:
        if self._is_trained(param):
            return
        param.grad = None
        raise RuntimeError(
            f"backward has reached the parameter {self._name} of a model without an optimizer (optimizer=None, or no "
            'section "optimizer"): only this rank would have its gradient. Give an optimizer to train it, or '
            "freeze it (requires_grad_(False)), or run the model under torch.no_grad()"
        )
