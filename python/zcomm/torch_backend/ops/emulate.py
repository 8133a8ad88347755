"""Reductions that the core lacks, by torch: bitwise ones, and of dtypes such as int16, or complex products.

Every rank gathers all inputs (stacked in rank order, dim 0) and reduces them itself, so the bits are equal everywhere.
"""

from __future__ import annotations

from functools import cache, reduce
from typing import Any

import torch

from zcomm.torch_backend.options import Kind, name_of

_WIDER = {
    torch.int16: torch.int64,
    torch.uint16: torch.int64,
    torch.uint32: torch.int64,
    torch.complex32: torch.complex64,
}
_TOP_BIT = -(2**63)
_BITWISE = {Kind.BAND: torch.bitwise_and, Kind.BOR: torch.bitwise_or, Kind.BXOR: torch.bitwise_xor}


def check(what: str, kind: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Check a reduction before anything is sent.

    Raises: ValueError if it has no meaning for ``dtype``; NotImplementedError if torch has no operation for it.
    """
    floating = dtype.is_floating_point or dtype.is_complex
    if kind in _BITWISE and floating:
        raise ValueError(f"{what}: {kind.name} is not defined on {dtype}")
    if kind == Kind.AVG and not floating:
        raise ValueError(f"{what}: {kind.name} of {dtype}: integers have no average; use SUM")
    if kind in (Kind.MIN, Kind.MAX) and dtype.is_complex:
        raise ValueError(f"{what}: {kind.name} is not defined on {dtype}")
    if kind not in _BITWISE and kind not in (Kind.SUM, Kind.AVG, Kind.MIN, Kind.MAX, Kind.PRODUCT):
        raise ValueError(f"{what}: reduction {kind.name} is not supported")
    if not _has_operations(int(kind), dtype, device):
        raise NotImplementedError(f"{what}: {kind.name} of {dtype}: torch has no such operation on {device.type}")


@cache
def _has_operations(kind: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if ``combine`` works: torch has no arithmetic for storage-only dtypes (bits, uint4)."""
    try:
        combine(Kind(kind), torch.zeros((2, dtype.itemsize), dtype=torch.uint8, device=device).view(dtype))
    except (NotImplementedError, RuntimeError):
        return False
    return True


def name(what: str, kind: Any, dtype: torch.dtype) -> str:
    """Name a reduction for the ranks to compare, as all of them move as bytes."""
    return f"{what} {kind.name} of {name_of(dtype)}"


def combine(kind: Any, stack: torch.Tensor) -> torch.Tensor:
    """Reduce dim 0. Small floats accumulate in fp32, small integers in int64."""
    dtype = stack.dtype
    if kind in _BITWISE:
        return reduce(_BITWISE[kind], stack.unbind(0))
    wide = torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else _WIDER.get(dtype, dtype)
    if dtype == torch.uint64:  # sums and products are the same bits, modulo 2**64
        stack, wide = stack.view(torch.int64), torch.int64
    is_shifted = dtype == torch.uint64 and kind in (Kind.MIN, Kind.MAX)  # the order of signed numbers, 2**63 below
    stack = stack ^ _TOP_BIT if is_shifted else stack.to(wide)
    if kind == Kind.SUM or kind == Kind.AVG:
        result = reduce(torch.add, stack.unbind(0))
        result = result / stack.shape[0] if kind == Kind.AVG else result
    elif kind == Kind.PRODUCT:
        result = reduce(torch.mul, stack.unbind(0))
    else:
        result = stack.amin(0) if kind == Kind.MIN else stack.amax(0)
    result = result ^ _TOP_BIT if is_shifted else result
    return result.view(dtype) if dtype == torch.uint64 else result.to(dtype)
