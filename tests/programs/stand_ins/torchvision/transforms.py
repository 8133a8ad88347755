"""Transforms of images that are tensors already."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class Compose:
    def __init__(self, steps: Sequence[Callable[[Any], Any]]) -> None:
        self.steps = steps

    def __call__(self, image: Any) -> Any:
        for step in self.steps:
            image = step(image)
        return image


class Resize:
    def __init__(self, size: int) -> None:
        pass

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return image


class CenterCrop(Resize):
    pass


class ToTensor:
    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return image


class Normalize:
    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean, self.std = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return (image - self.mean) / self.std
