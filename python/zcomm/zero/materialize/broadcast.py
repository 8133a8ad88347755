"""First weights: broadcast from rank 0 piece by piece, so that the model never exists a second time.

Memory: a piece in fp32, a piece in its own dtype, and this rank's part of a bucket in the store's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from zcomm.comm.communicator import Communicator
from zcomm.memory.device_streams import DeviceLane, Lane
from zcomm.zero.agree import broadcast, from_root
from zcomm.zero.groups.mesh_comms import MeshComms
from zcomm.zero.layout.flat import FlatBucket, Geometry
from zcomm.zero.layout.local_param import as_local
from zcomm.zero.layout.sections import Sections
from zcomm.zero.layout.tiles import cut
from zcomm.zero.materialize import deferred
from zcomm.zero.optim_state.ram import Run
from zcomm.zero.optim_state.state import OptimState
from zcomm.zero.options import Precision
from zcomm.zero.params.stores import ParameterStore
from zcomm.zero.sharded.closed import closed_value, is_closed, revive

PIECE_TILES = 16


class Sender:
    """Sends rank 0's pieces to all ranks. comm: of the ranks with the same tensors, in host memory."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def broadcast(self, piece: torch.Tensor, name: str) -> None:
        """Broadcast a piece of fp32, in place. Collective."""
        self.comm.broadcast(piece, root=0, name=name)


class DeviceSender(Sender):
    """Sends them between the ranks' devices, by NCCL: along ``joins``, one after the other. Memory: a piece on the
    device."""

    def __init__(self, comm: Communicator, joins: Sequence[Communicator], lane: DeviceLane) -> None:
        super().__init__(comm)
        self._joins, self._lane, self._there = joins, lane, torch.empty(0)

    def broadcast(self, piece: torch.Tensor, name: str) -> None:
        if self._there.numel() < piece.numel():
            self._there = self._lane.empty(piece.numel(), piece.dtype, "first weights")
        there = self._there[: piece.numel()]
        if self.comm.rank == 0:
            there.copy_(piece)
        for join in self._joins:
            join.broadcast(there, root=0, name=name)
        if self.comm.rank != 0:
            piece.copy_(there)


def sender_of(comms: MeshComms, lane: Lane) -> Sender:
    """Choose how first weights travel: between devices on several hosts, else through host memory."""
    all_joined = comms.peers.world_size * comms.peers_across.world_size == comms.data.world_size
    if isinstance(lane, DeviceLane) and all_joined and not all(join.is_symmetric for join in comms.joins):
        first = comms.shard.rank == 0  # of its group: it gets them from rank 0, for all ranks of the group
        return DeviceSender(comms.data, [j for j in comms.joins[::-1] if first or j is comms.peers], lane)
    return Sender(comms.data)


Reader = Callable[[int, int], torch.Tensor]  # of flat elements [begin, end)


def start(
    model: nn.Module,
    sections: Sections,
    geometry: Geometry,
    comms: MeshComms,
    store: ParameterStore,
    state: OptimState,
    initial: Sequence[Sequence[Run]],
    precision: Precision,
    device: torch.device,
    sender: Sender,
    owned_elsewhere: set[int],
) -> None:
    """Fill ``store`` and ``state``. Collective.

    initial: per trained bucket, first values of the arrays of this rank's part. device: of the model afterwards.
    owned_elsewhere: id() of parameters that belong to other optimizers and are not changed.
    """
    memory, begun = torch.empty(0), dict[int, tuple[str, Reader]]()
    with torch.no_grad():
        for bucket in geometry.every:
            own_comms = comms.of(bucket)
            source = sender if own_comms is comms else Sender(own_comms.data)
            values = _FirstValues(sections, geometry, bucket, own_comms, source, begun)
            part, weight = bucket.part, store.begin(bucket)
            for piece in _pieces(bucket, part):
                count = piece.stop - piece.start
                if memory.numel() < count:
                    memory = torch.empty(count)
                master = memory[:count].zero_()
                mine = part.start <= piece.start and piece.stop <= part.stop
                values.fill(master, piece, mine)
                own = slice(piece.start - part.start, piece.stop - part.start)
                if mine and bucket.index < len(initial):
                    state.start(bucket.index, own, weight, master, initial[bucket.index])
                elif mine:
                    weight[own].copy_(master)
            del values
            for index in bucket.params:
                if bucket.index == geometry.spans(index)[-1].bucket:
                    begun.pop(index)
                    _become(sections.local[index], torch.empty(0, dtype=precision.dtype))
            store.commit(bucket, weight)
        _start_rest(model, owned_elsewhere | {id(param) for param in sections.params}, comms, precision, device)
        store.publish()
    comms.world.barrier(name="weights are there")


def _pieces(bucket: FlatBucket, part: slice) -> Iterator[slice]:
    """Cut a bucket into pieces of PIECE_TILES tiles, each in one rank's part."""
    size = part.stop - part.start
    for begin in range(0, bucket.count, max(size, 1)):
        for inside in cut(size, PIECE_TILES):
            yield slice(begin + inside.start, begin + inside.stop)


def _reader_of(param: torch.Tensor, name: str, comms: MeshComms) -> tuple[str, Reader]:
    """Return the source of a parameter's first value, and a reader that reads it from front to back."""
    waiting = deferred.check(param, name) if param.is_meta else None
    kept = closed_value(param)
    if kept is not None:
        return "parts", _in_dtype(param.dtype, partial(kept.read, comms.shard, name))
    if waiting is not None and waiting.read is not None:
        return "file", waiting.read
    if waiting is not None and waiting.part is not None:
        return "parts", _in_dtype(param.dtype, partial(waiting.part.read, comms.data, name))
    return "root", _in_dtype(param.dtype, deferred.reader_of(param, name))


