"""``deepspeed.compression.compress``: init_compression, redundancy_clean, student_initialization, get_module_name."""

from __future__ import annotations

from typing import Any

from torch import nn

from zcomm.compression import clean, prepare
from zcomm.compression.layers import take_layers
from zcomm.compression.plan import matching
from zcomm.config import Source, compression_settings


def init_compression(
    model: nn.Module, deepspeed_config: Source, teacher_model: nn.Module | None = None, mpu: Any = None
) -> nn.Module:
    """Prepare ``model``, in place, for the methods of the section "compression_training", and return it.

    Weights become parametrizations of torch. teacher_model: of layer_reduction. mpu: an object with Megatron's layers,
    which the model must not have. Raises: as ``zcomm.compression.prepare``; NotImplementedError.
    """
    _check_mpu(model, mpu)
    return prepare(model, deepspeed_config, teacher_model)


def redundancy_clean(model: nn.Module, deepspeed_config: Source, mpu: Any = None) -> nn.Module:
    """Bake the methods into the weights of ``model``, or of an engine's model, cut pruned places, and return it.

    Raises: as ``zcomm.compression.clean``; NotImplementedError for Megatron's layers.
    """
    _check_mpu(model, mpu)
    return clean(model, deepspeed_config)


def student_initialization(student_model: nn.Module, teacher_model: nn.Module, deepspeed_config: Source) -> None:
    """Copy the layers of the teacher that the section "layer_reduction" names. Raises: ValueError."""
    take_layers(student_model, teacher_model, compression_settings(deepspeed_config).layer_reduction)


def get_module_name(
    group_name: str, model: nn.Module, key_word: str, exist_module_name: set[str], mpu: Any = None, verbose: bool = True
) -> tuple[list[str], set[str]]:
    """Return the names of Linear, Conv2d, Embedding and BatchNorm2d that a pattern finds, and all names so far.

    Raises: ValueError if ``verbose`` and a name was found before.
    """
    from zcomm.compat.deepspeed.compression.helper import is_module_compressible

    found: list[str] = []
    for name, module in matching(model, key_word):
        if is_module_compressible(module, mpu):
            if name not in exist_module_name:
                exist_module_name.add(name)
                found.append(name)
            elif verbose:
                raise ValueError(f"{name} is in another group already, too: check the patterns of {group_name}")
    return found, exist_module_name


def check_deepspeed_config(config: Any) -> Any:
    """Return the configuration as a dict, from a dict or the path of a file. Raises: OSError, ValueError."""
    from zcomm import config as configs

    return configs.raw(config)


def _check_mpu(model: nn.Module, mpu: Any) -> None:
    kinds = [getattr(mpu, name, None) for name in ("ColumnParallelLinear", "RowParallelLinear")]
    for name, module in model.named_modules():
        if any(kind is not None and isinstance(module, kind) for kind in kinds):
            raise NotImplementedError(
                f"mpu=: {name} is {type(module).__name__}, a part of a layer: ranges and masks are of whole layers"
            )
