"""First weights: rank 0's become those of all ranks, bucket by bucket, so that the model never exists a second time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from zcomm.comm.communicator import Communicator
from zcomm.zero.layout.flat import FlatBucket, Geometry
from zcomm.zero.layout.sections import Sections
from zcomm.zero.materialize import deferred
from zcomm.zero.optim_state.ram import Run, ShardState
from zcomm.zero.options import Precision
from zcomm.zero.params.stores import ParameterStore
from zcomm.zero.placement import broadcast


def start(
    model: nn.Module | None,
    sections: Sections,
    geometry: Geometry,
    comm: Communicator,
    store: ParameterStore,
    state: ShardState,
    initial: Sequence[Sequence[Run]],
    precision: Precision,
    device: torch.device,
    owned_elsewhere: set[int],
) -> None:
    """Fill ``store`` and ``state``. Collective.

    initial: per trained bucket, what the arrays of this rank's part begin as. device: where the model is afterwards.
    owned_elsewhere: by id(), what other optimizers have: left alone.
    """
    memory = torch.zeros(max((bucket.count for bucket in geometry.every), default=0))
    with torch.no_grad():
        for bucket in geometry.every:
            master = memory[: bucket.count].zero_()
            _first_values(master, sections, geometry, bucket, comm, store.part(bucket))
            weight = store.begin(bucket)
            if bucket.index < len(initial):
                state.start(bucket.index, weight, master[store.part(bucket)], initial[bucket.index])
            else:
                weight.copy_(master[store.part(bucket)])
            for index in bucket.params:
                deferred.materialize(sections.params[index], torch.empty(0, dtype=precision.dtype))
            store.commit(bucket, weight)
        if model is not None:
            _start_rest(model, owned_elsewhere | {id(param) for param in sections.params}, comm, precision, device)
        store.publish()
    comm.barrier(name="weights are there")


def _first_values(
    master: torch.Tensor,
    sections: Sections,
    geometry: Geometry,
    bucket: FlatBucket,
    comm: Communicator,
    part: slice,
) -> None:
    """Fill ``master`` (zeros), at least ``part`` of it, with rank 0's weights; each rank reads itself what comes from a
    file."""
    reads, by_parts = {}, []
    for index in bucket.params:
        param, name = sections.params[index], sections.names[index]
        waiting = deferred.check(param, name) if param.is_meta else None
        if waiting is not None and waiting.read is not None:
            reads[index] = waiting.read
        elif waiting is not None and waiting.part is not None:
            by_parts.append(index)
        elif waiting is None or comm.rank == 0:
            geometry.view(master, index).copy_(deferred.value_of(param, name, comm))
    if len(reads) + len(by_parts) < len(bucket.params):
        comm.broadcast(master, root=0, name=f"weights of bucket {bucket.index}")
    for index in by_parts:
        geometry.view(master, index).copy_(deferred.value_of(sections.params[index], sections.names[index], comm))
    for index, read in reads.items():
        place = geometry.places[index]
        low, high = place.within(part)
        if low < high:
            master[low:high] = read(low - place.offset, high - place.offset)


def _start_rest(
    model: nn.Module, done: set[int], comm: Communicator, precision: Precision, device: torch.device
) -> None:
    """Broadcast what no store has from rank 0: floating parameters in the training dtype, buffers in theirs."""
    for name, param in model.named_parameters():
        if id(param) in done:
            continue
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
        dtype = _buffer_dtype(model.get_submodule(name.rpartition(".")[0]), precision)
        if dtype is not None and buffer.is_floating_point() and buffer.itemsize > 1:  # 8 bits are codes
            buffer.data = _finite_in(buffer.data, dtype)
        _spread(comm, name, buffer, device)


def _buffer_dtype(module: nn.Module, precision: Precision) -> torch.dtype | None:
    """Return the dtype of floating buffers of ``module``; None: they stay. torch takes the running statistics of a norm
    with weights in the dtype of these alone."""
    if precision.buffer_dtype is None and isinstance(module, _NormBase) and module.weight is not None:
        return module.weight.dtype
    return precision.buffer_dtype


def _spread(comm: Communicator, name: str, tensor: torch.Tensor, device: torch.device) -> None:
    data = tensor.data.resolve_conj().resolve_neg()
    tensor.data = data.contiguous() if device.type == "cpu" else data.to(device).contiguous()
    broadcast(comm, tensor.data, 0, f"first value of {name}")


def _finite_in(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``value`` in ``dtype``; what is finite stays so (a mask of the least fp32 would be -inf in 16 bits)."""
    if value.dtype == dtype:
        return value
    limits, cast = torch.finfo(dtype), value.to(dtype)
    return torch.where(value.isfinite(), cast.clamp(limits.min, limits.max), cast)
