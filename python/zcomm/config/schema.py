"""The configuration keys that take effect: DeepSpeed's JSON shape as frozen dataclasses.

Names and defaults are DeepSpeed's (its documentation of config-json, and its defaults of 2026); if zcomm's default
differs, the meaning names it. Units: bucket sizes are in ELEMENTS, as in DeepSpeed.
DeepSpeed's other keys are in foreign.py. docs/config.md and docs/config-compat.md are written from these two files
(``python -m zcomm.config --write docs``).
"""
# ruff: noqa: RUF009  (key() and section() are field specifiers, as dataclasses.field is)

from __future__ import annotations

from dataclasses import dataclass

from zcomm.config.compression_keys import CompressionTraining
from zcomm.config.data_keys import DataEfficiency
from zcomm.config.keys import AT_LEAST_0, AT_LEAST_1, BELOW_1, FRACTION, NOT_EMPTY, POSITIVE, SHARD_SIZE, key, section
from zcomm.config.monitor_keys import Comet, CommsLogger, CsvMonitor, FlopsProfiler, TensorBoard, Wandb
from zcomm.config.optimizer_keys import Optimizer, Scheduler
from zcomm.config.training_keys import (
    Autotuning,
    CurriculumLearning,
    Eigenvalues,
    Elasticity,
    HybridEngine,
    ProgressiveLayerDrop,
)


@dataclass(frozen=True)
class Fp16:
    """Section ``fp16``."""

    enabled: bool = key(
        False,
        "fp16 weights and gradients with an fp32 master and a loss scale",
        auto="args.fp16, or whether the model's parameters are fp16",
    )
    loss_scale: float = key(0.0, "fixed loss scale; 0 = dynamic", AT_LEAST_0)
    initial_scale_power: int = key(16, "first dynamic scale is 2^this", AT_LEAST_0)
    loss_scale_window: int = key(1000, "good steps, after the first, before the scale grows", AT_LEAST_1)
    hysteresis: int = key(2, "overflows before the scale shrinks", AT_LEAST_1)
    min_loss_scale: float = key(1.0, "lowest dynamic scale; an overflow there raises", POSITIVE)
    auto_cast: bool = key(False, "cast floating-point tensors among the forward's positional arguments to fp16")
    consecutive_hysteresis: bool = key(
        False, "refill the hysteresis at every good step, instead of when the scale grows"
    )


@dataclass(frozen=True)
class Bf16:
    """Section ``bf16``."""

    enabled: bool = key(
        False,
        "bf16 weights and gradients with an exact fp32 master; false = fp32",
        auto="args.bf16, or whether the model's parameters are bf16",
    )
    check_grad_overflow: bool = key(
        True, "skip a step with gradients that are not finite; the first of them is named either way"
    )
    bf16_optimizer_states: bool = key(False, "moments of the configuration's Adam or AdamW in bf16")


@dataclass(frozen=True)
class TensorParallel:
    """Section ``tensor_parallel``."""

    autotp_size: int = key(0, "ranks that divide the layers of the model; 0 or 1 = off", AT_LEAST_0)


@dataclass(frozen=True)
class TorchAutocast:
    """Section ``torch_autocast``."""

    enabled: bool = key(
        False, "run the engine's forward in torch.autocast; float16 also scales the loss, as the section fp16 says"
    )
    dtype: str = key(
        "bfloat16",
        "of autocast's operations",
        choices=("bfloat16", "float16", "bf16", "fp16", "half", "torch.bfloat16", "torch.float16"),
    )


@dataclass(frozen=True)
class ActivationCheckpointing:
    """Section ``activation_checkpointing``; the model decides which blocks to recompute (torch.utils.checkpoint)."""

    cpu_checkpointing: bool = key(
        False,
        "tensors that the engine's forward saves for backward (also inputs of recomputed blocks), from 1 MiB on, wait "
        "in pinned host memory; see zcomm.offload_activations",
    )


@dataclass(frozen=True)
class OffloadOptimizer:
    """Section ``zero_optimization.offload_optimizer``."""

    device: str = key("none", "where optimizer state lives between steps", choices=("none", "cpu", "nvme"))
    nvme_path: str | tuple[str, ...] | None = key(
        None, "swap directory, or a list with one per drive; needed with device nvme, unused otherwise", NOT_EMPTY
    )
    ratio: float = key(
        1.0,
        "share of the optimizer state that is offloaded; the rest stays on the device (cpu) or in host memory (nvme)",
        FRACTION,
    )


