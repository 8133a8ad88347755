"""Updates made of whole matrices, and norms over whole parameters, which ranks have in parts.

WholeMatrices is for a rule that has ``whole_matrices``, WholeNorms for one that has ``sums``.
[Note: whole matrices] Matrix n, in the order of the param groups, belongs to rank n % world_size. A batch is as many
buckets, in the order of the step, as have a matrix for each rank. Each rank computes its parts of a batch
(``Rule.part_of``). Rounds follow. In each, every rank gathers one of its matrices, computes the update, and scatters it
to the ranks that keep its parts. These are two all_to_all.
Memory: this rank's parts of a batch, and one whole matrix with the workspace of its update. Bits do not depend on
stage, tier or bucket size, because each matrix is whole, and its rank does not depend on them.
The sums of squares of norms are exact ([Note: gradient norm]), so norms do not depend on the boundaries of shards. The
host or the device adds them up, next to the parts. One integer all_reduce adds the sums of all ranks.
Thread rule: the thread of the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from zcomm import _core
from zcomm.comm.communicator import Communicator
from zcomm.comm.tensors import core_dtype
from zcomm.memory.device_streams import Lane
from zcomm.zero.layout.flat import FlatBucket
from zcomm.zero.parts import Parts
from zcomm.zero.rules.rule import Rule, Update
from zcomm.zero.tensors.shard_io import pieces

_NAME = "matrices of the update"
_NONE = torch.empty(0, dtype=torch.uint8)


class WholeMatrices:
    """The matrices of one optimizer, and the ranks that they belong to."""

    def __init__(self, parts: Parts, rule: Rule) -> None:
        self._parts, self._rule = parts, rule
        every = [index for index in range(parts.geometry.trained_count) if parts.group_of[index] in rule.whole_matrices]
        every.sort(key=parts.first_index.__getitem__)
        self._error: BaseException | None = None
        self._owner_of = {index: number % parts.comms.shard.world_size for number, index in enumerate(every)}

    def batches(self, buckets: Iterable[FlatBucket]) -> Iterator[list[FlatBucket]]:
        """Cut ``buckets`` into batches."""
        return matrix_batches(buckets, self._owner_of, self._parts.comms.shard.world_size)

    def parts_of(
        self, batch: Sequence[FlatBucket], hyper_of: Callable[[int], Any], grad_of: Callable[[FlatBucket], torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """Compute this rank's flat parts of a batch's matrices. hyper_of: a parameter's; None: it is skipped. Local."""
        found: dict[int, torch.Tensor] = {}
        for bucket in batch:
            for index in bucket.params:
                hyper = hyper_of(index) if index in self._owner_of else None
                if hyper is not None:
                    found[index] = self._part(bucket, index, hyper, grad_of(bucket))
        return found

    def _part(self, bucket: FlatBucket, index: int, hyper: Any, grad: torch.Tensor) -> torch.Tensor:
        mine = self._range(index, bucket.own)
        part = torch.empty(mine.stop - mine.start, dtype=self._rule.matrix_dtype(hyper))
        state = self._parts.state
        for piece in pieces(self._parts, index):
            with state.tile(bucket.index, piece.tile) as tile:
                inside = slice(piece.flat.start - mine.start, piece.flat.stop - mine.start)
                part[inside] = self._rule.part_of(state.form, tile, grad[piece.tile], piece.inside, hyper)
        return part

    def _range(self, index: int, number: int) -> slice:
        """Return the elements of a matrix in shard ``number`` of its bucket."""
        parts, place = self._parts, self._parts.geometry.places[index]
        begin, end = place.within(parts.geometry.bucket_of(index).shard(number))
        return slice(begin - place.offset, max(begin, end) - place.offset)

    def updates(self, local: dict[int, torch.Tensor], hyper_of: Callable[[int], Any]) -> dict[int, Update]:
        """Compute the updates of the parts from ``parts_of``, in the same memory. Collective.

        An error of an update does not stop the collective: ``check`` raises it.
        """
        parts = self._parts
        queues: list[list[int]] = [[] for _ in range(parts.comms.shard.world_size)]
        for index in local:
            queues[self._owner_of[index]].append(index)
        for turn in range(max(map(len, queues))):
            self._round([queue[turn] if turn < len(queue) else None for queue in queues], local, hyper_of)
        found = {}
        for index, elements in local.items():
            bucket, place = parts.geometry.bucket_of(index), parts.geometry.places[index]
            begin = self._range(index, bucket.own).start + place.offset - bucket.part.start
            found[index] = Update(begin, elements, place.shape)
        return found

    def check(self) -> None:
        """Raise this rank's error of the last ``updates``."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _round(
        self, chosen: Sequence[int | None], local: dict[int, torch.Tensor], hyper_of: Callable[[int], Any]
    ) -> None:
        """Update one matrix of each rank. chosen: by rank; None: it has none."""
        comm, own = self._parts.comms.shard, chosen[self._parts.comms.shard.rank]
        if comm.world_size == 1 and own is not None:  # its part is the matrix
            local[own] = self._updated(own, local[own], hyper_of(own))
            return
        mine = [_NONE if index is None else local[index].view(torch.uint8) for index in chosen]
        matrix = None
        if own is not None:
            matrix = torch.empty(self._parts.geometry.places[own].count, dtype=local[own].dtype)
        comm.all_to_all(self._cut(own, matrix), mine, name=_NAME)
        if own is not None and matrix is not None:
            matrix = self._updated(own, matrix, hyper_of(own))
        comm.all_to_all(mine, self._cut(own, matrix), name=_NAME)

    def _updated(self, index: int, matrix: torch.Tensor, hyper: Any) -> torch.Tensor:
        """Return the flat update of a whole flat matrix; zeros after an error."""
        try:
            update = self._rule.whole_update(matrix.view(self._parts.geometry.places[index].shape), hyper)
            return update.contiguous().view(-1)
        except BaseException as error:
            self._error = self._error or error
            return torch.zeros_like(matrix)

    def _cut(self, index: int | None, matrix: torch.Tensor | None) -> list[torch.Tensor]:
        """Cut a whole matrix into the bytes of each rank's part."""
        if index is None or matrix is None:
            return [_NONE] * self._parts.comms.shard.world_size
        numbers = range(self._parts.geometry.bucket_of(index).parts)
        return [matrix[self._range(index, number)].view(torch.uint8) for number in numbers]


