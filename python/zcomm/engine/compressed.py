"""The section "compression_training" of an engine: its schedule. zcomm.compression is imported when a model has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from zcomm.config import Config
from zcomm.engine.pipeline_module import PipelineModule

if TYPE_CHECKING:
    from zcomm.compression.schedule import Schedule


def schedule_of(model: nn.Module, settings: Config) -> Schedule | None:
    """Return the schedule of the enabled methods; None if there are none.

    Raises: ValueError if ``model`` is not prepared for them; NotImplementedError for a model that other forms divide.
    """
    section = settings.compression_training
    if not section.enabled():
        return None
    if isinstance(model, PipelineModule):
        raise NotImplementedError('"compression_training" is for a whole model, not for the stages of a PipelineModule')
    if settings.tensor_parallel.autotp_size > 1:
        raise NotImplementedError(
            '"compression_training" has ranges and masks of whole weights, and '
            f'"tensor_parallel": {{"autotp_size": {settings.tensor_parallel.autotp_size}}} divides weights'
        )
    from zcomm.compression.schedule import Schedule

    return Schedule(model, section)
