"""One configuration key: its default, meaning, status and permitted values.

Keys with an effect are fields of the schema's dataclasses (schema.py); all others are rows of the table in foreign.py.
Reading, checking and documenting walk these two, and there is no other list of keys.
Status rule: HONOURED keys take effect. A NO_EFFECT key set to another value than its default warns once, or is logged
at level DEBUG if it is quiet. A REFUSED key set to another value than its default is a NotImplementedError.
Auto rule: "auto" means the value that the key's ``auto`` names, or the default if the key has no effect; other keys
refuse it.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


class Status(enum.Enum):
    """Effect when a file sets the key to something else than its default."""

    HONOURED = "honoured"
    NO_EFFECT = "accepted"
    REFUSED = "refused"


# Sizes in elements, which programs compute (0.9 * hidden_size ** 2): fractions are rounded down.
ELEMENTS = {
    *"reduce_bucket_size allgather_bucket_size stage3_prefetch_bucket_size sub_group_size buffer_size".split(),
    *"stage3_param_persistence_threshold stage3_model_persistence_threshold max_in_cpu".split(),
    *"stage3_module_granularity_threshold stage3_max_live_parameters stage3_max_reuse_distance".split(),
}
REQUIRED: Any = dataclasses.MISSING  # the default of a key that its section must give


@dataclass(frozen=True)
class Check:
    """A test of a value, and the words that finish the sentence "must be ..."."""

    passes: Callable[[Any], bool]
    words: str


POSITIVE = Check(lambda value: value > 0 and math.isfinite(value), "> 0")
AT_LEAST_0 = Check(lambda value: value >= 0 and math.isfinite(value), ">= 0")
AT_LEAST_1 = Check(lambda value: value >= 1, ">= 1")
SHARD_SIZE = Check(lambda value: value == -1 or value >= 1, "-1, or at least 1")
ALL_AT_LEAST_1 = Check(lambda value: len(value) > 0 and all(each >= 1 for each in value), "whole numbers >= 1")
ALL_AT_LEAST_0 = Check(lambda value: all(each >= 0 for each in value), "whole numbers >= 0")
RATIO = Check(lambda value: 0 < value <= 1, "> 0 and <= 1")
BITS = Check(lambda value: 1 <= value <= 16, "between 1 and 16")
INPUT_BITS = Check(lambda value: 2 < value <= 16, "between 3 and 16")
LISTS_OF_WORDS = Check(lambda value: _is_lists_of_words(value), "a list of lists of strings")
NOT_EMPTY = Check(lambda value: bool(value) and all(value), "a path, not an empty string")
WORDS = Check(NOT_EMPTY.passes, "a string or a list of strings, none of them empty")
BELOW_1 = Check(lambda value: 0 <= value < 1, ">= 0 and < 1")
ALL_AT_LEAST_0 = Check(lambda value: all(each >= 0 for each in value), "whole numbers >= 0")
FRACTION = Check(lambda value: 0 <= value <= 1, "between 0 and 1")
BETAS = Check(lambda value: all(0 <= beta < 1 for beta in value), "two numbers, each >= 0 and < 1")
CHECKS = {check.words: check for check in (POSITIVE, AT_LEAST_0, AT_LEAST_1, FRACTION)}


def _is_lists_of_words(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(
        isinstance(each, (list, tuple)) and each and all(isinstance(word, str) for word in each) for each in value
    )


@dataclass(frozen=True)
class Key:
    """The description of one key; a field of the schema has it in its metadata under ``"key"``.

    reason: why it has no effect or is refused. shown: words for the documentation in place of the default. auto: the
    meaning of "auto". switches: of a foreign section: see ``asked_by``; empty: it always asks. kind: an annotation.
    quiet: without effect, and Hugging Face writes it for each run, or its examples have it.
    """

    meaning: str
    status: Status = Status.HONOURED
    reason: str = ""
    check: Check | None = None
    choices: tuple[Any, ...] = ()
    shown: str = ""
    auto: str = ""
    switches: tuple[tuple[str, Any], ...] = ()
    kind: Any = None
    default: Any = None
    optional: bool = False
    quiet: bool = False


@dataclass(frozen=True)
class Note:
    """A line about a key that was accepted and changes nothing. quiet: as ``Key.quiet``."""

    text: str
    quiet: bool = False


def asked_by(section: Mapping[str, Any], switches: tuple[tuple[str, Any], ...]) -> tuple[str, Any] | None:
    """Return the dotted path, in ``section``, of the first switch that is on, and its value; None if all are off.

    switches: dotted paths, each with the value of an absent key; "*" stands for any name. A switch is off if its value
    is false, 0, null or "auto". A value in place of a section that the path names counts as the switch. An absent
    switch that is on has the path "" and the section as its value.
    """
    for path, absent in switches:
        name, _, rest = path.partition(".")
        for each in section if name == "*" else (name,):
            value = section.get(each, {} if rest else absent)
            if rest and isinstance(value, Mapping):
                found = asked_by(value, ((rest, absent),))
                if found is not None:
                    return f"{each}.{found[0]}", found[1]
            elif value and value != "auto" and name != "*":
                return (each, value) if each in section else ("", section)
    return None


def key(
    default: Any,
    meaning: str,
    check: Check | None = None,
    *,
    choices: tuple[Any, ...] = (),
    shown: str = "",
    auto: str = "",
) -> Any:
    """Create a dataclass field that is a configuration key. ``default`` REQUIRED: the section must give it."""
    metadata = {"key": Key(meaning, check=check, choices=choices, shown=shown, auto=auto)}
    return dataclasses.field(default=default, metadata=metadata)


def section(factory: type) -> Any:
    """Create a dataclass field that is a nested section; an absent section has its defaults."""
    return dataclasses.field(default_factory=factory)
