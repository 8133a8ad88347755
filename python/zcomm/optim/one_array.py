"""CPUAdagrad, CPULion and CPUSGD: fused CPU optimizers with one array of state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from zcomm import _core
from zcomm.optim.fused import FusedOptimizer
from zcomm.optim.options import given


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
        super().__init__(params, given(locals()))

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
        super().__init__(params, given(locals()))


class CPUSGD(FusedOptimizer[_core.SgdParams]):
    """torch.optim.SGD on CPU tensors: one fused, multi-threaded pass per parameter over gradient, state and weight.

    params: fp32, bf16 or fp16 CPU parameters (or groups); bf16 as in CPUAdam.
    State per parameter: ``momentum_buffer`` (fp32) once momentum is not 0 and, for bf16, ``remainder`` (int16). The
    first buffer is the gradient, not dampened, as torch's. Loads from and into torch.optim.SGD.

    Raises: ValueError naming a hyperparameter out of range, or a parameter of another dtype or device;
    NotImplementedError for a sparse gradient.
    Source: Sutskever et al. 2013; order of operations of torch.optim.SGD.
    """

    ARRAYS = ("momentum_buffer",)
    COUNTS = False
    PARAMS, NUMBERS = _core.SgdParams, "lr momentum dampening weight_decay"
    AT_LEAST_0 = "lr momentum weight_decay"
    BATCH = _core.SgdBatch

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, given(locals()))

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError(
                f"nesterov=True needs momentum > 0 and dampening 0; they are {group['momentum']} and "
                f"{group['dampening']}"
            )

    def _names(self, group: dict[str, Any], state: dict[str, Any]) -> tuple[str, ...]:
        buffer = group["momentum"] != 0 or state.get("momentum_buffer") is not None
        return self.ARRAYS if buffer else ()

    def _hyper(self, group: dict[str, Any]) -> _core.SgdParams:
        params = super()._hyper(group)
        params.nesterov = bool(group["nesterov"])
        return params

    def _form(self, group: dict[str, Any]) -> bool:
        return bool(group["momentum"] != 0)
