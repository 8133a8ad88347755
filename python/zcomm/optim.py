"""CPUAdam: the fused CPU Adam / AdamW as a drop-in for torch.optim, usable with no other part of zcomm."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from zcomm import _core
from zcomm._tensors import core_dtype

_STATE = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32, "remainder": torch.int16}


class CPUAdam(torch.optim.Optimizer):
    """Adam or AdamW on CPU tensors: one fused, multi-threaded pass per parameter over gradient, state and weight.

    params: fp32 or bf16 CPU parameters (or groups). A bf16 parameter keeps an exact fp32 master, split in the weight
    and a 16-bit remainder in the state (include/zcomm/adam.hpp).
    adamw: decoupled weight decay; False adds the L2 term to the gradient, as torch.optim.Adam does.
    State per parameter: ``step``, ``exp_avg`` and ``exp_avg_sq`` (fp32, views of one buffer) and, for bf16,
    ``remainder`` (int16).

    Raises: ValueError naming a hyperparameter out of range, or a parameter of another dtype or device.
    Source: Kingma & Ba (arXiv:1412.6980), Loshchilov & Hutter (arXiv:1711.05101).
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adamw: bool = True,
        maximize: bool = False,
    ) -> None:
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise ValueError(f"{name}={value} must be at least 0")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas={betas} must lie in [0, 1)")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "adamw": adamw,
            "maximize": maximize,
        }
        super().__init__(params, defaults)
        self._buffers: dict[torch.Tensor, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient. closure: as in torch.optim."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            hyper = _hyper(group)
            for param in group["params"]:
                if param.grad is not None:
                    self._step_param(param, hyper)
        return loss

    def _step_param(self, param: torch.Tensor, hyper: _core.AdamParams) -> None:
        _check(param)
        state = self.state[param]
        if not state:
            self._start(param)
        buffer = self._buffers.get(param)
        if buffer is None:
            buffer = self._adopt(param)  # state came from load_state_dict
        state["step"] += 1
        hyper.step = int(state["step"])
        grad = param.grad if param.grad is not None and param.grad.is_contiguous() else param.grad.contiguous()  # type: ignore[union-attr]
        count = param.numel()
        if count == 0:
            return
        _core.adam_step(
            _core.AdamShard(
                weight=param.data_ptr(),
                weight_dtype=core_dtype(param.dtype),
                grad=grad.data_ptr(),
                grad_dtype=core_dtype(grad.dtype),
                state=buffer.data_ptr(),
                count=count,
                tile_count=count,
                begin=0,
                end=count,
            ),
            hyper,
        )

    def _start(self, param: torch.Tensor) -> None:
        self.state[param]["step"] = torch.tensor(0.0)
        self._buffers[param] = self._views(param)

    def _views(self, param: torch.Tensor) -> torch.Tensor:
        """A zeroed buffer of the kernel's layout; the state's tensors become views of it."""
        count = param.numel()
        buffer = torch.zeros(_core.adam_state_nbytes(core_dtype(param.dtype), count), dtype=torch.uint8)
        state = self.state[param]
        state["exp_avg"] = buffer[: 4 * count].view(torch.float32).view(param.shape)
        state["exp_avg_sq"] = buffer[4 * count : 8 * count].view(torch.float32).view(param.shape)
        if param.dtype == torch.bfloat16:
            state["remainder"] = buffer[8 * count :].view(torch.int16).view(param.shape)
        return buffer

    def _adopt(self, param: torch.Tensor) -> torch.Tensor:
        loaded = dict(self.state[param])
        buffer = self._views(param)
        for name in _STATE:
            if name in loaded and name in self.state[param]:
                self.state[param][name].copy_(loaded[name])
        self._buffers[param] = buffer
        return buffer

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this optimizer's state, or torch.optim.Adam's or AdamW's."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            group.setdefault("adamw", self.defaults["adamw"])
        # torch casts all state to the parameter's dtype; what belongs to a bf16 parameter is not bf16.
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for number, param in zip(numbers, params, strict=True):
            loaded = state_dict["state"].get(number, {})
            for name, dtype in _STATE.items():
                if name in loaded:
                    self.state[param][name] = loaded[name].to(dtype, copy=True)
        self._buffers.clear()


def _check(param: torch.Tensor) -> None:
    if param.device.type != "cpu" or param.dtype not in (torch.float32, torch.bfloat16) or not param.is_contiguous():
        raise ValueError(
            f"CPUAdam: a parameter of shape {tuple(param.shape)} is {param.dtype} on {param.device}; "
            "it must be a contiguous fp32 or bf16 CPU tensor"
        )


def _hyper(group: dict[str, Any]) -> _core.AdamParams:
    hyper = _core.AdamParams()
    hyper.lr = float(group["lr"])
    hyper.beta1, hyper.beta2 = (float(beta) for beta in group["betas"])
    hyper.eps = float(group["eps"])
    hyper.weight_decay = float(group["weight_decay"])
    hyper.adamw = bool(group["adamw"])
    hyper.maximize = bool(group["maximize"])
    return hyper
