"""``deepspeed.runtime.bf16_optimizer``: the class of optimizers of bf16 in stage 0, for isinstance()."""

from __future__ import annotations

import torch

from zcomm.compat.deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from zcomm.zero import ZeroOptimizer


class BF16_Optimizer(DeepSpeedOptimizer):
    """A ZeroOptimizer of stage 0 in bf16."""

    @staticmethod
    def zcomm_holds(optimizer: ZeroOptimizer) -> bool:
        return optimizer.stage == 0 and optimizer.precision.dtype == torch.bfloat16
