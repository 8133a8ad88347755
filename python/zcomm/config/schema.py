"""The table of configuration keys: DeepSpeed's JSON shape as frozen dataclasses.

Names and defaults are DeepSpeed's (its documentation of config-json, and its defaults of 2026); where zcomm's default
differs, the meaning says so. Units: DeepSpeed counts bucket sizes in ELEMENTS, and so do the keys here.
docs/config.md is written from this file (``python -m zcomm.config --write docs/config.md``).
"""
# ruff: noqa: RUF009  (key() and section() are field specifiers, as dataclasses.field is)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zcomm.config.keys import (
    AT_LEAST_0,
    AT_LEAST_1,
    BETAS,
    FRACTION,
    NOT_EMPTY,
    POSITIVE,
    REQUIRED,
    Status,
    key,
    section,
)

_NO_EFFECT = Status.NO_EFFECT
_REFUSED = Status.REFUSED
_SWAP_OWN = "the swap file sizes its own buffers and I/O depth"
_PINNED = "staging slots come from one arena that is page-locked wherever CUDA is there"
_FP32_MASTER = "the master and the accumulated gradients are always exact fp32"
_FP32_SUMS = "gradients are summed in fp32 and divided once"
_UNITS = "stage 3 gathers and frees whole units (modules), one unit ahead"


@dataclass(frozen=True)
class Fp16:
    """Section ``fp16``."""

    enabled: bool = key(False, "fp16 weights and gradients with an fp32 master and a loss scale")
    loss_scale: float = key(0.0, "fixed loss scale; 0 = dynamic", check=AT_LEAST_0)
    initial_scale_power: int = key(16, "first dynamic scale is 2^this", check=AT_LEAST_0)
    loss_scale_window: int = key(1000, "good steps before the scale grows", check=AT_LEAST_1)
    hysteresis: int = key(2, "overflows before the scale shrinks", check=AT_LEAST_1)
    min_loss_scale: float = key(1.0, "lowest dynamic scale; training goes on there", check=AT_LEAST_0)
    auto_cast: bool = key(
        False, "cast inputs to fp16", status=_REFUSED, reason="inputs are the program's; cast them, as for the others"
    )
    consecutive_hysteresis: bool = key(
        False,
        "refill the hysteresis at every good step",
        status=_REFUSED,
        reason="the hysteresis is refilled when the scale grows",
    )
    fp16_master_weights_and_grads: bool = key(
        False, "fp16 master weights and gradients", status=_REFUSED, reason=_FP32_MASTER
    )


@dataclass(frozen=True)
class Bf16:
    """Section ``bf16``."""

    enabled: bool = key(False, "bf16 weights and gradients with an exact fp32 master; false = fp32")
    immediate_grad_update: bool = key(
        False, "add up gradients as they come", status=_NO_EFFECT, reason="they are, in every precision"
    )
    check_grad_overflow: bool = key(
        False,
        "skip a step whose gradients are not finite",
        status=_REFUSED,
        reason="bf16 steps are not skipped; the first gradient that is not finite is named",
    )
    bf16_master_weights_and_grads: bool = key(
        False, "bf16 master weights and gradients", status=_REFUSED, reason=_FP32_MASTER
    )


