"""``deepspeed.compression.config``: the section "compression_training" with its defaults, as dicts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from zcomm.config import compression_settings


def get_compression_config(param_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section of a configuration as nested dicts, checked, with all defaults. Raises: ValueError."""
    return dataclasses.asdict(compression_settings(param_dict))
