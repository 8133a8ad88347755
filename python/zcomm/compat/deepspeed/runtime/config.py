"""DeepSpeedConfig, a checked configuration under DeepSpeed's attribute names, and its sections as objects.

A section keeps its keys and the values in effect.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from enum import Enum
from functools import reduce
from typing import Any, ClassVar

from zcomm.config import load_with_notes, resolve_batch
from zcomm.config.parse import Source, read_source

DeepSpeedConfigError = ValueError  # raised for wrong configurations

__all__ = ["DeepSpeedConfig", "DeepSpeedConfigError"]

ADAM_OPTIMIZER = "adam"
ADAMW_OPTIMIZER = "adamw"
LAMB_OPTIMIZER = "lamb"
MUON_OPTIMIZER = "muon"
ADAGRAD_OPTIMIZER = "adagrad"
LION_OPTIMIZER = "lion"
ZERO_OPTIMIZATION = "zero_optimization"
FP16, BFLOAT16, BFLOAT16_OLD = "fp16", "bf16", "bfloat16"
_MONITORS = ("tensorboard", "comet", "wandb", "csv_monitor")


class Section:
    """Keys of one section. Raises: ValueError, NotImplementedError as the configuration.

    An attribute is the value in effect, or, for a key without effect, the given value.
    """

    zcomm_path: ClassVar[tuple[str, ...]] = ()
    zcomm_keys: ClassVar[dict[str, tuple[str, ...]]] = {}  # keys of an attribute that has another name

    def __init__(self, **keys: Any) -> None:
        whole: Any = keys
        for name in reversed(self.zcomm_path):
            whole = {name: whole}
        if len(self.zcomm_path) > 1:  # below stage 3 the keys of offloaded weights would be refused
            whole["zero_optimization"]["stage"] = 3
        config, _ = load_with_notes({"train_batch_size": 1, **whole})
        self._given = dict(keys)
        self._effective = reduce(getattr, self.zcomm_path, config)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            if hasattr(self._effective, name):
                return getattr(self._effective, name)
            for key in self.zcomm_keys.get(name, (name,)):
                if key in self._given:
                    return self._given[key]
        raise AttributeError(f"{type(self).__name__} has no {name!r} here; it was given {sorted(self._given)}")

    def model_dump(self) -> dict[str, Any]:
        """Return the given keys."""
        return dict(self._given)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._given})"


# --- zero_optimization ------------------------------------------------------------------------------------------------


class OffloadDeviceEnum(str, Enum):
    """Tiers."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """States that ``engine.offload_states(include=)`` names."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class DeepSpeedZeroOffloadParamConfig(Section):
    """``zero_optimization.offload_param``, checked."""

    zcomm_path = ("zero_optimization", "offload_param")


class DeepSpeedZeroOffloadOptimizerConfig(Section):
    """``zero_optimization.offload_optimizer``, checked."""

    zcomm_path = ("zero_optimization", "offload_optimizer")


class ZeroStageEnum(int, Enum):
    """Stages."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3  # noqa: PIE796  (another name of the last one, as there)


class DeepSpeedZeroConfig(Section):
    """``zero_optimization``, checked."""

    zcomm_path = (ZERO_OPTIMIZATION,)
    zcomm_keys: ClassVar[dict[str, tuple[str, ...]]] = {
        "gather_16bit_weights_on_model_save": (
            "stage3_gather_16bit_weights_on_model_save",
            "stage3_gather_fp16_weights_on_model_save",
        ),
        "max_live_parameters": ("stage3_max_live_parameters",),
        "max_reuse_distance": ("stage3_max_reuse_distance",),
        "param_persistence_threshold": ("stage3_param_persistence_threshold",),
        "prefetch_bucket_size": ("stage3_prefetch_bucket_size",),
    }

    @property
    def offload_param(self) -> DeepSpeedZeroOffloadParamConfig | None:
        """The section of the weights' tier; None if it is not given."""
        given = self._offload("offload_param", "cpu_offload_param")
        return None if given is None else DeepSpeedZeroOffloadParamConfig(**given)

    @property
    def offload_optimizer(self) -> DeepSpeedZeroOffloadOptimizerConfig | None:
        """The section of the optimizer state's tier; None if it is not given."""
        given = self._offload("offload_optimizer", "cpu_offload")
        return None if given is None else DeepSpeedZeroOffloadOptimizerConfig(**given)

    def _offload(self, name: str, older: str) -> dict[str, Any] | None:
        given = self._given.get(name)
        if given is None:
            return {"device": "cpu"} if self._given.get(older) else None
        return dict(given)


def get_zero_config(param_dict: Mapping[str, Any]) -> DeepSpeedZeroConfig:
    """Return the section of a whole configuration."""
    return DeepSpeedZeroConfig(**dict(param_dict.get(ZERO_OPTIMIZATION) or {}))


# --- fp16, bf16 -------------------------------------------------------------------------------------------------------


