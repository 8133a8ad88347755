"""FSDP2's collectives by a zcomm communicator, with any process group: ``use(model)``.

``fully_shard`` accepts custom all_gather and reduce_scatter. With these a model on a group of Gloo, or of another
backend, gathers and reduces by zcomm. The rest of the program is unchanged. On the backend "zcomm" this module is not
needed. Both calls return when they are done; FSDP2 overlaps them by its streams.

Thread rule: as the communicator; FSDP2 calls them in the same order on all ranks.
Source: torch.distributed.fsdp, FSDPModule.set_custom_all_gather and set_custom_reduce_scatter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zcomm.comm.communicator import Communicator
from zcomm.comm.job import init

__all__ = ["AllGather", "ReduceScatter", "use"]


class _Collective:
    """A collective over a communicator: the check of FSDP2's group, and memory for its buffers."""

    def __init__(self, comm: Communicator | None = None) -> None:
        self.comm = comm or init()
        self._checked: set[int] = set()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for a buffer of FSDP2."""
        return torch.empty(*size, dtype=dtype, device=device)

    def _check(self, name: str, group: dist.ProcessGroup) -> None:
        """Raise ValueError if ``group`` and the communicator differ in their number of ranks or in this rank."""
        if id(group) in self._checked:
            return
        if (dist.get_world_size(group), dist.get_rank(group)) != (self.comm.world_size, self.comm.rank):
            raise ValueError(
                f"{name}: FSDP2's group has this process as rank {dist.get_rank(group)} of "
                f"{dist.get_world_size(group)}, the communicator as rank {self.comm.rank} of {self.comm.world_size}; "
                "give the communicator of the same ranks (comm.split)"
            )
        self._checked.add(id(group))


class AllGather(_Collective):
    """An all_gather for ``FSDPModule.set_custom_all_gather``.

    comm: of the same ranks as FSDP2's group; None: the job's.
    """

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Fill ``output_tensor`` with the inputs of all ranks, in rank order."""
        self._check("AllGather", group)
        self.comm.all_gather(input_tensor.view(-1), out=output_tensor.view(-1), name="FSDP2")


class ReduceScatter(_Collective):
    """A reduce_scatter for ``FSDPModule.set_custom_reduce_scatter``. comm: as AllGather's."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce ``input_tensor`` over the ranks, in fp32 for 16-bit types, and keep this rank's part.

        Raises: ValueError for an op other than sum, avg, min, max, prod. For FSDP2's own divide factor call
        ``set_force_sum_reduction_for_comms(True)``: else it asks for a sum with a factor, which CPU groups lack.
        """
        self._check("ReduceScatter", group)
        self.comm.reduce_scatter(input_tensor.view(-1), op, out=output_tensor.view(-1), name="FSDP2")


def use(model: nn.Module, comm: Communicator | None = None) -> None:
    """Set zcomm's all_gather and reduce_scatter in all modules of ``model`` that ``fully_shard`` has wrapped.

    comm: of the same ranks as FSDP2's group; None: the job's (``zcomm.init()``).
    Raises: ValueError if no module is sharded, NotImplementedError for a torch without custom collectives.
    """
    from torch.distributed.fsdp import FSDPModule

    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not sharded:
        raise ValueError("use(): no module of the model is sharded: call fully_shard(model) first")
    if not hasattr(sharded[0], "set_custom_reduce_scatter"):
        raise NotImplementedError(f"use(): torch {torch.__version__} has no custom collectives in FSDP2: update torch")
    gather, scatter = AllGather(comm), ReduceScatter(comm)
    for module in sharded:
        module.set_custom_all_gather(gather)  # type: ignore[arg-type]  # torch's base class has no public name
        module.set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]
