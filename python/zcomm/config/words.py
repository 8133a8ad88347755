"""Other spellings of keys in existing configurations, changed to the schema's.

Dotted keys of the top level ("zero_optimization.stage") set the nested key. Old names (``bfloat16``, ``cpu_offload``)
and DeepSpeed's names without ``stage3_`` become today's names. One key may be written in two ways if both have one
value.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from zcomm.config.keys import ELEMENTS, Key

_ZERO = "zero_optimization"
_NAMES_WITHOUT_STAGE = (
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
    "gather_16bit_weights_on_model_save",
    "module_granularity_threshold",
    "use_all_reduce_for_fetch_params",
    "allgather_sequential",
)
_RENAMED = {
    "bfloat16": "bf16",
    **{f"{_ZERO}.{name}": f"{_ZERO}.stage3_{name}" for name in _NAMES_WITHOUT_STAGE},
}
_OFFLOAD = {
    f"{_ZERO}.cpu_offload": f"{_ZERO}.offload_optimizer",
    f"{_ZERO}.cpu_offload_param": f"{_ZERO}.offload_param",
}

# By dotted path, for documentation and for "did you mean".
OTHER_WORDS = {
    **{old: Key(f"another name of `{new}`", shown="not set", kind=Any) for old, new in _RENAMED.items()},
    **{
        old: Key(f'true: an old name of `{new}: {{"device": "cpu"}}`', shown="not set", kind=bool)
        for old, new in _OFFLOAD.items()
    },
}
OTHER_WORDS["bfloat16"] = Key("an old name of the section `bf16`", shown="not set", kind=dict[str, Any])


def in_todays_words(data: Mapping[str, Any], source: str) -> tuple[dict[str, Any], list[str]]:
    """Return a copy of ``data`` with one way to write each key, and notes on values that are not used.

    Raises: ValueError if two spellings of one key contradict each other.
    """
    notes: list[str] = []
    found = {key: dict(value) if isinstance(value, Mapping) else value for key, value in data.items()}
    switch: Any = found.get(_ZERO)
    if isinstance(switch, bool):  # true was stage 1, before there were stages
        found[_ZERO] = {"stage": int(switch)}
    for path in [key for key in found if isinstance(key, str) and "." in key]:
        _spread(found, path, found.pop(path), source, notes)
    _rename(found, "", source)
    section = found.get(_ZERO)
    if isinstance(section, dict):
        _rename(section, f"{_ZERO}.", source)
        for old, new in _OFFLOAD.items():
            _offload(section, old, new, source)
    return found, notes


def _spread(found: dict[str, Any], path: str, value: Any, source: str, notes: list[str]) -> None:
    """Set the nested key of a dotted one. A present nested value counts, if it may differ; "auto" does not."""
    *sections, name = path.split(".")
    place = found
    for section in sections:
        inside = place.get(section)
        if inside is not None and not isinstance(inside, Mapping):
            raise ValueError(f'{source}: "{path}" needs "{section}" to be an object {{...}}, got {_shown(inside)}')
        place[section] = dict(inside or {})
        place = place[section]
    nested = place.get(name)
    if nested is None or nested == "auto":
        place[name] = value
    elif value == "auto" or _same(name, nested, value):
        return
    elif name in ELEMENTS:  # DeepSpeed does not read the dotted form; a size changes no number
        notes.append(
            f'{source}: "{path}": {_shown(value)} at the top level has no effect: the section has {_shown(nested)}'
        )
    else:
        raise ValueError(
            f'{source}: "{path}": {_shown(value)} at the top level contradicts {_shown(nested)} in the section; '
            "give one of them"
        )


def _rename(section: dict[str, Any], prefix: str, source: str) -> None:
    for old, new in _RENAMED.items():
        name, today = old.removeprefix(prefix), new.removeprefix(prefix)
        if not old.startswith(prefix) or "." in name or name not in section:
            continue
        value = section.pop(name)
        if section.get(today) is None:
            section[today] = value
        elif value is not None and not _same(today, section[today], value):
            raise ValueError(
                f'{source}: "{old}": {_shown(value)} and "{new}": {_shown(section[today])} are two names of one key, '
                "and differ; give one of them"
            )


def _offload(section: dict[str, Any], old: str, new: str, source: str) -> None:
    name, today = old.rpartition(".")[2], new.rpartition(".")[2]
    value = section.pop(name, None)
    if value is None:
        return
    if isinstance(value, str) or value not in (False, True):
        raise ValueError(f'{source}: "{old}" must be true or false, got {_shown(value)}')
    given = section.get(today)
    if given is None:
        if value:
            section[today] = {"device": "cpu"}
        return
    device = given.get("device", "none") if isinstance(given, Mapping) else given
    if device != ("cpu" if value else "none"):
        raise ValueError(
            f'{source}: "{old}": {_shown(value)} is an old name of "{new}.device": "cpu" and contradicts '
            f'"{new}": {_shown(given)}; remove "{old}"'
        )


def _same(name: str, one: Any, other: Any) -> bool:
    numbers = all(isinstance(value, (int, float)) and math.isfinite(value) for value in (one, other))
    if name in ELEMENTS and numbers:
        return bool(math.floor(one) == math.floor(other))
    return bool(one == other)


def _shown(value: Any) -> str:
    try:
        return json.dumps(value)
    except TypeError:
        return repr(value)