@dataclass(frozen=True)
class OptimizerParams:
    """Section ``optimizer.params``."""

    lr: float | None = key(
        None, "learning rate", check=AT_LEAST_0, shown_default="`0.001`; Lion `0.0001`, Adagrad `0.01`"
    )
    betas: tuple[float, float] | None = key(
        None,
        "decay of the two moments (Adam, AdamW, Lion)",
        check=BETAS,
        shown_default="`[0.9, 0.999]`; Lion `[0.9, 0.99]`",
    )
    eps: float | None = key(
        None,
        "added to the root (Adam, AdamW, Adagrad)",
        check=AT_LEAST_0,
        shown_default="`1e-08`; Adagrad `1e-10`",
    )
    weight_decay: float | None = key(
        None,
        "decoupled (AdamW, Lion) or L2 (Adam, SGD, Adagrad) decay",
        check=AT_LEAST_0,
        shown_default="`0.0`; with torch_adam what torch's class has (AdamW 0.01)",
    )
    adam_w_mode: bool = key(
        True, "with type Adam: true = AdamW's decoupled decay (DeepSpeed's default), false = L2; type AdamW is AdamW"
    )
    torch_adam: bool = key(
        False,
        "true = the defaults of torch's own class; the update is the same fused kernel, of the same formula",
    )
    momentum: float = key(0.0, "of SGD", check=AT_LEAST_0)
    dampening: float = key(0.0, "of SGD's momentum", check=AT_LEAST_0)
    nesterov: bool = key(False, "SGD looks ahead")
    lr_decay: float = key(0.0, "of Adagrad", check=AT_LEAST_0)
    initial_accumulator_value: float = key(0.0, "of Adagrad's sum of squares", check=AT_LEAST_0)


_COMMON = ("lr", "weight_decay")
OPTIMIZER_PARAMS = {
    "Adam": (*_COMMON, "betas", "eps", "adam_w_mode", "torch_adam"),
    "AdamW": (*_COMMON, "betas", "eps", "adam_w_mode", "torch_adam"),
    "Lion": (*_COMMON, "betas"),
    "SGD": (*_COMMON, "momentum", "dampening", "nesterov"),
    "Adagrad": (*_COMMON, "eps", "lr_decay", "initial_accumulator_value"),
}


@dataclass(frozen=True)
class Optimizer:
    """Section ``optimizer``."""

    type: str = key(REQUIRED, "which optimizer (letter case does not matter)", choices=tuple(OPTIMIZER_PARAMS))
    params: OptimizerParams = section(OptimizerParams, "its arguments")


@dataclass(frozen=True)
class SchedulerParams:
    """Section ``scheduler.params``; which of them a schedule has is in SCHEDULER_PARAMS."""

    warmup_min_lr: float = key(0.0, "learning rate at the start", check=AT_LEAST_0)
    warmup_max_lr: float | None = key(
        None,
        "learning rate after the warm-up",
        check=AT_LEAST_0,
        shown_default="each parameter group's own lr; WarmupDecayLR `0.001`",
    )
    warmup_num_steps: int = key(1000, "optimizer steps of warm-up (1 counts as 2)", check=AT_LEAST_1)
    warmup_type: str = key("log", "shape of the warm-up", choices=("log", "linear"))
    total_num_steps: int | None = key(
        None,
        "steps until the rate has decayed",
        check=AT_LEAST_1,
        shown_default="(WarmupDecayLR and WarmupCosineLR need it)",
    )
    warmup_min_ratio: float = key(0.0, "of the group's lr, at the start", check=AT_LEAST_0)
    cos_min_ratio: float = key(0.0001, "of the group's lr, at the end", check=AT_LEAST_0)
    lr_range_test_min_lr: float = key(1e-3, "learning rate at the start", check=AT_LEAST_0)
    lr_range_test_step_size: int = key(2000, "steps in which the rate grows by step_rate", check=AT_LEAST_1)
    lr_range_test_step_rate: float = key(1.0, "growth, as a part of the first rate", check=AT_LEAST_0)
    lr_range_test_staircase: bool = key(False, "grow in stairs")
    cycle_min_lr: float | None = key(
        None, "learning rate at the ends of the cycle", check=AT_LEAST_0, shown_default="(OneCycle needs it)"
    )
    cycle_max_lr: float | None = key(
        None, "learning rate at its top", check=AT_LEAST_0, shown_default="(OneCycle needs it)"
    )
    decay_lr_rate: float = key(0.0, "after the cycle: lr = min / (1 + this x intervals)", check=AT_LEAST_0)
    cycle_first_step_size: int = key(2000, "steps up", check=AT_LEAST_1)
    cycle_second_step_size: int | None = key(
        None, "steps down", check=AT_LEAST_0, shown_default="cycle_first_step_size"
    )
    cycle_first_stair_count: int = key(0, "climb in so many stairs; 0 = a line", check=AT_LEAST_0)
    cycle_second_stair_count: int | None = key(
        None, "descend in so many stairs", check=AT_LEAST_0, shown_default="cycle_first_stair_count"
    )
    decay_step_size: int = key(0, "steps of a decay interval; 0 = no decay", check=AT_LEAST_0)
    cycle_momentum: bool = key(True, "the first beta goes the other way; the second becomes 0.99")
    cycle_min_mom: float = key(0.8, "first beta at the top", check=AT_LEAST_0)
    cycle_max_mom: float = key(0.9, "first beta at the ends", check=AT_LEAST_0)
    decay_mom_rate: float = key(0.0, "after the cycle: beta = max x (1 + this x intervals)", check=AT_LEAST_0)


