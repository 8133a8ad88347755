"""Counters of steps of ranks with different parameters, as one checkpoint has them."""

from __future__ import annotations

from typing import Any

from zcomm.zero.rules.counters import of_ranks


def cohort(group: int, step: int, *params: str) -> dict[str, Any]:
    return {"group": group, "params": list(params), "counters": {"step": step}, "scalars": None}


def test_one_rank_gives_its_own_cohorts_without_whole_groups() -> None:
    assert of_ranks([[cohort(0, 5, "a", "b"), cohort(0, 3, "c")]], 1) == [cohort(0, 3, "c")]


def test_parameters_of_other_ranks_keep_their_steps() -> None:
    first = [cohort(0, 5, "a", "x"), cohort(1, 5, "b"), cohort(0, 2, "c")]
    second = [cohort(0, 5, "a", "y"), cohort(1, 4, "d"), cohort(0, 2, "c", "z")]
    assert of_ranks([first, second], 2) == [cohort(0, 2, "c"), cohort(1, 4, "d"), cohort(0, 2, "z")]
