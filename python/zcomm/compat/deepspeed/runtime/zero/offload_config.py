"""``deepspeed.runtime.zero.offload_config``: words for tiers and states, and the two sections of offloading."""

from __future__ import annotations

from enum import Enum

from zcomm.compat.deepspeed.runtime.section import Section


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
