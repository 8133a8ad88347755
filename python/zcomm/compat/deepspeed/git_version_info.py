"""``deepspeed.git_version_info``: the version, and which operations zcomm has."""

from __future__ import annotations

from typing import Any

from zcomm.compat.deepspeed import __version__

version = __version__
git_hash = git_branch = None  # zcomm is not built from DeepSpeed's repository


def __getattr__(name: str) -> Any:
    if name in ("compatible_ops", "installed_ops"):
        from zcomm.compat.deepspeed.ops.op_builder import ALL_OPS

        return {op: builder.is_compatible() for op, builder in ALL_OPS.items()}
    if name == "torch_info":
        import torch

        cuda, hip = torch.version.cuda or "0.0", torch.version.hip or "0.0"
        return {"version": ".".join(torch.__version__.split(".")[:2]), "bf16_support": True, "cuda_version": cuda} | {
            "nccl_version": "0.0",
            "hip_version": hip,
        }
    raise AttributeError(f"{__name__} has no {name!r}")