class DeepSpeedFP16Config(Section):
    """``fp16``, checked."""

    zcomm_path = (FP16,)


class DeepSpeedBF16Config(Section):
    """``bf16``, checked."""

    zcomm_path = (BFLOAT16,)


def get_float16_config(param_dict: Mapping[str, Any]) -> DeepSpeedFP16Config:
    """Return the section of a whole configuration."""
    return DeepSpeedFP16Config(**dict(param_dict.get(FP16) or {}))


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> DeepSpeedBF16Config:
    """Return the section of a whole configuration, which may have its older name."""
    given = param_dict.get(BFLOAT16)
    return DeepSpeedBF16Config(**dict((param_dict.get(BFLOAT16_OLD) or {}) if given is None else given))


# --- monitors ---------------------------------------------------------------------------------------------------------


class DeepSpeedMonitorConfig(Section):
    """The sections ``tensorboard``, ``comet``, ``wandb`` and ``csv_monitor``, checked."""

    zcomm_path = ()

    @property
    def enabled(self) -> bool:
        """True if one of the monitors is enabled."""
        return any(getattr(self, name).enabled for name in _MONITORS)


def get_monitor_config(param_dict: Mapping[str, Any]) -> DeepSpeedMonitorConfig:
    """Return the monitors' sections of a whole configuration."""
    return DeepSpeedMonitorConfig(**{name: param_dict[name] for name in _MONITORS if param_dict.get(name) is not None})


# --- the whole configuration ------------------------------------------------------------------------------------------


class DeepSpeedConfig:
    """A configuration: a dict, a path of a JSON file or JSON text. Batch sizes are for this job's ranks.

    mpu, mesh_device (torch's, of "data_parallel" and "sequence_parallel"): groups of the ranks. world_size: the ranks
    that read different samples.

    Attributes are DeepSpeed's (train_batch_size, zero_config, optimizer_name, ...). Another one is the value in effect
    of that key. Raises: ValueError (DeepSpeedConfigError), NotImplementedError as ``initialize`` does.
    """

    def __init__(self, config: Source, mpu: Any = None, mesh_device: Any = None) -> None:
        from zcomm.compat.deepspeed.utils.groups import (
            bwc_pipeline_parallel_world_size,
            bwc_tensor_model_parallel_world_size,
        )

        divided = bwc_tensor_model_parallel_world_size(mpu) * bwc_pipeline_parallel_world_size(mpu)
        self._param_dict = copy.deepcopy(dict(read_source(config)[0]))
        self._config, self._notes = load_with_notes(self._param_dict)
        self.world_size = _world_size() // divided // self._sequence(mpu, mesh_device)
        self.global_rank = _rank()
        batch = resolve_batch(self._config, self.world_size)
        self.train_batch_size = batch.train
        self.train_micro_batch_size_per_gpu = batch.micro
        self.gradient_accumulation_steps = batch.accumulation
        zero = self._config.zero_optimization
        self.zero_config = DeepSpeedZeroConfig(**dict(self._param_dict.get("zero_optimization") or {}))
        self.zero_optimization_stage = zero.stage
        self.zero_enabled = zero.stage > 0
        self.float16_config, self.bfloat16_config = self._config.fp16, self._config.bf16
        self.fp16_enabled, self.bfloat16_enabled = self._config.fp16.enabled, self._config.bf16.enabled
        self.optimizer_name, self.optimizer_params = self._section("optimizer")
        if self.optimizer_name is not None:
            self.optimizer_name = str(self.optimizer_name).lower()
        self.monitor_config = get_monitor_config(self._param_dict)
        self.scheduler_name, self.scheduler_params = self._section("scheduler")

    def _sequence(self, mpu: Any, mesh_device: Any) -> int:
        """Return the number of ranks that read parts of the same samples."""
        if mesh_device is not None:
            return int(mesh_device.size(mesh_device.mesh_dim_names.index("sequence_parallel")))
        if hasattr(mpu, "get_sequence_parallel_world_size"):
            return int(mpu.get_sequence_parallel_world_size())
        return self._config.sequence_parallel_size or 1

    def _section(self, name: str) -> tuple[Any, Any]:
        section = self._param_dict.get(name) or {}
        return section.get("type"), section.get("params")

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and hasattr(self._config, name):
            return getattr(self._config, name)
        raise AttributeError(f"DeepSpeedConfig has no {name!r} here; ._param_dict is the configuration as it was given")

    def print(self, name: str) -> None:
        """Print the configuration as it was given."""
        print(f"{name}: {self._param_dict}")

    print_user_config = print


def _world_size() -> int:
    from zcomm.comm import job

    return job.current().world_size if job.is_initialized() else _torch("get_world_size", 1)


def _rank() -> int:
    from zcomm.comm import job

    return job.current().rank if job.is_initialized() else _torch("get_rank", 0)


def _torch(name: str, alone: int) -> int:
    import torch.distributed as dist

    return int(getattr(dist, name)()) if dist.is_available() and dist.is_initialized() else alone
