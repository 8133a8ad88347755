"""Variants of the step: zcomm's CPUAdam in its precisions, torch's fused AdamW, DeepSpeedCPUAdam, the stream roof.

The variants of a row share weight and gradient (their memory, not their history), but not state. With bf16
weights the peers keep an fp32 master: cast the gradient, step, cast the weight.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from harness.peers import Absent
from optim.reference import AdamW

Tensors = list[torch.Tensor]


@dataclass
class Variant:
    """One variant.

    step: one optimizer step. master: the fp32 weights as they are now, flat. slack: see reference.count_wrong.
    """

    step: Callable[[], object]
    master: Callable[[], torch.Tensor]
    slack: float = 0.0


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat([tensor.flatten() for tensor in tensors])


def _parameters(weights: Tensors, grads: Tensors) -> list[torch.nn.Parameter]:
    """Return parameters over the given memory."""
    result = []
    for weight, grad in zip(weights, grads, strict=True):
        param = torch.nn.Parameter(weight.detach())
        param.grad = grad
        result.append(param)
    return result


def ours(weights: Tensors, grads: Tensors, adam: AdamW, state: Any, slack: float) -> Variant:
    from zcomm.optim import CPUAdam

    params = _parameters(weights, grads)
    optimizer = CPUAdam(params, adam.lr, (adam.beta1, adam.beta2), adam.eps, adam.weight_decay, state_dtype=state)

    def master() -> torch.Tensor:
        if weights[0].dtype == torch.float32:
            return _flat(weights)
        pairs = [(p.detach().view(torch.int16).int() << 16, optimizer.state[p]["remainder"].int()) for p in params]
        return _flat([(high + low).view(torch.float32) for high, low in pairs])

    return Variant(optimizer.step, master, slack)


def _with_master(weights: Tensors, grads: Tensors, make: Callable[[Any], Any]) -> Variant:
    """Return a peer's optimizer on the weights, or on fp32 masters of bf16 weights."""
    if weights[0].dtype == torch.float32:
        params = _parameters(weights, grads)
        return Variant(make(params).step, lambda: _flat(weights))
    masters = [weight.float() for weight in weights]
    wide = [torch.empty_like(master) for master in masters]
    step = make(_parameters(masters, wide)).step

    def cast_step_cast() -> None:
        for to, grad in zip(wide, grads, strict=True):
            to.copy_(grad)
        step()
        for weight, master in zip(weights, masters, strict=True):
            weight.copy_(master)

    return Variant(cast_step_cast, lambda: _flat(masters))


def torch_fused(weights: Tensors, grads: Tensors, adam: AdamW) -> Variant:
    def make(params: Any) -> Any:
        betas = (adam.beta1, adam.beta2)
        return torch.optim.AdamW(params, adam.lr, betas, adam.eps, adam.weight_decay, fused=True)

    return _with_master(weights, grads, make)


def deepspeed(weights: Tensors, grads: Tensors, adam: AdamW) -> Variant:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError:
        raise Absent("deepspeed is not installed") from None

    def make(params: Any) -> Any:
        betas = (adam.beta1, adam.beta2)
        return DeepSpeedCPUAdam(params, adam.lr, betas=betas, eps=adam.eps, weight_decay=adam.weight_decay)

    stdout = sys.stdout
    sys.stdout = sys.stderr  # its builder talks
    try:
        return _with_master(weights, grads, make)
    except Absent:
        raise
    except Exception as error:
        raise Absent(f"its op does not build here: {error}") from None
    finally:
        sys.stdout = stdout


class Stream:
    """The roof, which reads p, g, m, v and writes p, m, v; `seconds` of a call are without starting threads."""

    def __init__(self, library: ctypes.CDLL, weight: torch.Tensor, grad: torch.Tensor, threads: int) -> None:
        self._call = library.zcomm_bench_adam_stream_s
        self._state = torch.zeros(2, weight.numel())
        self._tensors = (weight, grad, self._state[0], self._state[1])
        self._threads = threads
        self.variants = {"stream": 0, "stream_tiles": 1}

    def seconds(self, name: str) -> float:
        pointers = [tensor.data_ptr() for tensor in self._tensors]
        return float(self._call(*pointers, self._tensors[0].numel(), self._threads, self.variants[name]))
