"""Exact result of AdamW, in float64: the oracle of #wrong.

Gradients of the checked steps are multiples of one tensor g. So m and v are multiples of g and g * g by numbers that
are known ahead. The reference keeps no state and reads a piece at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

PIECE = 1 << 20
GRADS = (1.0, -0.5, 0.25)  # the gradient of checked step i is GRADS[i] * g: powers of two, so exact in bf16


@dataclass(frozen=True)
class AdamW:
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01

    def after(self, weight: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        """Return ``weight`` (f64) after the checked steps."""
        m = v = 0.0
        for step, factor in enumerate(GRADS, 1):
            m = self.beta1 * m + (1 - self.beta1) * factor
            v = self.beta2 * v + (1 - self.beta2) * factor * factor
            root = math.sqrt(v / (1 - self.beta2**step))
            rate = self.lr * m / (1 - self.beta1**step)
            weight = weight * (1 - self.lr * self.weight_decay) - rate * g / (root * g.abs() + self.eps)
        return weight


CODED = -1.0  # slack of 8-bit state: see coded_slack


def coded_slack(g: torch.Tensor) -> torch.Tensor:
    """Return the permitted error of an element with 8-bit state.

    Its codes are half as dense every 4 octaves below its block's largest (zcomm/optim_shard.hpp). 0.04 of a step in
    the first 4; measured 0.03.
    """
    block = 256
    size = g.abs()
    padded = torch.nn.functional.pad(size, (0, -len(g) % block)).view(-1, block)
    top = padded.amax(1, keepdim=True).expand_as(padded).reshape(-1)[: len(g)]
    octaves = torch.log2((top / size).nan_to_num(1.0, posinf=torch.inf))  # of a zero: infinite
    return (0.04 * torch.exp2(torch.floor(octaves / 4))).clamp(max=1.0)


def count_wrong(result: torch.Tensor, start: torch.Tensor, g: torch.Tensor, adam: AdamW, slack: float) -> int:
    """Count elements of ``result`` that are further from the reference than rounding explains.

    slack: permitted error of the state's format, as a share of the checked steps' length (3 lr); 0 for fp32 state,
    CODED for 8 bits.
    """
    wrong = 0
    for begin in range(0, result.numel(), PIECE):
        part = slice(begin, begin + PIECE)
        first = start[part].double()
        share = coded_slack(g[part].double()) if slack == CODED else slack
        allowed = len(GRADS) * adam.lr * (share + 4e-6)
        error = (result[part].double() - adam.after(first, g[part].double())).abs()
        wrong += int((~(error <= allowed + first.abs() * 2.0**-21)).sum())
    return wrong
