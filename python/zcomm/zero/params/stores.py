"""Parameter stores: the memory of an optimizer's flat parameters, and a step's access to this rank's shards.

SharedStore: one copy for all CPU ranks of the host (decision D4); each rank writes its shard, a barrier publishes it.
PrivateStore: a whole copy per rank; each rank writes its shard, which an all_gather publishes.
The store of sharded parameters that are gathered unit by unit (stage 3) is in units/store.py.

[Note: edited weights] A program may edit its parameters between steps (``p.mul_()``, ``p.data.clamp_()``, nn.init), and
every rank does the same, as with DDP. Each rank's edit must count once, for the rank itself. So the parameters of a
SharedStore are copy-on-write views (``_core.PrivateView``) of the shared memory. A step writes this rank's part of the
edited pages to the shared memory, updates it there, and drops the copies. This needs no detection by version counters,
which ``p.data.mul_()`` does not move.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from zcomm import _core
from zcomm.comm.codec import Codec
from zcomm.comm.communicator import Communicator
from zcomm.comm.tensors import tensor_of
from zcomm.memory.device_streams import NO_PEERS, Peers
from zcomm.zero.groups.mesh_comms import MeshComms
from zcomm.zero.layout.flat import WHOLE_SHARD, FlatBucket, Geometry
from zcomm.zero.layout.local_param import counted_memory
from zcomm.zero.params.weights_across import WeightsAcross

Form = tuple[int, torch.dtype, torch.Size, tuple[int, ...], bool]


def form_of(tensor: torch.Tensor) -> Form:
    """Address, dtype, shape, strides and negative bit of a parameter's data while the data is the store's."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_neg()


@dataclass(frozen=True)
class StoreForm:
    """The parameters of a store. tiers: of each bucket. dtype: of the weights."""

    params: Sequence[torch.nn.Parameter]
    geometry: Geometry
    comm: Communicator
    dtype: torch.dtype
    tiers: Sequence[str]


