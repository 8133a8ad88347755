"""``deepspeed.runtime.precision_config``: the sections ``fp16`` and ``bf16`` (or ``bfloat16``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zcomm.compat.deepspeed.runtime.section import Section

FP16, BFLOAT16, BFLOAT16_OLD = "fp16", "bf16", "bfloat16"


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