_WARMUP = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type")
SCHEDULER_PARAMS = {
    "WarmupLR": _WARMUP,
    "WarmupDecayLR": ("total_num_steps", *_WARMUP),
    "WarmupCosineLR": ("total_num_steps", "warmup_min_ratio", "warmup_num_steps", "cos_min_ratio", "warmup_type"),
    "LRRangeTest": tuple(f"lr_range_test_{name}" for name in ("min_lr", "step_size", "step_rate", "staircase")),
    "OneCycle": (
        "cycle_min_lr",
        "cycle_max_lr",
        "decay_lr_rate",
        "cycle_first_step_size",
        "cycle_second_step_size",
        "cycle_first_stair_count",
        "cycle_second_stair_count",
        "decay_step_size",
        "cycle_momentum",
        "cycle_min_mom",
        "cycle_max_mom",
        "decay_mom_rate",
    ),
}
NEEDED = ("total_num_steps", "cycle_min_lr", "cycle_max_lr")


@dataclass(frozen=True)
class Scheduler:
    """Section ``scheduler``."""

    type: str = key(REQUIRED, "which schedule", choices=tuple(SCHEDULER_PARAMS))
    params: SchedulerParams = section(SchedulerParams, "its arguments")


@dataclass(frozen=True)
class OffloadOptimizer:
    """Section ``zero_optimization.offload_optimizer``."""

    device: str = key("none", "where optimizer state lives between steps", choices=("none", "cpu", "nvme"))
    nvme_path: str | tuple[str, ...] | None = key(
        None, "swap directory, or a list with one per drive; needed with device nvme, unused otherwise", check=NOT_EMPTY
    )
    ratio: float = key(
        1.0,
        "share of the optimizer state that is offloaded; the rest stays on the device (cpu) or in host memory (nvme)",
        check=FRACTION,
    )
    pin_memory: bool = key(True, "page-locked staging", status=_NO_EFFECT, reason=_PINNED)
    buffer_count: int = key(4, "swap buffers", status=_NO_EFFECT, reason=_SWAP_OWN, check=AT_LEAST_1)
    pipeline_read: bool = key(False, "read ahead", status=_NO_EFFECT, reason="reads always run ahead of the update")
    pipeline_write: bool = key(False, "write behind", status=_NO_EFFECT, reason="writes always run behind the update")
    fast_init: bool = key(False, "quick first write", status=_NO_EFFECT, reason="the swap file is preallocated once")


@dataclass(frozen=True)
class OffloadParam:
    """Section ``zero_optimization.offload_param``."""

    device: str = key("none", "where parameters live while unused (stage 3)", choices=("none", "cpu", "nvme"))
    nvme_path: str | tuple[str, ...] | None = key(
        None, "swap directory, or a list with one per drive; needed with device nvme, unused otherwise", check=NOT_EMPTY
    )
    pin_memory: bool = key(True, "page-locked staging", status=_NO_EFFECT, reason=_PINNED)
    buffer_count: int = key(5, "swap buffers", status=_NO_EFFECT, reason=_SWAP_OWN, check=AT_LEAST_1)
    buffer_size: int = key(100_000_000, "elements per swap buffer", status=_NO_EFFECT, reason=_SWAP_OWN, check=POSITIVE)
    max_in_cpu: int = key(
        1_000_000_000, "elements kept in host memory", status=_NO_EFFECT, reason=_UNITS, check=AT_LEAST_0
    )


