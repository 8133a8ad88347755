"""ShardGather: gathers buckets in host memory: each rank copies its shard, a barrier or an all_gather adds the rest.

[Note: coded weights] With ``Compression(weights=)`` passes compute with decode(encode(w)): a rank's shard of a bucket
is encoded, and all ranks decode it, also its own. In memory that the ranks share nothing travels, so weights are exact.
Sources keep exact weights, which updates, saves and exports use, and reads of whole weights outside of passes
(``UnitStore.full``). Weights by rows are exact, too. With bases, differences travel ([Note: differences of weights]).
Thread rule: ``fill``, ``fill_part``, ``update`` and ``allocate`` on the gathering thread, which has a communicator of
its own; the rest on the main thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch

from zcomm.comm.codec import Codec
from zcomm.comm.communicator import Communicator
from zcomm.zero.layout.flat import FlatBucket
from zcomm.zero.params.sources import Sources
from zcomm.zero.poison import broadcast_error, check_error
from zcomm.zero.units.bases import WeightBases
from zcomm.zero.units.unit import Unit
from zcomm.zero.update_hooks import UpdateHooks
from zcomm.zero.worker import Call, Worker

T = TypeVar("T")


class ShardGather:
    """The gathering thread of units.

    source: of this rank's shards. shared: the ranks share the filled memory, so each rank copies one shard.
    updates: hooks that may run pending updates in a gather. codec: of weights ([Note: coded weights]); None: exact.
    bases: the codec is of differences to them; None: there are none. experts: of buckets of experts ([Note: experts]).
    """

    def __init__(
        self,
        comm: Communicator,
        source: Sources,
        shared: bool,
        updates: UpdateHooks,
        codec: Codec | None = None,
        bases: WeightBases | None = None,
        experts: Communicator | None = None,
    ) -> None:
        self.comm = comm.duplicate()
        self._experts = self.comm if experts is None else experts.duplicate()
        self.codec, self.bases = codec, bases or WeightBases(torch.float32)
        self.source = source
        self.shared = shared
        self.updates = updates
        self.moved_nbytes = 0  # bytes gathered between ranks
        self._thread = Worker("zcomm-gather")

    @property
    def every(self) -> list[Communicator]:
        """The communicators, each once."""
        return [self.comm] if self._experts is self.comm else [self.comm, self._experts]

    def submit(self, function: Callable[..., T], *arguments: Any) -> Call[T]:
        """Run ``function(*arguments)`` on the gathering thread, after all calls before it."""
        return self._thread.submit(function, *arguments)

    def synchronize(self) -> None:
        """Wait until all earlier calls have returned or raised."""
        with suppress(Exception):
            self._thread.submit(int).result()

    def allocate(self, nbytes: int) -> Any:
        core = self.comm._core
        return core.allocate_shared(nbytes) if self.shared else core.allocate(nbytes)

    def fill(self, unit: Unit, buckets: Sequence[FlatBucket], whole: Sequence[torch.Tensor]) -> None:
        """Gather ``buckets`` of the unit into ``whole``, memory from ``allocate``. Collective."""
        if self.bases.keeps:
            self._fill_by_bases(unit, buckets, whole)
            return
        name = self._name_of(unit)
        if self.shared:
            # No rank may still use the unit that was in the slot.
            self.comm.barrier(name=f"slot for {name}")
        shards = [w[bucket.part] for bucket, w in zip(buckets, whole, strict=True)]
        self._bring_shards(list(zip(buckets, shards, strict=True)), name)
        if self.shared:
            self.comm.barrier(name=name)
        for comm, experts in ((self.comm, False), (self._experts, True)):
            chosen = [n for n, bucket in enumerate(buckets) if bucket.experts == experts]
            if chosen and not self.shared:
                self._gather(comm, [shards[n] for n in chosen], [whole[n] for n in chosen], name, self.codec)

    def _name_of(self, unit: Unit) -> str:
        """Return the name of a gather, with the program's edits, so that ranks with different ones are found."""
        edits = f" after {unit.edits} changes of weights by the program" if unit.edits else ""
        return unit.gather_name + edits

    def _bring_shards(self, parts: list[tuple[FlatBucket, torch.Tensor]], name: str) -> None:
        """Read this rank's shards, and run their pending updates. Collective."""

        def bring() -> None:
            for work in [self.source.fetch(bucket, shard) for bucket, shard in parts]:
                if work is not None:
                    work.wait()

        if self.updates.in_gathers:
            self.updates.run(self.comm, parts, bring)
        else:
            self._bring(bring, name)

    def _gather(
        self,
        comm: Communicator,
        shards: list[torch.Tensor],
        whole: Sequence[torch.Tensor],
        name: str,
        codec: Codec | None,
        differences: bool = False,
    ) -> None:
        comm.all_gather(shards, out=list(whole), name=name, codec=codec, differences=differences)
        sizes = [shard.nbytes if codec is None else codec.encoded_nbytes(shard.numel()) for shard in shards]
        self.moved_nbytes += sum(sizes) * comm.world_size

    def _fill_by_bases(self, unit: Unit, buckets: Sequence[FlatBucket], whole: Sequence[torch.Tensor]) -> None:
        """Bring the bases of ``buckets`` up to date, and copy them to ``whole``. Collective."""
        bases, name, stamp = self.bases, self._name_of(unit), unit.stamp
        exact, differ = bases.split(buckets, stamp)
        places = {bucket.index: w for bucket, w in zip(buckets, whole, strict=True)}
        shards = {bucket.index: places[bucket.index][bucket.part] for bucket in (*exact, *differ)}
        if shards:
            self._bring_shards([(bucket, shards[bucket.index]) for bucket in (*exact, *differ)], name)
        for some, codec in ((exact, None), (differ, self.codec)):
            if some:
                mine = [shards[bucket.index] for bucket in some]
                self._gather(self.comm, mine, bases.begin(some), name, codec, differences=codec is not None)
                bases.end(some, stamp)
        for bucket in buckets:
            bases.copy(bucket, places[bucket.index])

    def fill_part(self, name: str, bucket: FlatBucket, part: slice, out: torch.Tensor) -> None:
        """Gather ``part`` of the bucket into ``out``, memory from ``allocate``. Collective."""
        if self.shared:
            self.comm.barrier(name=f"slot for {name}")
        pieces: list[tuple[int, slice, torch.Tensor]] = []  # number of a shard, slice of it, target
        for number in range(bucket.parts):
            shard = bucket.shard(number)
            low, high = max(part.start, shard.start), min(part.stop, shard.stop)
            if low < high:
                inside = slice(low - shard.start, high - shard.start)
                pieces.append((number, inside, out[low - part.start : high - part.start]))

        def bring(shard: torch.Tensor | None = None) -> None:
            for number, inside, target in pieces:
                if number == bucket.own and shard is not None:
                    target.copy_(shard[inside])
                elif number == bucket.own:
                    self.source.fetch_part(bucket, inside, target)

        if self.updates.in_gathers:
            self.updates.run_part(self.comm, bucket, bring)
        else:
            self._bring(bring, name)
        if self.shared:
            self.comm.barrier(name=name)
            return
        for number, _, target in pieces:
            (self._experts if bucket.experts else self.comm).broadcast(target, root=number, name=name)
            self.moved_nbytes += target.nbytes

    def update(self, buckets: Sequence[FlatBucket]) -> None:
        """Run the pending updates of ``buckets`` in their source. Collective."""
        for bucket in buckets:
            self.updates.run_part(self.comm, bucket, lambda shard: None)

    def maximum(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Replace ``values`` by their maximum over ranks and return them. Collective."""
        self.comm.all_reduce(values, op="max", name=name)
        return values

    def _bring(self, bring: Callable[[], None], name: str) -> None:
        """Call ``bring``. A read of a drive can fail on one rank: then all ranks raise."""
        if not self.source.on_drive:
            bring()
            return
        try:
            bring()
        except BaseException as error:
            broadcast_error(self.comm, error)
            raise
        check_error(self.comm, f"gathering {name}")

    def end_thread(self) -> None:
        self._thread.close()

    def close(self) -> None:
        for comm in self.every:
            comm.close()
        self.bases.close()