Norms = tuple[float, ...]


class WholeNorms:
    """``sums`` norms of each of ``params`` parameters. Memory: 560 bytes for each."""

    def __init__(self, comm: Communicator, params: int, sums: int, lane: Lane) -> None:
        self._comm, self._sums, self._lane = comm, sums, lane
        self._host = [_core.ExactSum() for _ in range(params * sums)]
        self._there: torch.Tensor | None = None  # words of the sums on the device; made by the first

    def begin(self) -> None:
        """Make all sums zero."""
        for each in self._host:
            each.clear()
        if self._there is not None:
            self._there.zero_()

    def add(self, param: int, terms: Sequence[torch.Tensor]) -> None:
        """Add the squares of ``terms``, flat in host memory, to the sums of a parameter."""
        for number, term in enumerate(terms, param * self._sums):
            self._host[number].add_squares(term.data_ptr(), core_dtype(term.dtype), term.numel())

    def add_on(self, stream: Any, param: int, terms: Sequence[torch.Tensor]) -> None:
        """Queue the same on torch's ``stream``, for terms in the device's memory."""
        if self._there is None:
            count = len(self._host) * _core.EXACT_SUM_WORDS
            self._there = self._lane.empty(count, torch.int64, "sums of squares").zero_()
        for number, term in enumerate(terms, param * self._sums):
            words = self._there.data_ptr() + 8 * _core.EXACT_SUM_WORDS * number
            _core.stream_norm(stream, words, term.data_ptr(), core_dtype(term.dtype), term.numel())

    def end(self) -> list[Norms]:
        """Return the norms of each parameter. Collective: adds the sums of all ranks."""
        if self._there is not None:
            there = self._there.to("cpu").view(-1, _core.EXACT_SUM_WORDS)
            for each, words in zip(self._host, there, strict=True):
                _core.add_words(each, words.data_ptr())
        for each in self._host:
            each.normalize()
        views = [torch.from_numpy(np.asarray(each)) for each in self._host]
        message = torch.stack(views)
        self._comm.all_reduce(message, name="norms of whole parameters")
        for view, words in zip(views, message, strict=True):
            view.copy_(words)
        values = [math.sqrt(each.value()) for each in self._host]
        return [tuple(values[at : at + self._sums]) for at in range(0, len(values), self._sums)]


def matrix_batches(
    buckets: Iterable[FlatBucket], matrices: Collection[int], world_size: int
) -> Iterator[list[FlatBucket]]:
    """Cut ``buckets`` into batches with a matrix for each rank. matrices: their parameters."""
    batch: list[FlatBucket] = []
    count = 0
    for bucket in buckets:
        batch.append(bucket)
        count += sum(index in matrices for index in bucket.params)
        if count >= world_size:
            yield batch
            batch, count = [], 0
    if batch:
        yield batch
