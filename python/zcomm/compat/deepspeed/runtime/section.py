"""A section of the configuration as an object: what was given, and the values in effect."""

from __future__ import annotations

from functools import reduce
from typing import Any, ClassVar

from zcomm.config import load_with_notes


class Section:
    """Keys of one section. Raises: ValueError, NotImplementedError as the configuration.

    An attribute is the value in effect; of a key that has none here it is the value that was given.
    """

    zcomm_path: ClassVar[tuple[str, ...]] = ()
    zcomm_keys: ClassVar[dict[str, tuple[str, ...]]] = {}  # keys of an attribute that has another name

    def __init__(self, **keys: Any) -> None:
        whole: Any = keys
        for name in reversed(self.zcomm_path):
            whole = {name: whole}
        if len(self.zcomm_path) > 1:  # below stage 3 the keys of offloaded weights would be refused
            whole["zero_optimization"]["stage"] = 3
        config, _ = load_with_notes({"train_batch_size": 1, **whole})
        self._given = dict(keys)
        self._effective = reduce(getattr, self.zcomm_path, config)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            if hasattr(self._effective, name):
                return getattr(self._effective, name)
            for key in self.zcomm_keys.get(name, (name,)):
                if key in self._given:
                    return self._given[key]
        raise AttributeError(f"{type(self).__name__} has no {name!r} here; it was given {sorted(self._given)}")

    def model_dump(self) -> dict[str, Any]:
        """Return what was given."""
        return dict(self._given)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._given})"
