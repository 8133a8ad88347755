"""First weights: rank 0's become everybody's, bucket by bucket, so that the model never exists a second time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import nn

from zcomm.comm import Communicator
from zcomm.zero import deferred
from zcomm.zero.geometry import FlatBucket, Geometry
from zcomm.zero.on_host import broadcast
from zcomm.zero.parameters import ParameterStore
from zcomm.zero.state import Run, ShardState


def start(
    model: nn.Module | None,
    params: Sequence[nn.Parameter],
    names: Sequence[str],
    geometry: Geometry,
    comm: Communicator,
    store: ParameterStore,
    state: ShardState,
    initial: Sequence[Sequence[Run]],
    dtype: torch.dtype,
    device: torch.device,
    taken: set[int],
) -> None:
    """Fill ``store`` and ``state``. Collective.

    params, names: in the numbering of ``geometry``. initial: per trained bucket, what the arrays of this rank's part
    begin as. device: where the model is afterwards. taken: by id(), what other optimizers have: left alone.
    """
    memory = torch.zeros(max((bucket.count for bucket in geometry.every), default=0))
    with torch.no_grad():
        for bucket in geometry.every:
            master = memory[: bucket.count].zero_()
            _first_values(master, params, names, geometry, bucket, comm, store.part(bucket))
            weight = store.begin(bucket)
            if bucket.index < len(initial):
                state.start(bucket.index, weight, master[store.part(bucket)], initial[bucket.index])
            else:
                weight.copy_(master[store.part(bucket)])
            for index in bucket.params:
                deferred.land(params[index], torch.empty(0, dtype=dtype))
            store.commit(bucket, weight)
        if model is not None:
            _start_rest(model, taken | {id(param) for param in params}, comm, dtype, device)
        store.publish()
    comm.barrier(name="weights are there")


def _first_values(
    master: torch.Tensor,
    params: Sequence[nn.Parameter],
    names: Sequence[str],
    geometry: Geometry,
    bucket: FlatBucket,
    comm: Communicator,
    part: slice,
) -> None:
    """Fill ``master`` (zeros), at least ``part`` of it, with rank 0's weights; each rank reads itself what comes from a
    file."""
    reads = {}
    for index in bucket.params:
        waiting = deferred.check(params[index], names[index]) if params[index].device.type == "meta" else None
        if waiting is not None and waiting.read is not None:
            reads[index] = waiting.read
        elif waiting is None or comm.rank == 0:
            geometry.view(master, index).copy_(deferred.value_of(params[index], names[index]))
    if len(reads) < len(bucket.params):
        comm.broadcast(master, root=0, name=f"weights of bucket {bucket.index}")
    for index, read in reads.items():
        place = geometry.places[index]
        low, high = max(place.offset, part.start), min(place.offset + place.count, part.stop)
        if low < high:
            master[low:high] = read(low - place.offset, high - place.offset)


def _start_rest(model: nn.Module, done: set[int], comm: Communicator, dtype: torch.dtype, device: torch.device) -> None:
    """Buffers and parameters that the store does not have: rank 0's, floating ones in the training dtype."""
    for name, param in model.named_parameters():
        if param.device.type == "meta" and id(param) not in done:
            waiting = deferred.check(param, name)
            mine = comm.rank == 0 or waiting.read is not None
            deferred.land(
                param, deferred.value_of(param, name) if mine else torch.empty(param.shape, dtype=param.dtype)
            )
    others = (param for param in model.parameters() if id(param) not in done)
    for tensor in itertools.chain(others, model.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
        tensor.data = tensor.data.contiguous() if device.type == "cpu" else tensor.data.to(device).contiguous()
        broadcast(comm, tensor.data, 0, "buffers")
