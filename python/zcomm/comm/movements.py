"""The operations of a communicator that move data to, from or between all ranks.

Source: docs/internals/algorithms.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch

from zcomm.comm.calls import Buckets, Calls, listed, old_name
from zcomm.comm.codec import Codec, Errors
from zcomm.comm.tensors import core_dtype, integers, refuse_weights, spans, whole
from zcomm.comm.work import Work


class Movements(Calls):
    def all_gather(
        self,
        shards: Buckets,
        out: Buckets | None = None,
        async_op: bool = False,
        *,
        name: str = "",
        codec: Codec | str | None = None,
        error: Errors | None = None,
        keep: float = 0.0,
        differences: bool = False,
    ) -> Buckets | tuple[Buckets, Work]:
        """Concatenate the shards of all ranks, in rank order.

        Shapes: each shard of n elements -> a flat bucket of world_size * n.
        out: the buckets to write; a shard may be its own part of ``out``, but may not overlap it otherwise.
        codec: a Codec or its name: shards travel encoded, and all ranks, also the shard's own, receive
            decode(encode(shard)), so that their bits are equal. fp32, bf16 or fp16.
        error: error feedback, one for each shard: fp32 or bf16 of its numel. keep: as all_reduce.
        differences: ``out`` holds the result of the last call, or zeros, the same on all ranks. Only the difference
            of a shard to it is encoded, and added: weights that change little do not drift. No shard lies in ``out``.
        Cost with a codec: (P-1) E(n) bytes sent per rank, E: Codec.encoded_nbytes.
        Returns: the bucket(s), or (bucket(s), Work) if ``async_op``. Raises: as all_reduce.
        """
        tensors = listed("all_gather", shards)
        dtype = self._buffers("all_gather", tensors)
        buckets = self._whole(tensors) if out is None else listed("all_gather", out)
        self._check_same_dtype("all_gather", "out", buckets, dtype)
        self._check_counts("all_gather", buckets, tensors)
        result = buckets[0] if isinstance(shards, torch.Tensor) else buckets
        if codec is not None:
            if differences and out is None:
                raise ValueError("all_gather: differences=True needs out: the result of the last call, or zeros")
            coded = self._coded("all_gather", codec, error, keep, differences=differences)
            work = self._core.all_gather(
                spans(tensors), spans(buckets), core_dtype(dtype), name, async_op, coded.coding
            )
            return self._end_with(result, work, (tensors, buckets, coded.keep_alive), [*buckets, *coded.written])
        if error is not None or keep or differences:
            self._refuse_without_codec("all_gather")
        work = self._core.all_gather(spans(tensors), spans(buckets), core_dtype(dtype), name, async_op)
        return self._end_with(result, work, (tensors, buckets), buckets)

    @overload
    def broadcast(
        self, buckets: Buckets, root: int = ..., async_op: Literal[False] = ..., *, name: str = ...
    ) -> None: ...
    @overload
    def broadcast(self, buckets: Buckets, root: int = ..., *, async_op: Literal[True], name: str = ...) -> Work: ...
    @overload
    def broadcast(self, buckets: Buckets, root: int = ..., async_op: bool = ..., *, name: str = ...) -> Work | None: ...

    def broadcast(
        self, buckets: Buckets, root: int = 0, async_op: bool = False, *old: object, name: str = ""
    ) -> Work | None:
        """Copy ``root``'s buckets to all ranks. Counts and dtype are the same. Raises: as all_reduce."""
        name = old_name("broadcast", name, old) if old else name
        tensors = listed("broadcast", buckets)
        dtype = core_dtype(self._buffers("broadcast", tensors))
        self._check_root("broadcast", root)
        work = self._core.broadcast(spans(tensors), dtype, root, name, async_op)
        return self._end(work, tensors, tensors, here=self.rank != root)

    def gather(
        self, shards: Buckets, root: int = 0, out: Buckets | None = None, async_op: bool = False, *, name: str = ""
    ) -> Buckets | tuple[Buckets | None, Work] | None:
        """Concatenate the shards of all ranks at ``root``, in rank order.

        Shapes: each shard of n elements -> at root a flat bucket of world_size * n.
        out: the buckets to write; only root may pass it.
        Returns: the bucket(s) at root and None elsewhere, or (the same, Work) if ``async_op``. Raises: as all_reduce.
        """
        tensors = listed("gather", shards)
        dtype = self._buffers("gather", tensors)
        self._check_root("gather", root)
        buckets: list[torch.Tensor] = []
        if self.rank == root:
            refuse_weights("gather", out)
            buckets = self._whole(tensors) if out is None else listed("gather", out)
            self._check_same_dtype("gather", "out", buckets, dtype)
            self._check_counts("gather", buckets, tensors)
        elif out is not None:
            raise ValueError(f"gather: out is given on rank {self.rank}, but only root={root} receives")
        work = self._core.gather(spans(tensors), spans(buckets), core_dtype(dtype), root, name, async_op)
        result = None if self.rank != root else buckets[0] if isinstance(shards, torch.Tensor) else buckets
        return self._end_with(result, work, (tensors, buckets), buckets)

    def scatter(
        self, out: Buckets, buckets: Buckets | None = None, root: int = 0, async_op: bool = False, *, name: str = ""
    ) -> Work | None:
        """Deal ``root``'s buckets to all ranks.

        Shapes: at root each bucket of world_size * n elements -> on each rank ``out`` of n, elements
        [rank * n, (rank + 1) * n).
        buckets: at root only. Returns: a Work if ``async_op``. Raises: as all_reduce.
        """
        shards = listed("scatter", out)
        dtype = self._buffers("scatter", shards)
        self._check_root("scatter", root)
        tensors: list[torch.Tensor] = []
        if self.rank == root:
            if buckets is None:
                raise ValueError(f"scatter: root={root} must give the buckets")
            tensors = listed("scatter", buckets)
            self._check_same_dtype("scatter", "buckets", tensors, dtype)
            self._check_counts("scatter", tensors, shards)
        elif buckets is not None:
            raise ValueError(f"scatter: buckets are given on rank {self.rank}, but only root={root} sends")
        work = self._core.scatter(spans(tensors), spans(shards), core_dtype(dtype), root, name, async_op)
        return self._end(work, (tensors, shards), shards)

    def all_to_all(
        self,
        out: Buckets,
        inp: Buckets,
        async_op: bool = False,
        *,
        out_splits: Sequence[int] | None = None,
        in_splits: Sequence[int] | None = None,
        name: str = "",
    ) -> Work | None:
        """Send a part to each rank and receive a part from each.

        out, inp: lists of world_size tensors of any counts, by rank. Or one tensor each, cut into world_size parts of
        ``out_splits`` / ``in_splits`` elements (default: equal parts).
        The count that rank a sends to b must equal the count that b expects from a. Splits are integers of any kind
        (numpy's, a tensor's).
        Returns: a Work if ``async_op``. Raises: ValueError, also if out and inp overlap; CollectiveMismatch naming
        both ranks and counts; as all_reduce.
        """
        inputs = self._parts("all_to_all inp", inp, in_splits)
        outputs = self._parts("all_to_all out", out, out_splits)
        dtype = self._buffers("all_to_all inp", inputs)
        self._check_same_dtype("all_to_all", "out", outputs, dtype)
        work = self._core.all_to_all(spans(inputs), spans(outputs), core_dtype(dtype), name, async_op)
        return self._end(work, (inputs, outputs), outputs)

    @overload
    def barrier(self, async_op: Literal[False] = ..., *, name: str = ...) -> None: ...
    @overload
    def barrier(self, async_op: Literal[True], *, name: str = ...) -> Work: ...
    @overload
    def barrier(self, async_op: bool = ..., *, name: str = ...) -> Work | None: ...

    def barrier(self, async_op: bool | str = False, *old: object, name: str = "") -> Work | None:
        """Wait until every rank has called it. Returns: a Work if ``async_op``."""
        if isinstance(async_op, str):  # zcomm 0.1: barrier(name, async_op)
            name, async_op = async_op, bool(old and old[0])
        if self._device != "cpu":
            self._name_stream()
        return self._end(self._core.barrier(name, async_op), None)

    def verify(self, behind: bool = False) -> None:
        """Wait until the ranks have compared their calls so far. Collective, in the order of calls.

        Backend "nccl" compares calls after they have started. The others do so before bytes move: there it returns at
        once. behind: only calls before the last ``verify``, so that a program which calls it before each update seldom
        waits for another rank. Raises: CollectiveMismatch, PeerLost, TimeoutError, as the calls themselves; results of
        the calls that it names and of later ones are not valid then.
        """
        self._core.verify(behind)

    def _whole(self, shards: list[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.empty(t.numel() * self.world_size, dtype=t.dtype, device=t.device) for t in shards]

    def _parts(self, what: str, buckets: Buckets, splits: Sequence[int] | None) -> list[torch.Tensor]:
        if not isinstance(buckets, torch.Tensor):
            tensors = listed(what, buckets)
            if splits is not None:
                raise ValueError(f"{what}: splits are for one tensor, not for a list")
            if len(tensors) != self.world_size:
                raise ValueError(f"{what}: {len(tensors)} tensors, expected one for each of {self.world_size} ranks")
            return tensors
        buckets = whole(what, buckets)
        self._buffers(what, [buckets])
        count = buckets.numel()
        if splits is None:
            if count % self.world_size:
                raise ValueError(
                    f"{what}: count {count} does not divide by world_size {self.world_size}; give the splits"
                )
            splits = [count // self.world_size] * self.world_size
        splits = integers(f"{what}: splits", splits)
        if len(splits) != self.world_size or sum(splits) != count or min(splits) < 0:
            raise ValueError(
                f"{what}: splits {splits} must be {self.world_size} numbers >= 0, and their sum is {count}"
            )
        return list(buckets.view(-1).split(splits))
