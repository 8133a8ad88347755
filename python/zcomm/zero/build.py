"""Puts the parts of a ZeroOptimizer together, and takes them apart."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zcomm import _core, swap_tuning
from zcomm.comm import Communicator
from zcomm.offload import StrPath, as_paths, close_at_exit, say_fallbacks
from zcomm.zero import deferred
from zcomm.zero.geometry import FlatBucket, Geometry
from zcomm.zero.gradients import GradientReducer
from zcomm.zero.norm import GradientNorm
from zcomm.zero.options import Offload, Precision
from zcomm.zero.parameters import ParameterStore, PrivateStore, SharedStore
from zcomm.zero.rules import Rule
from zcomm.zero.sources import RamSource, ShardSource, SwapSource
from zcomm.zero.state import RamState, Run, ShardState
from zcomm.zero.swapped import SwappedState, swap_nbytes
from zcomm.zero.tile import TileForm
from zcomm.zero.unit_choice import UnitChoice, choose_units, tensors_in
from zcomm.zero.unit_hooks import UnitHooks
from zcomm.zero.units import UnitStore


@dataclass
class Parts:
    """What one ZeroOptimizer owns. Parameters are numbered in the order of ``names``; ``index_of`` is by id(),
    ``group_of`` by number. ``runs``: per bucket, (begin, end, group) of this rank's part;
    ``param_runs``: with the parameter instead, where the rule is indexed. ``first_index``: by number, elements before
    it in the param groups."""

    model: nn.Module | None
    names: list[str]
    index_of: dict[int, int]
    group_of: list[int]
    geometry: Geometry
    comm: Communicator
    arena: _core.PinnedArena
    store: ParameterStore
    state: ShardState
    reducer: GradientReducer
    norm: GradientNorm
    runs: list[list[tuple[int, int, int]]]
    param_runs: list[list[tuple[int, int, int]]] | None
    first_index: list[int]
    swap: _core.SwapFile | None
    hooks: UnitHooks | None
    output_hook: Any
    save_comm: Communicator | None = None  # of checkpoints in the background; made by the first

    def allocation_count(self) -> int:
        count: int = self.comm.memory()["allocation_count"] + self.arena.stats()["allocation_count"]
        return count

    def close(self) -> None:
        """After failures too: no part waits for another rank."""
        if self.hooks is not None:
            self.hooks.close()
        if self.output_hook is not None:
            self.output_hook.remove()
        self.reducer.close()
        self.store.close()
        self.state.close()
        if self.swap is not None:
            self.swap.close()
        if self.save_comm is not None:
            self.save_comm.close()
        self.comm.close()


def build_parts(
    model: nn.Module | None,
    groups: Sequence[dict[str, Any]],
    job: Communicator,
    rule: Rule,
    *,
    stage: int,
    offload: Offload,
    precision: Precision,
    nvme_path: StrPath | Sequence[StrPath] | None,
    bucket_nbytes: int,
    prefetch: int,
    overlap: bool,
    share_parameters: bool,
) -> Parts:
    """Collective. Parameters are numbered unit by unit, in order of registration."""
    share_parameters = (
        share_parameters and job.backend == "shm"
    )  # others have ranks that cannot see each other's memory
    arena = _core.PinnedArena()
    params = [param for group in groups for param in group["params"]]
    _check_params(params, _names(model, params))
    by_unit = stage == 3 and (offload.params == "nvme" or not share_parameters)
    choices = _choose(model, params) if by_unit else [UnitChoice("all", [], _registered(model, params))]
    ordered = [param for choice in choices for param in choice.params]
    shapes = [[param.shape for param in choice.params] for choice in choices]
    geometry = Geometry(shapes, job.world_size, bucket_nbytes, precision.param_nbytes)
    numbers = {id(param): number for number, group in enumerate(groups) for param in group["params"]}

    form = TileForm(rule.arrays, precision.dtype, rule.state_dtype)
    swaps_state = offload.optimizer == "nvme" and form.element_nbytes > 0
    swap = None
    if swaps_state or offload.params == "nvme":  # before all other memory: a full disk is said first
        assert nvme_path is not None
        paths = as_paths(nvme_path)
        tuned = swap_tuning.load(paths[0]) if paths else swap_tuning.SwapTuning()
        nbytes = _swap_nbytes(geometry, offload, form, stage)
        swap = _core.SwapFile(paths, nbytes=nbytes, block_nbytes=tuned.block_nbytes, depth=tuned.depth)
        say_fallbacks(swap)
        close_at_exit(swap)  # also when what follows is interrupted
    comm = job.duplicate()  # gradients and parameters keep an order of their own beside the caller's collectives

    tier = offload.params or "device"
    store: ParameterStore
    if by_unit:
        source = _source(geometry, precision.dtype, arena, swap, tier)
        units = [choice.name for choice in choices]
        store = UnitStore(ordered, geometry, comm, precision.dtype, units, source, share_parameters, prefetch)
    elif stage >= 1 and share_parameters:
        store = SharedStore(ordered, geometry, comm, precision.dtype)
    else:
        store = PrivateStore(ordered, geometry, comm, precision.dtype, replicated=stage == 0)
    if stage == 3 and tier == "cpu":
        store.tier = "cpu"

    counts = [part.stop - part.start for part in map(store.part, geometry.buckets)]
    state: ShardState
    if swaps_state:
        assert swap is not None
        state = SwappedState(counts, precision.dtype, rule, arena, swap, offload.fraction)
    else:
        state = RamState(counts, precision.dtype, rule, arena, offload)
    group_of = [numbers[id(param)] for param in ordered]
    runs = [geometry.runs(bucket, store.part(bucket), group_of) for bucket in geometry.buckets]
    param_runs = None
    if rule.indexed:
        each = range(len(ordered))
        param_runs = [geometry.runs(bucket, store.part(bucket), each) for bucket in geometry.buckets]
    values = [rule.initial({**rule.defaults, **group}) for group in groups]
    initial = [[(begin, end, values[group]) for begin, end, group in of_bucket] for of_bucket in runs]
    _start(model, ordered, geometry, comm, store, state, initial, precision.dtype)

    names = _names(model, ordered)
    reducer = GradientReducer(ordered, geometry, comm, precision.dtype, stage <= 1, overlap, names)
    hooks = None
    if isinstance(store, UnitStore):
        assert model is not None
        hooks = UnitHooks(model, choices, store)
    return Parts(
        model=model,
        names=names,
        index_of={id(param): index for index, param in enumerate(ordered)},
        group_of=group_of,
        geometry=geometry,
        comm=comm,
        arena=arena,
        store=store,
        state=state,
        reducer=reducer,
        norm=GradientNorm(comm),
        runs=runs,
        param_runs=param_runs,
        first_index=_first_indices(ordered, params, geometry),
        swap=swap,
        hooks=hooks,
        output_hook=None if model is None else model.register_forward_hook(_announcer(reducer)),
    )


def _announcer(reducer: GradientReducer) -> Callable[..., None]:
    """A forward hook of the model: the first tensor of its backward tells the reducer that a pass has begun."""

    def announce(module: nn.Module, args: Any, output: Any) -> None:
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(lambda grad: reducer.arm())

    return announce


def _source(
    geometry: Geometry, dtype: torch.dtype, arena: _core.PinnedArena, swap: _core.SwapFile | None, tier: str
) -> ShardSource:
    if tier != "nvme":
        return RamSource(geometry, dtype, tier, arena)
    assert swap is not None
    return SwapSource(geometry, dtype, arena, swap)


def _first_indices(ordered: Sequence[nn.Parameter], grouped: Sequence[torch.Tensor], geometry: Geometry) -> list[int]:
    """Elements before each parameter in the order of the param groups, which does not depend on the stage."""
    counts = {id(param): place.count for param, place in zip(ordered, geometry.places, strict=True)}
    first: dict[int, int] = {}
    at = 0
    for param in grouped:
        first[id(param)] = at
        at += counts[id(param)]
    return [first[id(param)] for param in ordered]


def _check_params(params: Sequence[torch.Tensor], names: Sequence[str]) -> None:
    seen: set[int] = set()
    for number, (param, name) in enumerate(zip(params, names, strict=True)):
        where = f"parameter {number} of shape {tuple(param.shape)}"
        if id(param) in seen:
            raise ValueError(f"{where} is in the param groups twice")
        seen.add(id(param))
        if param.device.type == "meta":
            deferred.check(param, name)
        elif param.device.type != "cpu":
            raise NotImplementedError(f"{where} is on {param.device}; this version trains on the CPU")
        if not param.dtype.is_floating_point:
            raise ValueError(f"{where} is {param.dtype}; only floating-point parameters can be trained")


def _registered(model: nn.Module | None, params: list[nn.Parameter]) -> list[nn.Parameter]:
    """``params`` in the order of the model, so that the flat index does not depend on the param groups."""
    if model is None:
        return params
    wanted = {id(param) for param in params}
    ordered = [param for param in model.parameters() if id(param) in wanted]
    if len(ordered) != len(params):
        raise ValueError(f"{len(params) - len(ordered)} parameter(s) of the param groups are not the model's")
    return ordered


def _choose(model: nn.Module | None, params: list[nn.Parameter]) -> list[UnitChoice]:
    assert model is not None
    return choose_units(model, _registered(model, params))


def _names(model: nn.Module | None, params: Sequence[nn.Parameter]) -> list[str]:
    names = {id(p): name for name, p in model.named_parameters()} if model is not None else {}
    return [names.get(id(param), f"parameter.{index}") for index, param in enumerate(params)]


def _swap_nbytes(geometry: Geometry, offload: Offload, form: TileForm, stage: int) -> int:
    """What the swap file will hold; extents begin at pages."""
    nbytes = 0
    if offload.optimizer == "nvme":
        counts = [bucket.count if stage == 0 else bucket.shard_count for bucket in geometry.buckets]
        nbytes += swap_nbytes(counts, offload.fraction, form)
    if offload.params == "nvme":
        nbytes += geometry.shard_count * form.dtype.itemsize + len(geometry.buckets) * _core.page_nbytes()
    return nbytes


def _start(
    model: nn.Module | None,
    params: Sequence[nn.Parameter],
    geometry: Geometry,
    comm: Communicator,
    store: ParameterStore,
    state: ShardState,
    initial: Sequence[Sequence[Run]],
    dtype: torch.dtype,
) -> None:
    """Rank 0's weights become everybody's, bucket by bucket, so that the model never exists a second time."""
    names = _names(model, params)
    memory = torch.zeros(max((bucket.count for bucket in geometry.buckets), default=0))
    with torch.no_grad():
        for bucket in geometry.buckets:
            master = memory[: bucket.count].zero_()
            _first_values(master, params, names, geometry, bucket, comm, store.part(bucket))
            weight = store.begin(bucket)
            state.start(bucket.index, weight, master[store.part(bucket)], initial[bucket.index])
            for index in bucket.params:
                deferred.land(params[index], torch.empty(0, dtype=dtype))
            store.commit(bucket, weight)
        if model is not None:
            _start_rest(model, {id(param) for param in params}, comm, dtype)
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


def _start_rest(model: nn.Module, done: set[int], comm: Communicator, dtype: torch.dtype) -> None:
    """Buffers and frozen parameters: rank 0's, floating ones in the training dtype."""
    for name, param in model.named_parameters():
        if param.device.type == "meta" and id(param) not in done:
            waiting = deferred.check(param, name)
            mine = comm.rank == 0 or waiting.read is not None
            deferred.land(
                param, deferred.value_of(param, name) if mine else torch.empty(param.shape, dtype=param.dtype)
            )
    frozen = (param for param in model.parameters() if id(param) not in done)
    for tensor in itertools.chain(frozen, model.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
        tensor.data = tensor.data.contiguous()
        comm.broadcast(tensor.data, root=0, name="buffers")
