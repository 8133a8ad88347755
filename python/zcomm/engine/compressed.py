"""The section "compression_training" of an engine: its schedule. zcomm.compression is imported when a model has it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from torch import nn

from zcomm.compression import is_prepared
from zcomm.config import Config
from zcomm.engine.pipeline_module import PipelineModule

if TYPE_CHECKING:
    from zcomm.compression.schedule import Schedule


def schedule_of(model: nn.Module, settings: Config, warn: bool = False) -> Schedule | None:
    """Return the schedule of the enabled methods; None if there are none.

    warn: log a warning about a prepared model without a schedule.
    Raises: ValueError if ``model`` is not prepared for them; NotImplementedError for a model that other forms divide.
    """
    section = settings.compression_training
    if not section.enabled():
        if warn and is_prepared(model):
            logging.getLogger("zcomm").warning(
                'the model is prepared for compression, and "compression_training" of this configuration enables no '
                "method: call step() of a zcomm.compression.Schedule after each optimizer step"
            )
        return None
    if isinstance(model, PipelineModule):
        raise NotImplementedError('"compression_training" is for a whole model, not for the stages of a PipelineModule')
    if settings.tensor_parallel.autotp_size > 1:
        raise NotImplementedError(
            '"compression_training" has ranges and masks of whole weights, and '
            f'"tensor_parallel": {{"autotp_size": {settings.tensor_parallel.autotp_size}}} divides weights'
        )
    weights = section.weight_quantization
    if settings.eigenvalue.enabled and weights.shared_parameters.enabled:
        for name, group in weights.different_groups.items():
            if group.params.start_bits != group.params.target_bits:
                raise NotImplementedError(
                    f'"eigenvalue" would lengthen the periods of "compression_training.weight_quantization.'
                    f'different_groups.{name}", which is not available: begin with target_bits, or switch it off'
                )
    from zcomm.compression.schedule import Schedule

    return Schedule(model, section)
