"""The operations of a communicator that reduce: all_reduce, reduce, reduce_scatter.

Each element is rounded once, and all ranks hold the same bits. On one host it is summed in rank order; between hosts
``order="rank"`` asks for that (include/zcomm/dtype.hpp).
Source: docs/internals/algorithms.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

import torch

from zcomm.comm.calls import REDUCE_OPS, Buckets, Calls, Op, listed, old_name, order_option, reduce_op
from zcomm.comm.codec import Codec, Coded, Errors
from zcomm.comm.tensors import check_buffers, core_dtype, increment_versions, refuse_weights, spans
from zcomm.comm.work import Work

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Reductions(Calls):
    @overload
    def all_reduce(
        self,
        buckets: Buckets,
        op: Op = ...,
        async_op: Literal[False] = ...,
        *,
        name: str = ...,
        order: str = ...,
        **coded: Unpack[Coded],
    ) -> None: ...
    @overload
    def all_reduce(
        self,
        buckets: Buckets,
        op: Op,
        async_op: Literal[True],
        *,
        name: str = ...,
        order: str = ...,
        **coded: Unpack[Coded],
    ) -> Work: ...
    @overload
    def all_reduce(
        self,
        buckets: Buckets,
        op: Op = ...,
        *,
        async_op: Literal[True],
        name: str = ...,
        order: str = ...,
        **coded: Unpack[Coded],
    ) -> Work: ...
    @overload
    def all_reduce(
        self,
        buckets: Buckets,
        op: Op = ...,
        async_op: bool = ...,
        *,
        name: str = ...,
        order: str = ...,
        **coded: Unpack[Coded],
    ) -> Work | None: ...

    def all_reduce(
        self,
        buckets: Buckets,
        op: Op = "sum",
        async_op: bool = False,
        *old: object,
        name: str = "",
        order: str = "any",
        codec: Codec | str | None = None,
        error: tuple[Errors, Errors] | None = None,
        keep: float = 0.0,
        mask: Errors | None = None,
    ) -> Work | None:
        """Reduce in place over all ranks.

        buckets: a tensor or a list of contiguous CPU tensors of one dtype; same counts on each rank.
        op: sum, avg, min, max, prod, or torch's ReduceOp. name: for messages. Compared between the ranks. fp16 and bf16
        accumulate in fp32 and round once.
        order: "rank" sums each element in rank order, so that its bits do not depend on sizes. With several ranks on
            several hosts that is: within each host, then in order of the hosts. The same on all ranks.
        Cost: 2N bytes of memory traffic per rank on symmetric tensors.

        codec: a Codec or its name: elements travel encoded ("sign": the 1-bit all_reduce). Rank r sums its part of a
            tensor of n elements in fp32, and sends the sums, encoded once more, to all. Its part is elements
            [r * step, (r + 1) * step), with step = ceil(n / world_size) rounded up to a multiple of 256. The last ranks
            have fewer, or none. Op sum or avg; fp32, bf16 or fp16. All ranks end with equal bits. A single rank encodes
            and decodes twice, too.
        error: (worker, server), error feedback: the residue of encoding is added in the next call. worker: fp32 or bf16
            of n elements. server: the same dtype, with this rank's part of the sums. For a list: a list of each.
            ``codec_errors`` makes both.
        keep: in [0, 1), the errors' moving average: error = keep * error + (1 - keep) * (x + error - decoded).
        mask: only of "sign": uint8, bit k % 8 of byte k // 8 belongs to element k. Elements with a 0 count as 0 and
            decode to 0. The same on all ranks.
        Cost with a codec: 2 (P-1) E(n/P) bytes sent per rank, E: Codec.encoded_nbytes.
        Returns: a Work if ``async_op``. Raises: ValueError, CollectiveMismatch, PeerLost, TimeoutError;
        NotImplementedError if the communicator has no codecs (devices, MPI).
        """
        if old:
            name = old_name("all_reduce", name, old)
        if codec is not None:
            tensors = listed("all_reduce", buckets)
            dtype = core_dtype(self._buffers("all_reduce", tensors))
            coded = self._coded("all_reduce", codec, error, keep, tensors=tensors, mask=mask)
            work = self._core.all_reduce(spans(tensors), dtype, reduce_op(op), name, async_op, coded.coding)
            return self._end(work, (tensors, coded.keep_alive), [*tensors, *coded.written])
        if error is not None or keep or mask is not None:
            self._refuse_without_codec("all_reduce")
        if self._reads_tensors and order == "any":
            # The core checks a plain CPU tensor faster than the lines below.
            try:
                kind = REDUCE_OPS[op]  # type: ignore[index]
            except (KeyError, TypeError):
                kind = reduce_op(op)
            work = self._core.all_reduce_tensor(buckets, kind, name, async_op)
            if work is None:
                increment_versions((buckets,))  # type: ignore[arg-type]
                return None
            if work is not NotImplemented:
                return self._end(work, buckets, (buckets,))  # type: ignore[arg-type]
        tensors = listed("all_reduce", buckets)
        dtype = core_dtype(self._buffers("all_reduce", tensors))
        work = self._core.all_reduce(spans(tensors), dtype, reduce_op(op), name, async_op, **order_option(order))
        return self._end(work, tensors, tensors)

    @overload
    def reduce(
        self, buckets: Buckets, root: int = ..., op: Op = ..., async_op: Literal[False] = ..., *, name: str = ...
    ) -> None: ...
    @overload
    def reduce(
        self, buckets: Buckets, root: int = ..., op: Op = ..., *, async_op: Literal[True], name: str = ...
    ) -> Work: ...
    @overload
    def reduce(
        self, buckets: Buckets, root: int = ..., op: Op = ..., async_op: bool = ..., *, name: str = ...
    ) -> Work | None: ...

    def reduce(
        self, buckets: Buckets, root: int = 0, op: Op = "sum", async_op: bool = False, *old: object, name: str = ""
    ) -> Work | None:
        """Reduce over all ranks into ``root``'s buckets; the other ranks' buckets are unchanged.

        Shapes, ops, errors: as all_reduce. Returns: a Work if ``async_op``.
        """
        name = old_name("reduce", name, old) if old else name
        refuse_weights("reduce", buckets)
        tensors = listed("reduce", buckets)
        dtype = core_dtype(self._buffers("reduce", tensors))
        self._check_root("reduce", root)
        work = self._core.reduce(spans(tensors), dtype, reduce_op(op), root, name, async_op)
        return self._end(work, tensors, tensors if self.rank == root else ())

    def reduce_scatter(
        self,
        buckets: Buckets,
        op: Op = "sum",
        out: Buckets | None = None,
        async_op: bool = False,
        *,
        accumulate: bool = False,
        name: str = "",
        order: str = "any",
        codec: Codec | str | None = None,
        error: Errors | None = None,
        keep: float = 0.0,
    ) -> Buckets | tuple[Buckets, Work]:
        """Reduce, and keep this rank's part.

        Shapes: each bucket of world_size * n elements -> a flat shard of n, elements [rank * n, (rank + 1) * n).
        out: the shards to write; same dtype, or float32 for fp16/bf16 buckets (then nothing is rounded). A shard of the
            same dtype may be its own part of the bucket, without ``accumulate``.
        accumulate: add to ``out`` instead of replacing it. order: as all_reduce.
        codec: a Codec or its name: each rank's part travels encoded, and the decoded parts are added in rank order in
            fp32. Op sum or avg; fp32, bf16 or fp16. A single rank has decode(encode(x)). If ranks share hosts, the
            ranks of a host add exactly, and only the sums of hosts are encoded.
        error: error feedback, one for each bucket: fp32 or bf16 of the bucket's numel; if ranks share hosts, of
            n * (number of hosts). ``codec_errors`` makes it. keep: as all_reduce.
        Cost with a codec: (P-1) E(n) bytes sent per rank, E: Codec.encoded_nbytes.
        Returns: the shard(s), or (shard(s), Work) if ``async_op``.
        Raises: ValueError naming count and world_size when they do not divide (padding is BucketLayout's job).
        """
        tensors = listed("reduce_scatter", buckets)
        dtype = self._buffers("reduce_scatter", tensors)
        for tensor in tensors:
            if tensor.numel() % self.world_size:
                raise ValueError(
                    f"reduce_scatter: count {tensor.numel()} does not divide by world_size {self.world_size}; "
                    "zcomm.BucketLayout pads"
                )
        if out is None:
            if accumulate:
                raise ValueError("reduce_scatter: accumulate=True needs out")
            shards = [torch.empty(t.numel() // self.world_size, dtype=dtype, device=t.device) for t in tensors]
        else:
            shards = listed("reduce_scatter", out)
        out_dtype = core_dtype(check_buffers("reduce_scatter out", shards, self._device, is_second=True))
        self._check_counts("reduce_scatter", tensors, shards)
        result = shards[0] if isinstance(buckets, torch.Tensor) else shards
        if codec is not None:
            coded = self._coded("reduce_scatter", codec, error, keep)
            work = self._core.reduce_scatter(
                spans(tensors),
                spans(shards),
                core_dtype(dtype),
                reduce_op(op),
                out_dtype,
                accumulate,
                name,
                async_op,
                coded.coding,
            )
            return self._end_with(result, work, (tensors, shards, coded.keep_alive), [*shards, *coded.written])
        if error is not None or keep:
            self._refuse_without_codec("reduce_scatter")
        work = self._core.reduce_scatter(
            *(spans(tensors), spans(shards), core_dtype(dtype), reduce_op(op), out_dtype, accumulate, name, async_op),
            **order_option(order),
        )
        return self._end_with(result, work, (tensors, shards), shards)
