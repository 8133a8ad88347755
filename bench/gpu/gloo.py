"""Barrier and sums of small CPU tensors by torch's Gloo, with the names of a zcomm communicator."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from collective.peers.torch_distributed import default_group


class GlooHost:
    """Collective; Gloo becomes torch's default group."""

    def __init__(self, rank: int, world: int) -> None:
        default_group(rank, world)

    def barrier(self) -> None:
        dist.barrier()

    def all_reduce(self, tensor: Any) -> None:
        dist.all_reduce(tensor)
