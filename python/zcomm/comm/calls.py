"""Common steps of a communicator's operations: checks of arguments, and the end of an operation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from zcomm import _core
from zcomm.comm.codec import ERROR_DTYPES, Codec, CodedCall, Errors, codec_of, zero_error
from zcomm.comm.tensors import check_buffers, count_written, stands_for_weight, whole
from zcomm.comm.work import DeviceWork, Work, current_stream
from zcomm.hints import did_you_mean

Buckets = torch.Tensor | Sequence[torch.Tensor]
Op = str | dist.ReduceOp | dist.ReduceOp.RedOpType  # a reduction: its name, or torch's
Result = TypeVar("Result")


def listed(what: str, buckets: Buckets) -> list[torch.Tensor]:
    """List the tensors, with sharded weights replaced by their gathered values. One tensor is a list of one.

    Raises: TypeError for anything else.
    """
    if isinstance(buckets, torch.Tensor):
        return [whole(what, buckets)]
    given = list(buckets) if isinstance(buckets, Iterable) and not isinstance(buckets, (str, bytes, dict)) else None
    if given is None:
        raise TypeError(f"{what}: pass a tensor or a list of tensors, got {type(buckets).__name__}")
    for index, tensor in enumerate(given):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{what}: pass a tensor or a list of tensors, element {index} is {type(tensor).__name__}")
    return [whole(what, each) for each in given]


def old_name(what: str, name: str, old: Sequence[object]) -> str:
    """Return the name of a call that gives it by position, as zcomm 0.1 allowed. Raises: TypeError."""
    if len(old) > 1 or name or not isinstance(old[0], str):
        raise TypeError(f"{what}: {len(old)} argument(s) too many; name= is given by keyword")
    return old[0]


REDUCE_OPS: dict[str, _core.ReduceOp] = dict(_core.ReduceOp.__members__)
_OTHER_NAMES = {"mean": "avg", "average": "avg", "add": "sum", "product": "prod", "maximum": "max", "minimum": "min"}


def reduce_op(op: Op) -> _core.ReduceOp:
    """Return the core's name of a reduction. Raises: ValueError naming an unknown one."""
    try:
        return REDUCE_OPS[op]  # type: ignore[index]
    except (KeyError, TypeError):
        pass
    if isinstance(op, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
        kind = str(getattr(op, "op", op)).rpartition(".")[2].lower()
        kind = _OTHER_NAMES.get(kind, kind)
        if kind in REDUCE_OPS:
            return REDUCE_OPS[kind]
    hint = did_you_mean(op, REDUCE_OPS, _OTHER_NAMES)
    raise ValueError(f"op={op!r} is not a reduction; use one of {', '.join(REDUCE_OPS)}{hint}")


def order_option(order: str) -> dict[str, _core.ReduceOrder]:
    """Return the core's option for the order of a sum; none for "any". Raises: ValueError naming an unknown one."""
    if order == "any":
        return {}
    if order == "rank":
        return {"order": _core.ReduceOrder.rank}
    raise ValueError(f'order={order!r}: expected "any" or "rank"')


class Calls:
    """The core communicator behind the operations, and their common steps."""

    rank: int
    world_size: int

    def __init__(
        self, core: _core.Communicator, device: str = "cpu", messenger: _core.Communicator | None = None
    ) -> None:
        self._core = core  # _core.Communicator, or an object with its interface (backend "mpi")
        self._messenger = messenger or core  # of send and recv
        self._device = device  # of all tensors
        self._reads_tensors = device == "cpu" and hasattr(core, "all_reduce_tensor")

    def _buffers(self, what: str, tensors: Sequence[torch.Tensor]) -> torch.dtype:
        """Return the common dtype of ``tensors``, and order the call on their stream. Raises: as check_buffers."""
        dtype = check_buffers(what, tensors, self._device)
        if self._device != "cpu":
            self._name_stream()
        return dtype

    def _name_stream(self) -> None:
        """Order the core's next call after the work already queued on torch's current stream (decision D6)."""
        _core.set_call_stream(current_stream(self._device))

    def _check_root(self, what: str, root: int) -> None:
        if not 0 <= root < self.world_size:
            raise ValueError(f"{what}: root={root} is not a rank of a world of size {self.world_size}")

    def _check_counts(self, what: str, buckets: list[torch.Tensor], shards: list[torch.Tensor]) -> None:
        if len(buckets) != len(shards):
            raise ValueError(f"{what}: {len(buckets)} bucket(s) but {len(shards)} shard(s)")
        for index, (bucket, shard) in enumerate(zip(buckets, shards, strict=True)):
            if bucket.numel() != shard.numel() * self.world_size:
                raise ValueError(
                    f"{what}: bucket {index} has {bucket.numel()} elements, its shard {shard.numel()}; "
                    f"a shard is 1/{self.world_size} of its bucket"
                )

    def _check_same_dtype(self, what: str, side: str, tensors: list[torch.Tensor], dtype: torch.dtype) -> None:
        other = check_buffers(f"{what} {side}", tensors, self._device, is_second=True)
        if other != dtype:
            raise ValueError(f"{what}: tensors are {dtype}, {side} is {other}")

    def _coded(
        self, what: str, codec: Codec | str, error: Errors | tuple[Errors, Errors] | None, keep: float, **more: Any
    ) -> CodedCall:
        """Check the arguments of a call with a codec. Raises: ValueError, TypeError, NotImplementedError."""
        self._coded_parts(f"{what}, codec {codec_of(codec)}")
        return CodedCall(what, codec, error, keep, self._device, **more)

    def _coded_parts(self, what: str) -> int:
        parts = getattr(self._core, "coded_parts", None)
        if parts is None:
            raise NotImplementedError(f"{what}: backend 'mpi' has no codecs; use 'tcp' or 'hierarchical'")
        return int(parts)

    def _refuse_without_codec(self, what: str) -> NoReturn:
        raise ValueError(f"{what}: error, keep, mask and differences belong to a codec; pass codec=, too")

    def codec_errors(
        self, buckets: Buckets, call: str = "reduce_scatter", dtype: torch.dtype = torch.float32
    ) -> Errors | tuple[Errors, Errors]:
        """Make the ``error=`` of a call with a codec: zeros. Local.

        buckets: as the call gets them (all_gather: the shards). call: "reduce_scatter", "all_gather" or "all_reduce";
        the last has a pair (worker, server). dtype: float32 or bfloat16; int8: encoded bytes, 1.008 for an element.
        Returns: flat tensors, in the form of ``buckets``: one, or a list. Raises: ValueError.
        """
        tensors = listed("codec_errors", buckets)
        if call not in ("reduce_scatter", "all_gather", "all_reduce"):
            raise ValueError(f"codec_errors: call={call!r}; expected reduce_scatter, all_gather or all_reduce")
        if dtype not in ERROR_DTYPES.values():
            raise ValueError(f"codec_errors: dtype={dtype}; expected float32, bfloat16 or int8")
        counts = [tensor.numel() for tensor in tensors]
        parts = 1

        def zeros(counts: list[int], steps: list[int]) -> Errors:
            made = [zero_error(dtype, count, step) for count, step in zip(counts, steps, strict=True)]
            return made[0] if isinstance(buckets, torch.Tensor) else made

        if call == "reduce_scatter":
            parts = self._coded_parts("codec_errors")
            counts = [count // self.world_size for count in counts]
        if call != "all_reduce":
            return zeros([count * parts for count in counts], counts)
        steps = [_core.all_reduce_part(count, 0, self.world_size)[1] for count in counts]
        own = [_core.all_reduce_part(count, self.rank, self.world_size)[1] for count in counts]
        return zeros(counts, steps), zeros(own, steps)

    def _end(
        self, core_work: _core.Work | None, keep_alive: object, written: Sequence[torch.Tensor] = (), here: bool = True
    ) -> Work | None:
        """Count the tensors that a call has written, and return its Work, if it has one.

        core_work: None when the call was blocking. written: on this rank, or (``here`` False) only on others.
        """
        work: Work | None = None
        if core_work is not None:
            on_cpu = self._device == "cpu"
            work = Work(core_work, keep_alive) if on_cpu else DeviceWork(core_work, keep_alive, self._device)
            if any(stands_for_weight(tensor) for tensor in written):
                work.wait()  # because count_written() writes the gathered copy back to the weight
        count_written(written, here)
        return work

    def _end_with(
        self, result: Result, core_work: _core.Work | None, keep_alive: object, written: Sequence[torch.Tensor]
    ) -> Result | tuple[Result, Work]:
        work = self._end(core_work, keep_alive, written)
        return result if work is None else (result, work)
