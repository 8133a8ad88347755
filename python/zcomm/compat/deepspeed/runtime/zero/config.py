"""``deepspeed.runtime.zero.config``: the section ``zero_optimization``, and the words of its stages."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, ClassVar

from zcomm.compat.deepspeed.runtime.section import Section
from zcomm.compat.deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
)

ZERO_OPTIMIZATION = "zero_optimization"


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
        """The section of the weights' tier; None where it is not given."""
        given = self._offload("offload_param", "cpu_offload_param")
        return None if given is None else DeepSpeedZeroOffloadParamConfig(**given)

    @property
    def offload_optimizer(self) -> DeepSpeedZeroOffloadOptimizerConfig | None:
        """The section of the optimizer state's tier; None where it is not given."""
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
