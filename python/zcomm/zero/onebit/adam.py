"""AdamReplicas: 1-bit Adam after the freeze."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from zcomm.optim.onebit import AdamNumbers, step_weight
from zcomm.zero.layout.flat import FlatBucket
from zcomm.zero.onebit.replicas import LocalUpdate, Replicas
from zcomm.zero.onebit.signs import Signed, average_signs, server_error


class AdamReplicas(Replicas):
    """The moments of 1-bit Adam. Each parameter's first moment is averaged by itself, so bucket sizes change no bit."""

    _workers: list[torch.Tensor]
    _servers: dict[int, torch.Tensor]

    def begin(self, first: bool) -> None:
        self._workers = [torch.zeros(bucket.count) for bucket in self.geometry.buckets]
        self._servers = {
            index: server_error(self.geometry.places[index].count, self.comm)
            for bucket in self.geometry.buckets
            for index in bucket.params
        }
        for of_bucket in self.whole:
            del of_bucket["exp_avg_sq"]  # the roots are enough: it is frozen

    def update(self, step: LocalUpdate) -> None:
        for bucket in self.geometry.buckets:
            if self.params_in(bucket, step):
                self._update(bucket, step)

    def _update(self, bucket: FlatBucket, step: LocalUpdate) -> None:
        params, tensors = self.params_in(bucket, step), []
        for index in params:
            numbers: AdamNumbers = step.numbers[index]
            moment, inside = self.of(index, "exp_avg").mul_(numbers.beta), self.inside(index)
            if index in step.grads:
                moment.add_(step.grads[index].view(-1).mul(numbers.grad))
            errors = self._workers[bucket.index][inside], self._servers[index]
            tensors.append(Signed(moment, *errors, self.masks.get(index)))
        self.moved_nbytes += average_signs(self.comm, tensors, f"moments of bucket {bucket.index}")
        master = self.master(bucket)
        for index in params:
            inside = self.inside(index)
            step_weight(master[inside], self.of(index, "exp_avg"), self.root(index), step.numbers[index])
        self.set_master(bucket, master)
        self.write_back(bucket, master, "exp_avg")

    def errors(self) -> Iterator[torch.Tensor]:
        yield from self._workers
        yield from self._servers.values()

    def close(self) -> None:
        super().close()
        self._workers, self._servers = [], {}
