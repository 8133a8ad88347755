"""Variants of a try, each with its best setting for little memory: a step, and a loss without one.

The same decoder for all: its file is loaded by itself, so that the peers hold nothing of zcomm.
"""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from limited.trial import Job

Step = Callable[[Any], float]
_LLAMA = Path(__file__).resolve().parents[2] / "python/zcomm/demo/llama.py"
_VOCAB, _LR, _BETAS, _DECAY = 256, 1e-4, (0.9, 0.95), 0.1
_WORKING_NBYTES = 64 << 20  # inside of operators, and of a block that is computed again


class Absent(Exception):
    """Error: the library is not here; the text has the reason."""


def make(job: Job) -> tuple[Step, Step]:
    """Return a step, and a loss without a step; both take tokens. Raises: Absent; errors of the library."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(1)
    return _MAKERS[job.variant](job)


def batches(job: Job) -> list[Any]:
    """Return tokens of each step: int64 [1, context + 1]."""
    import torch

    generator = torch.Generator().manual_seed(7)
    return [torch.randint(_VOCAB, (1, job.context + 1), generator=generator) for _ in range(job.steps)]


def numel_of(layers: int, width: int, heads: int) -> int:
    """Return the parameters of a model."""
    return int(_config(layers, width, heads).numel())


def _llama() -> Any:
    if "zcomm_bench_llama" not in sys.modules:
        spec = importlib.util.spec_from_file_location("zcomm_bench_llama", _LLAMA)
        assert spec is not None and spec.loader is not None
        module = sys.modules["zcomm_bench_llama"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["zcomm_bench_llama"]


def _config(layers: int, width: int, heads: int) -> Any:
    inner = -(-width * 11 // 4 // 64) * 64  # as the demo's decoder
    return _llama().LlamaConfig(_VOCAB, width, inner, layers, heads, max(1, heads // 8))


def meta_model(job: Job, dtype: Any = None) -> Any:
    """Make the model on the meta device."""
    import torch

    with torch.device("meta"):
        model = _llama().Llama(_config(job.layers, job.width, job.heads), recompute=True)
    return model if dtype is None else model.to(dtype)


def kept_nbytes(job: Job) -> int:
    """Return the bytes that forward saves for backward, and the needs of operators."""
    import torch

    from zcomm.planning import saved_nbytes

    with torch.device("meta"):
        tokens = torch.zeros(1, job.context, dtype=torch.int64)
        return saved_nbytes(meta_model(job, torch.bfloat16), tokens) + _WORKING_NBYTES


def _start(weight: Any) -> None:
    """Set a weight's first values, as the model does."""
    weight.fill_(1.0) if weight.dim() < 2 else weight.normal_(std=0.02)


def _loss(model: Any, tokens: Any) -> Any:
    return _llama().loss_of(model, tokens)


def _without_step(model: Any) -> Step:
    import torch

    def loss(tokens: Any) -> float:
        with torch.no_grad():
            return float(_loss(model, tokens))

    return loss


def _zcomm(job: Job) -> tuple[Step, Step]:
    import zcomm

    limit = None if job.limit_nbytes is None else zcomm.zero.MemoryLimit(job.limit_nbytes, kept_nbytes(job))
    with zcomm.zero.Init():
        model = _llama().Llama(_config(job.layers, job.width, job.heads), recompute=True)
    optimizer = zcomm.ZeroOptimizer(
        model,
        "adamw",
        stage=3,
        offload="nvme",
        nvme_path=job.folder,
        precision="bf16",
        memory=limit,
        lr=_LR,
        betas=_BETAS,
        weight_decay=_DECAY,
        **({"state_dtype": "8bit"} if job.variant == "zcomm-8bit" else {}),
    )

    def step(tokens: Any) -> float:
        loss = _loss(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step, _without_step(model)


def _torch_step(model: Any, optimizer: Any, set_to_none: bool) -> Step:
    def step(tokens: Any) -> float:
        loss = _loss(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        return float(loss.detach())

    return step


def _process_group(job: Job) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{job.folder}/store", rank=0, world_size=1)


def _fsdp2(job: Job) -> tuple[Step, Step]:
    """Make FSDP2 on the CPU: made on meta, fp32 shards, one unit per block, fused AdamW."""
    import torch

    try:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    except ImportError as error:
        raise Absent(str(error)) from None
    _process_group(job)
    model = meta_model(job)
    options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (1,))}
    options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.model.layers:
        fully_shard(block, **options)
    fully_shard(model, **options)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for weight in model.parameters():
            _start(weight.to_local())
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, betas=_BETAS, weight_decay=_DECAY, fused=True)
    return _torch_step(model, optimizer, True), _without_step(model)


