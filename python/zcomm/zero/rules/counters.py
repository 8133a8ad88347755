"""StepCounters: parameters of one param group that have taken the same steps.

torch counts steps for each parameter, and a step skips one without a gradient (frozen or dropped). A rule counts for
each group. Until a step has skipped a part of a group, the group is its only cohort; a skip splits it. The counters of
other cohorts (steps, whether SGD's buffer has begun, a torch rule's scalars) are here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from zcomm.zero.rules.rule import Rule

COUNTERS = ("step", "buffered")  # of a group


def reset_counters(group: dict[str, Any]) -> None:
    """Reset a group to its state before the first step, which has no counters."""
    for key in COUNTERS:
        group.pop(key, None)


@dataclass
class Cohort:
    """Parameters of group ``group``, by number. counters: COUNTERS. scalars: of the rule."""

    group: int
    members: set[int]
    counters: dict[str, Any]
    scalars: Any


class StepCounters:
    """The cohorts of all param groups. group_of: by parameter. Cohort number g is group g itself, or the rest of it
    after splits; others follow."""

    def __init__(self, rule: Rule, group_of: Sequence[int], groups: int) -> None:
        self._rule = rule
        self._group_of = group_of
        self._groups = groups
        self.others: list[Cohort] = []
        self.number_of = list(group_of)  # the cohort of each parameter

    def prepare(self, groups: Sequence[dict[str, Any]], scale: float, skipped: Collection[int]) -> list[Any]:
        """Return the rule's input for each cohort in this step, which counts for those that are not skipped."""
        if skipped:
            self._split(groups, set(skipped))
        used = set(self.number_of) if not skipped else {
            cohort for index, cohort in enumerate(self.number_of) if index not in skipped
        }  # fmt: skip
        hyper = [
            self._rule.prepare(number, group, scale) if number in used else None for number, group in enumerate(groups)
        ]
        for number, cohort in enumerate(self.others, self._groups):
            hyper.append(self._prepare(cohort, groups[cohort.group], scale) if number in used else None)
        return hyper

    def _prepare(self, cohort: Cohort, group: dict[str, Any], scale: float) -> Any:
        shadow = {key: value for key, value in group.items() if key not in COUNTERS} | cohort.counters
        scalars = self._rule.scalars
        kept, scalars[cohort.group] = scalars[cohort.group], cohort.scalars
        try:
            hyper = self._rule.prepare(cohort.group, shadow, scale)
            cohort.scalars = scalars[cohort.group]
        finally:
            scalars[cohort.group] = kept
        cohort.counters = {key: shadow[key] for key in COUNTERS if key in shadow}
        return hyper

    def _split(self, groups: Sequence[dict[str, Any]], skipped: set[int]) -> None:
        """Separate the skipped members of each cohort from the others."""
        members: dict[int, set[int]] = {}
        for index, number in enumerate(self.number_of):
            members.setdefault(number, set()).add(index)
        for number, every in members.items():
            apart = every & skipped
            if not apart or apart == every:
                continue
            if number < self._groups:
                counters = {key: groups[number][key] for key in COUNTERS if key in groups[number]}
                self._add(Cohort(number, apart, counters, self._rule.scalars[number]))
            else:
                whole = self.others[number - self._groups]
                whole.members -= apart
                self._add(Cohort(whole.group, apart, dict(whole.counters), whole.scalars))

    def _add(self, cohort: Cohort) -> None:
        number = self._groups + len(self.others)
        self.others.append(cohort)
        for index in cohort.members:
            self.number_of[index] = number

    def steps(self, index: int, groups: Sequence[dict[str, Any]]) -> int:
        """Return the number of steps that parameter ``index`` has taken."""
        return int(self.counters(index, groups).get("step", 0))

    def counters(self, index: int, groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the counters of parameter ``index``, and for a whole group its options."""
        number = self.number_of[index]
        return groups[number] if number < self._groups else self.others[number - self._groups].counters

    def scalars(self, index: int) -> Any:
        """Return the rule's scalars of parameter ``index``."""
        number = self.number_of[index]
        return self._rule.scalars[number] if number < self._groups else self.others[number - self._groups].scalars

    # --- for checkpoints ----------------------------------------------------------------------------------------

    def state(self, names: Sequence[str], groups: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
        """Return the cohorts other than whole groups, as plain values. groups: if given, the whole groups come first,
        for ``of_ranks``."""
        whole = [
            Cohort(
                number,
                {index for index, cohort in enumerate(self.number_of) if cohort == number},
                {key: group[key] for key in COUNTERS if key in group},
                self._rule.scalars[number],
            )
            for number, group in enumerate(groups)
        ]
        return [
            {
                "group": cohort.group,
                "params": sorted(names[index] for index in cohort.members),
                "counters": dict(cohort.counters),
                "scalars": self._rule.plain_scalars(cohort.scalars),
            }
            for cohort in (*whole, *self.others)
        ]

    def set_state(self, saved: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
        """Restore a result of ``state``. Unknown names are left out."""
        self.others.clear()
        self.number_of[:] = self._group_of
        numbers = {name: index for index, name in enumerate(names[: len(self._group_of)])}
        for one in saved:
            members = {numbers[name] for name in one["params"] if name in numbers}
            if members:
                group = self._group_of[next(iter(members))]
                self._add(Cohort(group, members, dict(one["counters"]), self._rule.scalars_of(one["scalars"])))


def of_ranks(told: Sequence[list[dict[str, Any]]], groups: int) -> list[dict[str, Any]]:
    """Return the cohorts of all ranks' parameters, other than the ``groups`` whole groups of rank 0. told: of each
    rank, ``state`` with its groups."""
    found, seen = [], {name for cohort in told[0][:groups] for name in cohort["params"]}
    for number, cohort in ((number, cohort) for every in told for number, cohort in enumerate(every)):
        new = [name for name in cohort["params"] if name not in seen]
        seen.update(new)
        if new and not (number < groups and {**cohort, "params": []} == {**told[0][number], "params": []}):
            found.append({**cohort, "params": new})
    return found
