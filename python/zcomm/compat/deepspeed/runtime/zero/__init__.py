"""``deepspeed.runtime.zero``: the modules of it that programs import."""

from __future__ import annotations

from zcomm.compat.deepspeed.lazy import names_of

NAMES = {
    "zcomm.zero": "GatheredParameters",
    ".runtime.zero.init": "Init",
    ".runtime.zero.partition_parameters": "ZeroParamStatus ZeroParamType register_external_parameter "
    "unregister_external_parameter",
    ".runtime.zero.parameter_offload": "DeepSpeedZeRoOffload",
    ".runtime.zero.stage3": "unwrap_model_for_generation",
}

__getattr__ = names_of(__name__, NAMES)
