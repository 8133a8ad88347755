"""ActivationQuantiser: quantised inputs of a layer, with ranges of each token, or one range that training has found.

It is the layer's submodule ``activation_quantiser``, called by a forward hook, so that a copy of the layer has its own.
Range of "dynamic": that of each vector along the last dimension, or of each sample of images, as ZeroQuant's tokens.
Range of "static": a moving average of the least and largest input, in a buffer. Each rank has its own until the step of
an engine, which averages them.
Sources: Yao et al., "ZeroQuant" (arXiv:2206.01861), section 3.2; Jacob et al. (arXiv:1712.05877), section 3.1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zcomm.compression.quantisers import quantise, straight_through

NAME = "activation_quantiser"


class ActivationQuantiser(nn.Module):
    """Inputs in ``bits`` bits, once ``enabled``. Gradients pass straight through, as in weights.

    kind: "symmetric" or "asymmetric". static: one range. images: of [samples, channels, height, width]. momentum: of
    the moving average, which begins with the first input. A static range without any training input yet quantises
    nothing.
    """

    range: torch.Tensor

    def __init__(
        self, bits: int, kind: str = "symmetric", static: bool = False, images: bool = False, momentum: float = 0.95
    ) -> None:
        super().__init__()
        self.bits, self.kind, self.static, self.images, self.momentum = bits, kind, static, images, momentum
        self.enabled = False
        if static:
            self.register_buffer("range", torch.full((2,), torch.nan))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Return ``value``, of any shape, quantised."""
        if not self.enabled or not value.is_floating_point() or value.numel() == 0:
            return value
        limits = None
        if self.static:
            if self.training:
                self._observe(value.detach())
            limits = (self.range[0], self.range[1])
            known = ~self.range.isnan().any()
        groups = 1 if self.static else value.numel() // (value[0].numel() if self.images else value.shape[-1])
        found = quantise(value, self.bits, self.kind, groups, limits=limits)
        return straight_through(value, torch.where(known, found, value.detach()) if self.static else found)

    @torch.no_grad()
    def _observe(self, value: torch.Tensor) -> None:
        low, high = value.aminmax()
        seen = torch.stack([low, high]).to(self.range)
        old = torch.where(self.range.isnan(), seen, self.range)
        self.range.copy_(old * self.momentum + seen * (1 - self.momentum))

    def extra_repr(self) -> str:
        """Return the settings, for ``print(model)``."""
        state = "on" if self.enabled else "off"
        return f"bits={self.bits}, {self.kind}, {'static' if self.static else 'dynamic'}, {state}"


def quantise_inputs(layer: nn.Module, quantiser: ActivationQuantiser) -> None:
    """Quantise the input of each forward of ``layer``: its first argument, or ``input=``."""
    layer.add_module(NAME, quantiser)
    layer.register_forward_pre_hook(_quantised, with_kwargs=True)


def _quantised(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    quantiser = getattr(layer, NAME)
    if args:
        return (quantiser(args[0]), *args[1:]), kwargs
    return args, kwargs | {"input": quantiser(kwargs["input"])}
