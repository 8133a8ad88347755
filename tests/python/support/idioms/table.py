"""The table of idioms: each is one function, with the settings in which ZeroOptimizer refuses it, and the errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from idioms.run import IdiomRun


def among(place: str, patterns: tuple[str, ...] | set[str]) -> bool:
    """Return True if a place ("WORLD:SETTING") fits one of the patterns."""
    return any(fnmatchcase(place, pattern) for pattern in patterns)


@dataclass(frozen=True)
class Refusal:
    """An error instead of torch's numbers: its class (or a base), a pattern of its message, and its places."""

    kind: str
    says: str  # a regular expression
    where: tuple[str, ...] = ("*",)  # patterns of places


@dataclass(frozen=True)
class Idiom:
    """A row of the table."""

    run: Callable[[IdiomRun], None]
    refusals: tuple[Refusal, ...] = ()
    precisions: tuple[str, ...] = ("fp32",)
    worlds: tuple[int, ...] = (1, 2)

    @property
    def name(self) -> str:
        return self.run.__name__

    def refusal(self, place: str) -> Refusal | None:
        return next((refusal for refusal in self.refusals if among(place, refusal.where)), None)


IDIOMS: list[Idiom] = []
HALF = ("fp32", "bf16", "fp16")


def idiom(*refusals: Refusal, precisions: tuple[str, ...] = ("fp32",), worlds: tuple[int, ...] = (1, 2)) -> Any:
    """Add the decorated function to the table."""

    def add(run: Callable[[IdiomRun], None]) -> Callable[[IdiomRun], None]:
        IDIOMS.append(Idiom(run, refusals, precisions, worlds))
        return run

    return add
