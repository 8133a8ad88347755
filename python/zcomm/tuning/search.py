"""The order in which configurations are tried, and the choice of the best one. Pure: ``measure`` runs them.

In each stage the micro batch size doubles while the score grows by more than GAIN. Then sizes between the best one and
its neighbours are tried. A stage that does not fit into memory is left out. Nothing is tried twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

GAIN = 0.02  # of the score; less is noise
NOT_TRIED = "not tried: tuner_num_trials"
_OTHERS: tuple[tuple[str, Any], ...] = (
    ("overlap_comm", False),
    ("reduce_bucket_size", 1_000_000),
    ("reduce_bucket_size", 50_000_000),
)


@dataclass(frozen=True)
class Candidate:
    """A configuration: a stage, samples per rank and micro-step, and further keys of "zero_optimization"."""

    stage: int
    micro: int
    keys: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """A name for folders, such as z2_mbs8."""
        more = "".join(f"_{key}_{str(value).lower()}" for key, value in self.keys)
        return f"z{self.stage}_mbs{self.micro}{more}"


@dataclass(frozen=True)
class Outcome:
    """The result of a candidate. score: higher is better; None: it did not run, because of ``reason``."""

    score: float | None
    reason: str = ""
    metrics: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Limits:
    """The space. stages: in order. low, high: smallest and largest micro batch size. close: sizes of a stage that are
    compared closely: its best power of two, and sizes next to it. fast: False also tries keys of communication.
    trials: most runs."""

    stages: Sequence[int]
    low: int
    high: int
    close: int = 3
    fast: bool = True
    trials: int = 50


@dataclass
class Found:
    """All outcomes, in the order of trials. best: None if nothing ran. left_out: stages, with reasons."""

    outcomes: dict[Candidate, Outcome] = field(default_factory=dict)
    left_out: dict[int, str] = field(default_factory=dict)
    best: Candidate | None = None

    def score(self, candidate: Candidate | None) -> float | None:
        """Return the score of a candidate; None without one."""
        outcome = None if candidate is None else self.outcomes.get(candidate)
        return None if outcome is None else outcome.score

    def is_better(self, candidate: Candidate, than: Candidate | None, gain: float = 0.0) -> bool:
        """Return True if a candidate ran, and its score is larger, by more than ``gain`` of the other's."""
        new, old = self.score(candidate), self.score(than)
        return new is not None and (old is None or new > old + gain * abs(old))


def search(
    limits: Limits,
    measure: Callable[[Candidate], Outcome],
    fits: Callable[[int], str] = lambda stage: "",
) -> Found:
    """Try candidates. fits: why a stage does not fit into memory, or "". Raises: as ``measure``."""
    found = Found()

    def run(candidate: Candidate) -> Candidate:
        if candidate not in found.outcomes:
            ran = sum(1 for outcome in found.outcomes.values() if outcome.reason != NOT_TRIED)
            found.outcomes[candidate] = measure(candidate) if ran < limits.trials else Outcome(None, NOT_TRIED)
        if found.is_better(candidate, found.best):
            found.best = candidate
        return candidate

    for stage in limits.stages:
        reason = fits(stage)
        if reason:
            found.left_out[stage] = reason
            continue
        best: Candidate | None = None
        micro = limits.low
        while micro <= limits.high:
            tried = run(Candidate(stage, micro))
            grows = found.is_better(tried, best, GAIN)
            if found.is_better(tried, best):
                best = tried
            if not grows:
                break
            micro *= 2
        if best is not None:
            between = [3 * best.micro // 2, 3 * best.micro // 4]
            sizes = [size for size in between if limits.low <= size <= limits.high and size != best.micro]
            for size in sizes[: limits.close - 1]:
                run(Candidate(stage, size))
    if not limits.fast and found.best is not None:
        for key in _OTHERS:
            now = found.best
            kept = tuple(each for each in now.keys if each[0] != key[0])
            run(replace(now, keys=(*kept, key)))
    return found