@dataclass(frozen=True)
class ZeroOptimization:
    """Section ``zero_optimization``."""

    stage: int = key(0, "0 replicated, 1 optimizer, 2 + gradients, 3 + parameters sharded", choices=(0, 1, 2, 3))
    offload_optimizer: OffloadOptimizer = section(OffloadOptimizer, "tier of the optimizer state")
    offload_param: OffloadParam = section(OffloadParam, "tier of the parameters")
    overlap_comm: bool | None = key(
        None, "reduce gradients while backward runs (same bits either way)", shown_default="true (any stage)"
    )
    reduce_bucket_size: int | None = key(
        None,
        "elements per gradient bucket",
        check=POSITIVE,
        shown_default="as many as 25 MiB hold (DeepSpeed: 5e8)",
    )
    allgather_partitions: bool = key(
        True,
        "gather parameters by all_gather instead of broadcasts",
        status=_NO_EFFECT,
        reason="parameters are always gathered by all_gather, or shared in memory by a host's CPU ranks",
    )
    allgather_bucket_size: int = key(
        500_000_000,
        "elements per all_gather",
        status=_NO_EFFECT,
        reason="parameters are gathered by the same buckets and units that reduce them",
        check=POSITIVE,
    )
    reduce_scatter: bool = key(
        True,
        "average gradients by reduce_scatter instead of all_reduce",
        status=_NO_EFFECT,
        reason="sharded gradients are always reduce-scattered; the bits are the same",
    )
    contiguous_gradients: bool = key(
        True,
        "copy gradients into one buffer",
        status=_NO_EFFECT,
        reason="gradients always go to contiguous bucket slots",
    )
    stage3_prefetch_bucket_size: int = key(
        50_000_000, "elements gathered ahead", status=_NO_EFFECT, reason=_UNITS, check=AT_LEAST_0
    )
    stage3_param_persistence_threshold: int = key(
        100_000, "parameters below this size stay whole", status=_NO_EFFECT, reason=_UNITS, check=AT_LEAST_0
    )
    stage3_max_live_parameters: int = key(
        1_000_000_000, "most elements gathered at once", status=_NO_EFFECT, reason=_UNITS, check=AT_LEAST_0
    )
    stage3_max_reuse_distance: int = key(
        1_000_000_000, "keep what is used again this soon", status=_NO_EFFECT, reason=_UNITS, check=AT_LEAST_0
    )
    sub_group_size: int = key(
        1_000_000_000,
        "elements per optimizer pass",
        status=_NO_EFFECT,
        reason="the fused optimizer works tile by tile",
        check=POSITIVE,
    )
    cpu_offload: bool = key(
        False,
        "the old word for offload_optimizer",
        status=_REFUSED,
        reason='use "zero_optimization.offload_optimizer": {"device": "cpu"}',
    )
    cpu_offload_param: bool = key(
        False,
        "the old word for offload_param",
        status=_REFUSED,
        reason='use "zero_optimization.offload_param": {"device": "cpu"}',
    )
    elastic_checkpoint: bool = key(
        False,
        "checkpoints for other world sizes",
        status=_NO_EFFECT,
        reason="every checkpoint loads at any world size",
    )
    load_from_fp32_weights: bool = key(
        True, "load the exact master", status=_NO_EFFECT, reason="it always is, where the checkpoint has it"
    )
    ignore_unused_parameters: bool = key(
        True,
        "parameters without gradients are no error",
        status=_NO_EFFECT,
        reason="they never are; they count as zero",
    )
    stage3_gather_16bit_weights_on_model_save: bool = key(
        False,
        "save whole weights in stage 3",
        status=_NO_EFFECT,
        reason="save_16bit_model and checkpoints always hold whole weights",
    )
    zero_hpz_partition_size: int = key(
        1,
        "ranks of a second set of parameter shards",
        status=_REFUSED,
        reason="parameters are sharded over all ranks, and shared by a host's CPU ranks",
        check=AT_LEAST_1,
    )
    zero_quantized_weights: bool = key(
        False, "gather weights in 8 bits", status=_REFUSED, reason="weights travel as they are"
    )
    zero_quantized_gradients: bool = key(
        False, "reduce gradients in 4 bits", status=_REFUSED, reason="gradients travel as they are"
    )
    round_robin_gradients: bool = key(
        False, "spread gradient copies", status=_NO_EFFECT, reason="each rank copies only its own shard"
    )


