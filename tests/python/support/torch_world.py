"""A rank of a world of the c10d backend "zcomm", for the tests of zcomm.torch_backend."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

_made = 0  # worlds of this rank


@contextmanager
def world(timeout_s: float = 60.0) -> Iterator[tuple[int, int]]:
    """Yield rank and world size in a default process group. Each world has its own file: torch removes it late."""
    import zcomm.torch_backend  # noqa: F401

    global _made
    _made += 1
    dist.init_process_group(
        "zcomm",
        init_method=os.environ["ZCOMM_INIT_METHOD"] + f"-torch{_made}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


def make(rank: int, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Rank's input: small integers, so that every order of summation gives the same bits."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    values = torch.randint(0 if dtype == torch.bool else 1, 2 if dtype == torch.bool else 4, shape, generator=generator)
    return values.to(dtype)
