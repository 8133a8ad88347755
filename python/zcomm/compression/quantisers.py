"""Quantised values as floating-point numbers: symmetric, asymmetric, ternary and binary, in groups of elements.

A group is an equal part of the flattened tensor, with a range of its own. Ranges and divisions are at least fp32, and
the result has the dtype of the input. A group of equal values, also of zeros, is exact (symmetric: zeros only); a NaN
makes its whole group NaN. Gradients pass straight through: the input gets the result's gradient.
Sources: Yao et al., "ZeroQuant" (arXiv:2206.01861), section 3. Of ternary and binary weights, as Wu et al., "XTC"
(arXiv:2206.01859), use them: Li et al. (arXiv:1605.04711), equations 5 and 6, and Rastegari et al. (arXiv:1603.05279),
equation 6. Of gradients: Bengio et al. (arXiv:1308.3432).
"""

from __future__ import annotations

from typing import Any

import torch

KINDS = ("symmetric", "asymmetric")


class _StraightThrough(torch.autograd.Function):
    """The second tensor, with the gradient of the first one."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, quantised: torch.Tensor) -> torch.Tensor:
        return quantised.view_as(quantised)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


def straight_through(value: torch.Tensor, quantised: torch.Tensor) -> torch.Tensor:
    """Return ``quantised``, of the same shape, with a gradient that goes to ``value`` unchanged."""
    found: torch.Tensor = _StraightThrough.apply(value, quantised)  # type: ignore[no-untyped-call]
    return found


@torch.no_grad()
def quantise(
    value: torch.Tensor,
    bits: int,
    kind: str = "symmetric",
    groups: int = 1,
    stochastic: bool = False,
    limits: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return ``value``, of any shape, with at most ``2**bits`` different numbers in each of its groups. No gradient.

    bits: 1 is binary and 2 ternary. kind: one of KINDS, from 3 bits on. stochastic: round up with the probability of
    the fraction, by torch's generator. limits: the least and largest value, of one group, instead of the group's own.
    Raises: ValueError if ``groups`` does not divide the number of elements.
    """
    if value.numel() == 0:
        return value.clone()
    if value.numel() % groups:
        raise ValueError(f"{groups} groups do not divide the {value.numel()} elements of shape {list(value.shape)}")
    wide = value.dtype if value.dtype in (torch.float32, torch.float64) else torch.float32
    flat = value.detach().reshape(groups, -1).to(wide)
    if bits == 1:
        found = flat.sign() * _mean_size(flat)
    elif bits == 2:
        found = _ternary(flat)
    else:
        ends = flat.aminmax(dim=1, keepdim=True) if limits is None else [each.to(wide).view(1, 1) for each in limits]
        found = (_symmetric if kind == "symmetric" else _asymmetric)(flat, bits, ends[0], ends[1], stochastic)
    return found.to(value.dtype).reshape(value.shape)


def _mean_size(flat: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.linalg.vector_norm(flat, 1, dim=1, keepdim=True) / flat.shape[1]
    return found


def _ternary(flat: torch.Tensor) -> torch.Tensor:
    size = flat.abs()
    large = size > 0.7 * _mean_size(flat)
    count = large.sum(dim=1, keepdim=True).clamp(min=1)  # a group of zeros has none
    return flat.sign() * large * ((size * large).sum(dim=1, keepdim=True) / count)


def _symmetric(flat: torch.Tensor, bits: int, low: torch.Tensor, high: torch.Tensor, stochastic: bool) -> torch.Tensor:
    scale = torch.maximum(low.abs(), high.abs()) * 2 / 2**bits
    scale = torch.where(scale == 0, 1, scale)
    return _rounded(flat / scale, stochastic).clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) * scale


def _asymmetric(flat: torch.Tensor, bits: int, low: torch.Tensor, high: torch.Tensor, stochastic: bool) -> torch.Tensor:
    scale = (high - low) / 2**bits
    equal = scale == 0
    scale = torch.where(equal, 1, scale)
    zero = (low / scale).round() * scale
    found = _rounded((flat - zero) / scale, stochastic).clamp(0, 2**bits - 1) * scale + zero
    return torch.where(equal, low.expand_as(flat), found)


def _rounded(value: torch.Tensor, stochastic: bool) -> torch.Tensor:
    return (value + torch.rand_like(value) - 0.5).round() if stochastic else value.round()
