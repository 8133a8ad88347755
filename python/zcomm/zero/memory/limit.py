"""MemoryLimit: the most memory that a rank's process may hold, kept by the choice of units, buckets and tiers.

[Note: memory limit] plan.py computes an optimizer's memory before any is allocated. The program's own share is
unknown: the contents of the process are measured, and the program may state its activations. ``choose`` takes the first
setting that fits. Sums of gradients in RAM precede sums on the drive, large units precede small ones, and large buckets
precede small ones. Weights by rows come last: they change the last bits of a Linear's input gradients.
The remaining memory holds the tensors that save most of the drive's work for each byte. Weights in RAM are neither read
twice nor written in a step; optimizer state in RAM is neither read once nor written.
For a model on a device the limit is of host memory, which holds everything that is offloaded. If one rank makes several
passes in a step, sums are on the device ([Note: sums on a device]). They must fit there next to the activations that
the program states.
If nothing fits, construction raises with the largest holders and the smallest limit that works. Afterwards ``Guard``
compares the process's high-water mark with the limit after each step, and logs the largest holders once it is higher.
Both name the parts of a batch (``split_batch``) that lower the activations by as much as is lacking. If blocks run in
parts, units smaller than a block come after all other settings, because each part gathers them again.
Sources: VmRSS and VmHWM of proc(5); mallopt(3).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zcomm.comm.communicator import Communicator
from zcomm.memory import device_streams
from zcomm.memory.device_streams import DeviceLane, Lane
from zcomm.memory.sizes import as_nbytes
from zcomm.memory.split_batch import parts_of
from zcomm.zero.agree import all_values
from zcomm.zero.groups.mesh_comms import MeshComms
from zcomm.zero.layout.sections import NoModel, names_of
from zcomm.zero.layout.tiles import TileForm
from zcomm.zero.materialize.mapped_file import file_range
from zcomm.zero.memory.plan import MemoryPlan, Settings, plan_memory
from zcomm.zero.memory.usage import Memory, in_words
from zcomm.zero.options import GradientTier, Units
from zcomm.zero.parts import TrainState

VARIABLE = "ZCOMM_MEMORY"
_MARGIN = 0.03  # of the limit: for allocators and Python's objects
_UNTOLD = 0.1  # of the limit: for activations if their size is unknown
_FIRST_PASS_NBYTES = 96 << 20  # code, kernels and buffers of torch that the first pass loads, as measured
_UNIT_MB = (512, 256, 128, 64, 32, 16)
_BUCKET_MB = (8.0, 4.0, 2.0, 1.0)
_MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -3, -4, -8  # mallopt's numbers
_MAPPED_NBYTES = 64 << 10  # tensors of at least this size get their own mapping
_MOST_PARTS = 64  # of a batch, to advise
_MOST_MAPPED = 16384  # of the 65,530 mappings that a process may have
_NEVER_WHOLE = (
    "That was before the first step: a model that is built inside of 'with zcomm.zero.Init():' is never whole in memory"
)
_SMALLER = (
    "Smaller batches or checkpointing lower the activations; zcomm.zero.MemoryLimit(..., activations=) keeps room for "
    "them"
)
Holders = dict[str, int]  # bytes, by words


@dataclass(frozen=True)
class MemoryLimit:
    """The most memory that a rank's process may hold: a count of bytes, or text such as "4GiB".

    activations: bytes that the program's forward and backward need (``zcomm.planning.live_memory`` finds them).
    The rest of the limit is spent on weights and state in RAM. None: unknown: a tenth of the limit is reserved for
    them, and nothing is spent.
    device_activations: bytes that they need on the model's device, which then have no part in the limit. The rest of
    its free memory is spent on sums of gradients, if they fit. None: unknown: nothing is spent there.
    Raises: ValueError for an invalid size.
    """

    limit: int | str
    activations: int | str | None = None
    device_activations: int | str | None = None

    def __post_init__(self) -> None:
        _ = self.nbytes, self.activations_nbytes, self.device_activations_nbytes

    @property
    def nbytes(self) -> int:
        """The bytes of ``limit``."""
        return _size("limit", self.limit)

    @property
    def activations_nbytes(self) -> int:
        """The bytes that are reserved for activations."""
        if self.activations is None:
            return int(_UNTOLD * self.nbytes)
        return _size("activations", self.activations) if self.activations else 0

    @property
    def device_activations_nbytes(self) -> int:
        """The bytes of ``device_activations``; 0 if unknown."""
        return _size("device_activations", self.device_activations) if self.device_activations else 0

    @property
    def room(self) -> int:
        """The bytes for the optimizer and the present contents of the process."""
        return int((1 - _MARGIN) * self.nbytes) - self.activations_nbytes

    def holding(self, nbytes: int) -> int:
        """Return the smallest limit with ``nbytes`` of room, with the same activations."""
        if self.activations is None:
            return int(nbytes / (1 - _MARGIN - _UNTOLD)) + 1
        return int((nbytes + self.activations_nbytes) / (1 - _MARGIN)) + 1


def _size(name: str, value: int | str) -> int:
    try:
        return as_nbytes(value)
    except ValueError as error:
        raise ValueError(f"MemoryLimit: {name}={error}") from None


def as_limit(memory: int | str | MemoryLimit | None, local_world_size: int = 1) -> MemoryLimit | None:
    """Return ``memory`` as a limit; None: the rank's part of the host's limit in ZCOMM_MEMORY. Raises: ValueError."""
    if memory is not None:
        return memory if isinstance(memory, MemoryLimit) else MemoryLimit(memory)
    given = os.environ.get(VARIABLE, "")
    try:
        return MemoryLimit(as_nbytes(given) // local_world_size) if given else None
    except ValueError as error:
        raise ValueError(f"environment variable {VARIABLE}: {error}") from None


@contextlib.contextmanager
def divided(memory: int | str | MemoryLimit | None, local_world_size: int) -> Iterator[None]:
    """Name ZCOMM_MEMORY in an error if it gives the limit, because it is of a host, not of a rank."""
    try:
        yield
    except (NotImplementedError, ValueError) as error:
        if memory is None:
            given = os.environ.get(VARIABLE, "")
            error.args = (f"{error} (a rank has {VARIABLE}={given!r} of its host / {local_world_size} ranks)",)
        raise


# --- the choice -----------------------------------------------------------------------------------------------------


def within(
    limit: MemoryLimit,
    model: nn.Module,
    train: TrainState,
    comms: MeshComms,
    bucket_mb: float,
    prefetch: int,
    units: Units,
    device: torch.device | str | None,
    shared: bool,
) -> Settings:
    """Choose the settings of an optimizer that keep ``limit``. Collective. Raises: ValueError if none does."""
    if isinstance(model, NoModel):
        raise ValueError(f"memory={limit.limit!r} needs the model itself, not a list of parameters")
    params = [param for group in train.param_groups for param in group["params"]]
    names = names_of(model, params)
    lane = device_streams.for_params(((names[id(param)], param) for param in params), device)
    room = _device_room(model, lane, limit) if comms.world.world_size == 1 and train.grad_accum > 1 else 0
    if lane.on_device and comms.hops:
        lane.close()
        raise NotImplementedError(
            f"memory={limit.limit!r} with mesh={comms.mesh.describe()} and a model on a device is not available: leave "
            "one of them out"
        )
    lane.close()  # opening it has allocated the driver's host memory, which is measured below
    form = TileForm(train.rule.arrays, train.precision.dtype, train.rule.state_dtype)
    size = (bucket_mb, prefetch, units, shared, train.rule.matrices(train.param_groups), lane.on_device)
    ranks, hops = comms.shard.world_size, comms.hops
    last = lane.on_device and comms.world.world_size == 1 and _adds_last(train)
    groups = 1 if comms.across is None else comms.across.world_size
    more: dict[str, Any] = {"device_room": room, "hops": hops, "last_pass": last}
    more |= {"compression": train.compression, "across": groups, "groups": comms.groups}
    wanted = Settings(train.stage, train.offload, ranks, train.precision, form, *size, **more)
    return choose(model, params, limit, wanted, comms.world)


def _adds_last(train: TrainState) -> bool:
    """Return True if updates of one rank with a device can add the last of several passes ([Note: last pass]). It is
    certain only if "auto" cannot mean "forward", so without a drive."""
    offload = train.offload
    on_host = offload.optimizer == "cpu" and offload.params in (None, "cpu")
    in_step = offload.update == "step" or (offload.update == "auto" and on_host)
    in_step = in_step and not offload.step_behind_forward
    return train.grad_accum > 1 and in_step and train.rule.takes_half and not train.needs_norm


def _device_room(model: nn.Module, lane: Lane, limit: MemoryLimit) -> int:
    """Return the bytes for the optimizer on the lane's device, without activations; 0 if these are unknown."""
    if not isinstance(lane, DeviceLane) or limit.device_activations is None:
        return 0
    inside = sum(param.nbytes for param in model.parameters() if not param.is_meta and param.device == lane.device)
    return max(0, inside + int((1 - _MARGIN) * lane.free_nbytes()) - limit.device_activations_nbytes)


