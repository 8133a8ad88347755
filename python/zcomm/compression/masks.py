"""Masks of pruning: the share of elements, rows, heads or channels with the largest scores, the others become zeros.

"l1": scores are absolute values (their sums), taken once, so that the mask is a buffer. "topk": scores are parameters,
trained with the model: a mask's gradient goes to its scores. A mask is one module, which the weight, the bias
and related layers share. Sources: Han et al. (arXiv:1506.02626) and Li et al. (arXiv:1608.08710) for l1; Sanh et al.,
"Movement Pruning" (arXiv:2005.07683), section 4, for topk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


def largest(scores: torch.Tensor, ratio: float) -> torch.Tensor:
    """Return True for the ``ceil(ratio * count)`` largest of ``scores``, of any shape; of equals for the first ones."""
    order = scores.detach().flatten().sort(descending=True, stable=True).indices
    mask = torch.zeros(scores.numel(), dtype=torch.bool, device=scores.device)
    mask[order[: math.ceil(ratio * scores.numel())]] = True
    return mask.view(scores.shape)


class _Largest(torch.autograd.Function):
    """``largest`` as numbers, with the gradient of the scores themselves."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, ratio: float) -> torch.Tensor:
        return largest(scores, ratio).to(scores.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class Mask(nn.Module):
    """A mask that keeps ``ratio`` of its elements, once ``enabled``.

    scores: as many as the mask has elements, for "l1"; for "topk" only their shape [2 dimensions or more],
    dtype and device count.
    prunes: the method, so that it can be found.
    """

    mask: torch.Tensor
    scores: nn.Parameter

    def __init__(self, scores: torch.Tensor, ratio: float, method: str, prunes: str) -> None:
        super().__init__()
        self.ratio, self.method, self.prunes = ratio, method, prunes
        self.enabled = False
        if method == "l1":
            self.register_buffer("mask", largest(scores, ratio))
        else:
            self.scores = nn.Parameter(torch.empty_like(scores, memory_format=torch.contiguous_format))
            nn.init.kaiming_uniform_(self.scores, a=math.sqrt(5))

    def forward(self) -> torch.Tensor:
        """Return the mask, boolean or with a gradient."""
        if self.method == "l1":
            return self.mask
        found: torch.Tensor = _Largest.apply(self.scores, self.ratio)  # type: ignore[no-untyped-call]
        return found

    def kept(self) -> torch.Tensor:
        """Return the mask as flat booleans."""
        found: torch.Tensor = self.forward().detach().bool().flatten()
        return found

    def extra_repr(self) -> str:
        """Return the settings, for ``print(model)``."""
        return f"{self.prunes}, ratio={self.ratio}, {self.method}, {'on' if self.enabled else 'off'}"


class Masked(nn.Module):
    """A parametrization of torch: a tensor times the mask.

    shape: of the mask as a factor. repeats: equal neighbours of each element of the mask, before it gets this shape.
    """

    def __init__(self, mask: Mask, shape: Sequence[int], repeats: int = 1) -> None:
        super().__init__()
        self.mask, self.shape, self.repeats = mask, tuple(shape), repeats

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Return ``value`` with zeros for pruned elements."""
        return self.times(value, self.mask()) if self.mask.enabled else value

    def times(self, value: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """Return ``value`` times a mask of any shape and type."""
        factor = kept.flatten().repeat_interleave(self.repeats) if self.repeats > 1 else kept
        return value * factor.reshape(self.shape).to(value.dtype)

    def right_inverse(self, value: torch.Tensor) -> torch.Tensor:
        """Return ``value``: an assigned tensor is the unmasked one."""
        return value
