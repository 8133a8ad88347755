"""CPULion: the fused CPU Lion."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from zcomm import _core
from zcomm.optim.fused import FusedOptimizer, as_params, check_at_least_0, check_betas, refuse


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

    def _check_group(self, group: dict[str, Any]) -> None:
        check_at_least_0(group, "lr", "weight_decay")
        check_betas(group)
        refuse(group, "differentiable")

    def _hyper(self, group: dict[str, Any]) -> _core.LionParams:
        hyper = as_params(_core.LionParams(), group, numbers="lr weight_decay", flags="maximize")
        hyper.beta1, hyper.beta2 = (float(beta) for beta in group["betas"])
        return hyper

    def _batch(self) -> _core.LionBatch:
        return _core.LionBatch()
