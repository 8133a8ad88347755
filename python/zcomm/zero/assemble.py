"""Assembly of the parts of a ZeroOptimizer."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from zcomm import _core
from zcomm.comm.communicator import Communicator
from zcomm.machine import swap_tuning
from zcomm.memory import device_streams
from zcomm.memory.device_streams import DeviceLane, Lane
from zcomm.memory.swap_file import StrPath, as_paths, close_at_exit, log_fallbacks
from zcomm.zero.agree import ErrorHolder, agree, all_values
from zcomm.zero.cache.swap import AnySwap, NoSwap, Swap
from zcomm.zero.choose import StorePlan, make_state, make_store, reach, state_tiers
from zcomm.zero.format_names import format_names
from zcomm.zero.gradients import choose_transport
from zcomm.zero.gradients.coded import planned_nbytes
from zcomm.zero.gradients.norm import GradientNorm
from zcomm.zero.gradients.reducer import GradientReducer
from zcomm.zero.gradients.sum_ring import drive_nbytes
from zcomm.zero.gradients.transport import ReducePlan
from zcomm.zero.groups.compression import EXACT, align_of, check_compression, encodes_shard, weights_codec
from zcomm.zero.groups.mesh_comms import MeshComms
from zcomm.zero.layout.flat import Geometry
from zcomm.zero.layout.local_param import cut_of
from zcomm.zero.layout.sections import Sections, frozen_of, names_of
from zcomm.zero.layout.tiles import TileForm
from zcomm.zero.layout.unit_policy import large_units, tensors_in
from zcomm.zero.materialize import deferred
from zcomm.zero.materialize.broadcast import sender_of, start
from zcomm.zero.module_hook import Hook
from zcomm.zero.onebit import make_replicas
from zcomm.zero.optim_state.device import StagedState
from zcomm.zero.optim_state.nvme import swap_nbytes
from zcomm.zero.options import Units, check_device_sums, shares_weights
from zcomm.zero.params.device import DeviceStore
from zcomm.zero.params.forward_edits import ForwardEdits
from zcomm.zero.params.rebinder import ParamRebinder
from zcomm.zero.params.stores import ParameterStore
from zcomm.zero.parts import Parts, TrainState
from zcomm.zero.schedule.backward import InBackward
from zcomm.zero.schedule.behind import Behind
from zcomm.zero.schedule.forward import InForward
from zcomm.zero.schedule.from_slots import FromSlots
from zcomm.zero.schedule.legality import NEEDS_UNITS, Place, choose_policy
from zcomm.zero.schedule.scheduler import UpdateScheduler
from zcomm.zero.schedule.transaction import NoTransaction, Transaction
from zcomm.zero.sharded.closed import mark_lost
from zcomm.zero.tensors import shard_io
from zcomm.zero.units.hooks import UnitHooks
from zcomm.zero.units.state_dict import Form, StateDictHooks, form_of
from zcomm.zero.units.store import UnitStore, host_nbytes

logger = logging.getLogger("zcomm")
_POLICIES = {
    "step": UpdateScheduler,
    "forward": InForward,
    "behind": Behind,
    "backward": InBackward,
    "slots": FromSlots,
}


def build_parts(
    model: nn.Module,
    train: TrainState,
    comms: MeshComms,
    undo: ExitStack,
    *,
    nvme_path: StrPath | Sequence[StrPath] | None,
    bucket_nbytes: int,
    prefetch: int,
    overlap: bool,
    share_parameters: bool,
    owned_elsewhere: set[int],
    units: Units,
    device: torch.device | str | None = None,
    last_pass: bool = True,
) -> tuple[Parts, UpdateScheduler]:
    """Build the parts of an optimizer, and the scheduler of its updates. Collective.

    Parameters are numbered section by section, in order of registration. undo: closes acquired resources if this fails.
    owned_elsewhere: by id(), parameters of other optimizers. device: None: the parameters' device. last_pass: there is
    room for the last pass's gradients next to fp32 sums ([Note: last pass]).
    """
    groups, rule = train.param_groups, train.rule
    stage, offload, precision = train.stage, train.offload, train.precision
    job = comms.world
    # Ranks of other backends cannot see each other's memory.
    shared = shares_weights(stage, share_parameters) and comms.shard.backend == "shm" and comms.experts is None
    refused = ErrorHolder()
    with refused.errors():
        params = [param for group in groups for param in group["params"]]
        frozen = frozen_of(model, params, owned_elsewhere) if stage == 3 else []
        lane = _check_params(model, params, frozen, device)
        _check_rule(model, train, lane, comms)
        if comms.hpz:
            _check_hpz(comms, train, shared)
        if comms.experts is not None:
            _check_experts(comms, train)
        if train.sparse is not None:
            train.sparse.check(model, train, comms, lane)
        check_device_sums(offload, lane.on_device, job.world_size)
        if lane.on_device:
            _check_host(job)
            comms.check_device()
            rule.threads = _update_threads(job)
            names = names_of(model, params)
            stay = (offload.param_tier(names[id(param)], param) == "device" for param in (*params, *frozen))
            if stage == 3 and job.world_size == 1 and all(stay):
                stage, frozen = 2, []  # all weights stay on one rank's device: there is nothing to shard
        arena = _core.PinnedArena(page_lock=lane.on_device)  # source and target of a device's copies
        state_arena = _core.PinnedArena(page_lock=False)  # state, most of the memory, never crosses to the device
        item = precision.param_nbytes
        for mark in filter(None, (getattr(module, "mark_experts", None) for module in model.modules())):
            mark()  # new parameters of experts, too
        placements = comms.placements((*params, *frozen))
        sections = Sections(
            model, params, frozen, placements, stage, offload, shared, units, lane.on_device, item, train.sparse or ()
        )
        chosen = units.blocks is not None or units.max_bytes is not None
        text = large_units(sections.choices) if sections.by_unit and not chosen else ""
        if text and job.rank == 0:
            logger.warning(text)
        matrices = {id(param) for number in rule.whole_matrices for param in groups[number]["params"]}
        align = align_of(train.compression, rule.align)
        geometry = sections.geometry(bucket_nbytes, item, align, matrices)
        form = TileForm(rule.arrays, precision.dtype, rule.state_dtype)
        tiers = state_tiers(sections, geometry, offload, lane.on_device)
        on_host = not lane.on_device or "device" not in {*tiers, *(section.weights for section in sections.list)}
        whole = lane.on_device and not sections.by_unit
        units_only = sections.by_unit and not on_host
        place = Place(sections.by_unit and on_host, whole, units_only, sections.trains_from_nvme, job.world_size == 1)
        policy = choose_policy(model, train, place, job.rank)
        if offload.atomic and not (sections.by_unit and on_host):
            raise ValueError(f"Offload: atomic=True {NEEDS_UNITS}")
        if policy == "backward" and not geometry.buckets:
            policy = "forward"
        if policy == "slots" and set(tiers) <= {"device"}:
            policy = "step"  # no gradient leaves the device
        if offload.atomic and policy == "forward" and comms.across is not None:
            raise NotImplementedError(
                f"Offload: atomic=True with updates in forward and mesh={comms.mesh.describe()}: an error in a gather "
                "is known in one shard group only: give update='step' or 'backward', or leave atomic out"
            )
        scheduler = _POLICIES[policy](train)
    swap = _open_everywhere(refused, lambda: _open_swap(geometry, sections, train, comms, form, nvme_path), job)
    undo.callback(swap.close)
    swap.comms = [job]
    comms = comms.with_own_world(undo)
    comm = comms.world
    weights = [sections.list[bucket.section].weights for bucket in geometry.every]
    on_device = frozenset(bucket for bucket, tier in enumerate(tiers) if tier == weights[bucket] == "device")
    on_device, joined = reach(on_device, stage == 3 and "device" in weights, comms, lane)
    store = make_store(
        StorePlan(
            sections,
            geometry,
            joined,
            precision.dtype,
            shared,
            prefetch,
            units,
            arena,
            swap,
            lane,
            scheduler,
            on_device,
            comm.local_world_size,
            weights_codec(train.compression, comms, shared),
            train.compression.differences,
            offload.stored,
        )
    )
    comms = joined if on_device else comms  # otherwise the store owns them
    swap.comms = [job, *comms.every, *(store.gather.every if isinstance(store, UnitStore) else [])]
    counts = [bucket.shard_count for bucket in geometry.buckets]
    state = make_state(counts, tiers, precision.dtype, rule, state_arena, swap, offload.fraction, lane, on_device)
    numbers = {id(param): number for number, group in enumerate(groups) for param in group["params"]}
    trained = sections.params[: geometry.trained_count]
    local = sections.local
    group_of = [numbers[id(param)] for param in trained]
    runs = [geometry.runs(bucket, bucket.part, group_of) for bucket in geometry.buckets]
    param_runs = None
    if rule.indexed:
        each = range(len(trained))
        param_runs = [geometry.runs(bucket, bucket.part, each) for bucket in geometry.buckets]
    values = [rule.initial({**rule.defaults, **group}) for group in groups]
    initial = [[(begin, end, values[group]) for begin, end, group in of_bucket] for of_bucket in runs]
    undo.push(partial(mark_lost, sections.local, [place.shape for place in geometry.places]))
    sender = sender_of(joined, lane)
    start(model, sections, geometry, comms, store, state, initial, precision, lane.device, sender, owned_elsewhere)

    plan = ReducePlan(
        geometry.by_block,
        comms,
        precision.communication_dtype,
        train.compression,
        lambda: train.gradient_factor,
        swap,
        arena,
    )
    sums = swap if offload.gradients == "nvme" else NoSwap()
    if not isinstance(lane, DeviceLane):
        rows = train.sparse.transports(plan, sections.params) if train.sparse else {}
        accumulators = choose_transport.on_host(plan, arena, scheduler, sums, rows)
    else:
        staged = any(isinstance(part, StagedState) for part in state.kinds)
        ready = _weights_ready(store, lane)
        device_sums = offload.gradients == "device"
        once = train.grad_accum == 1 and (rule.takes_half or plan.dtype == torch.float32)
        # If the norm comes before the update, adding up in backward takes less of the time after backward.
        squares = isinstance(store, DeviceStore) or state.is_on_host  # in the pass of the update
        takes = scheduler.in_step and rule.takes_half and not scheduler.norm_decides
        last = last_pass and takes and squares
        accumulators = choose_transport.on_device(
            plan,
            lane,
            store.on_device,
            ready,
            arena,
            staged,
            scheduler,
            sums,
            once,
            last,
            device_sums,
            policy == "slots",
        )
    stays_local = (lambda: rule.is_local(train.param_groups)) if rule.exchanges else None
    reducer = GradientReducer(
        local[: len(trained)],
        sections.names[: len(trained)],
        plan,
        accumulators,
        overlap,
        scheduler,
        lambda: train.gradient_factor,
        stays_local,
    )
    hooks: list[Any] = []
    if isinstance(store, UnitStore):
        hooks = [UnitHooks(model, sections.choices, store.life)]
        store.weights.row_weights.grads = reducer.row_grads
        state_form = _state_dict_form(geometry, precision.dtype, comms)
        hooks += StateDictHooks(model, state_form, comms.data).handles
    bucket_of = {id(param): place.bucket for param, place in zip(trained, geometry.places, strict=False)}
    scheduler.hook_modules(model, bucket_of)
    rebinder = ParamRebinder(
        model, local, sections.names, geometry, store, precision.dtype, lane.device, reducer, scheduler
    )
    watched = local[: len(trained)] if comm.world_size > 1 and not hooks else []
    edits = ForwardEdits(watched, sections.names[: len(watched)], comms)
    parts = Parts(
        model=model,
        names=sections.names,
        cuts=[cut_of(param) for param in local],
        index_of={id(param): index for index, param in enumerate(sections.params)},
        group_of=group_of,
        geometry=geometry,
        comm=comm,
        comms=comms,
        arenas=(arena, state_arena),
        store=store,
        state=state,
        reducer=reducer,
        norm=GradientNorm(comm),
        runs=runs,
        param_runs=param_runs,
        first_index=_first_indices(trained, params, geometry),
        swap=swap,
        rebinder=rebinder,
        model_hooks=[*_hook_model(model, reducer, rebinder), *edits.hook(model), *hooks],
        forward_edits=edits,
        lane=lane,
        updates=scheduler,
        replicas=make_replicas(rule, geometry, comms.world, store, state, sections.names),
    )
    scheduler.start(parts, arena, _make_transaction(parts, train))
    if isinstance(store, UnitStore):
        store.open(sections.names, partial(shard_io.edit, parts), partial(shard_io.whole_weight, parts))
        store.start_thread()  # last, so that a failed construction leaves no thread
    return parts, scheduler


def _make_transaction(parts: Parts, train: TrainState) -> NoTransaction:
    if not train.offload.atomic:
        return NoTransaction()
    assert isinstance(parts.store, UnitStore)
    return Transaction(parts.store, parts.state, parts.swap, parts.comm, train)


def _weights_ready(store: ParameterStore, lane: DeviceLane) -> Any:
    """Return the event after all copies of old weights to the device; units only have ``synchronize``."""
    return store.all_ready if isinstance(store, DeviceStore) else lane.event()


def _open_everywhere(refused: ErrorHolder, open_swap: Callable[[], AnySwap], job: Communicator) -> AnySwap:
    """Return the swap file of ``open_swap`` if all ranks open one, and none has ``refused`` its arguments. Otherwise
    all raise, and no file stays open. Collective."""
    with ExitStack() as undo:
        if refused.error is None:
            with refused.errors():
                undo.callback((swap := open_swap()).close)
        if job.world_size > 1:
            agree(job, refused.error, "ZeroOptimizer", name="arguments and swap file")
        elif refused.error is not None:
            raise refused.error
        undo.pop_all()
    return swap


def _open_swap(
    geometry: Geometry,
    sections: Sections,
    train: TrainState,
    comms: MeshComms,
    form: TileForm,
    nvme_path: StrPath | Sequence[StrPath] | None,
) -> AnySwap:
    """Open the swap file, if there is to be one, before memory is allocated, so that a full disk raises first."""
    offload, compression = train.offload, train.compression
    swaps_sums, swaps_errors = offload.gradients == "nvme", compression.error_tier == "nvme"
    if not sections.uses_nvme and not swaps_sums and not swaps_errors:
        return NoSwap()
    if nvme_path is None:
        what = "error_tier='nvme'" if swaps_errors and not (sections.uses_nvme or swaps_sums) else "offload to 'nvme'"
        raise ValueError(f"{what} needs nvme_path, a directory on the drive to swap to")
    page = _core.page_nbytes()  # extents begin at page boundaries
    shards = [b.shard_count for b in geometry.every if sections.list[b.section].weights == "nvme"]
    nbytes = 0 if offload.stored else sum(count * form.dtype.itemsize + page for count in shards)  # it reserves its own
    counts = [bucket.shard_count for bucket in geometry.buckets]
    tiers = [sections.list[bucket.section].state for bucket in geometry.buckets]
    nbytes += swap_nbytes(counts, tiers, offload.fraction, form)
    if offload.atomic:
        trained = [b.shard_count for b in geometry.buckets if sections.list[b.section].weights == "nvme"]
        nbytes += sum(count * form.dtype.itemsize + page for count in trained)
        nbytes += swap_nbytes(counts, tiers, offload.fraction, form)
    if swaps_sums:
        nbytes += drive_nbytes([bucket.shard_count for bucket in geometry.buckets])
    if swaps_errors:
        groups = 1 if comms.across is None else comms.across.world_size
        nbytes += planned_nbytes(compression, geometry.by_block.buckets, groups, encodes_shard(compression, comms))[1]
    elif not swaps_sums and not shards and not form.element_nbytes:
        return NoSwap()  # a rule without state
    paths = as_paths(nvme_path)
    tuned = swap_tuning.load(paths[0]) if paths else swap_tuning.SwapTuning()
    try:
        swap = Swap(paths, nbytes=nbytes, block_nbytes=tuned.block_nbytes, depth=tuned.depth, atomic=offload.atomic)
    except OSError as error:
        if offload.atomic and error.errno == errno.ENOSPC:
            error.strerror = f"{error.strerror} (Offload(atomic=True) keeps two versions of weights and state)"
        raise
    log_fallbacks(swap)
    close_at_exit(swap)  # also if the rest of construction is interrupted
    return swap


def _hook_model(model: nn.Module, reducer: GradientReducer, rebinder: ParamRebinder) -> list[Any]:
    """Register hooks of the model's forward.

    Before it, Parameters that the program has replaced are put back, so that gradients find their hooks. After it, its
    outputs are hooked: the first gradient arms the reducer for a backward pass."""

    def put_back(module: nn.Module, args: Any) -> None:
        rebinder.put_back(in_forward=True)

    def announce(module: nn.Module, args: Any, output: Any) -> None:
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(lambda grad: reducer.arm())

    return [model.register_forward_pre_hook(Hook(put_back)), model.register_forward_hook(Hook(announce))]


def _state_dict_form(geometry: Geometry, dtype: torch.dtype, comms: MeshComms) -> Form:
    """Choose the form of ``model.state_dict()``: experts of several ranks are no DTensors. Collective."""
    comm = comms.data
    hosts = all_values(comm, [host_nbytes(), comm.local_world_size], "memory of hosts")
    parts = comm.world_size // comms.experts.data.world_size if comms.experts is not None else 1
    count = sum(bucket.count * (parts if bucket.experts else 1) for bucket in geometry.every)
    form = form_of(count * dtype.itemsize, comm.world_size, hosts)
    return Form.ERROR if form is Form.DTENSOR and comms.experts is not None else form


def _first_indices(ordered: Sequence[nn.Parameter], grouped: Sequence[torch.Tensor], geometry: Geometry) -> list[int]:
    """Elements before each parameter in the order of the param groups, which does not depend on the stage."""
    counts = {id(param): place.count for param, place in zip(ordered, geometry.places, strict=False)}
    first: dict[int, int] = {}
    at = 0
    for param in grouped:
        first[id(param)] = at
        at += counts[id(param)]
    return [first[id(param)] for param in ordered]


def _check_host(job: Communicator) -> None:
    """Raise NotImplementedError for a communicator that cannot move host memory."""
    if job._device != "cpu":
        raise NotImplementedError(
            f"ZeroOptimizer reduces gradients in host memory, but backend {job.backend!r} moves tensors on "
            f"{job._device} only; use zcomm.init(backend='auto'), or give comm= another communicator"
        )


def _update_threads(job: Communicator) -> int:
    """Return the threads of an update on the host, for a model on a device: all of this rank's cores but two.

    These are for the thread that issues kernels, and for the communicator's. At least one thread updates.
    """
    cores = len(os.sched_getaffinity(0)) // int(job.local_world_size)
    return max(1, min(_core.threads(), cores - 2))


def _check_hpz(comms: MeshComms, train: TrainState, shared: bool) -> None:
    """Check that the ranks can divide the state of copies ([Note: hpZ]). Raises: ValueError, NotImplementedError."""
    offload = train.offload
    if train.stage != 3:
        raise ValueError(f"hpz=True keeps copies of divided weights, so it needs stage=3, not {train.stage}")
    if comms.across is None:
        raise ValueError(
            f"hpz=True with mesh={comms.mesh.describe()}: copies of the weights need an axis 'replicate' with 2 "
            "ranks or more"
        )
    if train.rule.whole_matrices:
        raise NotImplementedError(f"hpz=True with {train.rule.name}, which needs whole matrices, is not available")
    if not shared:
        raise NotImplementedError(
            "hpz=True needs shard groups of CPU ranks that share their host's memory: one host each, and "
            "share_parameters=True"
        )
    if offload.params == "nvme" or callable(offload.params) or offload.gradients == "nvme":
        raise NotImplementedError("hpz=True with weights or sums of gradients on a drive is not available")


def _check_experts(comms: MeshComms, train: TrainState) -> None:
    """Check that the options allow two placements ([Note: experts]). Raises: NotImplementedError."""
    refused = {
        "hpz=True": comms.hpz,
        "compression=": train.compression != EXACT,
        "gradients='nvme'": train.offload.gradients == "nvme",
        train.rule.name: train.rule.exchanges or train.rule.sums > 0 or bool(train.rule.whole_matrices),
    }
    for option in (option for option, found in refused.items() if found):
        raise NotImplementedError(
            f"{option} with experts on different ranks (mesh={comms.mesh.describe()}) is not available: leave one of "
            "them out"
        )


def _check_rule(model: nn.Module, train: TrainState, lane: Lane, comms: MeshComms) -> None:
    """Check that the rule can update the parameters on their device. Raises: ValueError, NotImplementedError."""
    params = [param for group in train.param_groups for param in group["params"]]
    names = names_of(model, params)
    for number, group in enumerate(train.param_groups):
        for param in group["params"]:
            train.rule.check_param(number, names[id(param)], param)
    if train.rule.whole_matrices or train.rule.sums:
        comms.check_whole(f"{train.rule.name}, which needs whole parameters,")
    if train.rule.exchanges and (comms.shard is not comms.world or comms.hops):
        raise ValueError(
            f"{train.rule.name}: mesh={comms.mesh.describe()}: all ranks exchange moments, and feed different samples: "
            "leave mesh= out, or use AdamW"
        )
    exchanges = train.rule.name if train.rule.exchanges else ""
    check_compression(train.compression, train.stage, comms, lane.on_device, exchanges)
    if train.rule.exchanges and comms.world.backend == "mpi":
        raise NotImplementedError(
            f"{train.rule.name}: the communicator's backend is 'mpi', which has no codecs: use zcomm run or torchrun"
        )
    if train.rule.exchanges and lane.on_device:
        raise NotImplementedError(
            f"{train.rule.name}: the model is on {lane.device}, and signs are exchanged from host memory: train it on "
            "the CPU, or use AdamW"
        )
    if not train.rule.whole_matrices or not lane.on_device:
        return
    kind, offload = train.rule.name, train.offload
    there = [names[id(param)] for param in params if offload.state_tier(names[id(param)], param) == "device"]
    if there or (offload.rest == "device" and offload.fraction < 1.0):
        raise NotImplementedError(
            f"{kind}: optimizer state on a device ({format_names(there) or f'fraction={offload.fraction}'}) is not "
            "available, its matrices are updated on the host: use offload='cpu' or 'nvme', or AdamW"
        )


def _check_params(
    model: nn.Module,
    params: Sequence[nn.Parameter],
    frozen: Sequence[nn.Parameter],
    device: torch.device | str | None,
) -> Lane:
    """Return the lane of the device that holds all of them. Raises: ValueError, NotImplementedError."""
    seen: set[int] = set()
    names = names_of(model, params)
    for number, param in enumerate((*params, *frozen)):
        name = names[id(param)]
        where = f"parameter {number} of shape {tuple(param.shape)}"
        if id(param) in seen:
            raise ValueError(f"{where} is in the param groups twice")
        seen.add(id(param))
        if param.is_meta:
            deferred.check(param, name)
        if not param.dtype.is_floating_point:
            raise ValueError(f"{where} is {param.dtype}; only floating-point parameters can be trained")
    return device_streams.for_params(((names[id(param)], param) for param in (*params, *frozen)), device)
