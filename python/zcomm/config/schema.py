"""The table of configuration keys: DeepSpeed's JSON shape as frozen dataclasses.

Names and defaults are DeepSpeed's (its documentation of config-json, and its defaults of 2026); where zcomm's default
differs, the meaning names it. Units: DeepSpeed counts bucket sizes in ELEMENTS, and so do the keys here.
docs/config.md and docs/config-compat.md are written from this file (``python -m zcomm.config --write docs``).
"""
# ruff: noqa: RUF009  (key() and section() are field specifiers, as dataclasses.field is)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zcomm.config.keys import (
    AT_LEAST_0,
    AT_LEAST_1,
    POSITIVE,
    Status,
    key,
    section,
)
from zcomm.config.optimizer_keys import Optimizer, Scheduler
from zcomm.config.other_keys import Checkpoint, Compile, DataTypes
from zcomm.config.zero_keys import Aio, ZeroOptimization

_NO_EFFECT = Status.NO_EFFECT
_REFUSED = Status.REFUSED
_FP32_MASTER = "the master and the accumulated gradients are always exact fp32"
_GONE = "there is none (DeepSpeed has removed it)"
_FP32_SUMS = "gradients are summed in fp32 and divided once"


@dataclass(frozen=True)
class Fp16:
    """Section ``fp16``."""

    enabled: bool = key(
        False,
        "fp16 weights and gradients with an fp32 master and a loss scale",
        auto="args.fp16, or whether the model's parameters are fp16",
    )
    loss_scale: float = key(0.0, "fixed loss scale; 0 = dynamic", check=AT_LEAST_0)
    initial_scale_power: int = key(16, "first dynamic scale is 2^this", check=AT_LEAST_0)
    loss_scale_window: int = key(1000, "good steps, after the first, before the scale grows", check=AT_LEAST_1)
    hysteresis: int = key(2, "overflows before the scale shrinks", check=AT_LEAST_1)
    min_loss_scale: float = key(1.0, "lowest dynamic scale; training goes on there", check=AT_LEAST_0)
    auto_cast: bool = key(
        False, "cast inputs to fp16", status=_REFUSED, reason="inputs are the program's; cast them, as for the others"
    )
    consecutive_hysteresis: bool = key(
        False,
        "refill the hysteresis at every good step, instead of when the scale grows",
    )
    fp16_master_weights_and_grads: bool = key(
        False, "fp16 master weights and gradients", status=_REFUSED, reason=_FP32_MASTER
    )


@dataclass(frozen=True)
class Bf16:
    """Section ``bf16``."""

    enabled: bool = key(
        False,
        "bf16 weights and gradients with an exact fp32 master; false = fp32",
        auto="args.bf16, or whether the model's parameters are bf16",
    )
    immediate_grad_update: bool = key(
        False, "add up gradients as they come", status=_NO_EFFECT, reason="they are, in every precision"
    )
    check_grad_overflow: bool = key(
        True, "skip a step with gradients that are not finite; the first of them is named either way"
    )
    bf16_master_weights_and_grads: bool = key(
        False, "bf16 master weights and gradients", status=_REFUSED, reason=_FP32_MASTER
    )
    bf16_optimizer_states: bool = key(
        False,
        "optimizer state in bf16",
        status=_REFUSED,
        reason="initialize(optimizer=zcomm.optim.CPUAdam(..., state_dtype=torch.bfloat16)) has it",
    )


@dataclass(frozen=True)
class ActivationCheckpointing:
    """Section ``activation_checkpointing``: for what is recomputed, as the model decides (torch.utils.checkpoint)."""

    partition_activations: bool = key(
        False, "split saved activations among model-parallel ranks", status=_NO_EFFECT, reason="there is one such rank"
    )
    contiguous_memory_optimization: bool = key(
        False, "copy them into one buffer", status=_NO_EFFECT, reason="what is offloaded has buffers of its own"
    )
    cpu_checkpointing: bool = key(
        False,
        "what the engine's forward saves for backward (inputs of recomputed blocks, too), from 1 MiB on, waits in "
        "pinned host memory; see zcomm.offload_activations",
    )
    number_checkpoints: int | None = key(
        None,
        "how many blocks are recomputed",
        status=_NO_EFFECT,
        reason="buffers come as they are needed",
        check=AT_LEAST_1,
        shown_default="not set",
    )
    synchronize_checkpoint_boundary: bool = key(
        False, "synchronize the device at blocks", status=_NO_EFFECT, reason="nothing needs it"
    )
    profile: bool = key(False, "time the blocks", status=_NO_EFFECT, reason="zcomm.profile shows where time goes")


