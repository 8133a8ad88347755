"""CPULion: the fused CPU Lion."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from zcomm import _core
from zcomm.optim.fused import FusedOptimizer


class CPULion(FusedOptimizer[_core.LionParams]):
    """Lion on CPU tensors: one fused, multi-threaded pass per parameter over gradient, state and weight.

    params: fp32, bf16 or fp16 CPU parameters (or groups); bf16 as in CPUAdam. weight_decay is decoupled.
    State per parameter: ``exp_avg`` (fp32; the name of the paper's code) and, for bf16, ``remainder`` (int16). A NaN
    in the gradient makes its weight NaN.

    Raises: ValueError naming a hyperparameter out of range, or a parameter of another dtype or device;
    NotImplementedError for a sparse gradient.
    Source: Chen et al. (arXiv:2302.06675), algorithm 2.
    """

    ARRAYS = ("exp_avg",)
    COUNTS = False
    PARAMS, NUMBERS = _core.LionParams, "lr weight_decay"
    AT_LEAST_0 = NUMBERS
    BATCH = _core.LionBatch

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})
