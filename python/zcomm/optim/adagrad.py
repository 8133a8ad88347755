"""CPUAdagrad: the fused CPU Adagrad."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from zcomm import _core
from zcomm.optim.fused import FusedOptimizer


class CPUAdagrad(FusedOptimizer[_core.AdagradParams]):
    """torch.optim.Adagrad on CPU tensors: one fused, multi-threaded pass per parameter over gradient, state and weight.

    params: fp32, bf16 or fp16 CPU parameters (or groups); bf16 as in CPUAdam.
    State per parameter: ``step``, ``sum`` (fp32) and, for bf16, ``remainder`` (int16), allocated by the constructor,
    as torch does. Loads from and into torch.optim.Adagrad.

    Raises: ValueError naming a hyperparameter out of range, or a parameter of another dtype or device;
    NotImplementedError for a sparse gradient.
    Source: Duchi, Hazan, Singer 2011; order of operations of torch.optim.Adagrad.
    """

    ARRAYS = ("sum",)
    COUNTS = True
    PARAMS, NUMBERS = _core.AdagradParams, "lr lr_decay weight_decay eps"
    AT_LEAST_0 = "lr lr_decay weight_decay initial_accumulator_value eps"
    BATCH = _core.AdagradBatch

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "eps": eps,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch's, and start its sums. Raises: ValueError; the optimizer is then as before."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            for param in group["params"]:  # all of them before any has state
                self._check_param(param)
        except ValueError:
            del self.param_groups[-1]
            raise
        for param in group["params"]:
            self._buffer(param, group, self.ARRAYS)

    def _initial(self, group: dict[str, Any]) -> float:
        return float(group["initial_accumulator_value"])
