"""Plain values (numbers, strings, lists, dicts) as JSON and back, with tuples and keys that are no strings kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

_TUPLE, _ITEMS, _COUNTS = "__tuple__", "__items__", "__counts__"  # the last: milestones of a schedule


def to_json(value: Any, where: str) -> Any:
    """``value`` as JSON can hold it. Raises: ValueError naming the place of what is no plain value."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, tuple):
        return {_TUPLE: [to_json(item, f"{where}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, list):
        return [to_json(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        tagged = isinstance(value, Counter) or bool({_TUPLE, _ITEMS, _COUNTS} & set(value))
        if not tagged and all(isinstance(key, str) for key in value):
            return {key: to_json(item, f"{where}.{key}") for key, item in value.items()}
        kind = _COUNTS if isinstance(value, Counter) else _ITEMS
        return {kind: [[to_json(key, where), to_json(item, f"{where}.{key}")] for key, item in value.items()]}
    if getattr(value, "numel", lambda: 0)() == 1 or type(value).__module__ == "numpy":
        return value.item()  # a number of torch's or numpy's
    raise ValueError(
        f"{where} is {type(value).__name__}, which a checkpoint cannot keep; it keeps numbers, strings, lists, tuples "
        "and dicts of them"
    )


def from_json(value: Any) -> Any:
    """The inverse of ``to_json``."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if isinstance(value, dict):
        if _TUPLE in value:
            return tuple(from_json(item) for item in value[_TUPLE])
        if _COUNTS in value:
            return Counter(dict(value[_COUNTS]))
        if _ITEMS in value:
            return {from_json(key): from_json(item) for key, item in value[_ITEMS]}
        return {key: from_json(item) for key, item in value.items()}
    return value
