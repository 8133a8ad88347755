"""CPUSGD: the fused CPU SGD with momentum and Nesterov's look-ahead."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from zcomm import _core
from zcomm.optim.fused import FusedOptimizer


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
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

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
