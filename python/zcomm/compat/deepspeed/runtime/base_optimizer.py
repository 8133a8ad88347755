"""DeepSpeed's classes of optimizers (stages, precisions), for isinstance() of a ZeroOptimizer.

These classes have no instances: ``initialize`` returns a ZeroOptimizer, and isinstance() follows its stage and
precision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zcomm.zero import ZeroOptimizer

DeepSpeedOptimizerCallable = Callable[[Any], Optimizer]
DeepSpeedSchedulerCallable = Callable[[Optimizer], LRScheduler]


class Kind(type):
    """A class that every ZeroOptimizer is an instance of for which ``zcomm_holds`` is true."""

    zcomm_holds: Callable[[ZeroOptimizer], bool]

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, ZeroOptimizer) and cls.zcomm_holds(instance)

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"{cls.__name__} is not made by programs: deepspeed.initialize() and zcomm.ZeroOptimizer shard optimizers"
        )


class DeepSpeedOptimizer(metaclass=Kind):
    """Any ZeroOptimizer."""

    @staticmethod
    def zcomm_holds(optimizer: ZeroOptimizer) -> bool:
        return True


class ZeROOptimizer(DeepSpeedOptimizer):
    """A ZeroOptimizer of stages 1 to 3."""

    @staticmethod
    def zcomm_holds(optimizer: ZeroOptimizer) -> bool:
        return optimizer.stage > 0


class DeepSpeedZeroOptimizer(ZeROOptimizer):
    """A ZeroOptimizer of stage 1 or 2."""

    @staticmethod
    def zcomm_holds(optimizer: ZeroOptimizer) -> bool:
        return optimizer.stage in (1, 2)


class DeepSpeedZeroOptimizer_Stage3(ZeROOptimizer):
    """A ZeroOptimizer of stage 3."""

    @staticmethod
    def zcomm_holds(optimizer: ZeroOptimizer) -> bool:
        return optimizer.stage == 3


class BF16_Optimizer(DeepSpeedOptimizer):
    """A ZeroOptimizer of stage 0 in bf16."""

    @staticmethod
    def zcomm_holds(optimizer: ZeroOptimizer) -> bool:
        return optimizer.stage == 0 and optimizer.precision.dtype == torch.bfloat16


class FP16_Optimizer(DeepSpeedOptimizer):
    """A ZeroOptimizer of stage 0 in fp16."""

    @staticmethod
    def zcomm_holds(optimizer: ZeroOptimizer) -> bool:
        return optimizer.stage == 0 and optimizer.precision.dtype == torch.float16


class FP16_UnfusedOptimizer(DeepSpeedOptimizer):
    """DeepSpeed's optimizer of whole fp16 parameters; zcomm's stage 0 in fp16 is an FP16_Optimizer."""

    @staticmethod
    def zcomm_holds(optimizer: ZeroOptimizer) -> bool:
        return False
