"""CPUAdam: the fused CPU Adam / AdamW."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from zcomm import _core
from zcomm.comm.tensors import core_dtype
from zcomm.optim.fused import FusedOptimizer, allocate, refuse
from zcomm.optim.options import given


class FusedAdamBase(FusedOptimizer[_core.AdamParams]):
    """Common part of CPUAdam and FusedAdam: options, checks, the forms of state."""

    ARRAYS = ("exp_avg", "exp_avg_sq")
    COUNTS = True
    PARAMS, NUMBERS = _core.AdamParams, "lr eps weight_decay"
    AT_LEAST_0 = NUMBERS

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adamw: bool = True,
        maximize: bool = False,
        *,
        amsgrad: bool = False,
        state_dtype: torch.dtype | str = torch.float32,
    ) -> None:
        defaults = given(locals(), "adamw")
        defaults["decoupled_weight_decay"] = adamw
        defaults["state_dtype"] = torch.uint8 if state_dtype == "8bit" else state_dtype
        super().__init__(params, defaults)

    def _adapt_group(self, group: dict[str, Any]) -> None:
        if group.get("state_dtype") == "8bit":
            group["state_dtype"] = torch.uint8
        if "adamw" in group:
            group["decoupled_weight_decay"] = bool(group.pop("adamw"))

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        refuse(group, "amsgrad")
        if group["state_dtype"] not in (torch.float32, torch.bfloat16, torch.uint8):
            raise ValueError(f"state_dtype={group['state_dtype']} must be torch.float32, torch.bfloat16 or torch.uint8")

    def _state_dtype(self, group: dict[str, Any]) -> torch.dtype:
        dtype: torch.dtype = group["state_dtype"]
        return dtype

    def _hyper(self, group: dict[str, Any]) -> _core.AdamParams:
        refuse(group, "amsgrad")  # a program may set it later
        params = super()._hyper(group)
        params.adamw = bool(group["decoupled_weight_decay"])
        return params

    def wide_state(self, param: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``exp_avg`` and ``exp_avg_sq`` of a parameter as new fp32 tensors, for any state_dtype.

        Raises: KeyError for a parameter that has no state yet.
        """
        state = self.state[param]
        if state["exp_avg"].dtype == torch.uint8:
            first, second = _decoded(state)
            return first.to(param.device), second.to(param.device)
        return state["exp_avg"].float().clone(), state["exp_avg_sq"].float().clone()

    def _adopted(self, param: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
        first, second = (state.get(name) for name in self.ARRAYS)
        if first is None or second is None or first.dtype == group["state_dtype"]:
            return state
        if first.dtype == torch.uint8:
            first, second = _decoded(state)
            return {**state, "exp_avg": first, "exp_avg_sq": second}
        if group["state_dtype"] == torch.uint8 and first.shape == second.shape == param.shape:
            return {**state, **_encoded(*(x.to("cpu", torch.float32).contiguous() for x in (first, second)))}
        return state


class CPUAdam(FusedAdamBase):
    """Adam or AdamW on CPU tensors: one fused, multi-threaded pass per parameter over gradient, state and weight.

    params: fp32, bf16 or fp16 CPU parameters (or groups). A bf16 parameter keeps an exact fp32 master, split in the
    weight and a 16-bit remainder in the state (include/zcomm/optim_shard.hpp). An fp16 parameter has it whole in the
    state (``master``).
    adamw: decoupled weight decay; False adds the L2 term to the gradient, as torch.optim.Adam does. In a group it is
    torch's ``decoupled_weight_decay``.
    weight_decay: 0 by default, as in torch.optim.Adam and DeepSpeed's CPUAdam; torch.optim.AdamW's default is 0.01, so
    pass it if this class replaces AdamW. The other defaults are torch's.
    state_dtype: torch.bfloat16 halves the state; torch.uint8 (or "8bit") quarters it, as codes with a scale per block
    of 256. Both use stochastic rounding, which is unbiased and reproducible from the step and the element's position
    among all parameters. A state_dict contains it, as all of a group's options.
    State per parameter: ``step``, ``exp_avg`` and ``exp_avg_sq`` (state_dtype, views of one buffer), for 8-bit state
    ``scales`` (fp32, [blocks, 2]), and for bf16 parameters ``remainder`` (int16). Loads from torch.optim.Adam and
    AdamW, and, except 8-bit state, into them; ``wide_state`` reads 8-bit state.

    Raises: ValueError naming a hyperparameter out of range, or a parameter of another dtype or device;
    NotImplementedError for amsgrad=True or a sparse gradient.
    Source: Kingma & Ba (arXiv:1412.6980), Loshchilov & Hutter (arXiv:1711.05101).
    """

    BATCH = _core.AdamBatch


def _coded_shard(like: torch.Tensor) -> tuple[_core.OptimShard, dict[str, torch.Tensor]]:
    """Allocate 8-bit state for a tensor in separate memory."""
    meta = torch.empty(like.shape, device="meta")
    buffer, views = allocate(meta, FusedAdamBase.ARRAYS, torch.uint8, like.numel(), "cpu")
    views["buffer"] = buffer
    count, f32 = like.numel(), core_dtype(torch.float32)
    address = buffer.data_ptr()  # also the address of weight and gradient, which are not read
    return _core.OptimShard(address, f32, address, f32, address, count, count, 0, count, core_dtype(torch.uint8)), views


def _decoded(state: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    shard, views = _coded_shard(state["exp_avg"])
    for name in ("scales", *FusedAdamBase.ARRAYS):
        views[name].copy_(state[name])
    first, second = torch.empty(state["exp_avg"].shape), torch.empty(state["exp_avg"].shape)
    _core.adam_decode_state(shard, first.data_ptr(), second.data_ptr())
    return first, second


def _encoded(first: torch.Tensor, second: torch.Tensor) -> dict[str, torch.Tensor]:
    shard, views = _coded_shard(first)
    _core.adam_encode_state(shard, first.data_ptr(), second.data_ptr())
    return views
