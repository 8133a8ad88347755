"""Variants of training a Llama on one GPU: each steps ``accum`` micro-batches and returns its loss.

All: bf16 compute, fp32 master, AdamW with the same options, activations recomputed, the same batches from the same
weights. Only zcomm and *none* (zcomm with everything on the GPU) clip, if it is requested. The peers' settings are
their documentation's for this: FSDP2 with CPUOffloadPolicy and fused AdamW, DeepSpeed with DeepSpeedCPUAdam, pinned
memory and overlap. A variant that is not here raises Absent.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from harness.device import PLAYED, release
from harness.peers import Absent

_WAYS: dict[str, dict[str, Any]] = {  # of zcomm's updates
    "behind": {"update": "forward"},
    "backward": {"update": "backward"},
    "sums": {"gradients": "device"},
}
LR, DECAY, BETAS = 1e-5, 0.1, (0.9, 0.95)


@dataclass
class Variant:
    """One variant.

    step: one optimizer step; returns the mean loss as a tensor on the device. close: frees everything. settle: waits
    for a step that runs behind the next forward. optimizer: zcomm's.
    """

    step: Callable[[int], Any]
    close: Callable[[], None]
    settle: Callable[[], None] = lambda: None
    optimizer: Any = None


@dataclass(frozen=True)
class Job:
    """Data that all variants share. tokens: [batch, context + 1] int64 on the device, taken in turn."""

    arguments: argparse.Namespace
    config: Any
    device: Any
    tokens: list[Any]

    @property
    def accum(self) -> int:
        return int(self.arguments.accum)

    @property
    def tokens_per_step(self) -> int:
        return self.accum * int(self.arguments.batch) * int(self.arguments.context)

    def batch(self, step: int, micro: int) -> Any:
        return self.tokens[(step * self.accum + micro) % len(self.tokens)][: self.arguments.batch]

    def loss(self, model: Any, tokens: Any) -> Any:
        """Return the loss of a micro-batch. in_blocks: without whole logits, so that it fits a small device."""
        from zcomm import linear_cross_entropy
        from zcomm.demo.llama import loss_of

        if not self.arguments.in_blocks:
            return loss_of(model, tokens)
        return linear_cross_entropy(model(tokens[:, :-1]), model.lm_head.weight, tokens[:, 1:])

    def make_model(self, dtype: Any = None) -> Any:
        """Make the model with bf16 weights of the seed, on the device; in fp32 the same values."""
        import torch

        from zcomm.demo.llama import Llama

        torch.manual_seed(1)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with self.device:
                model = Llama(self.config, recompute=True)
        finally:
            torch.set_default_dtype(before)
        if self.arguments.in_blocks:
            model.lm_head.forward = lambda hidden: hidden  # ``loss`` takes its weight
        return model if dtype is None else model.to(dtype)


def make_job(arguments: argparse.Namespace, device: Any) -> Job:
    import torch

    from zcomm.demo.llama import PRESETS

    config = PRESETS[arguments.model]
    if arguments.layers:
        config = replace(config, num_hidden_layers=arguments.layers)
    generator = torch.Generator().manual_seed(7)
    shape = (arguments.batch, arguments.context + 1)
    tokens = [torch.randint(config.vocab_size, shape, generator=generator).to(device) for _ in range(4)]
    return Job(arguments, config, device, tokens)


def make_variant(name: str, job: Job) -> Variant:
    """Return a variant. Raises: Absent; KeyError; errors of the library."""
    kind, _, rest = name.partition("-")
    return _MAKERS[kind](job, rest)


def _accumulated(job: Job, model: Any, after_micro: Callable[[Any], None], after: Callable[[], None]) -> Any:
    """Return a step: forward of each micro-batch, ``after_micro(loss)``, then ``after``.

    after_micro: backward and its optimizer's calls.
    """
    import torch

    def step(number: int) -> Any:
        total = torch.zeros((), device=job.device)
        for micro in range(job.accum):
            loss = job.loss(model, job.batch(number, micro))
            after_micro(loss)
            total += loss.detach() / job.accum
        after()
        return total

    return step


def _compute(job: Job, _rest: str) -> Variant:
    """Return only forward and backward: each gradient is dropped once accumulated."""
    model = job.make_model()

    def drop(parameter: Any) -> None:
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(drop)
    return Variant(
        _accumulated(job, model, lambda loss: loss.backward(), lambda: None), lambda: model.to("meta") and None
    )


def _zcomm(job: Job, rest: str) -> Variant:
    import zcomm

    model, fraction = job.make_model(), job.arguments.fraction
    rest, _, way = rest.partition("-")
    offload: Any = None if rest == "none" else rest
    if way and not PLAYED:  # only on a device
        offload = zcomm.Offload(rest, **_WAYS[way])
    if rest == "nvme" and fraction < 1.0:
        offload = zcomm.Offload(optimizer="nvme", fraction=fraction)
    optimizer = zcomm.ZeroOptimizer(
        model,
        "adamw",
        lr=LR,
        betas=BETAS,
        weight_decay=DECAY,
        stage=job.arguments.stage,
        offload=offload,
        nvme_path=job.arguments.nvme_path if rest == "nvme" else None,
        precision="bf16",
        clip_norm=job.arguments.clip,
        grad_accum=job.accum,
    )

    def micro(loss: Any) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return Variant(_accumulated(job, model, micro, lambda: None), optimizer.close, optimizer.join, optimizer)


def _process_group() -> None:
    """Create a world of one rank, for the peers."""
    import torch.distributed as dist

    if not dist.is_initialized():
        folder = tempfile.mkdtemp(prefix="zcomm-bench-")
        backend = "gloo" if PLAYED else "cpu:gloo,cuda:nccl"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else it may ask the network for this host's name
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)


def _fsdp2(job: Job, _rest: str) -> Variant:
    import torch

    try:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
    except ImportError as error:
        raise Absent(str(error)) from None
    _process_group()
    model = job.make_model(torch.float32)
    options: dict[str, Any] = {
        "mesh": init_device_mesh(job.device.type, (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    if not PLAYED:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=True)
    for block in model.model.layers:
        fully_shard(block, **options)
    fully_shard(model, **options)
    release()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=DECAY, fused=True)

    def after() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Variant(_accumulated(job, model, lambda loss: loss.backward(), after), lambda: None)


def _deepspeed(job: Job, rest: str) -> Variant:
    try:
        import deepspeed
    except ImportError:
        raise Absent("deepspeed is not installed") from None
    where = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29531"}
    before = dict(os.environ)
    os.environ.update(where)
    try:
        _process_group()
        engine, *_ = deepspeed.initialize(
            model=job.make_model(), config=deepspeed_config(job.arguments, job.accum, rest), dist_init_required=False
        )
    finally:
        os.environ.clear()
        os.environ.update(before)

    def micro(loss: Any) -> None:
        engine.backward(loss)
        engine.step()

    return Variant(_accumulated(job, engine, micro, lambda: None), lambda: None)


def deepspeed_config(arguments: argparse.Namespace, accum: int, where: str) -> dict[str, Any]:
    """Return DeepSpeed's configuration; its defaults of 2026 that would change the work (clipping) are set."""
    offload: dict[str, Any] = {"device": where, "pin_memory": True}
    zero: dict[str, Any] = {"stage": 2, "overlap_comm": True, "contiguous_gradients": True}
    if where == "nvme":
        zero["stage"] = 3
        offload |= {"nvme_path": arguments.nvme_path, "pipeline_read": True, "pipeline_write": True, "buffer_count": 5}
    return {
        "train_micro_batch_size_per_gpu": arguments.batch,
        "gradient_accumulation_steps": accum,
        "bf16": {"enabled": True},
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "betas": list(BETAS), "weight_decay": DECAY}},
        "zero_optimization": zero | {"offload_optimizer": offload},
        "zero_force_ds_cpu_optimizer": True,
        "steps_per_print": 1 << 30,
    }


_MAKERS: dict[str, Callable[[Job, str], Variant]] = {
    "compute": _compute,
    "none": lambda job, _rest: _zcomm(job, "none"),
    "zcomm": _zcomm,
    "fsdp2": _fsdp2,
    "deepspeed": _deepspeed,
}
