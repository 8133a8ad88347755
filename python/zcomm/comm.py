"""Communicator: collectives of the job's ranks on torch tensors.

A tensor or a list of tensors is one operation. Operations of one communicator run in call order on its own progress
thread, and every rank must issue them in the same order; before bytes move, the ranks compare what they called.
Tensors from ``empty`` lie in symmetric memory (every rank has it mapped): collectives on them copy nothing.
Source: owner-computes reduction, docs/algorithms.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch

from zcomm import _core
from zcomm._tensors import check_buffers, core_dtype, spans, tensor_of
from zcomm._work import Work

Buckets = torch.Tensor | Sequence[torch.Tensor]


def _listed(buckets: Buckets) -> list[torch.Tensor]:
    return [buckets] if isinstance(buckets, torch.Tensor) else list(buckets)


def _reduce_op(op: str) -> _core.ReduceOp:
    known = _core.ReduceOp.__members__
    if op not in known:
        raise ValueError(f"op={op!r} is not a reduction; use one of {', '.join(known)}")
    return known[op]


class Communicator:
    """The ranks of a job, in a fixed order. Made by ``zcomm.init``; ``duplicate`` makes further ones."""

    def __init__(self, core: _core.Communicator, mesh: _core.Mesh, local_rank: int) -> None:
        self._core = core
        self._mesh = mesh
        self.rank: int = core.rank
        self.world_size: int = core.world_size
        self.local_rank = local_rank
        self.local_world_size: int = core.world_size

    # --- reductions -------------------------------------------------------------------------------------------

    @overload
    def all_reduce(self, buckets: Buckets, op: str = ..., async_op: Literal[False] = ..., name: str = ...) -> None: ...
    @overload
    def all_reduce(self, buckets: Buckets, op: str, async_op: Literal[True], name: str = ...) -> Work: ...
    @overload
    def all_reduce(self, buckets: Buckets, op: str = ..., *, async_op: Literal[True], name: str = ...) -> Work: ...

    def all_reduce(self, buckets: Buckets, op: str = "sum", async_op: bool = False, name: str = "") -> Work | None:
        """Reduce in place over all ranks.

        buckets: a tensor or a list of contiguous CPU tensors of one dtype; same counts on each rank.
        op: sum, avg, min, max, prod. fp16 and bf16 accumulate in fp32, in rank order, and round once.
        Cost: 2N bytes of memory traffic per rank on symmetric tensors.
        Returns: a Work if ``async_op``. Raises: ValueError, CollectiveMismatch, PeerLost, TimeoutError.
        """
        tensors = _listed(buckets)
        dtype = core_dtype(check_buffers("all_reduce", tensors))
        return self._end(self._core.all_reduce(spans(tensors), dtype, _reduce_op(op), name), tensors, async_op)

    def reduce_scatter(
        self,
        buckets: Buckets,
        op: str = "sum",
        out: Buckets | None = None,
        async_op: bool = False,
        *,
        accumulate: bool = False,
        name: str = "",
    ) -> Buckets | tuple[Buckets, Work]:
        """Reduce, and keep this rank's part.

        Shapes: each bucket of world_size * n elements -> a flat shard of n, elements [rank * n, (rank + 1) * n).
        out: where the shards go; same dtype, or float32 for fp16/bf16 buckets (then nothing is rounded).
        accumulate: add to ``out`` instead of replacing it.
        Returns: the shard(s), or (shard(s), Work) if ``async_op``.
        Raises: ValueError naming count and world_size when they do not divide (padding is BucketLayout's job).
        """
        tensors = _listed(buckets)
        dtype = check_buffers("reduce_scatter", tensors)
        for tensor in tensors:
            if tensor.numel() % self.world_size:
                raise ValueError(
                    f"reduce_scatter: count {tensor.numel()} does not divide by world_size {self.world_size}; "
                    "zcomm.BucketLayout pads"
                )
        if out is None:
            if accumulate:
                raise ValueError("reduce_scatter: accumulate=True needs out")
            shards = [torch.empty(t.numel() // self.world_size, dtype=dtype) for t in tensors]
        else:
            shards = _listed(out)
        out_dtype = check_buffers("reduce_scatter out", shards)
        self._check_counts("reduce_scatter", tensors, shards)
        work = self._core.reduce_scatter(
            spans(tensors), spans(shards), core_dtype(dtype), _reduce_op(op), core_dtype(out_dtype), accumulate, name
        )
        result = shards[0] if isinstance(buckets, torch.Tensor) else shards
        return self._end_with(result, work, (tensors, shards), async_op)

    def all_gather(
        self, shards: Buckets, out: Buckets | None = None, async_op: bool = False, *, name: str = ""
    ) -> Buckets | tuple[Buckets, Work]:
        """Put the shards of all ranks together, in rank order.

        Shapes: each shard of n elements -> a flat bucket of world_size * n.
        out: where the buckets go; a shard may be its own place in ``out``.
        Returns: the bucket(s), or (bucket(s), Work) if ``async_op``. Raises: as all_reduce.
        """
        tensors = _listed(shards)
        dtype = check_buffers("all_gather", tensors)
        if out is None:
            buckets = [torch.empty(t.numel() * self.world_size, dtype=dtype) for t in tensors]
        else:
            buckets = _listed(out)
        if check_buffers("all_gather out", buckets) != dtype:
            raise ValueError(f"all_gather: shards are {dtype}, out is {buckets[0].dtype}")
        self._check_counts("all_gather", buckets, tensors)
        work = self._core.all_gather(spans(tensors), spans(buckets), core_dtype(dtype), name)
        result = buckets[0] if isinstance(shards, torch.Tensor) else buckets
        return self._end_with(result, work, (tensors, buckets), async_op)

    def broadcast(self, buckets: Buckets, root: int = 0, async_op: bool = False, name: str = "") -> Work | None:
        """Copy ``root``'s buckets into everybody's. Same counts and dtype on each rank. Raises: as all_reduce."""
        tensors = _listed(buckets)
        dtype = core_dtype(check_buffers("broadcast", tensors))
        if not 0 <= root < self.world_size:
            raise ValueError(f"broadcast: root={root} is not a rank of a world of size {self.world_size}")
        return self._end(self._core.broadcast(spans(tensors), dtype, root, name), tensors, async_op)

    def barrier(self, name: str = "", async_op: bool = False) -> Work | None:
        """Wait until every rank has called it."""
        return self._end(self._core.barrier(name), None, async_op)

    # --- memory -----------------------------------------------------------------------------------------------

    def empty(self, n: int, dtype: torch.dtype = torch.float32, device: str | None = "cpu") -> torch.Tensor:
        """A flat symmetric tensor of ``n`` elements, zero-filled. Collective: same n on each rank."""
        return self._allocated(n, dtype, device, shared=False)

    def shared_empty(self, n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A flat tensor of ``n`` elements that all ranks of the host share: one memory, zero-filled. Collective."""
        return self._allocated(n, dtype, "cpu", shared=True)

    def _allocated(self, n: int, dtype: torch.dtype, device: str | None, shared: bool) -> torch.Tensor:
        if n < 0:
            raise ValueError(f"empty: n={n} is negative")
        if torch.device(device or "cpu").type != "cpu":
            raise NotImplementedError(f"empty: device={device!r}; this build has symmetric memory on the CPU only")
        core_dtype(dtype)
        allocate = self._core.allocate_shared if shared else self._core.allocate
        return tensor_of(allocate(n * dtype.itemsize), dtype, n)

    def memory(self) -> dict[str, int]:
        """Bytes that this communicator holds on this rank, by kind, and how many allocations it ever made."""
        return dict(self._core.memory())

    # --- life -------------------------------------------------------------------------------------------------

    def duplicate(self) -> Communicator:
        """A second communicator of the same ranks with its own order of calls. Collective."""
        return Communicator(self._core.duplicate(), self._mesh, self.local_rank)

    def close(self) -> None:
        """End pending operations with an error and free everything. Idempotent; not collective."""
        self._core.close()

    # --- helpers ----------------------------------------------------------------------------------------------

    def _check_counts(self, what: str, buckets: list[torch.Tensor], shards: list[torch.Tensor]) -> None:
        if len(buckets) != len(shards):
            raise ValueError(f"{what}: {len(buckets)} bucket(s) but {len(shards)} shard(s)")
        for index, (bucket, shard) in enumerate(zip(buckets, shards, strict=True)):
            if bucket.numel() != shard.numel() * self.world_size:
                raise ValueError(
                    f"{what}: bucket {index} has {bucket.numel()} elements, its shard {shard.numel()}; "
                    f"a shard is 1/{self.world_size} of its bucket"
                )

    @staticmethod
    def _end(core_work: _core.Work, keep_alive: object, async_op: bool) -> Work | None:
        work = Work(core_work, keep_alive)
        if async_op:
            return work
        work.wait()
        return None

    @staticmethod
    def _end_with(
        result: Buckets, core_work: _core.Work, keep_alive: object, async_op: bool
    ) -> Buckets | tuple[Buckets, Work]:
        work = Work(core_work, keep_alive)
        if async_op:
            return result, work
        work.wait()
        return result
