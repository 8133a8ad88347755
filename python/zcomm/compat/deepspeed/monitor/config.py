"""``deepspeed.monitor.config``: the sections of the monitors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zcomm.compat.deepspeed.runtime.section import Section

_SECTIONS = ("tensorboard", "comet", "wandb", "csv_monitor")


class DeepSpeedMonitorConfig(Section):
    """The sections ``tensorboard``, ``comet``, ``wandb`` and ``csv_monitor``, checked."""

    zcomm_path = ()

    @property
    def enabled(self) -> bool:
        """True if one of the monitors is enabled."""
        return any(getattr(self, name).enabled for name in _SECTIONS)


def get_monitor_config(param_dict: Mapping[str, Any]) -> DeepSpeedMonitorConfig:
    """Return the monitors' sections of a whole configuration."""
    return DeepSpeedMonitorConfig(**{name: param_dict[name] for name in _SECTIONS if param_dict.get(name) is not None})
