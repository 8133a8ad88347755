"""Attention of tensors on the meta device as one operator, if the CPU has one for such arguments.

The meta device would run the reference implementation, which keeps all weights of attention.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

_FLASH = 1  # torch.nn.attention.SDPBackend.FLASH_ATTENTION


class FusedAttention(TorchFunctionMode):
    """Context in which scaled_dot_product_attention of meta tensors is the CPU's operator."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return _attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if not query.is_meta or not _is_fused(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, torch.zeros((), dtype=query.dtype, device="meta"), -float("inf"))
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out: torch.Tensor = operator(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return out


def _is_fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
) -> bool:
    """Ask torch for the CPU's operator, with tensors of the same kind and small sizes."""
    q, k, v = (_small(tensor, {0, 2}) for tensor in (query, key, value))
    masked = None if mask is None else _small(mask, {0, 2, 3} if mask.dim() == 4 else {0, 1})
    chosen: int = torch._fused_sdp_choice(q, k, v, masked, dropout_p, is_causal, enable_gqa=enable_gqa)
    return chosen == _FLASH


def _small(tensor: torch.Tensor, dims: set[int]) -> torch.Tensor:
    sizes = [min(size, 2) if dim in dims else size for dim, size in enumerate(tensor.shape)]
    with _disable_current_modes():
        return torch.empty(sizes, dtype=tensor.dtype, device="cpu", requires_grad=tensor.requires_grad)
