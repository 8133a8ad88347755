"""Variants of a training step: each a function that takes one step and returns this rank's loss.

All: AdamW in fp32 with the same options, no clipping, gradients averaged over the ranks. The peers run with their best
settings for this work. These are fused AdamW if they can, gradients as views of the buckets, one unit per block, and
DeepSpeed's buckets and overlap. A variant that this machine lacks raises Absent.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from harness.peers import Absent, require_backend
from training.gpt import make_batch, make_model

Step = Callable[[], float]
LEARNING_RATE = 1e-4
WEIGHT_DECAY = 0.01


def make_step(name: str, arguments: argparse.Namespace, rank: int) -> Step:
    """Return a step. Raises: Absent, KeyError."""
    kind, _, rest = name.partition("-")
    return _MAKERS[kind](rest, arguments, make_batch(arguments, rank))


def _plain(_rest: str, arguments: argparse.Namespace, batch: Any) -> Step:
    return _torch_step(make_model(arguments), batch)


def _torch_step(model: Any, batch: Any, fused: bool = True) -> Step:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=fused)

    def step() -> float:
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def _zcomm(rest: str, arguments: argparse.Namespace, batch: Any) -> Step:
    import zcomm

    stage, _, offload = rest.partition("-")
    model = make_model(arguments)
    optimizer = zcomm.ZeroOptimizer(
        model,
        "adamw",
        lr=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        stage=int(stage),
        offload=offload or None,
        nvme_path=arguments.nvme_path if offload == "nvme" else None,
        bucket_mb=arguments.bucket_mb,
    )

    def step() -> float:
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    step.edits_s = lambda: optimizer.stats()["edits_s"]  # type: ignore[attr-defined]
    step.stand_ins_s = lambda: _stand_ins_s(optimizer)  # type: ignore[attr-defined]
    return step


def _stand_ins_s(optimizer: Any) -> float:
    """Measure the seconds of a step that stand-ins in ``p.grad`` take.

    It is the median of leaving, looking at and clearing all of them.
    """
    import torch

    grads = optimizer._live.reducer.grads
    params = [param for group in optimizer.param_groups for param in group["params"]]
    data = [torch.empty(param.shape) for param in params]
    seconds = []
    for _ in range(21):
        for param, grad in zip(params, data, strict=True):
            param.grad = grad
        start = time.perf_counter()
        for index in range(len(params)):
            grads.collect(index)
        grads.held()
        grads.clear(True)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _ddp(backend: str, arguments: argparse.Namespace, batch: Any) -> Step:
    import torch
    import torch.distributed as dist

    require_backend(backend)
    replica = torch.nn.parallel.DistributedDataParallel(
        make_model(arguments),
        process_group=dist.new_group(backend=backend),
        bucket_cap_mb=arguments.bucket_mb,
        gradient_as_bucket_view=not arguments.copy_gradients,
    )
    return _torch_step(replica, batch)


def _fsdp2(_rest: str, arguments: argparse.Namespace, batch: Any) -> Step:
    """Return FSDP2 with torch's fused AdamW, or foreach if the fused one does not accept DTensors."""
    try:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
    except ImportError as error:
        raise Absent(str(error)) from None
    import torch.distributed as dist

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = make_model(arguments)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _torch_step(model, batch)


def _deepspeed(rest: str, arguments: argparse.Namespace, batch: Any) -> Step:
    try:
        import deepspeed
    except ImportError:
        raise Absent("deepspeed is not installed") from None
    stage, _, offload = rest.partition("-")
    zero: dict[str, Any] = {"stage": int(stage), "overlap_comm": True, "contiguous_gradients": True}
    if offload:
        zero["offload_optimizer"] = {"device": offload, "nvme_path": arguments.nvme_path, "pipeline_read": True}
        zero["offload_optimizer"]["pipeline_write"] = True
    options = {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "adam_w_mode": True}
    config = {
        "train_micro_batch_size_per_gpu": arguments.batch,
        "optimizer": {"type": "AdamW", "params": options},
        "zero_optimization": zero,
        "gradient_clipping": 0.0,
        "steps_per_print": 1 << 30,
    }
    model = make_model(arguments)
    try:
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=config, dist_init_required=False
        )
    except Exception as error:
        raise Absent(f"its initialize() fails here: {type(error).__name__}: {error}") from None

    def step() -> float:
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step


_MAKERS: dict[str, Callable[[str, argparse.Namespace, Any], Step]] = {
    "none": _plain,
    "zcomm": _zcomm,
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    "deepspeed": _deepspeed,
}
