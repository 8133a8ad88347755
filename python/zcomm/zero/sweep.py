"""Sweep: the optimizer's rule over all shards of this rank, between the norm of the gradients and the new weights.

Sweeps alternate their direction ([Note: swapped step]); construction, which wrote first to last, counts as one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from zcomm.zero.geometry import FlatBucket
from zcomm.zero.rules import Indexed, Rule
from zcomm.zero.state import Run, ShardStep

if TYPE_CHECKING:
    from zcomm.zero.build import Parts


class Sweep:
    """whole: every rank updates everything (stage 0). waited_s: seconds of waiting for other ranks."""

    def __init__(self, parts: Parts, rule: Rule, whole: bool) -> None:
        self._parts, self._rule, self._whole = parts, rule, whole
        self._reverse = True
        self.waited_s = 0.0

    def norm(self) -> float:
        """Of all accumulated gradients. Collective: afterwards nobody reads the old weights any more."""
        start = time.perf_counter()
        parts = self._parts
        total = parts.norm(parts.reducer.shard_view(bucket) for bucket in parts.geometry.buckets)
        self.waited_s += time.perf_counter() - start
        return total

    def run(self, groups: Sequence[dict[str, Any]], scale: float) -> None:
        """A step with the accumulated gradients times ``scale``. Collective: every rank sees the new weights."""
        parts = self._parts
        if self._whole:
            parts.reducer.gather()
        hyper = [self._rule.prepare(number, group, scale) for number, group in enumerate(groups)]
        parts.state.step(self._shards(hyper), self._reverse)
        self._reverse = not self._reverse
        start = time.perf_counter()
        parts.store.publish()
        self.waited_s += time.perf_counter() - start

    def _shards(self, hyper: list[Any]) -> Iterator[ShardStep]:
        parts = self._parts
        for bucket, weight in parts.store.sweep(self._reverse):
            grad = parts.reducer.bucket_view(bucket) if self._whole else parts.reducer.shard_view(bucket)
            yield ShardStep(bucket.index, weight, grad, self._runs(bucket, hyper))

    def _runs(self, bucket: FlatBucket, hyper: list[Any]) -> list[Run]:
        parts = self._parts
        if parts.param_runs is None:
            return [(begin, end, hyper[group]) for begin, end, group in parts.runs[bucket.index]]
        start = parts.store.part(bucket).start
        first = [parts.first_index[n] + start - parts.geometry.places[n].offset for n in bucket.params]
        indexed = {n: Indexed(hyper[parts.group_of[n]], at) for n, at in zip(bucket.params, first, strict=True)}
        return [(begin, end, indexed[n]) for begin, end, n in parts.param_runs[bucket.index]]
