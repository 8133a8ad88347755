"""Values of the gradients that a reducer keeps: read whole, measured and changed in place, in true units.

An accumulator holds ``factor`` times the mean gradient. Norms and the last whole gradient are kept until they change.
Local sums (passes without sync) are the whole value before a pass has been reduced. Reading is collective; a change
only affects this rank's part.
Thread rule: as GradientReducer; not while a backward pass reduces gradients, which raises.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from zcomm.zero.gradients.accumulators import Accumulators
from zcomm.zero.gradients.unsynced import UnsyncedGradients
from zcomm.zero.groups.mesh_comms import MeshComms
from zcomm.zero.layout.flat import Geometry

Change = Callable[[torch.Tensor, slice], None]  # of flat values, and their slice of the parameter


@dataclass(frozen=True)
class NonFinite:
    """A gradient that was not finite. step: optimizer step, from 1, skipped ones included. parameter: its name."""

    step: int
    parameter: str


class Passes(Protocol):
    """Backward passes, as the reducer counts them."""

    @property
    def syncs(self) -> bool: ...
    @property
    def stays_local(self) -> bool: ...
    @property
    def broken(self) -> bool: ...
    @property
    def running(self) -> bool: ...
    def before_sums(self) -> None: ...


class GradientValues:
    """The values of the gradients that stand-ins stand for.

    generation: of gradients; a new one begins when they are forgotten.

    factor: by which accumulated gradients exceed the mean (micro-steps times loss scale).
    """

    def __init__(
        self,
        passes: Passes,
        accumulators: Accumulators,
        local: UnsyncedGradients,
        geometry: Geometry,
        comms: MeshComms,
        names: Sequence[str],
        factor: Callable[[], float],
    ) -> None:
        self._passes, self._accumulators, self._local = passes, accumulators, local
        self._geometry, self._comms, self._comm = geometry, comms, comms.data
        self.names = names
        self.factor = factor
        self.generation = 0
        self.warned = self._warned_sparse = False
        self.warning = (
            logging.WARNING if comms.world.rank == 0 else logging.INFO
        )  # level of messages that are logged once
        self.closed = False
        self._version = 0
        self._rest_reduced = -1  # the version at which all ranks knew that no local sums are left
        self._norms: dict[float, dict[int, torch.Tensor]] = {}  # by order and number
        self._last: tuple[int, torch.Tensor] | None = None

    def changed(self) -> None:
        """Forget cached results: gradients have arrived, or all may have changed."""
        self._version += 1
        self._norms.clear()
        self._last = None

    def _edited(self, index: int) -> None:
        """Forget cached results of one gradient, which has changed on all ranks."""
        for norms in self._norms.values():
            norms.pop(index, None)
        if self._last is not None and self._last[0] == index:
            self._last = None

    def forget(self) -> None:
        """Make stand-ins invalid: the gradients are forgotten."""
        self.generation += 1
        self.changed()

    def shape_of(self, index: int) -> torch.Size:
        """Return the parameter's shape, also if it is not gathered."""
        return self._geometry.places[index].shape

    def own(self, index: int, change: bool = False, first: bool = False) -> Iterator[tuple[torch.Tensor, slice]]:
        """Yield this rank's elements of a gradient in their accumulators, and their slice of the parameter.

        change: the caller may change them, until it asks for the next ones. first: only with the first copy.
        """
        for span in self._geometry.spans(index):
            bucket = self._geometry.every[span.bucket]
            if first and not bucket.first:
                continue
            shard = bucket.part
            low, high = span.within(shard)
            if low < high:
                view = self._accumulators.shard(bucket, change)[low - shard.start : high - shard.start]
                begin = span.begin - span.offset
                yield view, slice(low + begin, high + begin)

    def _waiting(self, index: int) -> list[tuple[torch.Tensor, slice]]:
        """Return the unreduced parts of a gradient, flat, and their slices."""
        found, width = [], self._geometry.places[index].shape[1:].numel()
        for number in self._geometry.numbers_of(index):
            sum_ = self._local.sums.get(number)
            if sum_ is not None:
                begin = (self._geometry.rows_of(number).start or 0) * width
                found.append((sum_.view(-1), slice(begin, begin + sum_.numel())))
        return found

    def dense(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        """Make a gradient dense, with a warning the first time that it is sparse."""
        if grad.layout is torch.strided:
            return grad
        if not self._warned_sparse:
            self._warned_sparse = True
            text = f"the gradient of {self.names[index]} is sparse; it is made dense here"
            logging.getLogger("zcomm").log(self.warning, "%s", text)
        return grad.to_dense()

    # --- changing ---------------------------------------------------------------------------------------------

    def edit(self, index: int, change: Change, homogeneous: bool = False) -> None:
        """Change a gradient in place. homogeneous: ``change(a x) = a change(x)``.

        Collective only if it is not homogeneous and local sums are left next to reduced gradients.
        """
        self._check(index)
        with torch.no_grad():
            for part, flat in self._parts(index, homogeneous):
                factor = self.factor()
                if homogeneous or factor == 1.0:
                    change(part, flat)
                else:
                    values = part / factor
                    change(values, flat)
                    torch.mul(values, factor, out=part)
        self._accumulators.edited()
        self._edited(index)

    def zero(self, index: int) -> None:
        """Make a gradient zero on this rank, also the elements that it sums for ranks of other groups."""
        for number in self._geometry.numbers_of(index):
            self._local.sums.pop(number, None)
        if self._accumulators.fresh:
            return
        self._passes.before_sums()
        self._finish(index)
        with torch.no_grad():
            for span in self._geometry.spans(index):
                bucket = self._geometry.every[span.bucket]
                low, high = span.within(bucket.held)
                if low < high:
                    begin = bucket.held.start
                    self._accumulators.held_sum(bucket)[low - begin : high - begin].zero_()

    def _finish(self, index: int) -> None:
        for bucket in self._geometry.buckets_of(index):
            self._accumulators.finish(bucket)

    def reduce_rest(self) -> None:
        """Reduce the local sums of all ranks, in fp32, and wait for all gradients. It is not a pass. Collective."""
        buckets = self._local.waiting()
        self._accumulators.finish()
        if buckets:
            self._accumulators.fill()
            self._local.reduce(buckets, self._local.sums.get)
            self._local.clear()
            self.replaced()

    def replaced(self) -> None:
        """Account for a write of accumulators by other means than a pass."""
        self._accumulators.edited()
        self.changed()

    def _parts(self, index: int, homogeneous: bool) -> Iterator[tuple[torch.Tensor, slice]]:
        """Yield the tensors that make up the value on this rank, and their slices."""
        accumulators = self._accumulators
        if self._passes.stays_local and accumulators.fresh:
            self._begin_sums(index)
            yield from self._waiting(index)
            return
        local = self._waiting(index)
        if local and not accumulators.fresh and not homogeneous:
            if not self._passes.syncs:
                where, remedy = "inside of no_sync()", "after the block"
                if self._passes.stays_local:
                    where, remedy = "of steps before and after freeze_step", "call zero_grad() after each step"
                raise RuntimeError(
                    f"p.grad of {self.names[index]} is a sum of reduced and local gradients {where}: "
                    f"change it only by factors, or {remedy}"
                )
            self.reduce_rest()
            local = []
        yield from local
        if not local or not accumulators.fresh:
            accumulators.fill()
            self._finish(index)
            yield from self.own(index, change=True)

    def _begin_sums(self, index: int) -> None:
        """Begin local sums of a gradient that no pass has reached: it counts as zero."""
        if index not in self._local.sums:
            self._local.sums[index] = torch.zeros(self.shape_of(index))

    def _check(self, index: int) -> None:
        """Wait until nothing reads the accumulators, which then hold means. Raises: RuntimeError if gradients are in
        flight."""
        self._passes.before_sums()
        if self._passes.broken:
            raise RuntimeError(
                f"p.grad of {self.names[index]}: the last backward pass ended with an error; call zero_grad() and run "
                "it again"
            )
        if self._passes.running:
            raise RuntimeError(
                f"p.grad of {self.names[index]} is being reduced: use it after backward() has returned. A hook of its "
                "own parameter (register_hook, register_post_accumulate_grad_hook) sees this rank's gradient. A model "
                "in DistributedDataParallel reduces twice: leave that out, ZeroOptimizer takes its place"
            )
        self._accumulators.complete()

    # --- reading ----------------------------------------------------------------------------------------------

    def _ready(self) -> None:
        """Reduce all gradients that can be reduced. Collective, the first time after a change."""
        accumulators = self._accumulators
        if self._passes.stays_local and accumulators.fresh:
            return
        if self._passes.syncs and self._rest_reduced != self._version and not accumulators.fresh:
            self.reduce_rest()
            self._rest_reduced = self._version
        elif not (self._local and accumulators.fresh):
            accumulators.fill()
        if accumulators.fresh:
            accumulators.finish()
        else:
            accumulators.guarded(accumulators.finish)

    def whole(self, index: int) -> torch.Tensor:
        """Return the whole gradient, fp32, on the CPU; not to be changed. Collective, unless all of it is local."""
        self._check(index)
        if self._last is None or self._last[0] != index:
            with torch.no_grad():
                self._ready()
                value = self.accumulated(index)
                self._last = index, value
        return self._last[1]

    def accumulated(self, index: int, scale: float | None = None) -> torch.Tensor:
        """Return ``whole`` without its checks. scale: of the accumulators; None: to true units."""
        place, factor = self._geometry.places[index], self.factor()
        times = 1.0 / factor if scale is None else scale
        value = torch.zeros(place.count)
        if not self._accumulators.fresh:
            self._accumulators.guarded(lambda: self._copy_own(index, value, times))
            # zeros for elements of other ranks, so that sums of integers are the elements' bits
            data = self._comms.of(self._geometry.bucket_of(index)).data
            data.all_reduce(value.view(torch.int32), name=f"whole gradient of {self.names[index]}")
        for local, elements in self._waiting(index):
            value[elements] += local.cpu() * times
        return value.view(place.shape)

    def _copy_own(self, index: int, value: torch.Tensor, times: float) -> None:
        for mine, elements in self.own(index, first=True):
            value[elements].copy_(torch.mul(mine.to(torch.float32), times))

    def first_nonfinite(self) -> str:
        """Name the first parameter with a gradient that is not finite. Collective; some rank's part must have one."""
        self._accumulators.guarded(self._accumulators.finish)
        count = self._geometry.trained_count
        parts = self._waiting if self._passes.stays_local and self._accumulators.fresh else self.own
        owned = ((index, mine) for index in range(count) for mine, _ in parts(index))
        bad = (index for index, mine in owned if not bool(torch.isfinite(mine).all()))
        first = torch.tensor([self._accumulators.guarded(lambda: next(bad, count))])
        self._comm.all_reduce(first, op="min", name="first non-finite gradient")
        name = self.names[int(first)] if int(first) < count else ""
        told = self._comms.told(name, "non-finite gradient of ranks with other tensors")
        return next(filter(None, told), "none that is left")

    def make_local(self) -> None:
        """Turn reduced gradients that no ``zero_grad()`` has dropped into local sums, the same on each rank. Collective
        if there are any."""
        if self._accumulators.fresh:
            return
        self._accumulators.finish()
        for bucket in self._geometry.buckets:
            whole, own = torch.empty(bucket.count), self._accumulators.shard(bucket)
            self._comm.all_gather(own, out=whole, name=f"sums of bucket {bucket.index}")
            for index in bucket.params:
                self._local.sums[index] = self._geometry.view(whole, index) + self._local.sums.get(index, 0.0)
        self._accumulators.forget()
        self.changed()

    def norm(self, index: int, ord: float) -> torch.Tensor:
        """Return the norm of a gradient, a float64 scalar on the CPU. Collective, once for all that have changed."""
        self._check(index)
        known = self._norms.setdefault(ord, {})
        if index not in known:
            with torch.no_grad():
                self._ready()
                known = self._norms.setdefault(ord, {})  # a rest has changed them
                wanted = [number for number in range(self._geometry.trained_count) if number not in known]
                known.update(zip(wanted, self._measure(wanted, ord).unbind(), strict=True))
        return known[index]

    def _measure(self, wanted: Sequence[int], ord: float) -> torch.Tensor:
        if self._accumulators.fresh:
            local = torch.stack([self._measured(self._waiting(index), ord) for index in wanted])
            return local if ord == 0 else local / self.factor()
        measured = (self._measured(self.own(index, first=True), ord) for index in wanted)
        mine = torch.stack(self._accumulators.guarded(lambda: list(measured)))
        if math.isfinite(ord) and ord != 0:
            mine = mine**ord
        norms = torch.empty(len(wanted), dtype=mine.dtype)
        experts = torch.tensor([self._geometry.bucket_of(index).experts for index in wanted])
        for comms, chosen in ((self._comms, ~experts), (self._comms.experts, experts)):
            if comms is not None and bool(chosen.any()):
                every = comms.data.all_gather(mine[chosen], name="norms of gradients (p.grad)")
                assert isinstance(every, torch.Tensor)
                every = every.view(comms.data.world_size, -1)
                if math.isinf(ord):
                    norms[chosen] = every.amax(0) if ord > 0 else every.amin(0)
                else:
                    norms[chosen] = every.sum(0) if ord == 0 else every.sum(0) ** (1.0 / ord)
        norms = norms if ord == 0 else norms / self.factor()
        for place, index in enumerate(wanted):  # inside of no_sync(), next to reduced gradients
            if self._waiting(index):
                norms[place] = torch.linalg.vector_norm(self.accumulated(index), ord, dtype=torch.float64)
        return norms

    @staticmethod
    def _measured(parts: Iterable[tuple[torch.Tensor, slice]], ord: float) -> torch.Tensor:
        norms: list[torch.Tensor] = [
            torch.linalg.vector_norm(values.reshape(-1), ord, dtype=torch.float64).cpu()
            for values, _ in parts
            if values.numel()
        ]
        if not norms:
            return torch.tensor(math.inf if ord < 0 else 0.0, dtype=torch.float64)
        if len(norms) == 1:
            return norms[0]
        every = torch.stack(norms)
        if ord == 0:
            return every.sum()
        whole: torch.Tensor = torch.linalg.vector_norm(every, ord)
        return whole
