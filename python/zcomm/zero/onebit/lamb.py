"""LambReplicas: 1-bit LAMB after the freeze.

The moments of all parameters are averaged as one flat tensor. Each is first multiplied by a coefficient, so that one
scale fits all: the mean of the parameters' root mean squares, over its own. The coefficients are measured at the
freeze, and again after a load, when errors begin again.
The trust ratio is the average of the warm-up's, times a factor. That is the change of the second moment since the
freeze, as the averaged moments show it. Norms are exact sums, so all ranks compute the same factor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from zcomm import _core
from zcomm.comm.communicator import Communicator
from zcomm.optim.lamb import exact_root
from zcomm.optim.onebit import FrozenLamb, next_factor
from zcomm.zero.layout.flat import Geometry
from zcomm.zero.onebit.replicas import LocalUpdate, Replicas
from zcomm.zero.onebit.signs import Signed, average_signs, packed, server_error
from zcomm.zero.optim_state.state import OptimState
from zcomm.zero.params.stores import ParameterStore
from zcomm.zero.rules.onebit_rule import OnebitLambRule

_FRESH = "exp_avg_sq_fresh"  # DeepSpeed's name of the second moment that is not frozen


class LambReplicas(Replicas):
    """The moments of 1-bit LAMB. rule: has the trust ratios, by name. names: of the parameters."""

    arrays = ("exp_avg", "exp_avg_sq", _FRESH)
    _worker: torch.Tensor
    _server: torch.Tensor
    _mask: torch.Tensor
    _scales: dict[int, float]  # coefficients by which moments are multiplied before they travel

    def __init__(
        self,
        geometry: Geometry,
        comm: Communicator,
        store: ParameterStore,
        state: OptimState,
        rule: OnebitLambRule,
        names: list[str],
    ) -> None:
        super().__init__(geometry, comm, store, state)
        self._rule, self._names = rule, names

    def begin(self, first: bool) -> None:
        params = [index for bucket in self.geometry.buckets for index in bucket.params]
        means = {index: _norm(self.of(index, "exp_avg")) / math.sqrt(self._count(index)) for index in params}
        mean = sum(means.values()) / max(len(means), 1)
        self._scales = {index: mean / own if own > 0 else 1.0 for index, own in means.items()}
        squares = torch.cat([self.of(index, "exp_avg_sq") for index in sorted(params)]) if params else torch.empty(0)
        self._worker, self._server = torch.zeros(squares.numel()), server_error(squares.numel(), self.comm)
        self._mask = packed(squares != 0)
        for of_bucket in self.whole:
            if first:
                of_bucket[_FRESH].copy_(of_bucket["exp_avg_sq"])
            del of_bucket["exp_avg_sq"]

    def _count(self, index: int) -> int:
        return self.geometry.places[index].count

    def update(self, step: LocalUpdate) -> None:
        every, at = sorted(self._scales), 0
        flat = torch.zeros(self._worker.numel())
        parts: dict[int, torch.Tensor] = {}
        for index in every:
            parts[index] = flat[at : at + self._count(index)]
            at += self._count(index)
            if index in step.numbers:
                numbers: FrozenLamb = step.numbers[index]
                parts[index].add_(self.of(index, "exp_avg")).mul_(numbers.beta)
                if index in step.grads:
                    parts[index].add_(step.grads[index].view(-1).mul(numbers.grad))
                parts[index].mul_(self._scales[index])
        if flat.numel():
            signed = Signed(flat, self._worker, self._server, self._mask)
            self.moved_nbytes += average_signs(self.comm, [signed], "moments")
        for bucket in self.geometry.buckets:
            params = self.params_in(bucket, step)
            if params:
                master = self.master(bucket)
                for index in params:
                    moment = parts[index].div_(self._scales[index])
                    self._step(index, master[self.inside(index)], moment, step.numbers[index])
                self.set_master(bucket, master)
                self.write_back(bucket, master, "exp_avg", _FRESH)

    def _step(self, index: int, weight: torch.Tensor, moment: torch.Tensor, numbers: FrozenLamb) -> None:
        """Update one parameter. moment: the averaged one."""
        old, fresh, root = self.of(index, "exp_avg"), self.of(index, _FRESH), self.root(index)
        grad = moment.sub(old.mul_(numbers.beta)).div_(1.0 - numbers.beta)  # as the averaged moment has it
        fresh.mul_(numbers.beta2).add_(grad.mul_(grad).mul_(1.0 - numbers.beta2))
        old.copy_(moment)
        below = root.add(numbers.eps)
        factor = float(below.div(exact_root(fresh).add_(numbers.eps)).max())
        update = moment.div_(below)
        share = 1.0
        if numbers.decay:
            plain = _norm(update)
            update.add_(weight.mul(numbers.decay))
            whole = _norm(update)
            share = min(1.0, plain / whole) if whole > 0 else 1.0
        own = self._rule.scalars_of_param(self._names[index])
        own["factor"] = factor = next_factor(factor * share + (1.0 - share), own["factor"], numbers)
        coefficient = own["coefficient"] or 1.0  # 0: all ratios of the warm-up were 1, and are not in it
        weight.sub_(update.mul_(numbers.rate * coefficient * factor))

    def errors(self) -> Iterator[torch.Tensor]:
        yield from (self._worker, self._server)

    def close(self) -> None:
        super().close()
        self._worker = self._server = self._mask = torch.empty(0)
        self._scales = {}


def _norm(values: torch.Tensor) -> float:
    """Return the norm by an exact sum: its bits do not depend on the order of elements."""
    total = _core.ExactSum()
    total.add_squares(values.data_ptr(), _core.DType.float32, values.numel())
    return math.sqrt(total.value())