class ParameterStore(ABC):
    """Holds the parameters of ``geometry``; after ``commit`` the model's parameters are views of it."""

    waited_s = 0.0
    moved_nbytes = 0  # of the parameters that were gathered between ranks
    base_nbytes = 0  # of weights that were sent last ([Note: differences of weights])
    keeps_weights = True  # close() leaves the model weights of its own, if it can
    age: str | None = ""  # of the weights: equal on ranks that have made the same steps; None: a step ended half way
    groups: tuple[tuple[int, ...], ...] = ()  # all shard groups of the job, for the next optimizer
    room = math.inf  # bytes of host memory that these may take, if they are free
    changes = 0  # of all weights: calls of count_change()
    adopted = 0  # calls of adopt()
    on_device: Collection[int] = frozenset()  # numbers of the buckets that are only on devices (on_device.py)

    @property
    def peers(self) -> Peers:
        """The communicator between the ranks' devices, if this store calls it."""
        return NO_PEERS

    def __init__(self, form: StoreForm) -> None:
        self._params, self._geometry, self._comm = form.params, form.geometry, form.comm
        self._dtype, self._tiers = form.dtype, form.tiers
        self._holds: dict[int, int] = {}  # parameters with a copy of their own now: how often they are held

    @abstractmethod
    def begin(self, bucket: FlatBucket) -> torch.Tensor:
        """Return memory for the first weights of this rank's part of ``bucket``."""

    @abstractmethod
    def commit(self, bucket: FlatBucket, weight: torch.Tensor) -> None:
        """Keep ``weight`` (from begin), which is filled, and point the model's parameters at the store."""

    @abstractmethod
    def iter_shards(self, reverse: bool = False) -> Iterator[tuple[FlatBucket, torch.Tensor]]:
        """Yield each trained bucket with the weights of this rank's part; the caller's changes are kept. reverse: last
        first."""

    @abstractmethod
    def load(self, bucket: FlatBucket) -> torch.Tensor:
        """Return the weights of this rank's part of one bucket, to change; ``save`` keeps the changes. Only after a
        barrier: until then other ranks may use the old weights."""

    def read(self, bucket: FlatBucket, part: slice = WHOLE_SHARD) -> torch.Tensor:
        """Return the weights of this rank's part of one bucket, or of ``part`` of that, not to be changed."""
        return self.load(bucket)[part]

    def read_held(self, bucket: FlatBucket) -> torch.Tensor:
        """Return the weights of ``bucket.held``, not to be changed."""
        return self.read(bucket)

    @abstractmethod
    def save(self, bucket: FlatBucket, weight: torch.Tensor) -> None:
        """Keep ``weight``, which came from ``load``. ``publish`` then shows it to every rank."""

    def publish(self) -> None:
        """Show the new weights to every rank, and to autograd. Collective."""
        self.spread()
        self.count_change()

    @abstractmethod
    def spread(self) -> None:
        """Show the new weights to every rank: all parts are updated. Collective."""

    def give_up_spread(self, reverse: bool) -> None:  # noqa: B027
        """Start the operations that other ranks wait for, because this rank's updates have failed, in the order of
        ``iter_shards(reverse)``. Does not wait."""

    def end_spread(self) -> None:  # noqa: B027
        """Wait for operations of failed updates; ignore their errors. Local, after ``give_up_spread`` on ranks that
        failed."""

    def read_ahead(self) -> None:  # noqa: B027
        """Start to read the first weights of the next forward, after a step. Collective; does not wait."""

    def count_change(self) -> None:
        """Move the version counters of the parameters.

        The backward pass of a graph that has saved the old weights then raises, as after torch's own in-place changes.
        """
        self.changes += 1
        torch.autograd.graph.increment_version(counted_memory(self._params))

    def detached(self) -> Iterator[int]:
        """Yield the parameters with data that the program has replaced: it has another address or form."""
        return iter(())

    def adopt(self, param: int, value: torch.Tensor) -> None:
        """Make ``value`` (of the parameter's shape) the program's edit of a parameter, and attach it again."""
        raise NotImplementedError("the weights of this store cannot be replaced by other tensors")

    def own_copy(self, param: int) -> torch.Tensor:
        """Copy the store's data of a parameter of ``detached``. Local."""
        raise NotImplementedError("the weights of this store cannot be replaced by other tensors")

    def take_edits(self, settle: Callable[[], None] | None = None) -> None:  # noqa: B027
        """Make the program's edits the weights that an update changes. Local.

        settle: returns once no rank reads the old weights any more; called before memory of edited ones is written.
        None: that is so already.
        """

    # Hooks for a store on a device; on the CPU nothing is in flight.

    looks_early = False  # whether ``begin_pass`` looks for edits
    overlaps = False  # whether weights of complete gradients may change while others are in flight from the device

    def clear_interrupted(self) -> None:  # noqa: B027
        """Forget passes that ended with an exception."""

    def begin_pass(self) -> None:  # noqa: B027
        """Prepare for the step of a backward pass that begins. Does not wait."""

    def look_for_edits(self) -> None:  # noqa: B027
        """Start to compare the weights on the device with the published ones. Does not wait."""

    def edited_late(self) -> Sequence[int]:
        """Return the parameters of buckets that the program has edited after ``take_edits`` looked, and before the
        last ``look_for_edits``. Waits until that look has run."""
        return ()

    def used(self) -> None:  # noqa: B027
        """Record that the current stream so far uses the weights as they are; an update follows."""

    def synchronize(self) -> None:  # noqa: B027
        """Wait until no operation of this rank reads the weights that a step changes. A barrier then informs other
        ranks."""

    def arrive(self) -> None:  # noqa: B027
        """Let the current stream use the published weights from now on."""

    def renew(self) -> None:  # noqa: B027
        """Prepare a load of all trained weights after a failure: nothing is in flight, and no weight is lost to it."""

    # For buckets that are only on devices.

    def edited(self, bucket: FlatBucket) -> bool:
        """Return True if the program has changed a parameter of ``bucket`` on the device since the last step."""
        return False

    def device_shard(self, bucket: FlatBucket) -> torch.Tensor:
        """Return the weights of this rank's part, which torch's stream may change."""
        raise NotImplementedError

    def spread_on_device(self, bucket: FlatBucket) -> None:  # noqa: B027
        """Start to gather the other ranks' parts; torch's stream has changed this rank's. Collective."""

    def arrive_on_device(self) -> None:  # noqa: B027
        """Let torch's stream see all parts from now on. The host waits until all ranks have spread theirs."""

    @abstractmethod
    def full(self, param: int) -> torch.Tensor:
        """Return a copy of a whole parameter. Collective if parameters are sharded."""

    def parameter(self, param: int) -> torch.nn.Parameter:
        return self._params[param]

    def whole(self, bucket: FlatBucket) -> torch.Tensor:
        """Return the weights of a whole bucket in this rank's own memory, to change. Other ranks make the same
        change."""
        raise NotImplementedError("this rank does not have all weights in memory of its own")

    @property
    def edits(self) -> int:
        """Return a number that moves with each change of weights that torch counts, and each adopted replacement."""
        return self.adopted + sum(param._version for param in self._params)

    def hold(self, param: int) -> None:
        """Give a parameter a whole copy of its own until ``release``. Collective if parameters are sharded."""
        if param not in self._holds:
            whole = self.full(param)
            self._begin_hold(param)
            self._params[param].data = whole
        self._holds[param] = self._holds.get(param, 0) + 1

    def release(self, param: int) -> None:
        """Release the parameter; the last release drops the copy, and the parameter is the store's again."""
        held = self._holds.pop(param) - 1
        if held:
            self._holds[param] = held
        else:
            own = self._own(param)
            with torch._C.DisableTorchFunctionSubclass():
                self._params[param].data = own

    def _begin_hold(self, param: int) -> None:  # noqa: B027
        """Prepare a parameter for data of its own, until ``_own`` is called."""

    def hold_count(self, param: int) -> int:
        """Count the calls of ``hold`` that no ``release`` has ended."""
        return self._holds.get(param, 0)

    def is_whole(self, param: int) -> bool:
        """Return True if a parameter is open for the program: held, or in use by a module that gathers it."""
        return param in self._holds

    @abstractmethod
    def _own(self, param: int) -> torch.Tensor:
        """Return the parameter's data for times when no ``hold`` is open."""

    @property
    def turns(self) -> bool:
        """True if updates that change their direction save reading from a drive."""
        return "nvme" in self._tiers

    @property
    def nbytes_by_tier(self) -> dict[str, int]:
        """Bytes of parameters that count for this rank (a shared copy counts once per host)."""
        counts: dict[str, int] = {}
        for bucket, tier in zip(self._geometry.every, self._tiers, strict=True):
            counts[tier] = counts.get(tier, 0) + self._kept(bucket)
        return {tier: count * self._dtype.itemsize // self._sharers for tier, count in counts.items()}

    def tier_of(self, bucket: FlatBucket) -> str:
        return self._tiers[bucket.index]

    def _kept(self, bucket: FlatBucket) -> int:
        """Return the elements of a bucket that are in memory."""
        return bucket.count

    @property
    def _sharers(self) -> int:
        """Ranks that share them."""
        return 1

    @property
    def slot_nbytes(self) -> int:
        """Bytes of slots for gathered units that count for this rank."""
        return 0

    @property
    def window_nbytes(self) -> int:
        """Bytes of staging windows of swapped shards."""
        return 0

    @property
    def allocation_count(self) -> int:
        """Allocations ever made by a communicator that is the store's own."""
        return 0

    def is_waiting(self) -> bool:
        """Return True if close() would wait for other ranks."""
        return False

    def give_up(self) -> None:  # noqa: B027
        """End the operations that close() would wait for, on communicators of the store's own."""

    def close(self) -> None:
        """Give the model parameters of its own again, if that needs no other rank; free the rest."""
        for param in self._params:
            param.data = param.data.clone()


class FlatStore(ParameterStore):
    """A store with parameters that are views of one flat tensor, at addresses that never change."""

    _flat: torch.Tensor

    def __init__(self, form: StoreForm) -> None:
        super().__init__(form)
        self._forms: list[Form | None] = [None] * len(form.params)  # of the view that each parameter is

    @abstractmethod
    def _bucket(self, bucket: FlatBucket) -> torch.Tensor:
        """Return the weights of a whole bucket."""

    def _own(self, param: int) -> torch.Tensor:
        return self._geometry.view(self._bucket(self._geometry.bucket_of(param)), param)

    def commit(self, bucket: FlatBucket, weight: torch.Tensor) -> None:
        for index in bucket.params:
            own = self._params[index].data = self._own(index)
            self._forms[index] = form_of(own)

    def detached(self) -> Iterator[int]:
        for index, (param, form) in enumerate(zip(self._params, self._forms, strict=True)):
            if form_of(param) != form and index not in self._holds:
                yield index

    def own_copy(self, param: int) -> torch.Tensor:
        return self._own(param).clone()

    def adopt(self, param: int, value: torch.Tensor) -> None:
        self.adopted += 1
        own = self._own(param)
        overlaps = value.untyped_storage().data_ptr() == own.untyped_storage().data_ptr()
        own.copy_(value.clone() if overlaps else value)
        self._params[param].data = own

    def full(self, param: int) -> torch.Tensor:
        return self._params[param].detach().clone()


class HostStore(FlatStore):
    """Parameters in this process's memory. empty: allocates elements of a dtype. without: buckets kept elsewhere."""

    def __init__(
        self, form: StoreForm, empty: Callable[[int, torch.dtype], torch.Tensor], without: Collection[int]
    ) -> None:
        super().__init__(form)
        here = [bucket for bucket in form.geometry.every if bucket.index not in without]
        ends = list(itertools.accumulate((bucket.count for bucket in here), initial=0))
        self._ranges = {bucket.index: slice(*ends[n : n + 2]) for n, bucket in enumerate(here)}  # of the flat tensor
        self._flat = empty(ends[-1], form.dtype)

    def _bucket(self, bucket: FlatBucket) -> torch.Tensor:
        return self._flat[self._ranges[bucket.index]]

    def _kept(self, bucket: FlatBucket) -> int:
        return bucket.count if bucket.index in self._ranges else 0

    @property
    def _trained(self) -> list[FlatBucket]:
        return [bucket for bucket in self._geometry.buckets if bucket.index in self._ranges]

    def _part(self, bucket: FlatBucket) -> torch.Tensor:
        """Return this rank's part of a bucket, which steps change."""
        return self._bucket(bucket)[bucket.part]

    def begin(self, bucket: FlatBucket) -> torch.Tensor:
        return self._part(bucket)

    def iter_shards(self, reverse: bool = False) -> Iterator[tuple[FlatBucket, torch.Tensor]]:
        for bucket in reversed(self._trained) if reverse else self._trained:
            yield bucket, self.load(bucket)

    def load(self, bucket: FlatBucket) -> torch.Tensor:
        return self._part(bucket)

    def save(self, bucket: FlatBucket, weight: torch.Tensor) -> None:
        pass  # load() gave the memory itself


class SharedStore(HostStore):
    """A store with one copy for the host; parameters are copy-on-write views of it ([Note: edited weights]).

    across: the ranks of other hosts that update the other pieces of the parts ``FlatBucket.held`` ([Note: hpZ]). codec:
    of these.
    """

    def __init__(
        self,
        form: StoreForm,
        without: Collection[int],
        across: Communicator | None = None,
        codec: Codec | None = None,
    ) -> None:
        super().__init__(form, form.comm.shared_empty, without)
        self._across = WeightsAcross(across, codec)
        self._view: _core.PrivateView | None = None  # made by the first commit, if parameters are on the CPU
        self._seen = torch.empty(
            0, dtype=form.dtype
        )  # the memory of the view: all elements as this rank's program has them
        self._own_parts: list[tuple[int, int]] = []  # bytes of this rank's parts
        self._merged = False  # whether the edits of this step are in the shared memory

    def commit(self, bucket: FlatBucket, weight: torch.Tensor) -> None:
        if self._view is None and self._flat.numel():
            self._view = _core.PrivateView(self._flat.data_ptr(), self._flat.nbytes)
            self._seen = tensor_of(self._view.memory(), self._dtype, self._flat.numel())
            self._own_parts = [self._own_bytes(b) for b in self._geometry.every if b.index in self._ranges]
        super().commit(bucket, weight)

    def _own_bytes(self, bucket: FlatBucket) -> tuple[int, int]:
        # Ranks of other hosts make the same edits, so this rank merges their pieces here.
        begin, part, size = self._ranges[bucket.index].start, bucket.held, self._dtype.itemsize
        return (begin + part.start) * size, (begin + part.stop) * size

    def take_edits(self, settle: Callable[[], None] | None = None) -> None:
        if self._view is not None:
            self._view.merge(self._own_parts)
        self._merged = True

    def load(self, bucket: FlatBucket) -> torch.Tensor:
        if not self._merged:
            self.take_edits()
        return super().load(bucket)

    def iter_shards(self, reverse: bool = False) -> Iterator[tuple[FlatBucket, torch.Tensor]]:
        for bucket, weight in super().iter_shards(reverse):
            yield bucket, weight
            self._start_gathers([bucket])  # the caller has updated it

    def read(self, bucket: FlatBucket, part: slice = WHOLE_SHARD) -> torch.Tensor:
        return self._as_seen(bucket)[bucket.part][part]

    def read_held(self, bucket: FlatBucket) -> torch.Tensor:
        return self._as_seen(bucket)[bucket.held]

    def _as_seen(self, bucket: FlatBucket) -> torch.Tensor:
        if self._view is None or self._merged:
            return self._bucket(bucket)
        return self._seen[self._ranges[bucket.index]]

    def publish(self) -> None:
        self._spread([bucket for bucket in self._geometry.every if bucket.index in self._ranges])
        self.count_change()

    def spread(self) -> None:
        self._spread(self._trained)

    def _spread(self, buckets: Sequence[FlatBucket]) -> None:
        """Show new weights of ``buckets`` to every rank. Collective."""
        if not self._merged:
            self.take_edits()  # a rank that had nothing to change shows the others' changes, too
        self._start_gathers(buckets)
        self._across.precede(self._comm)
        self._comm.barrier(name="parameters")
        self._across.finish()
        self._merged = False

    def _start_gathers(self, buckets: Sequence[FlatBucket]) -> None:
        for bucket in self._across.not_started(buckets):
            self._across.start(bucket, self._part(bucket), self._bucket(bucket)[bucket.held])

    def give_up_spread(self, reverse: bool) -> None:
        with suppress(Exception):  # groups that have failed wait for nothing
            self._start_gathers(self._trained[::-1] if reverse else self._trained)

    def end_spread(self) -> None:
        with suppress(Exception):
            self._across.finish()

    @property
    def moved_nbytes(self) -> int:  # type: ignore[override]
        return self._across.moved_nbytes

    def _own(self, param: int) -> torch.Tensor:
        return self._geometry.view(self._seen[self._ranges[self._geometry.bucket_of(param).index]], param)

    def close(self) -> None:
        super().close()
        self._seen, self._view = self._seen.new_empty(0), None

    @property
    def _sharers(self) -> int:
        return self._comm.local_world_size


class PrivateStore(HostStore):
    """A store with a copy for each rank. The parts that ranks update are gathered."""

    def __init__(self, form: StoreForm, without: Collection[int], comms: MeshComms) -> None:
        super().__init__(form, form.comm.empty, without)
        self._comms = comms

    def whole(self, bucket: FlatBucket) -> torch.Tensor:
        return self._bucket(bucket)

    def spread(self) -> None:
        for comms in filter(None, (self._comms, self._comms.experts)):
            mine = [bucket for bucket in self._trained if self._comms.of(bucket) is comms]
            if mine:
                buckets = [self._bucket(bucket) for bucket in mine]
                shards = [flat[b.part] for b, flat in zip(mine, buckets, strict=True)]
                comms.shard.all_gather(shards, out=buckets, name="parameters")
                self.moved_nbytes += sum(bucket.nbytes for bucket in buckets)
