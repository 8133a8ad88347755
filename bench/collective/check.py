"""Exact results: inputs of small integers, and expected outputs, window by window (a 1 GiB buffer fits twice)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from collective.operations import Operation

WINDOW = 1 << 22  # elements


def wrong(
    operation: Operation, redop: str, inp: Tensor, out: Tensor, call: Callable[[], object], rank: int, world: int
) -> int:
    """Run `call` once on known inputs; return the number of elements of this rank's result that are not exact."""
    part = max(inp.numel(), out.numel()) // world
    if operation.root not in (None, rank):
        inp.zero_()
    else:
        first = rank * part if operation.in_part else 0
        for begin, index in _windows(inp):
            inp[begin : begin + index.numel()] = value(operation, rank, index + first).to(inp.dtype)
    if inp.data_ptr() != out.data_ptr():
        out.zero_()
    call()
    bad = 0
    for begin, index in _windows(out):
        if operation.source:
            of_rank, of_index = operation.source(index, rank, world, max(1, part))
            want = value(operation, of_rank, of_index).to(out.dtype)
        else:
            offset = rank * part if operation.out_part else 0
            want = _reduced([value(operation, r, index + offset) for r in range(world)], redop, out.dtype)
        bad += int((out[begin : begin + index.numel()] != want).sum())
    return bad


def worst_ulp(inp: Tensor, call: Callable[[], object], rank: int, world: int) -> float:
    """Return the largest error of an all_reduce (sum, in place) of random numbers.

    Unit: units in the last place of the exact sum.
    """
    import torch

    n = min(inp.numel(), WINDOW)
    total = torch.zeros(n, dtype=torch.float64)
    for other in range(world):
        values = torch.randn(n, generator=torch.Generator().manual_seed(other)).to(inp.dtype)
        total += values.to(torch.float64)
        if other == rank:
            inp.zero_()
            inp[:n] = values
    call()
    info = torch.finfo(inp.dtype)
    _, exponent = torch.frexp(total)
    ulp = torch.ldexp(torch.full_like(total, info.eps), exponent - 1).clamp(min=info.tiny * info.eps)
    return float(((inp[:n].cpu().to(torch.float64) - total).abs() / ulp).max()) if n else 0.0


def value(operation: Operation, rank: Any, index: Tensor) -> Tensor:
    """Return element `index` of rank `rank`'s input, without a period, so that data in a wrong place shows.

    Reduced: 1, 2 or 3, so that results of few ranks are exact in every dtype; copied: 1 to 127.
    """
    scattered = (index * 2654435761 + rank * 40503) >> 9
    return scattered % (3 if operation.reduces else 127) + 1


def _windows(tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
    import torch

    for begin in range(0, tensor.numel(), WINDOW):
        yield begin, torch.arange(begin, min(begin + WINDOW, tensor.numel()), device=tensor.device)


def _reduced(inputs: list[Tensor], redop: str, dtype: torch.dtype) -> Tensor:
    import torch

    total = inputs[0].to(torch.float64 if dtype.is_floating_point else torch.int64)
    for other in inputs[1:]:
        if redop in ("sum", "avg"):
            total = total + other
        elif redop == "prod":
            total = total * other
        else:
            total = torch.minimum(total, other) if redop == "min" else torch.maximum(total, other)
    if redop == "avg":
        total = total / len(inputs) if dtype.is_floating_point else total // len(inputs)
    return total.to(dtype)
