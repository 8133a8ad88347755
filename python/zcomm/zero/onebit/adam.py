"""AdamReplicas: 1-bit Adam after the freeze; and ByParam, its exchange of one parameter at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from zcomm.optim.onebit import AdamNumbers, step_weight
from zcomm.zero.layout.flat import FlatBucket
from zcomm.zero.onebit.replicas import LocalUpdate, Replicas
from zcomm.zero.onebit.signs import Signed, average_signs, server_error


class ByParam(Replicas):
    """Replicas that exchange each parameter by itself, so bucket sizes change no bit."""

    _workers: list[torch.Tensor]  # errors, by bucket
    _servers: dict[int, torch.Tensor]  # by parameter

    def zero_errors(self) -> None:
        self._workers = [torch.zeros(bucket.count) for bucket in self.geometry.buckets]
        self._servers = {
            index: server_error(self.geometry.places[index].count, self.comm)
            for bucket in self.geometry.buckets
            for index in bucket.params
        }

    def signed(self, bucket: FlatBucket, index: int, value: torch.Tensor) -> Signed:
        """Return ``value`` of a parameter for ``average``."""
        errors = self._workers[bucket.index][self.inside(index)], self._servers[index]
        return Signed(value, *errors, self.masks.get(index))

    def average(self, bucket: FlatBucket, tensors: list[Signed], name: str) -> None:
        """Replace the values by the ranks' averages. Collective. name: the values', for messages."""
        self.moved_nbytes += average_signs(self.comm, tensors, f"{name} of bucket {bucket.index}")

    def freeze(self) -> None:
        """Free the second moments: their roots are enough."""
        for of_bucket in self.whole:
            del of_bucket["exp_avg_sq"]

    def errors(self) -> Iterator[torch.Tensor]:
        yield from (*self._workers, *self._servers.values())

    def close(self) -> None:
        super().close()
        self._workers, self._servers = [], {}


class AdamReplicas(ByParam):
    """The moments of 1-bit Adam."""

    def begin(self, first: bool) -> None:
        self.zero_errors()
        self.freeze()

    def update(self, step: LocalUpdate) -> None:
        for bucket in self.geometry.buckets:
            if self.params_in(bucket, step):
                self._update(bucket, step)

    def _update(self, bucket: FlatBucket, step: LocalUpdate) -> None:
        params, tensors = self.params_in(bucket, step), []
        for index in params:
            numbers: AdamNumbers = step.numbers[index]
            moment = self.of(index, "exp_avg").mul_(numbers.beta)
            if index in step.grads:
                moment.add_(step.grads[index].view(-1).mul(numbers.grad))
            tensors.append(self.signed(bucket, index, moment))
        self.average(bucket, tensors, "moments")
        master = self.master(bucket)
        for index in params:
            inside = self.inside(index)
            step_weight(master[inside], self.of(index, "exp_avg"), self.root(index), step.numbers[index])
        self.set_master(bucket, master)
        self.write_back(bucket, master, "exp_avg")
