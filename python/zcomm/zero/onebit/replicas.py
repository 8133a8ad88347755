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

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zcomm.comm.communicator import Communicator
from zcomm.optim.lamb import exact_root
from zcomm.zero.layout.flat import FlatBucket, Geometry
from zcomm.zero.layout.tiles import TileForm, cut
from zcomm.zero.onebit.signs import packed
from zcomm.zero.optim_state.state import OptimState
from zcomm.zero.params.stores import ParameterStore


@dataclass(frozen=True)
class LocalUpdate:
    """The input of one step. turn: see ``Rule.turn``. numbers: of each parameter that it updates, as the rule makes
    them. grads: by parameter, fp32 sums of this rank, or with the turn "mean" of all; others are zero."""

    turn: str
    numbers: Mapping[int, Any]
    grads: Mapping[int, torch.Tensor]


class NoReplicas:
    """Null object, of a rule that exchanges no moments. moved_nbytes: of moments that were exchanged between ranks."""

    moved_nbytes = 0

    @property
    def is_settled(self) -> bool:
        """Return True if the weights are equal on all ranks. The same on all ranks."""
        return True

    def settle(self, what: str) -> None:
        """Make weights and moments equal on all ranks, for the named call. Collective unless they are."""

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes of the state, and of the errors."""
        return 0, 0

    def close(self) -> None:
        """Free the replicas: they are stale then."""


class Replicas(NoReplicas, ABC):
    """The replicas of all trained buckets, and their updates.

    arrays: names of the state that is gathered. whole: by bucket and name, fp32 [bucket.count]. roots: by bucket, of
    the second moment. masks: by parameter, bits of elements with a second moment, if some have none. still: the
    parameters that have none at all.
    """

    arrays: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    whole: list[dict[str, torch.Tensor]]
    roots: list[torch.Tensor]
    masks: dict[int, torch.Tensor]
    still: list[int]
    _low: list[torch.Tensor]  # by bucket, a tile without arrays: with the weights the exact masters
    _writes: int  # of the sharded state, as the replicas know it

    def __init__(self, geometry: Geometry, comm: Communicator, store: ParameterStore, state: OptimState) -> None:
        self.geometry, self.comm, self._store, self._state = geometry, comm, store, state
        self._form = TileForm((), state.form.dtype)
        self._edits = -1  # of the weights, as the replicas know them
        self.close()

    @abstractmethod
    def update(self, step: LocalUpdate) -> None:
        """Update all weights, and the replicas. Collective."""

    @abstractmethod
    def begin(self, first: bool) -> None:
        """Make errors of zero, after the state was gathered. first: no step has exchanged before."""

    # --- changes by anything but a step -----------------------------------------------------------------------

    @property
    def is_stale(self) -> bool:
        """Return True if there are none, or the sharded state has changed since. Local."""
        return self._writes != self._state.writes

    @property
    def has_edits(self) -> bool:
        """Return True if the weights have changed since. Local."""
        return self._edits != self._store.edits

    def note(self) -> None:
        """Note that weights and state are as the replicas know them."""
        self._writes, self._edits = self._state.writes, self._store.edits

    def note_edits(self) -> None:
        """Note that the weights are as a step without replicas has left them."""
        self._edits = self._store.edits

    def take_edits(self) -> None:
        """Continue with each shard of the weights of its owner. Collective."""
        self._store.spread()

    # --- whole copies -----------------------------------------------------------------------------------------

    def gather(self, first: bool) -> None:
        """Make the replicas from the sharded state, with errors of zero. Collective. first: as ``begin``."""
        self.close()  # the old memory before the new
        for bucket in self.geometry.buckets:
            self.whole.append({name: self._gathered(bucket, name) for name in self.arrays})
            self._low.append(torch.zeros(self._form.nbytes(bucket.count), dtype=torch.uint8))
            if self._form.element_nbytes:
                self._form.set_master(self._store.whole(bucket), self._low[-1], self._gathered(bucket, ""))
        self.roots = [exact_root(of_bucket["exp_avg_sq"]) for of_bucket in self.whole]
        self.find_masks()
        self.begin(first)
        self.note()

    def find_masks(self) -> None:
        """Compute the masks of the second moments."""
        self.masks, self.still = {}, []
        for bucket in self.geometry.buckets:
            for index in bucket.params:
                moves = self.root(index) != 0
                if not bool(moves.all()):
                    self.masks[index] = packed(moves)
                if not bool(moves.any()):
                    self.still.append(index)

    def _gathered(self, bucket: FlatBucket, name: str) -> torch.Tensor:
        """Gather an array of a bucket; "": the fp32 master. Collective."""
        own = torch.empty(bucket.shard_count)
        for tile, state in self._tiles(bucket):
            if name:
                own[tile] = self._state.form.array(state, tile.stop - tile.start, name)
            else:
                own[tile] = self._state.form.master(self._store.whole(bucket)[bucket.part][tile], state)
        whole = torch.empty(bucket.count)
        self.comm.all_gather(own, out=whole, name=f"{name or 'masters'} of bucket {bucket.index}")
        return whole

    def _tiles(self, bucket: FlatBucket, store: bool = False) -> Iterator[tuple[slice, torch.Tensor]]:
        for tile in cut(bucket.shard_count):
            with self._state.tile(bucket.index, tile, store=store) as state:
                yield tile, state

    # --- one parameter, one bucket ----------------------------------------------------------------------------

    def inside(self, index: int) -> slice:
        """Return the elements of a parameter in its bucket."""
        place = self.geometry.places[index]
        return slice(place.offset, place.offset + place.count)

    def of(self, index: int, name: str) -> torch.Tensor:
        """Return an array of a parameter, flat."""
        return self.whole[self.geometry.bucket_of(index).index][name][self.inside(index)]

    def root(self, index: int) -> torch.Tensor:
        """Return the root of a parameter's second moment, flat."""
        return self.roots[self.geometry.bucket_of(index).index][self.inside(index)]

    def params_in(self, bucket: FlatBucket, step: LocalUpdate) -> list[int]:
        """Return the parameters of a bucket that ``step`` updates."""
        return [index for index in bucket.params if index in step.numbers]

    def master(self, bucket: FlatBucket) -> torch.Tensor:
        """Return the fp32 master of a whole bucket, to change: the weight itself, or a copy for ``set_master``."""
        return self._form.master(self._store.whole(bucket), self._low[bucket.index])

    def set_master(self, bucket: FlatBucket, master: torch.Tensor) -> None:
        """Store the changed master of a whole bucket."""
        weight = self._store.whole(bucket)
        if self._form.element_nbytes:
            self._form.set_master(weight, self._low[bucket.index], master)
        elif master is not weight:
            weight.copy_(master)

    def write_back(self, bucket: FlatBucket, master: torch.Tensor, *names: str) -> None:
        """Store this rank's shard of ``master``, as ``set_master`` received it, and of the named arrays in the sharded
        state."""
        form, whole, part = self._state.form, self.whole[bucket.index], bucket.part
        for tile, state in self._tiles(bucket, store=True):
            for name in names:
                form.array(state, tile.stop - tile.start, name).copy_(whole[name][part][tile])
            if self._form.element_nbytes:
                form.set_master(self._store.whole(bucket)[part][tile], state, master[part][tile])

    # --- life -------------------------------------------------------------------------------------------------

    def errors(self) -> Iterator[torch.Tensor]:
        """Yield the memory of errors, and of other state that no checkpoint has."""
        yield from ()

    @property
    def nbytes(self) -> tuple[int, int]:
        state = [each for of_bucket in self.whole for each in of_bucket.values()]
        every = (*state, *self.roots, *self._low, *self.masks.values())
        return sum(each.nbytes for each in every), sum(each.nbytes for each in self.errors())

    def close(self) -> None:
        self.whole, self.roots, self._low, self.masks, self.still, self._writes = [], [], [], {}, [], -1