@dataclass(frozen=True)
class OffloadParam:
    """Section ``zero_optimization.offload_param``."""

    device: str = key("none", "where parameters live while unused (stage 3)", choices=("none", "cpu", "nvme"))
    nvme_path: str | tuple[str, ...] | None = key(
        None, "swap directory, or a list with one per drive; needed with device nvme, unused otherwise", NOT_EMPTY
    )


@dataclass(frozen=True)
class ZeroppLocoParam:
    """Section ``zero_optimization.zeropp_loco_param``: the moving average of the residues of encoded gradients."""

    err_beta: float = key(
        0.8, "errors of quantised gradients: error = err_beta * error + (1 - err_beta) * residue", BELOW_1
    )
    reset_T: int = key(1024, "steps after which these errors restart at zero", AT_LEAST_1)


@dataclass(frozen=True)
class ZeroOptimization:
    """Section ``zero_optimization``."""

    stage: int = key(
        0,
        "0 to 2 shard optimizer and gradients, 1 and 2 share parameters, 3 shards them",
        choices=(0, 1, 2, 3),
    )
    offload_optimizer: OffloadOptimizer = section(OffloadOptimizer)
    offload_param: OffloadParam = section(OffloadParam)
    mics_shard_size: int = key(
        -1,
        "ranks that divide a model in stage 3; each such group has a copy (docs/clusters.md)",
        SHARD_SIZE,
        shown="-1: all ranks",
    )
    zero_hpz_partition_size: int = key(
        1,
        "ranks that have a copy of the weights together in stage 3; state is divided among all (docs/clusters.md)",
        AT_LEAST_1,
        shown="1: no copies",
    )
    zero_quantized_weights: bool = key(
        False,
        "stage 3 gathers weights in 8 bits, with zero_hpz_partition_size between groups, if they travel: those that a "
        "host's CPU ranks share in memory are exact otherwise; masters are exact "
        "(docs/zero_optimizer.md#compression-gradients-and-weights-in-fewer-bytes)",
    )
    zero_quantized_gradients: bool = key(
        False,
        "reduce gradients in 4 bits, with error feedback, in any stage; with copies of shard groups only across these, "
        "or also in them if weights are quantised",
    )
    zeropp_loco_param: ZeroppLocoParam | None = None
    overlap_comm: bool | None = key(
        None,
        "reduce gradients while backward runs (same bits either way)",
        shown="true (any stage)",
        auto="the default",
    )
    reduce_bucket_size: int | None = key(
        None,
        "elements per gradient bucket",
        POSITIVE,
        shown="as many as 25 MiB hold (DeepSpeed: 5e8)",
        auto="the default (Hugging Face: hidden_size squared)",
    )
    stage3_prefetch_bucket_size: int | None = key(
        None,
        "elements that stage 3 gathers ahead, in whole units",
        AT_LEAST_0,
        shown="one unit (DeepSpeed: 5e7)",
        auto="the default (Hugging Face: 0.9 hidden_size squared)",
    )


@dataclass(frozen=True)
class ExpertParallel:
    """Section ``expert_parallel``: experts of Hugging Face's blocks on several ranks (docs/parallel.md)."""

    enabled: bool = key(False, "divide the experts")
    autoep_size: int = key(1, "ranks that divide the experts of a block", AT_LEAST_1)
    preset_model: str | None = key(
        None,
        "kind of the blocks",
        choices=("mixtral", "qwen3_moe", "qwen3_5_moe", "deepseek_v2", "deepseek_v3"),
        shown="any of them",
    )


@dataclass(frozen=True)
class Pipeline:
    """Section ``pipeline``, of a PipelineModule."""

    activation_checkpoint_interval: int = key(
        0, "layers between two activation checkpoints of a PipelineModule; 0: as the module says", AT_LEAST_0
    )


@dataclass(frozen=True)
class Checkpoint:
    """Section ``checkpoint``."""

    tag_validation: str = key(
        "Warn",
        "the ranks' tags of a checkpoint differ: take that of rank 0, with a warning or without, or raise ValueError",
        choices=("Ignore", "Warn", "Fail"),
    )
    load_universal: bool = key(
        False, "load_checkpoint reads DeepSpeed's universal checkpoints, and without a tag the one of latest_universal"
    )


