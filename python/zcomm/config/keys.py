"""One configuration key: its default, meaning, status and permitted values, kept on the dataclass field.

Invariant: the schema's dataclasses are the only list of keys; reading, checking and documenting all walk them.
Status rule: HONOURED keys take effect. A NO_EFFECT key set to another value than its default warns once. A
REFUSED key set to another value than its default is a NotImplementedError.
Auto rule: "auto" means the value that the key's ``auto`` names, and the default where the key has no effect; other keys
refuse it.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class Status(enum.Enum):
    """Effect when a file sets the key to something else than its default."""

    HONOURED = "honoured"
    NO_EFFECT = "warns once"
    REFUSED = "refused"


class _Required(enum.Enum):
    REQUIRED = "required"


REQUIRED = _Required.REQUIRED


@dataclass(frozen=True)
class Check:
    """A test of a value, and the words that finish the sentence "must be ..."."""

    passes: Callable[[Any], bool]
    words: str


POSITIVE = Check(lambda value: value > 0 and math.isfinite(value), "> 0")
AT_LEAST_0 = Check(lambda value: value >= 0 and math.isfinite(value), ">= 0")
AT_LEAST_1 = Check(lambda value: value >= 1, ">= 1")
NOT_EMPTY = Check(lambda value: bool(value) and all(value), "a path, not an empty string")
FRACTION = Check(lambda value: 0 <= value <= 1, "between 0 and 1")
BETAS = Check(lambda value: all(0 <= beta < 1 for beta in value), "two numbers, each >= 0 and < 1")


@dataclass(frozen=True)
class Key:
    """The description of one key, found in a field's metadata under ``"key"``."""

    meaning: str
    status: Status = Status.HONOURED
    reason: str = ""  # for NO_EFFECT and REFUSED: why
    check: Check | None = None
    choices: tuple[Any, ...] = ()
    shown_default: str | None = None  # words for the documentation where the value alone would not tell
    auto: str = ""  # what "auto" means
    switch: tuple[str, Any] | None = (
        "enabled",
        False,
    )  # of a foreign section: its key, and the value if it is not there


def key(
    default: Any,
    meaning: str,
    *,
    status: Status = Status.HONOURED,
    reason: str = "",
    check: Check | None = None,
    choices: tuple[Any, ...] = (),
    shown_default: str | None = None,
    auto: str = "",
    switch: tuple[str, Any] | None = ("enabled", False),
) -> Any:
    """Make a dataclass field that is a configuration key. ``default`` REQUIRED: the section must give it.

    Raises: ValueError where a status other than HONOURED comes without a reason.
    """
    if status is not Status.HONOURED and not reason:
        raise ValueError(f"a key that is {status.value} needs a reason (meaning: {meaning})")
    described = Key(meaning, status, reason, check, choices, shown_default, auto, switch)
    if default is REQUIRED:
        return dataclasses.field(metadata={"key": described})
    return dataclasses.field(default=default, metadata={"key": described})


def section(factory: type | None, meaning: str) -> Any:
    """Make a dataclass field that is a nested section.

    factory: None: the section may be absent (its value is None).
    """
    described = Key(meaning)
    if factory is None:
        return dataclasses.field(default=None, metadata={"key": described})
    return dataclasses.field(default_factory=factory, metadata={"key": described})


def key_of(field: dataclasses.Field[Any]) -> Key:
    """Return the description on a schema field."""
    described = field.metadata["key"]
    assert isinstance(described, Key)
    return described