@dataclass(frozen=True)
class Aio:
    """Section ``aio``."""

    block_size: int = key(1_048_576, "bytes per request", status=_NO_EFFECT, reason=_SWAP_OWN, check=AT_LEAST_1)
    queue_depth: int = key(8, "requests in flight", status=_NO_EFFECT, reason=_SWAP_OWN, check=AT_LEAST_1)
    thread_count: int = key(1, "I/O threads", status=_NO_EFFECT, reason=_SWAP_OWN, check=AT_LEAST_1)
    intra_op_parallelism: int = key(1, "I/O threads", status=_NO_EFFECT, reason=_SWAP_OWN, check=AT_LEAST_1)
    single_submit: bool = key(False, "submit one by one", status=_NO_EFFECT, reason=_SWAP_OWN)
    overlap_events: bool = key(True, "overlap submit and wait", status=_NO_EFFECT, reason=_SWAP_OWN)


@dataclass(frozen=True)
class Config:
    """The whole configuration. train_batch_size = micro batch x accumulation x world_size; see ``resolve_batch``."""

    train_batch_size: int | None = key(
        None, "samples per optimizer step, all ranks", check=AT_LEAST_1, shown_default="derived"
    )
    train_micro_batch_size_per_gpu: int | None = key(
        None, "samples per rank and micro-step", check=AT_LEAST_1, shown_default="derived"
    )
    gradient_accumulation_steps: int | None = key(
        None, "micro-steps per optimizer step", check=AT_LEAST_1, shown_default="derived, or 1"
    )
    gradient_clipping: float = key(
        1.0,
        "largest global L2 norm of the gradient; 0 = no clipping (DeepSpeed's default before 0.19.3)",
        check=AT_LEAST_0,
    )
    steps_per_print: int | None = key(
        None, "optimizer steps between progress lines of rank 0", check=AT_LEAST_1, shown_default="no lines"
    )
    wall_clock_breakdown: bool = key(
        False, "print seconds of forward, backward and step, every steps_per_print steps (1 where that is not given)"
    )
    dataloader_drop_last: bool = key(False, "drop the last micro batch when it is short")
    prescale_gradients: bool = key(
        False,
        "divide gradients before the sum",
        status=_REFUSED,
        reason="gradients are summed in fp32 and divided once, so there is nothing to prescale",
    )
    gradient_predivide_factor: float = key(
        1.0, "divide by this before the sum, and multiply after it", status=_REFUSED, reason=_FP32_SUMS, check=POSITIVE
    )
    communication_data_type: str | None = key(
        None,
        "dtype of gradients on their way",
        status=_REFUSED,
        reason="they travel in the precision of training, with fp32 sums",
        shown_default="that of training",
    )
    sparse_gradients: bool = key(
        False, "reduce embeddings' gradients as rows", status=_REFUSED, reason="gradients are reduced dense"
    )
    disable_allgather: bool = key(
        False, "gather by broadcasts", status=_NO_EFFECT, reason="parameters are gathered as the host allows"
    )
    dump_state: bool = key(
        False, "print the engine's state", status=_NO_EFFECT, reason="opt.memory() and opt.stats() tell it"
    )
    memory_breakdown: bool = key(
        False, "print memory use", status=_NO_EFFECT, reason="opt.memory() and zcomm plan tell it"
    )
    zero_force_ds_cpu_optimizer: bool = key(
        True, "insist on DeepSpeed's CPU Adam", status=_NO_EFFECT, reason="the CPU optimizers are always zcomm's own"
    )
    zero_allow_untested_optimizer: bool = key(
        False,
        "allow other optimizers",
        status=_NO_EFFECT,
        reason="what updates each element by itself is accepted, and others are an error, whatever this says",
    )
    tensorboard: dict[str, Any] | None = key(
        None,
        "write its event files",
        status=_REFUSED,
        reason="rank 0 prints, and the program logs as it likes",
        shown_default="off",
    )
    wandb: dict[str, Any] | None = key(
        None,
        "log there",
        status=_REFUSED,
        reason="rank 0 prints, and the program logs as it likes",
        shown_default="off",
    )
    csv_monitor: dict[str, Any] | None = key(
        None,
        "write metrics as CSV",
        status=_REFUSED,
        reason="rank 0 prints, and the program logs as it likes",
        shown_default="off",
    )
    comms_logger: dict[str, Any] | None = key(
        None, "log collectives", status=_REFUSED, reason="zcomm.profile shows them", shown_default="off"
    )
    flops_profiler: dict[str, Any] | None = key(
        None, "count operations", status=_REFUSED, reason="zcomm.profile shows where time goes", shown_default="off"
    )
    autotuning: dict[str, Any] | None = key(
        None, "try configurations", status=_REFUSED, reason="zcomm plan says what fits", shown_default="off"
    )
    elasticity: dict[str, Any] | None = key(
        None,
        "change the world size while training",
        status=_REFUSED,
        reason="a checkpoint loads at any world size",
        shown_default="off",
    )
    compression_training: dict[str, Any] | None = key(
        None, "prune and quantise", status=_REFUSED, reason="there is none", shown_default="off"
    )
    data_efficiency: dict[str, Any] | None = key(
        None, "curricula and random dropping of tokens", status=_REFUSED, reason="there is none", shown_default="off"
    )
    curriculum_learning: dict[str, Any] | None = key(
        None, "lengthen sequences", status=_REFUSED, reason="there is none", shown_default="off"
    )
    progressive_layer_drop: dict[str, Any] | None = key(
        None, "drop layers", status=_REFUSED, reason="there is none", shown_default="off"
    )
    eigenvalue: dict[str, Any] | None = key(
        None, "estimate curvature", status=_REFUSED, reason="there is none", shown_default="off"
    )
    hybrid_engine: dict[str, Any] | None = key(
        None, "train and generate by turns", status=_REFUSED, reason="there is none", shown_default="off"
    )
    fp16: Fp16 = section(Fp16, "half precision")
    bf16: Bf16 = section(Bf16, "bfloat16")
    optimizer: Optimizer | None = section(None, "the optimizer, unless initialize(optimizer=) brings one")
    scheduler: Scheduler | None = section(None, "the schedule, unless initialize(lr_scheduler=) brings one")
    zero_optimization: ZeroOptimization = section(ZeroOptimization, "sharding and offload")
    aio: Aio = section(Aio, "NVMe requests")


# Keys that people bring along, and what to write instead.
HINTS = {
    "optimizer.params.max_grad_norm": 'use "gradient_clipping"',
    "optimizer.params.adamw_mode": 'did you mean "optimizer.params.adam_w_mode"?',
    "torch_autocast": 'zcomm does not cast inside of the model; use "bf16": {"enabled": true}, or torch.autocast',
    "data_types": "the master and the accumulated gradients are always fp32; leave it out",
    "amp": 'zcomm has no apex; use "bf16": {"enabled": true}',
}
