"""CPUAdam: the fused CPU Adam / AdamW."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from zcomm import _core
from zcomm.optim.fused import FusedOptimizer, as_params, check_at_least_0, check_betas, refuse


def adam_params(group: dict[str, Any], adamw: bool) -> _core.AdamParams:
    """A param group as the kernel takes it; its step is still to be set."""
    params = as_params(_core.AdamParams(), group, numbers="lr eps weight_decay", flags="maximize")
    params.beta1, params.beta2 = (float(beta) for beta in group["betas"])
    params.adamw = adamw
    return params


class CPUAdam(FusedOptimizer[_core.AdamParams]):
    """Adam or AdamW on CPU tensors: one fused, multi-threaded pass per parameter over gradient, state and weight.

    params: fp32 or bf16 CPU parameters (or groups). A bf16 parameter keeps an exact fp32 master, split in the weight
    and a 16-bit remainder in the state (include/zcomm/optim_shard.hpp).
    adamw: decoupled weight decay; False adds the L2 term to the gradient, as torch.optim.Adam does. In a group it is
    torch's ``decoupled_weight_decay``.
    state_dtype: torch.bfloat16 halves the state; it is rounded by chance so that its mean is right, reproducibly from
    the step and the element's place among all parameters. It travels with a state_dict, as all of a group's options do.
    State per parameter: ``step``, ``exp_avg`` and ``exp_avg_sq`` (state_dtype, views of one buffer) and, for bf16,
    ``remainder`` (int16). Loads from and into torch.optim.Adam and AdamW.

    Raises: ValueError naming a hyperparameter out of range, or a parameter of another dtype or device;
    NotImplementedError for amsgrad=True or a sparse gradient.
    Source: Kingma & Ba (arXiv:1412.6980), Loshchilov & Hutter (arXiv:1711.05101).
    """

    ARRAYS = ("exp_avg", "exp_avg_sq")
    COUNTS = True

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adamw: bool = True,
        maximize: bool = False,
        *,
        amsgrad: bool = False,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "decoupled_weight_decay": adamw,
            "state_dtype": state_dtype,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._adapt_group(param_group)
        super().add_param_group(param_group)

    def _adapt_group(self, group: dict[str, Any]) -> None:
        if "adamw" in group:
            group["decoupled_weight_decay"] = bool(group.pop("adamw"))

    def _check_group(self, group: dict[str, Any]) -> None:
        check_at_least_0(group, "lr", "eps", "weight_decay")
        check_betas(group)
        refuse(group, "amsgrad", "differentiable")
        if group["state_dtype"] not in (torch.float32, torch.bfloat16):
            raise ValueError(f"state_dtype={group['state_dtype']} must be torch.float32 or torch.bfloat16")

    def _state_dtype(self, group: dict[str, Any]) -> torch.dtype:
        dtype: torch.dtype = group["state_dtype"]
        return dtype

    def _hyper(self, group: dict[str, Any]) -> _core.AdamParams:
        return adam_params(group, bool(group["decoupled_weight_decay"]))

    def _update(self, hyper: _core.AdamParams, shard: _core.OptimShard, state: dict[str, Any], fresh: bool) -> None:
        hyper.step = int(state["step"])
        _core.adam_step(shard, hyper)