def choose(
    model: nn.Module, trained: Sequence[nn.Parameter], limit: MemoryLimit, wanted: Settings, comm: Communicator
) -> Settings:
    """Choose the settings that keep the limit, from ``wanted`` downwards; the same on all ranks. Collective.

    Limits of ranks may differ: the rank with the least room decides. Raises: ValueError on all ranks if none fits.
    """
    mine = [inside_nbytes(model), limit.limit, limit.activations]
    given = [(nbytes, MemoryLimit(*its)) for nbytes, *its in all_values(comm, mine, "memory in the process")]
    rank = min(range(len(given)), key=lambda other: given[other][1].room - given[other][0])
    inside, limit = given[rank]
    where = "on each rank" if len({its.nbytes for _, its in given}) == 1 else f"on rank {rank}"
    fits, least, parts = None, None, _parts(model)
    for settings in candidates(wanted, parts > 1):
        try:
            found = plan_memory(model, settings, trained)
        except ValueError:  # a module that is larger than a unit may be, and cannot be split
            if settings.units == wanted.units:
                raise
            continue
        if _overflows_device(found, settings, wanted):
            continue
        held = holders(found, settings, inside)
        total = sum(held.values())
        if total <= limit.room:
            fits = settings
            break
        if least is None or total < sum(least.values()):
            least = held
    if fits is None:
        assert least is not None
        raise ValueError(_too_small(limit, where, least, wanted, parts))
    if comm.rank == 0 and _cuts_parts(model, fits, wanted):
        logging.getLogger("zcomm").warning(
            "memory=%r has no room for whole blocks: units have at most %s bytes, so each part of split_batch gathers "
            "them again. Fewer parts, or more memory, lower the bytes that a step reads",
            limit.limit,
            fits.units.max_bytes,
        )
    if fits.units.rows and not wanted.units.rows and comm.rank == 0:
        logging.getLogger("zcomm").warning(
            "memory=%r has no room for the largest weights whole: they are gathered by rows, Units(max_bytes=%s, "
            "rows=True), which changes the last bits of the gradients of their inputs",
            limit.limit,
            fits.units.max_bytes,
        )
    limit_allocator()
    return fits if limit.activations is None else spend(model, trained, fits, limit.room - inside)