@dataclass(frozen=True)
class Config:
    """The whole configuration. train_batch_size = micro batch x accumulation x world_size; see ``resolve_batch``."""

    train_batch_size: int | None = key(
        None,
        "samples per optimizer step, all ranks",
        check=AT_LEAST_1,
        shown_default="derived",
        auto="derived from the others",
    )
    train_micro_batch_size_per_gpu: int | None = key(
        None,
        "samples per rank and micro-step",
        check=AT_LEAST_1,
        shown_default="derived",
        auto="args.per_device_train_batch_size, or derived",
    )
    gradient_accumulation_steps: int | None = key(
        None,
        "micro-steps per optimizer step",
        check=AT_LEAST_1,
        shown_default="derived, or 1",
        auto="args.gradient_accumulation_steps, or derived",
    )
    gradient_clipping: float = key(
        1.0,
        "largest global L2 norm of the gradient; 0 = no clipping (DeepSpeed's default before 0.19.3)",
        check=AT_LEAST_0,
        auto="args.max_grad_norm, or the default",
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
        "dtype of gradients on their way; sums are fp32",
        choices=("fp32", "bf16", "fp16"),
        shown_default="that of training",
    )
    sparse_gradients: bool = key(
        False, "reduce embeddings' gradients as rows", status=_REFUSED, reason="gradients are reduced dense"
    )
    gradient_allreduce_op: str = key(
        "mean",
        "what becomes of the ranks' gradients",
        choices=("mean", "sum"),
        status=_REFUSED,
        reason="gradients are averaged; multiply the loss by the number of ranks to have their sum",
    )
    seq_parallel_communication_data_type: str = key(
        "fp32", "of sequence parallelism", status=_NO_EFFECT, reason="there is none"
    )
    managed_gradient_accumulation: bool = key(
        True,
        "count micro-steps",
        status=_REFUSED,
        reason="use engine.set_gradient_accumulation_boundary()",
    )
    disable_python_gc: bool = key(
        False, "no garbage collection", status=_NO_EFFECT, reason="that is the program's: gc.disable()"
    )
    log_level: str | None = key(
        None,
        "of DeepSpeed's logger",
        status=_NO_EFFECT,
        reason='set it by logging.getLogger("zcomm").setLevel()',
        shown_default="its own",
    )
    vocabulary_size: int | None = key(
        None, "for a warning about its alignment", status=_NO_EFFECT, reason="there is none", shown_default="not set"
    )
    use_data_before_expert_parallelism: bool = key(
        False, "order of ranks among experts", status=_NO_EFFECT, reason="there are no experts"
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
        reason="what updates each element by itself is accepted, and others are an error, whatever its value",
    )
    tensorboard: dict[str, Any] | None = key(
        None,
        "write its event files",
        status=_REFUSED,
        reason="zcomm does not log to TensorBoard; remove the section and log in your loop",
        shown_default="off",
    )
    wandb: dict[str, Any] | None = key(
        None,
        "log there",
        status=_REFUSED,
        reason="zcomm does not log to wandb; remove the section and call wandb.log(...) in your loop",
        shown_default="off",
    )
    csv_monitor: dict[str, Any] | None = key(
        None,
        "write metrics as CSV",
        status=_REFUSED,
        reason="zcomm does not log to CSV files; remove the section and log in your loop",
        shown_default="off",
    )
    comet: dict[str, Any] | None = key(
        None,
        "log there",
        status=_REFUSED,
        reason="zcomm does not log to Comet; remove the section and log in your loop",
        shown_default="off",
    )
    timers: dict[str, Any] | None = key(
        None,
        "of throughput",
        status=_NO_EFFECT,
        reason="steps_per_print has samples per second",
        shown_default="off",
        switch=None,
    )
    pipeline: dict[str, Any] | None = key(
        None,
        "stages of a PipelineModule",
        status=_NO_EFFECT,
        reason="there are no pipelines",
        shown_default="off",
        switch=None,
    )
    tensor_parallel: dict[str, Any] | None = key(
        None,
        "split layers among ranks",
        status=_REFUSED,
        reason="ranks form one data-parallel group",
        shown_default="off",
        switch=("autotp_size", 0),
    )
    expert_parallel: dict[str, Any] | None = key(
        None, "split experts among ranks", status=_REFUSED, reason="there are no experts", shown_default="off"
    )
    weight_quantization: dict[str, Any] | None = key(
        None,
        "quantise weights for inference",
        status=_REFUSED,
        reason="there is none",
        shown_default="off",
        switch=("enabled", True),
    )
    datastates_ckpt: dict[str, Any] | None = key(
        None,
        "save by DataStates",
        status=_REFUSED,
        reason="save_checkpoint(wait=False) writes while training goes on",
        shown_default="off",
        switch=None,
    )
    nebula: dict[str, Any] | None = key(
        None,
        "save by Nebula",
        status=_REFUSED,
        reason="save_checkpoint(wait=False) writes while training goes on",
        shown_default="off",
    )
    torch_autocast: dict[str, Any] | None = key(
        None,
        "cast inside of the model",
        status=_REFUSED,
        reason='zcomm does not; use "bf16": {"enabled": true}, or torch.autocast',
        shown_default="off",
    )
    amp: dict[str, Any] | None = key(
        None,
        "mixed precision of apex",
        status=_REFUSED,
        reason='zcomm has no apex; use "bf16": {"enabled": true}',
        shown_default="off",
    )
    bfloat16: dict[str, Any] | None = key(
        None, "the old word for bf16", status=_REFUSED, reason='use "bf16": {"enabled": true}', shown_default="off"
    )
    comms_logger: dict[str, Any] | None = key(
        None, "log collectives", status=_REFUSED, reason="zcomm.profile shows them", shown_default="off"
    )
    flops_profiler: dict[str, Any] | None = key(
        None, "count operations", status=_REFUSED, reason="zcomm.profile shows where time goes", shown_default="off"
    )
    autotuning: dict[str, Any] | None = key(
        None, "try configurations", status=_REFUSED, reason="zcomm plan lists what fits", shown_default="off"
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
    sparse_attention: dict[str, Any] | None = key(
        None, "attend in blocks", status=_REFUSED, reason=_GONE, shown_default="off", switch=None
    )
    quantize_training: dict[str, Any] | None = key(
        None, "quantise while training", status=_REFUSED, reason=_GONE, shown_default="off"
    )
    graph_harvesting: bool = key(False, "CUDA graphs of the update", status=_REFUSED, reason=_GONE)
    hybrid_engine: dict[str, Any] | None = key(
        None, "train and generate by turns", status=_REFUSED, reason="there is none", shown_default="off"
    )
    fp16: Fp16 = section(Fp16, "half precision")
    bf16: Bf16 = section(Bf16, "bfloat16")
    optimizer: Optimizer | None = section(None, "the optimizer, unless initialize(optimizer=) brings one")
    scheduler: Scheduler | None = section(None, "the schedule, unless initialize(lr_scheduler=) brings one")
    zero_optimization: ZeroOptimization = section(ZeroOptimization, "sharding and offload")
    aio: Aio = section(Aio, "NVMe requests")
    checkpoint: Checkpoint = section(Checkpoint, "how checkpoints are written")
    data_types: DataTypes = section(DataTypes, "dtypes beside that of training")
    compile: Compile = section(Compile, "DeepSpeed's compiler")
    activation_checkpointing: ActivationCheckpointing = section(ActivationCheckpointing, "saved activations")


# Keys that people bring along, and what to write instead.
HINTS = {
    "optimizer.params.max_grad_norm": 'use "gradient_clipping"',
    "optimizer.params.adamw_mode": 'did you mean "optimizer.params.adam_w_mode"?',
}
