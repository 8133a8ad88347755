"""ZeroOneReplicas: 0/1 Adam after its first averaged steps.

Phase 1: with the turn "mean" averaged gradients move both moments; with "signs" the ranks exchange gradients, which
move the first one only. Phase 2, "apart": each rank steps weights of its own. They are ``anchor`` plus ``moved``:
the weights of the last exchange, equal on all ranks, and the sum of this rank's updates. "join": the ranks exchange
``moved`` in units of the moment. Its average gives the new weights, and over the sum of the rates the new moment.
Adding ``moved`` to the anchor, instead of taking it back from the weights, keeps the ranks' weights equal to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from zcomm.optim.lamb import exact_root
from zcomm.optim.onebit import ZeroOneNumbers
from zcomm.zero.layout.flat import FlatBucket
from zcomm.zero.onebit.adam import ByParam
from zcomm.zero.onebit.replicas import LocalUpdate


class ZeroOneReplicas(ByParam):
    """The moments of 0/1 Adam."""

    _anchors: list[torch.Tensor]  # fp32 masters, by bucket, in phase 2
    _moved: list[torch.Tensor]
    _rates: dict[int, float]  # sums of the rates since the last exchange, by parameter
    _numbers: dict[int, ZeroOneNumbers]  # of the last step of each

    def begin(self, first: bool) -> None:
        self._anchors, self._moved, self._rates, self._numbers = [], [], {}, {}
        self.zero_errors()

    def update(self, step: LocalUpdate) -> None:
        acts: dict[str, Callable[[FlatBucket, LocalUpdate], None]] = {
            "mean": self._mean,
            "signs": self._signs,
            "apart": self._apart,
            "join": self._join,
        }
        if step.turn in ("apart", "join") and not self._anchors:
            self._begin_apart()
        for bucket in self.geometry.buckets:
            if step.turn == "join" or self.params_in(bucket, step):
                acts[step.turn](bucket, step)
        if step.turn == "mean":
            self.find_masks()
        elif step.turn == "join":
            self._rates.clear()

    # --- phase 1 ----------------------------------------------------------------------------------------------

    def _mean(self, bucket: FlatBucket, step: LocalUpdate) -> None:
        """Update both moments by averaged gradients."""
        params, master = self.params_in(bucket, step), self.master(bucket)
        for index in params:
            numbers: ZeroOneNumbers = step.numbers[index]
            first, second = self.of(index, "exp_avg"), self.of(index, "exp_avg_sq")
            grad = step.grads[index].view(-1).mul(numbers.scale) if index in step.grads else torch.zeros_like(first)
            first.mul_(numbers.beta).add_(grad.mul(1.0 - numbers.beta))
            second.mul_(numbers.beta2).add_(grad.mul_(grad).mul_(1.0 - numbers.beta2))
            inside = self.inside(index)
            self.roots[bucket.index][inside] = exact_root(second)
            self._step(index, master[inside], numbers)
        self.set_master(bucket, master)
        self.write_back(bucket, master, "exp_avg", "exp_avg_sq")

    def _signs(self, bucket: FlatBucket, step: LocalUpdate) -> None:
        """Exchange gradients, and update the first moment."""
        params, tensors = self.params_in(bucket, step), []
        for index in params:
            grad = step.grads.get(index)
            value = torch.zeros(self.geometry.places[index].count) if grad is None else grad.view(-1)
            tensors.append(self.signed(bucket, index, value.mul(step.numbers[index].scale)))
        self.average(bucket, tensors, "gradients")
        master = self.master(bucket)
        for index, tensor in zip(params, tensors, strict=True):
            numbers: ZeroOneNumbers = step.numbers[index]
            self.of(index, "exp_avg").mul_(numbers.beta).add_(tensor.value.mul_(1.0 - numbers.beta))
            self._step(index, master[self.inside(index)], numbers)
        self.set_master(bucket, master)
        self.write_back(bucket, master, "exp_avg")

    def _step(self, index: int, weight: torch.Tensor, numbers: ZeroOneNumbers) -> None:
        weight.sub_(self._change(index, weight, numbers))

    def _below(self, index: int, numbers: ZeroOneNumbers) -> torch.Tensor:
        return self.root(index).mul(numbers.root).add_(numbers.eps)

    def _change(self, index: int, weight: torch.Tensor, numbers: ZeroOneNumbers) -> torch.Tensor:
        """Return a parameter's update, before its sign."""
        change = self.of(index, "exp_avg").div(self._below(index, numbers)).mul_(numbers.rate)
        return change.add_(weight.mul(numbers.decay)) if numbers.decay else change

    # --- phase 2 ----------------------------------------------------------------------------------------------

    def _begin_apart(self) -> None:
        self.zero_errors()
        self._anchors = [self.master(bucket).clone() for bucket in self.geometry.buckets]
        self.freeze()
        self._moved = [torch.zeros(bucket.count) for bucket in self.geometry.buckets]

    def _apart(self, bucket: FlatBucket, step: LocalUpdate) -> None:
        """Step this rank's own weights."""
        master = self._take_steps(bucket, step)
        self.set_master(bucket, master)

    def _take_steps(self, bucket: FlatBucket, step: LocalUpdate) -> torch.Tensor:
        """Return the new master of a bucket, after this rank's step."""
        master, moved = self.master(bucket), self._moved[bucket.index]
        for index in self.params_in(bucket, step):
            numbers: ZeroOneNumbers = step.numbers[index]
            inside, first = self.inside(index), self.of(index, "exp_avg").mul_(numbers.beta)
            if index in step.grads:
                first.add_(step.grads[index].view(-1).mul(numbers.scale).mul_(1.0 - numbers.beta))
            if index in self.masks:
                first.masked_fill_(self.root(index) == 0, 0.0)
            moved[inside].sub_(self._change(index, master[inside], numbers))
            master[inside] = self._anchors[bucket.index][inside].add(moved[inside])
            self._rates[index] = self._rates.get(index, 0.0) + numbers.rate
            self._numbers[index] = numbers
        return master

    def _join(self, bucket: FlatBucket, step: LocalUpdate) -> None:
        """Step this rank's own weights, then exchange the ranks' changes since the last exchange."""
        master, moved = self._take_steps(bucket, step), self._moved[bucket.index]
        params, tensors = [index for index in bucket.params if index in self._rates], []
        same: dict[int, torch.Tensor] = {}  # changes of elements that are not exchanged, but equal on all ranks
        below = {index: self._below(index, self._numbers[index]) for index in params}
        for index in params:
            value = moved[self.inside(index)]
            if index in self.masks:
                same[index] = value[self.root(index) == 0]
            if self._rates[index] == 0:  # rates of 0: nothing has moved, but the moments have
                value.copy_(self.of(index, "exp_avg"))
            else:
                value.mul_(below[index])
            tensors.append(self.signed(bucket, index, value))
        if tensors:
            self.average(bucket, tensors, "changes")
        for index, tensor in zip(params, tensors, strict=True):
            rate, value, inside = self._rates[index], tensor.value, self.inside(index)
            self.of(index, "exp_avg").copy_(value).div_(-rate if rate else 1.0)
            value.div_(below[index]) if rate else value.zero_()
            if index in same:
                value[self.root(index) == 0] = same[index]
            master[inside] = self._anchors[bucket.index][inside].add(value)
            value.zero_()
        self._anchors[bucket.index].copy_(master)
        self.set_master(bucket, master)
        self.write_back(bucket, master, "exp_avg")

    @property
    def is_settled(self) -> bool:
        return not self._rates

    def settle(self, what: str) -> None:
        if self.is_settled:
            return
        for bucket in self.geometry.buckets:
            master, first = self.master(bucket), self.whole[bucket.index]["exp_avg"]
            self.comm.all_reduce(master, "avg", name=f"weights of bucket {bucket.index}: {what}")
            self.comm.all_reduce(first, "avg", name=f"moments of bucket {bucket.index}: {what}")
            self.set_master(bucket, master)
            self.write_back(bucket, master, "exp_avg")
            self._anchors[bucket.index].copy_(master)
            self._moved[bucket.index].zero_()
        self._rates.clear()
        self._store.count_change()
        self.note()

    def take_edits(self) -> None:
        """Continue with each shard of its owner, or, between exchanges, with the mean of the ranks' weights."""
        if not self.is_settled:
            self.settle("after a change by the program")
            return
        super().take_edits()
        for bucket in self.geometry.buckets if self._anchors else ():
            self._anchors[bucket.index].copy_(self.master(bucket))

    def errors(self) -> Iterator[torch.Tensor]:
        yield from super().errors()
        yield from (*self._anchors, *self._moved)

    def close(self) -> None:
        super().close()
        self._anchors, self._moved, self._rates, self._numbers = [], [], {}, {}
