"""WeightQuantiser: a parametrization of torch that makes a weight its quantised value in each forward.

The trained parameter keeps all its bits (``parametrizations.weight.original``) and gets the gradient of the quantised
weight. The schedule sets ``bits`` and ``kept``; both are plain attributes, which torch.compile guards.
"""

from __future__ import annotations

import torch
from torch import nn

from zcomm.compression.quantisers import quantise, straight_through


class WeightQuantiser(nn.Module):
    """A weight in ``bits`` bits; None: the weight as it is.

    kind: "symmetric" or "asymmetric". groups: ranges of the weight. start_bits, target_bits, period: ``bits_at``.
    change_ratio: by so much of the whole the weight becomes its quantised value at each step; None: at once.
    stochastic: of rounding, in training; evaluation rounds to the nearest.
    """

    def __init__(
        self,
        start_bits: int,
        target_bits: int,
        period: int = 1,
        kind: str = "symmetric",
        groups: int = 1,
        stochastic: bool = False,
        change_ratio: float | None = None,
    ) -> None:
        super().__init__()
        self.start_bits, self.target_bits, self.period = start_bits, target_bits, period
        self.kind, self.groups, self.stochastic, self.change_ratio = kind, groups, stochastic, change_ratio
        self.bits: int | None = None
        self.kept = 0.0  # share of the unquantised weight

    def at(self, steps: int | None) -> None:
        """Set the bits of a step, counted from the first one that quantises. None: before it."""
        if steps is None:
            self.bits, self.kept = None, 0.0
            return
        self.bits = self.start_bits
        since = steps  # since the bits have last changed
        while self.bits > self.target_bits:
            wait = self.period * 2 ** (self.start_bits - self.bits) if self.period else self.start_bits - self.bits + 1
            if steps < wait:
                break
            self.bits, since = self.bits - 1, steps - wait
        self.kept = max(0.0, 1 - self.change_ratio * (since + 1)) if self.change_ratio is not None else 0.0

    def finish(self) -> None:
        """Set the last bits, and rounding to the nearest."""
        self.bits, self.kept, self.stochastic = self.target_bits, 0.0, False

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the quantised weight; its gradient is that of ``weight``."""
        if self.bits is None:
            return weight
        return straight_through(weight, self.value(weight, self.stochastic and self.training))

    def value(self, weight: torch.Tensor, stochastic: bool = False) -> torch.Tensor:
        """Return the quantised weight without a gradient."""
        if self.bits is None:
            return weight.detach()
        found = quantise(weight, self.bits, self.kind, self.groups, stochastic)
        return self.kept * weight.detach() + (1 - self.kept) * found if self.kept else found

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        """Return ``weight``: an assigned weight is the unquantised one."""
        return weight

    def extra_repr(self) -> str:
        """Return the settings, for ``print(model)``."""
        return f"bits={self.start_bits}..{self.target_bits}, now {self.bits}, {self.kind}, groups={self.groups}"
