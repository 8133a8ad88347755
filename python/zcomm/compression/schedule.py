"""Schedule: which methods work at a step, and in how many bits: a function of the number of optimizer steps.

Nothing but that number is state, so that a loaded checkpoint continues it. Each method works from its offset on.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zcomm.compression.activations import NAME, ActivationQuantiser
from zcomm.compression.masks import Mask, Masked
from zcomm.compression.plan import Job, Layer, plan
from zcomm.compression.weights import WeightQuantiser
from zcomm.config import Source, compression_settings
from zcomm.config.compression_keys import CompressionTraining

if TYPE_CHECKING:
    from zcomm.comm.communicator import Communicator

logger = logging.getLogger("zcomm")


class Schedule:
    """The schedule of a prepared model. Call ``step()`` after each optimizer step; an Engine does so itself.

    config: as of ``prepare``. training_steps: optimizer steps so far.
    Raises: ValueError if the model is not prepared for it.
    """

    def __init__(self, model: nn.Module, config: Source | CompressionTraining) -> None:
        settings = compression_settings(config)
        self._jobs = [(job, [part_of(job, layer) for layer in job.layers]) for job in plan(model, settings)]
        self._begun: set[str] = set()
        self.training_steps = 0
        self.at(0)

    def step(self) -> None:
        """Count an optimizer step."""
        self.at(self.training_steps + 1)

    def at(self, steps: int) -> None:
        """Set all layers to the state after ``steps`` optimizer steps."""
        self.training_steps = steps
        for job, parts in self._jobs:
            since = steps - job.shared.schedule_offset
            before = [getattr(part, "bits", None) for part in parts]
            for part in parts:
                if isinstance(part, WeightQuantiser):
                    part.at(since if since >= 0 else None)
                else:
                    part.enabled = since >= 0
            if since >= 0 and job.path not in self._begun:
                self._begun.add(job.path)
                logger.info("%s begins at step %d, in %d layers", job.path.strip('"'), steps, len(parts))
            elif since < 0:
                self._begun.discard(job.path)
            if getattr(job.shared, "quantize_verbose", False) and before != [getattr(p, "bits", None) for p in parts]:
                logger.info("%s: weights have %s bits from step %d on", job.path.strip('"'), parts[0].bits, steps)

    def average_ranges(self, comm: Communicator) -> None:
        """Set static ranges of inputs to their mean over the ranks that have seen inputs. Collective, if there are any.

        So all ranks quantise alike, and continue a checkpoint with the same ranges.
        """
        parts = [
            part for _, each in self._jobs for part in each if isinstance(part, ActivationQuantiser) and part.static
        ]
        if not parts or comm.world_size == 1:
            return
        own = torch.stack([part.range.cpu().double() for part in parts])  # [layers, 2]
        seen = ~own.isnan().any(1, keepdim=True)
        sums = torch.cat([torch.where(seen, own, 0), seen.double()], dim=1)
        comm.all_reduce(sums, name="ranges of activations")
        for part, (low, high, count) in zip(parts, sums.tolist(), strict=True):
            if count:
                part.range.copy_(torch.tensor([low / count, high / count]))

    def state_dict(self) -> dict[str, int]:
        """Return the number of steps."""
        return {"training_steps": self.training_steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after the steps of ``state``."""
        self.at(state["training_steps"])


def part_of(job: Job, layer: Layer) -> Any:
    """Return the quantiser or mask that a job has put into a layer. Raises: ValueError if there is none."""
    if job.method == "activation_quantization":
        found = layer.module._modules.get(NAME)
    else:
        listed = layer.module._modules.get("parametrizations")
        chain: Any = listed["weight"] if isinstance(listed, nn.ModuleDict) and "weight" in listed else ()
        found = next((part for part in map(_inner, chain) if _belongs(job, part)), None)
    if found is None:
        raise ValueError(
            f'{job.path}": {layer.name} is not prepared for it: call init_compression() (zcomm.compression.prepare) '
            "with this configuration before an optimizer is made"
        )
    return found


def _inner(part: Any) -> Any:
    return part.mask if isinstance(part, Masked) else part


def _belongs(job: Job, part: Any) -> bool:
    if job.method == "weight_quantization":
        return isinstance(part, WeightQuantiser)
    return isinstance(part, Mask) and part.prunes == job.method
