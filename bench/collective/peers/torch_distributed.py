"""torch.distributed: Gloo, NCCL, or zcomm's own backend."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.distributed as dist

from collective.peers import Absent
from harness.launch import FOLDER

if TYPE_CHECKING:
    from torch import Tensor

    from collective.operations import Operation

_REDUCE_OPS = {"sum": "SUM", "avg": "AVG", "min": "MIN", "max": "MAX", "prod": "PRODUCT"}


def default_group(rank: int, world: int) -> None:
    """Make Gloo over the run's FileStore the default group; others are made beside it."""
    if not dist.is_initialized():
        folder = os.environ.get(FOLDER)
        where = f"file://{folder}/torch" if folder else "env://"
        dist.init_process_group("gloo", rank=rank, world_size=world, init_method=where)


def require_backend(backend: str) -> None:
    """Check that the backend is there. Raises: Absent."""
    if backend == "zcomm":
        try:
            import zcomm.torch_backend
        except ImportError as error:
            raise Absent(str(error)) from None
    if backend == "nccl":
        import torch

        import zcomm

        if not dist.is_nccl_available() or not torch.cuda.is_available():
            raise Absent("this torch has no NCCL, or no CUDA device")
        if zcomm.init().device.type != "cuda":
            raise Absent("it moves CUDA tensors: --backend cuda_ipc or nccl")
        os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")  # NCCL 2.30 and newer: several ranks on one device


class TorchPeer:
    def __init__(self, backend: str, rank: int, world: int) -> None:
        self._rank, self._world = rank, world
        require_backend(backend)
        default_group(rank, world)
        self._group = dist.new_group(backend=backend)

    def call(self, operation: Operation, redop: str, inp: Tensor, out: Tensor) -> Callable[[], object] | None:
        group, op = self._group, getattr(dist.ReduceOp, _REDUCE_OPS[redop])
        after, before = (self._rank + 1) % self._world, (self._rank - 1) % self._world
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # renamed by newer torch
        together = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

        def sendrecv() -> None:
            work = dist.isend(inp, after, group=group)
            dist.recv(out, before, group=group)
            work.wait()

        return {
            "all_reduce": lambda: dist.all_reduce(out, op=op, group=group),
            "reduce_scatter": lambda: scatter(out, inp, op=op, group=group),
            "all_gather": lambda: together(out, inp, group=group),
            "broadcast": lambda: dist.broadcast(out, src=0, group=group),
            "all_to_all": lambda: dist.all_to_all_single(out, inp, group=group),
            "sendrecv": sendrecv,
        }[operation.name]

    def close(self) -> None:
        dist.destroy_process_group(self._group)