def _torch_mmap(job: Job) -> tuple[Step, Step]:
    """Make plain torch on mapped files: fp32 weights, gradients, m and v; computing is in bf16 by autocast."""
    import torch

    model = meta_model(job)
    names = ("weights", "gradients", "m", "v")
    numel = sum(weight.numel() for weight in model.parameters())
    files = {
        name: torch.from_file(f"{job.folder}/{name}", shared=True, size=numel, dtype=torch.float32) for name in names
    }
    begin, state = 0, {}
    for name, old in list(model.named_parameters()):
        parts = {key: file[begin : begin + old.numel()].view(old.shape) for key, file in files.items()}
        begin += old.numel()
        weight = torch.nn.Parameter(parts["weights"])
        with torch.no_grad():
            _start(weight)
        weight.grad = parts["gradients"]
        state[weight] = {"step": torch.zeros(()), "exp_avg": parts["m"], "exp_avg_sq": parts["v"]}
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, betas=_BETAS, weight_decay=_DECAY, fused=True)
    optimizer.state.update(state)

    def cast(tokens: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return model(tokens)

    return _torch_step(cast, optimizer, False), _without_step(cast)


def _deepspeed(job: Job) -> tuple[Step, Step]:
    """Make ZeRO-Infinity: stage 3, weights and state on the drive."""
    where = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29531"}
    os.environ.update(where | {"DS_ACCELERATOR": "cpu"})
    try:
        import deepspeed
    except Exception as error:
        raise Absent(f"deepspeed: {type(error).__name__}: {error}") from None
    import torch

    drive = {"device": "nvme", "nvme_path": job.folder, "pin_memory": False}
    numel = numel_of(1, job.width, job.heads)
    largest = max(weight.numel() for weight in meta_model(job).parameters())  # a buffer has one of them
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": _LR, "betas": list(_BETAS), "weight_decay": _DECAY}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": drive | {"buffer_count": 4},
            "offload_param": drive | {"buffer_count": 24, "buffer_size": largest, "max_in_cpu": 0},
            "sub_group_size": numel,
            "stage3_max_live_parameters": 2 * numel,
            "stage3_prefetch_bucket_size": 0,  # it fails with recomputed blocks, as it expects a weight once
            "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": 0,  # persistent weights need a buffer of the largest weight's size
            "reduce_bucket_size": numel,
        },
        "zero_force_ds_cpu_optimizer": True,
        "steps_per_print": 1 << 30,
    }
    _process_group(job)
    deepspeed.init_distributed(dist_backend="gloo", dist_init_required=False)
    with deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.bfloat16):
        model = _llama().Llama(_config(job.layers, job.width, job.heads), recompute=True)
    engine, *_ = deepspeed.initialize(model=model, config=config, dist_init_required=False)

    def step(tokens: Any) -> float:
        loss = _loss(engine, tokens)
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step, _without_step(engine)


def wrong(losses: list[float]) -> int:
    """Return the number of losses that are not finite."""
    return sum(not math.isfinite(loss) for loss in losses)


_MAKERS: dict[str, Callable[[Job], tuple[Step, Step]]] = {
    "zcomm": _zcomm,
    "zcomm-8bit": _zcomm,
    "deepspeed": _deepspeed,
    "fsdp2": _fsdp2,
    "torch-mmap": _torch_mmap,
}