def _overflows_device(found: MemoryPlan, settings: Settings, wanted: Settings) -> bool:
    """Return True if sums that the program did not place on the device do not fit there."""
    placed = settings.offload.gradients == "device" != wanted.offload.gradients
    return placed and sum(found.memory["device"].values()) > wanted.device_room


def inside_nbytes(model: nn.Module) -> int:
    """Return the present contents of the process, without the weights on the CPU, which the store replaces. Weights in
    a mapped file are none of them ([Note: mapped files])."""
    held = (p for p in {*model.parameters()} if p.is_cpu and not p.is_meta and file_range(p) is None)
    return max(0, _resident_nbytes() - sum(p.nbytes for p in held))


def _parts(model: nn.Module) -> int:
    return max(parts_of(model).values(), default=1)


def _cuts_parts(model: nn.Module, chosen: Settings, wanted: Settings) -> bool:
    """Return True if units are smaller than a block that runs in parts, and the program did not ask for that."""
    most, item = chosen.units.max_nbytes, chosen.precision.param_nbytes
    if most is None or most == wanted.units.max_nbytes:
        return False
    blocks = (model.get_submodule(name) for name, parts in parts_of(model).items() if parts > 1)
    return any(item * sum(param.numel() for param in block.parameters()) > most for block in blocks)


