"""Replicas: whole copies of optimizer state on each rank, for rules that exchange moments ([Note: replicas]).

[Note: replicas] In stage 0 a rank keeps the state of its shard. A rule that exchanges moments updates all weights on
each rank, so no weights travel. The first such step gathers the whole state that this needs. Each step writes this
rank's shard back to the sharded state, which checkpoints and ``full_optim_state`` read. If anything else has written
that state (a load, a program), the next step gathers again. Errors then begin at zero, also after a load: no checkpoint
has them.
All ranks compute the same bits, because the averaged moments have the same bits and each update is made of operations
that round once.
Thread rule: as ZeroOptimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from zcomm.comm.communicator import Communicator
from zcomm.zero.layout.flat import FlatBucket, Geometry
from zcomm.zero.layout.tiles import TileForm, cut
from zcomm.zero.onebit.signs import Signed, packed, part_of
from zcomm.zero.optim_state.state import OptimState
from zcomm.zero.params.stores import ParameterStore

_ROOT_COUNT = 1 << 20


@dataclass
class Replica:
    """The whole state of one bucket, flat, fp32 [bucket.count] each.

    root: of the frozen second moment. low: of 16-bit weights, the data of exact masters, as a tile without arrays.
    worker: see Signed. servers, masks: by parameter.
    """

    exp_avg: torch.Tensor
    root: torch.Tensor
    low: torch.Tensor
    worker: torch.Tensor
    servers: dict[int, torch.Tensor]
    masks: dict[int, torch.Tensor]


class Replicas:
    """The replicas of all trained buckets. moved_nbytes: of moments that were exchanged between ranks."""

    moved_nbytes = 0

    def __init__(self, geometry: Geometry, comm: Communicator, store: ParameterStore, state: OptimState) -> None:
        self._geometry, self._comm, self._store, self._state = geometry, comm, store, state
        self._of: list[Replica] = []
        self._written = -1  # writes of the sharded state, as the replicas know them
        self._low = TileForm((), state.form.dtype)

    @property
    def stale(self) -> bool:
        """Return True if there are none, or the sharded state has changed since. Local."""
        return self._written != self._state.writes

    def __getitem__(self, bucket: int) -> Replica:
        return self._of[bucket]

    def gather(self) -> list[int]:
        """Make the replicas from the sharded state, with errors of zero. Collective.

        Returns: the parameters with a second moment that is all zero: they never move again.
        """
        self._of.clear()  # the old memory before the new
        still: list[int] = []
        for bucket in self._geometry.buckets:
            self._of.append(self._gathered(bucket, still))
        self._written = self._state.writes
        return still

    def _gathered(self, bucket: FlatBucket, still: list[int]) -> Replica:
        arrays = {name: self._whole(bucket, name) for name in ("exp_avg", "exp_avg_sq")}
        low = torch.zeros(self._low.nbytes(bucket.count), dtype=torch.uint8)
        if self._low.element_nbytes:
            weight = self._store.whole(bucket)
            self._low.set_master(weight, low, self._whole(bucket, ""))
        squares = arrays["exp_avg_sq"]
        servers, masks = {}, {}
        for index in bucket.params:
            inside = self.inside(index)
            moves = squares[inside] != 0
            if not bool(moves.all()):
                masks[index] = packed(moves)
            if not bool(moves.any()):
                still.append(index)
            part = part_of(moves.numel(), self._comm.rank, self._comm.world_size)
            servers[index] = torch.zeros(part.stop - part.start)
        for values in squares.split(_ROOT_COUNT):  # exact, unlike torch's root of fp32, so that all hosts have one
            values.copy_(values.double().sqrt_())
        return Replica(arrays["exp_avg"], squares, low, torch.zeros(bucket.count), servers, masks)

    def _whole(self, bucket: FlatBucket, name: str) -> torch.Tensor:
        """Gather an array of a bucket; "": the fp32 master. Collective."""
        own = torch.empty(bucket.shard_count)
        for tile, state in self._tiles(bucket):
            if name:
                own[tile] = self._state.form.array(state, tile.stop - tile.start, name)
            else:
                own[tile] = self._state.form.master(self._store.whole(bucket)[bucket.part][tile], state)
        whole = torch.empty(bucket.count)
        self._comm.all_gather(own, out=whole, name=f"{name or 'masters'} of bucket {bucket.index}")
        return whole

    def _tiles(self, bucket: FlatBucket, store: bool = False) -> Iterator[tuple[slice, torch.Tensor]]:
        for tile in cut(bucket.shard_count):
            with self._state.tile(bucket.index, tile, store=store) as state:
                yield tile, state

    def inside(self, index: int) -> slice:
        """Return the elements of a parameter in its bucket."""
        place = self._geometry.places[index]
        return slice(place.offset, place.offset + place.count)

    def signed(self, bucket: FlatBucket, params: Sequence[int]) -> list[Signed]:
        """Return the first moments of these parameters of a bucket, to be averaged."""
        mine, found = self._of[bucket.index], []
        for index in params:
            inside = self.inside(index)
            errors = mine.worker[inside], mine.servers[index]
            found.append(Signed(mine.exp_avg[inside], *errors, mine.masks.get(index)))
        return found

    def master(self, bucket: FlatBucket) -> torch.Tensor:
        """Return the fp32 master of a whole bucket, to change: the weight itself, or a copy for ``set_master``."""
        return self._low.master(self._store.whole(bucket), self._of[bucket.index].low)

    def set_master(self, bucket: FlatBucket, master: torch.Tensor) -> None:
        """Store the changed master of a whole bucket, and this rank's shard of master and first moment in the sharded
        state."""
        mine, weight, form = self._of[bucket.index], self._store.whole(bucket), self._state.form
        if self._low.element_nbytes:
            self._low.set_master(weight, mine.low, master)
        for tile, state in self._tiles(bucket, store=True):
            form.array(state, tile.stop - tile.start, "exp_avg").copy_(mine.exp_avg[bucket.part][tile])
            if self._low.element_nbytes:
                form.set_master(weight[bucket.part][tile], state, master[bucket.part][tile])
        self._written = self._state.writes

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes of the state, and of the errors."""
        state = sum(each.exp_avg.nbytes + each.root.nbytes + each.low.nbytes for each in self._of)
        state += sum(mask.nbytes for each in self._of for mask in each.masks.values())
        servers = sum(server.nbytes for each in self._of for server in each.servers.values())
        return state, servers + sum(each.worker.nbytes for each in self._of)

    def close(self) -> None:
        self._of.clear()
