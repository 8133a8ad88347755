"""DeepSpeed's shared-memory all_reduce for CPUs, which it compiles on first use."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from collective.peers import Absent

if TYPE_CHECKING:
    from torch import Tensor

    from collective.operations import Operation


class DeepSpeedPeer:
    def __init__(self, rank: int, world: int) -> None:
        # It asks these whether all ranks share the host, and for a name for its shared memory.
        os.environ.setdefault("LOCAL_SIZE", str(world))
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(os.getppid()))
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        try:
            from deepspeed.ops.op_builder.cpu.comm import ShareMemCommBuilder
        except ImportError:
            raise Absent("deepspeed is not installed") from None
        try:
            ShareMemCommBuilder().load().initialize(world, rank)
        except Exception as error:
            raise Absent(f"its op does not build here: {error}") from None

    def call(self, operation: Operation, redop: str, inp: Tensor, out: Tensor) -> Callable[[], object] | None:
        if operation.name != "all_reduce" or redop != "sum" or out.dtype not in (torch.float32, torch.bfloat16):
            return None
        return lambda: torch.ops.deepspeed.inference_all_reduce_(out)

    def close(self) -> None:
        """Do nothing: the shared memory ends with the process."""