def candidates(wanted: Settings, in_parts: bool = False) -> Iterator[Settings]:
    """Yield settings that need less and less, ``wanted`` first. A given tier of gradients or ``max_bytes`` is kept.

    Each one with sums in memory follows one with sums on the device, if there may be such. Each one in which backward
    adds all passes follows one with room for the last pass's gradients, if updates can add these. in_parts: blocks run
    in parts, so units smaller than a block come last.
    """
    offload, units = wanted.offload, wanted.units
    swaps = "nvme" in (offload.optimizer, offload.params) and wanted.groups == 1
    lasts = (True, False) if wanted.last_pass and offload.gradients in (None, "cpu") else (False,)
    gradients: list[list[tuple[GradientTier | None, bool]]] = [[(offload.gradients, last) for last in lasts]]
    if offload.gradients is None:
        gradients = [[("device", False), *gradients[0]]] if wanted.device_room else gradients
        gradients += [[("nvme", False)]] if swaps else []
    by_unit = wanted.stage == 3 and offload.params is not None and units.max_bytes is None
    largest = [None, *(mb << 20 for mb in _UNIT_MB if mb << 20 >= units.min_nbytes)] if by_unit else [units.max_bytes]
    buckets = [wanted.bucket_mb, *(mb for mb in _BUCKET_MB if mb < wanted.bucket_mb)]
    ahead = dict.fromkeys((wanted.prefetch, min(1, wanted.prefetch)))
    choices = [(tiers, prefetch, n) for tiers in gradients for prefetch in ahead for n in range(len(largest))]
    if in_parts:
        choices.sort(key=lambda choice: choice[2])
    for tiers, prefetch, number in choices:
        for bucket_mb, (tier, last) in product(buckets, tiers):
            where = replace(offload, gradients=tier)
            size = replace(units, max_bytes=largest[number])
            other: dict[str, Any] = {"prefetch": prefetch, "bucket_mb": bucket_mb, "last_pass": last}
            yield replace(wanted, offload=where, units=size, **other)
    if not by_unit:
        return
    for tiers in gradients:
        for most in largest[1:]:
            for bucket_mb, (tier, last) in product(buckets, tiers):
                where = replace(offload, gradients=tier)
                size = replace(units, max_bytes=most, rows=True)
                other = {"prefetch": min(1, wanted.prefetch), "bucket_mb": bucket_mb, "last_pass": last}
                yield replace(wanted, offload=where, units=size, **other)


def holders(found: MemoryPlan, settings: Settings, inside: int) -> Holders:
    """Return the bytes that a rank will hold in RAM. inside: the present contents of its process."""
    memory = found.memory
    tiers = ("cpu",) if settings.on_device else ("device", "cpu")
    in_flight = 0 if settings.on_device else found.largest_unit_nbytes + 3 * found.largest_bucket_nbytes
    held = {
        "the present contents of the process": inside,
        "libraries that torch loads in its first pass": _FIRST_PASS_NBYTES,
        "units in use, buckets and windows": sum(memory[tier]["slots"] for tier in tiers),
        "second addresses of shared memory": found.mapped_nbytes,
        "gradients that autograd holds": min(in_flight, found.count * settings.precision.param_nbytes),
    }
    if found.matrices_nbytes > held["gradients that autograd holds"]:  # autograd holds no gradients during a step
        del held["gradients that autograd holds"]
        held["matrices that are whole in a step"] = found.matrices_nbytes
    for purpose in ("parameters", "gradients", "optimizer"):
        held[f"{purpose} in RAM"] = sum(memory[tier][purpose] for tier in tiers)
    return {words: nbytes for words, nbytes in held.items() if nbytes}


def spend(model: nn.Module, trained: Sequence[nn.Parameter], chosen: Settings, room: int) -> Settings:
    """Return ``chosen`` with as many weights in RAM as fit into ``room`` bytes, and then as much of the state."""
    if chosen.stage == 3 and chosen.offload.params == "nvme":
        names = [*names_of(model, [*model.parameters()]).values()]

        def with_weights(count: int) -> Settings:
            stay = frozenset(names[len(names) - count :])  # backward, which does most, begins with the last
            tier: Callable[[str, nn.Parameter], str] = lambda name, _: "cpu" if name in stay else "nvme"  # noqa: E731
            return replace(chosen, offload=replace(chosen.offload, params=tier)) if count else chosen

        chosen = with_weights(_most(len(names), lambda count: _fits(model, trained, with_weights(count), room)))
    if chosen.offload.optimizer == "nvme" and chosen.offload.fraction == 1.0:

        def with_state(percent: int) -> Settings:
            return replace(chosen, offload=replace(chosen.offload, fraction=1 - percent / 100))

        chosen = with_state(_most(100, lambda percent: _fits(model, trained, with_state(percent), room)))
    return chosen


def _fits(model: nn.Module, trained: Sequence[nn.Parameter], settings: Settings, room: int) -> bool:
    return sum(holders(plan_memory(model, settings, trained), settings, 0).values()) <= room


