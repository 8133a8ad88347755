"""Inputs of the collectives' tests, and the comparison of results."""

from __future__ import annotations

from collections.abc import Callable

import torch

import zcomm

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.int8,
    torch.uint8,
]
COUNTS = [0, 1, 7, 64, 1001, 300_007]  # the last is larger than all staging slots together (4-byte elements)
OPS = ["sum", "avg", "min", "max", "prod"]


def counts_of(dtype: torch.dtype) -> list[int]:
    """Return COUNTS; the large one for two dtypes only, since steps of a long buffer behave alike for all."""
    return COUNTS if dtype in (torch.float32, torch.bfloat16) else COUNTS[:-1]


def make(count: int, dtype: torch.dtype, rank: int, seed: int = 0) -> torch.Tensor:
    """Rank's input: small integers, so that every order of summation gives the same bits."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(1, 4, (count,), generator=generator).to(dtype)


def expected(inputs: list[torch.Tensor], op: str) -> torch.Tensor:
    """Return the reduction in fp64 (int64 for integers), rounded once."""
    wide = torch.float64 if inputs[0].dtype.is_floating_point else torch.int64
    stack = torch.stack([tensor.to(wide) for tensor in inputs])
    if op == "sum":
        result = stack.sum(0)
    elif op == "avg":
        result = stack.sum(0) / len(inputs)
    elif op == "prod":
        result = stack.prod(0)
    else:
        result = stack.amin(0) if op == "min" else stack.amax(0)
    return result.to(inputs[0].dtype)


def check_equal(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape, f"{what}: {got.dtype} {got.shape}"
    if not torch.equal(got, want):
        place = int((got != want).nonzero()[0])
        raise AssertionError(f"{what}: element {place} is {got[place]}, expected {want[place]}")


def check_close(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Compare with one rounding of tolerance to fp64's result, because avg multiplies or divides when accumulating."""
    torch.testing.assert_close(got, want, rtol=torch.finfo(got.dtype).eps * 2, atol=0, msg=lambda m: f"{what}: {m}")


def symmetric_copy(tensor: torch.Tensor) -> torch.Tensor:
    copy = zcomm.empty(tensor.numel(), dtype=tensor.dtype)
    copy.copy_(tensor)
    return copy


def failures_of(checks: list[Callable[[], None]]) -> list[str]:
    """Run `checks` on this rank of a new world; return the failures."""
    zcomm.init()
    failed = []
    for check in checks:
        try:
            check()
        except AssertionError as error:
            failed.append(f"{check.__name__}: {error}")
    zcomm.barrier()
    return failed
