"""A small model with the parts of AlexNet that the example reads."""

from __future__ import annotations

import torch
from torch import nn


class AlexNet(nn.Module):
    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1)
        )
        self.avgpool = nn.AdaptiveAvgPool2d((2, 2))
        self.classifier = nn.Sequential(nn.Linear(64, 32), nn.ReLU(inplace=True), nn.Linear(32, num_classes))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.classifier(torch.flatten(self.avgpool(self.features(image)), 1))
        return found


def vgg19(num_classes: int = 1000) -> nn.Module:
    return AlexNet(num_classes)
