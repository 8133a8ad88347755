"""Facts: the values that the updates of one step need, fixed when the step is decided.

An update that runs later (behind a forward, in a gather) reads them, and not the param groups of that time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from zcomm.zero.layout.flat import FlatBucket
from zcomm.zero.optim_state.ram import Run
from zcomm.zero.parts import Parts, TrainState
from zcomm.zero.rules.rule import Indexed, Update


@dataclass
class Facts:
    """The facts of one step. hyper: of each cohort (``StepCounters.prepare``). skipped: parameters without a gradient.

    factors: of each parameter, by norms over whole ones. updates: of the whole matrices that are being stepped.
    """

    parts: Parts
    train: TrainState
    hyper: list[Any]
    skipped: frozenset[int]
    factors: list[float] | None = None
    updates: dict[int, Update] = field(default_factory=dict)

    def hyper_of(self, index: int) -> Any:
        """Return the hyperparameters of a parameter; None: it is skipped."""
        return None if index in self.skipped else self.hyper[self.train.counters.number_of[index]]

    def runs(self, bucket: FlatBucket) -> list[Run]:
        """Return the runs of this rank's part of a bucket, as ShardStep takes them."""
        parts, skipped, number_of = self.parts, self.skipped, self.train.counters.number_of
        if parts.param_runs is None:
            runs = parts.runs[bucket.index]
            if self.train.counters.others or not skipped.isdisjoint(bucket.params):
                numbers = [-1 if index in skipped else number for index, number in enumerate(number_of)]
                runs = parts.geometry.runs(bucket, bucket.part, numbers)
            return [(begin, end, self.hyper[number]) for begin, end, number in runs if number >= 0]
        start = bucket.part.start
        indexed = {}
        for index in bucket.params:
            span = parts.geometry.span_in(bucket, index)
            first = parts.first_index[index] + span.begin + start - span.offset
            factor = 1.0 if self.factors is None else self.factors[index]
            indexed[index] = Indexed(self.hyper[number_of[index]], first, index, factor, self.updates.get(index))
        return [(begin, end, indexed[n]) for begin, end, n in parts.param_runs[bucket.index] if n not in skipped]