@dataclass(frozen=True)
class DataTypes:
    """Section ``data_types``."""

    grad_accum_dtype: str | None = key(
        None, "dtype of accumulated gradients: always fp32", choices=("fp32",), shown="`fp32`"
    )
    buffer_dtype: str | None = key(
        None,
        "dtype of floating buffers; running statistics of norms with weights have that of these where it is not given",
        choices=("fp32", "bf16", "fp16"),
        shown="as they are",
    )


@dataclass(frozen=True)
class Config:
    """The whole configuration. train_batch_size = micro batch x accumulation x data ranks; see ``resolve_batch``."""

    train_batch_size: int | None = key(
        None, "samples per optimizer step, all ranks", AT_LEAST_1, shown="derived", auto="derived from the others"
    )
    train_micro_batch_size_per_gpu: int | None = key(
        None,
        "samples per rank and micro-step",
        AT_LEAST_1,
        shown="derived",
        auto="args.per_device_train_batch_size, or derived",
    )
    gradient_accumulation_steps: int | None = key(
        None,
        "micro-steps per optimizer step",
        AT_LEAST_1,
        shown="derived, or 1",
        auto="args.gradient_accumulation_steps, or derived",
    )
    data_parallel_size: int | None = key(
        None, "ranks that read different samples", AT_LEAST_1, shown="all ranks / sequence_parallel_size"
    )
    sequence_parallel_size: int | None = key(
        None,
        "ranks that read parts of the same samples; their gradients are added up, not averaged",
        AT_LEAST_1,
        shown="1",
    )
    gradient_clipping: float = key(
        1.0,
        "largest global L2 norm of the gradient; 0 = no clipping (DeepSpeed's default before 0.19.3)",
        AT_LEAST_0,
        auto="args.max_grad_norm, or the default",
    )
    steps_per_print: int | None = key(
        None, "optimizer steps between progress lines of rank 0", AT_LEAST_1, shown="no lines"
    )
    wall_clock_breakdown: bool = key(
        False, "print seconds of forward, backward and step, every steps_per_print steps (1 if that is not given)"
    )
    dataloader_drop_last: bool = key(False, "drop the last micro batch when it is short")
    gradient_allreduce_op: str = key(
        "mean", "gradients of the ranks: their mean, or their sum (any stage)", choices=("mean", "sum")
    )
    managed_gradient_accumulation: bool = key(
        True, "count micro-steps; false: each step() updates, with all gradients since the last one"
    )
    sparse_gradients: bool = key(False, "reduce gradients of embeddings as rows (stages 0 to 2, on the CPU)")
    communication_data_type: str | None = key(
        None,
        "dtype of gradients on their way; sums are fp32",
        choices=("fp32", "bf16", "fp16"),
        shown="that of training",
    )
    fp16: Fp16 = section(Fp16)
    bf16: Bf16 = section(Bf16)
    optimizer: Optimizer | None = None
    scheduler: Scheduler | None = None
    zero_optimization: ZeroOptimization = section(ZeroOptimization)
    expert_parallel: ExpertParallel = section(ExpertParallel)
    pipeline: Pipeline = section(Pipeline)
    elasticity: Elasticity = section(Elasticity)
    curriculum_learning: CurriculumLearning = section(CurriculumLearning)
    progressive_layer_drop: ProgressiveLayerDrop = section(ProgressiveLayerDrop)
    data_efficiency: DataEfficiency = section(DataEfficiency)
    eigenvalue: Eigenvalues = section(Eigenvalues)
    autotuning: Autotuning = section(Autotuning)
    hybrid_engine: HybridEngine = section(HybridEngine)
    compression_training: CompressionTraining = section(CompressionTraining)
    checkpoint: Checkpoint = section(Checkpoint)
    data_types: DataTypes = section(DataTypes)
    activation_checkpointing: ActivationCheckpointing = section(ActivationCheckpointing)
    torch_autocast: TorchAutocast = section(TorchAutocast)
    tensorboard: TensorBoard = section(TensorBoard)
    wandb: Wandb = section(Wandb)
    csv_monitor: CsvMonitor = section(CsvMonitor)
    comet: Comet = section(Comet)
    comms_logger: CommsLogger = section(CommsLogger)
    tensor_parallel: TensorParallel = section(TensorParallel)
    flops_profiler: FlopsProfiler = section(FlopsProfiler)


# Keys of other libraries, with hints for zcomm's keys.
HINTS = {
    "optimizer.params.max_grad_norm": 'use "gradient_clipping"',
    "optimizer.params.adamw_mode": 'did you mean "optimizer.params.adam_w_mode"?',
}