def _most(count: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number up to ``count`` that fits; 0 does."""
    low, high = 0, count
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _too_small(limit: MemoryLimit, where: str, held: Holders, wanted: Settings, parts: int) -> str:
    largest = sorted(held.items(), key=lambda item: -item[1])[:3]
    words = ", ".join(f"{in_words(nbytes)} for {what}" for what, nbytes in largest)
    works = -(-limit.holding(sum(held.values())) // 2**20)
    remedy = "" if wanted.stage == 3 and wanted.offload.params else "; stage=3 with offload='nvme' needs least"
    kept = 0 if limit.activations is None or wanted.on_device else limit.activations_nbytes
    more = _more_parts(kept, sum(held.values()) - limit.room)
    if more:
        remedy += f"; zcomm.split_batch(blocks, parts={more * parts}) works, too, with its activations="
    return (
        f"memory={limit.limit!r} ({in_words(limit.nbytes)} {where}) is too small for this model: at least "
        f"{words}; memory='{works}MiB' works{remedy}"
    )


def _more_parts(activations: int, lacking: int) -> int:
    """Return the parts that lower ``activations`` by ``lacking`` bytes, if these are inside of blocks; 0: none do."""
    if not 0 < lacking < activations:
        return 0
    parts = -(-activations // (activations - lacking))
    return parts if parts <= _MOST_PARTS else 0


def limit_allocator() -> None:
    """Return freed tensors to the system, and share arenas between threads, if libc has ``mallopt``.

    A heap keeps holes between live blocks after tensors are freed. With each block of a model that kept an input of 128
    KiB until backward it grew by 0.4 MiB more.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _MAPPED_NBYTES)
        mallopt(_MMAP_MAX, _MOST_MAPPED)
        mallopt(_ARENA_MAX, 2)


# --- afterwards -----------------------------------------------------------------------------------------------------


class NoGuard:
    """Null object: the guard of an optimizer without a limit."""

    limited = False

    @property
    def room(self) -> float:
        """Bytes that the process may still allocate."""
        return math.inf

    def look(self, memory: Callable[[], Memory], built: bool = False) -> None:
        """Log the largest holders if the limit was passed. memory: of the optimizer. built: it was just constructed."""


class Guard(NoGuard):
    """Comparison of the process's peak memory with the limit, after construction and each step. Logs once.

    Construct it before the optimizer allocates: memory that the process freed before is not counted. on_device: the
    model is on a device; only tier "cpu" is host memory. model: for the parts of its batch.
    """

    limited = True

    def __init__(self, limit: MemoryLimit, rank: int, on_device: bool = False, model: nn.Module | None = None) -> None:
        self._limit, self._rank, self._logged = limit, rank, False
        self._model = None if on_device else model  # a device has its activations
        self._inside = 0 if model is None else inside_nbytes(model)
        self._tiers = ("cpu",) if on_device else ("device", "cpu")
        self._before = peak_nbytes() if _resident_nbytes() <= limit.nbytes else 0

    @property
    def room(self) -> float:
        return self._limit.nbytes - _resident_nbytes()

    def look(self, memory: Callable[[], Memory], built: bool = False) -> None:
        peak = peak_nbytes()
        held = peak if peak > self._before else _resident_nbytes()
        if self._logged or held <= self._limit.nbytes:
            return
        self._logged = True
        ours = {
            f"{purpose} of the optimizer": sum(by_tier[tier][purpose] for tier in self._tiers)
            for by_tier in (memory(),)
            for purpose in by_tier["device"]
        }
        rest = "the program and libraries" if built else "the program, its activations and libraries"
        ours[rest] = held - sum(ours.values())
        largest = sorted(((nbytes, what) for what, nbytes in ours.items() if nbytes > 0), reverse=True)[:3]
        advice = _NEVER_WHOLE if built else _SMALLER
        if not built and self._model is not None:
            activations = ours[rest] - self._inside - _FIRST_PASS_NBYTES
            more = _more_parts(activations, held - self._limit.nbytes)
            if more:
                call = f"zcomm.split_batch(blocks, parts={more * _parts(self._model)})"
                advice += f". With {call} activations inside of blocks take no more than the limit"
        logging.getLogger("zcomm").warning(
            "rank %d has held %s, more than memory=%r: %s. %s",
            self._rank,
            in_words(held),
            self._limit.limit,
            ", ".join(f"{in_words(nbytes)} {what}" for nbytes, what in largest),
            advice,
        )


def peak_nbytes() -> int:
    """Return the most memory that this process has ever held."""
    return _status("VmHWM")


def _resident_nbytes() -> int:
    return _status("VmRSS")


def _status(name: str) -> int:
    text = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(f"{name}:"))