def _become(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    if is_closed(param):
        revive(param, value)
    else:
        deferred.materialize(param, value)


class _FirstValues:
    """Rank 0's weights of a bucket, piece by piece. Values in a file are read by each rank itself.

    begun: readers by parameter, kept for parameters with elements in further buckets.
    """

    def __init__(
        self,
        sections: Sections,
        geometry: Geometry,
        bucket: FlatBucket,
        comms: MeshComms,
        sender: Sender,
        begun: dict[int, tuple[str, Reader]],
    ) -> None:
        self._geometry, self._bucket, self._sender = geometry, bucket, sender
        for index in bucket.params:
            if index not in begun:
                if bucket.experts and sections.local[index].is_meta and not is_closed(sections.local[index]):
                    raise NotImplementedError(
                        f"{sections.names[index]}, an expert's, has no memory: build layers of experts outside of "
                        "zero.Init"
                    )
                begun[index] = _reader_of(sections.local[index], sections.names[index], comms)

        def of(source: str) -> dict[int, Reader]:
            return {index: begun[index][1] for index in bucket.params if begun[index][0] == source}

        self._from_file, self._from_root = of("file"), of("root")
        self._by_parts = of("parts")  # collective

    def fill(self, master: torch.Tensor, piece: slice, mine: bool) -> None:
        """Fill ``master`` (zeros) with ``piece`` of the bucket. mine: it is in this rank's part. Collective."""

        def read(readers: dict[int, Reader]) -> None:
            for index, (low, high) in self._within(readers, piece):
                span = self._geometry.span_in(self._bucket, index)
                at = span.offset - span.begin
                master[low - piece.start : high - piece.start] = readers[index](low - at, high - at)

        if self._within(self._from_root, piece):
            what = f"reading weights of bucket {self._bucket.index}"
            from_root(self._sender.comm, 0, what, lambda: read(self._from_root))
            self._sender.broadcast(master, f"weights {piece.start} on of bucket {self._bucket.index}")
        read(self._by_parts)
        if mine:
            read(self._from_file)

    def _within(self, readers: dict[int, Reader], piece: slice) -> list[tuple[int, tuple[int, int]]]:
        """Return the parameters with elements in ``piece``, and the begin and end of these elements."""
        found = [(index, self._geometry.span_in(self._bucket, index).within(piece)) for index in readers]
        return [(index, (low, high)) for index, (low, high) in found if low < high]


def _in_dtype(dtype: torch.dtype, read: Reader) -> Reader:
    """Round as a ``model.to(dtype)`` after the initialisation would have done."""
    return lambda begin, end: read(begin, end).to(dtype)


def _start_rest(model: nn.Module, done: set[int], comms: MeshComms, precision: Precision, device: torch.device) -> None:
    """Broadcast tensors outside all stores from rank 0: floating parameters in the training dtype, and buffers."""
    for name, given in model.named_parameters():
        if id(given) in done:
            continue
        comm, param = comms.of_param(given).data, as_local(given)
        deferred.forget_mark(param)
        kept = closed_value(param)
        if kept is not None:
            revive(param, kept.gather(comms.of_param(param).shard, name))
        if param.is_meta:
            waiting = deferred.check(param, name)
            mine = comm.rank == 0 or waiting.read is not None or waiting.part is not None
            deferred.materialize(
                param, deferred.value_of(param, name, comm) if mine else torch.empty(param.shape, dtype=param.dtype)
            )
        if param.is_floating_point():
            param.data = param.data.to(precision.dtype)
        _spread(comm, name, param, device)
    for name, buffer in model.named_buffers():
        owner = model.get_submodule(name.rpartition(".")[0])
        comm = comms.data  # of all ranks, except next to parameters of experts
        for param in owner.parameters(recurse=False):
            comm = comms.of_param(param).data
        dtype, buffer = _buffer_dtype(owner, precision), as_local(buffer)
        if dtype is not None and buffer.is_floating_point() and buffer.itemsize > 1:  # 8 bits are codes
            buffer.data = _finite_in(buffer.data, dtype)
        _spread(comm, name, buffer, device)


def _buffer_dtype(module: nn.Module, precision: Precision) -> torch.dtype | None:
    """Return the dtype of floating buffers of ``module``; None: unchanged. torch accepts the running statistics of a
    norm with weights only in the weights' dtype."""
    if precision.buffer_dtype is None and isinstance(module, _NormBase) and module.weight is not None:
        return module.weight.dtype
    return precision.buffer_dtype


def _spread(comm: Communicator, name: str, tensor: torch.Tensor, device: torch.device) -> None:
    data = tensor.data.resolve_conj().resolve_neg()
    tensor.data = data.contiguous() if device.type == "cpu" else data.to(device).contiguous()
    broadcast(comm, tensor.data, 0, f"first value of {name}")


def _finite_in(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``value`` in ``dtype``; finite elements remain finite (fp32's minimum, as in masks, would become -inf)."""
    if value.dtype == dtype:
        return value
    limits, cast = torch.finfo(dtype), value.to(dtype)
    return torch.where(value.isfinite(), cast.clamp(limits.min, limits.max), cast)
