"""Libraries to compare with: an absent one has a reason, and torch.distributed starts once for all benches."""

from __future__ import annotations

import os

from harness.launch import FOLDER


class Absent(Exception):
    """Error: the peer is not in this machine or this build; the text has the reason."""


def default_group(rank: int, world: int) -> None:
    """Create the default group: Gloo over the run's FileStore. Other groups are created in addition."""
    import torch.distributed as dist

    if not dist.is_initialized():
        folder = os.environ.get(FOLDER)
        where = f"file://{folder}/torch" if folder else "env://"
        dist.init_process_group("gloo", rank=rank, world_size=world, init_method=where)


def require_backend(backend: str) -> None:
    """Check that torch.distributed has the backend. Raises: Absent."""
    if backend == "zcomm":
        try:
            import zcomm.torch_backend
        except ImportError as error:
            raise Absent(str(error)) from None
    if backend == "nccl":
        import torch
        import torch.distributed as dist

        import zcomm

        if not dist.is_nccl_available() or not torch.cuda.is_available():
            raise Absent("this torch has no NCCL, or no CUDA device")
        if zcomm.init().device.type != "cuda":
            raise Absent("it moves CUDA tensors: --backend cuda_ipc or nccl")
        os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")  # NCCL 2.30 and newer: several ranks on one device
