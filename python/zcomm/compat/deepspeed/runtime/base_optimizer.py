"""``deepspeed.runtime.base_optimizer``: DeepSpeed's classes of optimizers, for isinstance() of a ZeroOptimizer.

A class here has no instances of its own: ``initialize`` makes a ZeroOptimizer, and the class answers for it by its
stage and precision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from zcomm.zero import ZeroOptimizer


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
