"""``deepspeed.runtime.zero.stage3``: the class of optimizers of stage 3, and whole weights for ``generate()``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from zcomm.compat.deepspeed.runtime.base_optimizer import ZeROOptimizer
from zcomm.compat.deepspeed.runtime.zero.memory_estimates import (
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from zcomm.zero import GatheredParameters, ZeroOptimizer

__all__ = [
    "DeepSpeedZeroOptimizer_Stage3",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "unwrap_model_for_generation",
]


class DeepSpeedZeroOptimizer_Stage3(ZeROOptimizer):
    """A ZeroOptimizer of stage 3."""

    @staticmethod
    def zcomm_holds(optimizer: ZeroOptimizer) -> bool:
        return optimizer.stage == 3


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """Make the weights of engine ``model`` whole, once, and yield it. Collective.

    Inside, forwards gather nothing: ranks may run the model differently often. What is changed inside is forgotten.
    """
    with GatheredParameters(model.parameters()):
        yield model
