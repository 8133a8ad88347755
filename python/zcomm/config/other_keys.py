"""Sections ``checkpoint``, ``data_types`` and ``compile`` of the configuration: see schema.py."""
# ruff: noqa: RUF009  (key() and section() are field specifiers, as dataclasses.field is)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zcomm.config.keys import Status, key

_NO_EFFECT = Status.NO_EFFECT
_REFUSED = Status.REFUSED
_OWN_FORMAT = "one format, written tensor by tensor; save_checkpoint(wait=False) writes while training goes on"
_OWN_COMPILE = "compile the model's blocks yourself (block.compile())"


@dataclass(frozen=True)
class Checkpoint:
    """Section ``checkpoint``."""

    tag_validation: str = key(
        "Warn",
        "the ranks' tags of a checkpoint differ: take that of rank 0, with a warning or without, or raise ValueError",
        choices=("Ignore", "Warn", "Fail"),
    )
    load_universal: bool = key(
        False,
        "load DeepSpeed's universal checkpoints",
        status=_REFUSED,
        reason="`zcomm ckpt convert` reads DeepSpeed's zero checkpoints; those of zcomm load at any world size",
    )
    use_node_local_storage: bool = key(
        False,
        "a part of the checkpoint on each host",
        status=_REFUSED,
        reason="a checkpoint is one folder that all ranks see",
    )
    parallel_write: dict[str, Any] | None = key(
        None,
        "pipeline stages write beside each other",
        status=_NO_EFFECT,
        reason=_OWN_FORMAT,
        shown_default="off",
        switch=("pipeline_stage", False),
    )
    checkpoint_serialization: bool = key(True, "pickle's new format", status=_NO_EFFECT, reason=_OWN_FORMAT)
    writer: dict[str, Any] | None = key(
        None, "how files are written", status=_NO_EFFECT, reason=_OWN_FORMAT, shown_default="its own", switch=None
    )


@dataclass(frozen=True)
class DataTypes:
    """Section ``data_types``."""

    grad_accum_dtype: str | None = key(
        None, "dtype of accumulated gradients: always fp32", choices=("fp32",), shown_default="`fp32`"
    )
    param_dtype: str | None = key(
        None,
        "dtype of parameters, if another than that of fp16 or bf16",
        status=_REFUSED,
        reason="parameters have the precision of training; leave it out",
        shown_default="that of training",
    )
    buffer_dtype: str | None = key(
        None,
        "dtype of floating buffers; running statistics of norms with weights have that of these where it is not given",
        choices=("fp32", "bf16", "fp16"),
        shown_default="as they are",
    )
    keep_in_fp32_modules: Any = key(
        "auto",
        "names of modules with buffers that stay fp32",
        status=_NO_EFFECT,
        reason="buffers stay as the model has them, or have buffer_dtype",
    )


@dataclass(frozen=True)
class Compile:
    """Section ``compile``."""

    deepcompile: bool = key(False, "rewrite the compiled graph", status=_REFUSED, reason=_OWN_COMPILE)
    autoep_non_moe: bool = key(False, "compile around experts", status=_REFUSED, reason="there are no experts")
    free_activation: bool = key(False, "of deepcompile", status=_NO_EFFECT, reason=_OWN_COMPILE)
    free_activation_threshold: int = key(10 * 2**20, "of deepcompile", status=_NO_EFFECT, reason=_OWN_COMPILE)
    offload_activation: bool = key(
        False,
        "of deepcompile: saved activations wait on the host",
        status=_REFUSED,
        reason='use "activation_checkpointing.cpu_checkpointing": true',
    )
    offload_activation_pin_memory: bool = key(True, "of deepcompile", status=_NO_EFFECT, reason=_OWN_COMPILE)
    offload_opt_states: bool = key(
        False, "of deepcompile", status=_REFUSED, reason='use "zero_optimization.offload_optimizer"'
    )
    double_buffer: bool = key(True, "of deepcompile", status=_NO_EFFECT, reason=_OWN_COMPILE)
    symmetric_memory: bool = key(False, "of deepcompile", status=_NO_EFFECT, reason=_OWN_COMPILE)
    debug_log: bool = key(False, "of deepcompile", status=_NO_EFFECT, reason=_OWN_COMPILE)
    offload_parameters: bool = key(
        False, "of deepcompile", status=_REFUSED, reason='use "zero_optimization.offload_param"'
    )
    sync_before_reduce: bool = key(False, "of deepcompile", status=_NO_EFFECT, reason=_OWN_COMPILE)
    sync_after_reduce: bool = key(False, "of deepcompile", status=_NO_EFFECT, reason=_OWN_COMPILE)
    sync_before_allgather: bool = key(False, "of deepcompile", status=_NO_EFFECT, reason=_OWN_COMPILE)
    sync_after_allgather: bool = key(False, "of deepcompile", status=_NO_EFFECT, reason=_OWN_COMPILE)
    keep_int_input_tensors: bool = key(True, "of deepcompile", status=_NO_EFFECT, reason=_OWN_COMPILE)
    keep_all_input_tensors: bool = key(False, "of deepcompile", status=_NO_EFFECT, reason=_OWN_COMPILE)
    passes: Any = key(None, "of deepcompile", status=_NO_EFFECT, reason=_OWN_COMPILE, shown_default="all")
