"""RawConfig: ``engine.config``, the configuration as the program wrote it.

DeepSpeed's ``engine.config`` is that dict. Here it also has the attributes of the checked Config. So
``engine.config["fp16"]`` is the program's section, and ``engine.config.fp16.enabled`` the value in effect.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

from zcomm.config import Config
from zcomm.config.source import Source, read_source


class RawConfig(dict[str, Any]):
    """A dict of the configuration's keys, with the fields of ``checked`` as attributes."""

    def __init__(self, raw: Mapping[str, Any], checked: Config) -> None:
        super().__init__(raw)
        self._checked = checked

    def __getattr__(self, name: str) -> Any:
        checked = self.__dict__.get("_checked")
        if checked is None or name.startswith("_"):
            raise AttributeError(name)
        try:
            return getattr(checked, name)
        except AttributeError:
            raise AttributeError(
                f"engine.config is a dict and has no attribute {name!r}; engine.config[{name!r}] is the key that the "
                f"configuration has, and attributes are {', '.join(vars(checked))}"
            ) from None

    def __reduce__(self) -> Any:
        return RawConfig, (dict(self), self._checked)


def raw_config(source: Source | Config, checked: Config) -> RawConfig:
    """Return the configuration of ``source`` as a new dict. Of a Config: all of its fields."""
    raw = dataclasses.asdict(source) if isinstance(source, Config) else read_source(source)[0]
    return RawConfig(copy.deepcopy(dict(raw)), checked)
