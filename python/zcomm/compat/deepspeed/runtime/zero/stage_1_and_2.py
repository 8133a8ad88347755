"""``deepspeed.runtime.zero.stage_1_and_2``: the class of optimizers of stages 1 and 2, for isinstance()."""

from __future__ import annotations

from zcomm.compat.deepspeed.runtime.base_optimizer import ZeROOptimizer
from zcomm.compat.deepspeed.runtime.zero.memory_estimates import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
)
from zcomm.zero import ZeroOptimizer

__all__ = [
    "DeepSpeedZeroOptimizer",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
]


class DeepSpeedZeroOptimizer(ZeROOptimizer):
    """A ZeroOptimizer of stage 1 or 2."""

    @staticmethod
    def zcomm_holds(optimizer: ZeroOptimizer) -> bool:
        return optimizer.stage in (1, 2)
