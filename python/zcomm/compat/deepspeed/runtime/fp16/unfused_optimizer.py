"""``deepspeed.runtime.fp16.unfused_optimizer``: a class for isinstance(). No ZeroOptimizer is one."""

from __future__ import annotations

from zcomm.compat.deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from zcomm.zero import ZeroOptimizer


class FP16_UnfusedOptimizer(DeepSpeedOptimizer):
    """DeepSpeed's optimizer of whole fp16 parameters; stage 0 in fp16 is an FP16_Optimizer here."""

    @staticmethod
    def zcomm_holds(optimizer: ZeroOptimizer) -> bool:
        return False
