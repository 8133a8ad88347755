"""``deepspeed.compression.scheduler``: compression_scheduler, over the section as a dict or an object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from zcomm.compression.schedule import Schedule


class compression_scheduler(Schedule):
    """The schedule of a prepared model.

    compression_config: the contents of the section "compression_training", or a whole configuration with it.
    Raises: ValueError if the model is not prepared for it.
    """

    def __init__(self, model: nn.Module, compression_config: Any) -> None:
        if isinstance(compression_config, Mapping) and "compression_training" not in compression_config:
            compression_config = {"compression_training": compression_config}
        super().__init__(model, compression_config)

    def step(self, step_zero_check: bool = False) -> None:
        """Count an optimizer step, or with ``step_zero_check`` none, and set the state of the layers."""
        self.at(self.training_steps + (0 if step_zero_check else 1))
