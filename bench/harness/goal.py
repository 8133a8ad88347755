"""Goals by name, and the verdict of a figure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from goals import GOALS

_SIDES = {"at_least": ">=", "at_most": "<=", "below": "<"}
MARKS = {True: "holds", False: "**misses**", None: ""}


@dataclass(frozen=True)
class Goal:
    """A bound on one side. Figures beyond it by up to `tolerance` hold as well."""

    sign: str
    bound: float
    tolerance: float = 0.0
    unit: str = ""

    def __str__(self) -> str:
        precise = f"{self.bound:.2f}" if self.sign == ">=" and self.bound < 1 else f"{self.bound:g}"
        return f"{self.sign} {precise}{self.unit}"

    def holds(self, value: float) -> bool:
        if self.sign == ">=":
            return value >= self.bound - self.tolerance
        return value <= self.bound + self.tolerance if self.sign == "<=" else value < self.bound + self.tolerance


@dataclass(frozen=True)
class Verdict:
    """One figure and its goal; `good` None: it was not measured, and `measured` has the reason."""

    what: str
    goal: str
    measured: str
    good: bool | None

    @property
    def cells(self) -> tuple[str, str, str, str]:
        return self.what, self.goal, self.measured, MARKS[self.good]

    def __str__(self) -> str:
        mark = {True: "holds ", False: "MISSES", None: "  -   "}[self.good]
        return f"{mark} {self.what}: {self.measured} (goal {self.goal})"


def goal(name: str) -> Goal:
    """Return the goal of that name in goals.py. Raises: KeyError."""
    entry = GOALS[name]
    side = next(key for key in _SIDES if key in entry)
    return Goal(_SIDES[side], float(entry[side]), float(entry.get("tolerance", 0.0)), str(entry.get("unit", "")))


def judge(what: str, name: str, values: Iterable[float], digits: int = 2) -> Verdict:
    """Return a verdict that is good if every value holds. name: the goal's."""
    wanted, listed = goal(name), list(values)
    text = ", ".join(f"{value:.{digits}f}{wanted.unit}" for value in listed)
    return Verdict(what, str(wanted), text or "not measured", all(map(wanted.holds, listed)) if listed else None)


def table(titles: Sequence[str], cells: Iterable[Sequence[object]]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield f"| {' | '.join(titles)} |"
    yield "|" + "---|" * len(titles)
    for row in cells:
        yield f"| {' | '.join(map(str, row))} |"
