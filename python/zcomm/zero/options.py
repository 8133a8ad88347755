"""Options of ZeroOptimizer, checked once: Offload (where state lives), Precision, Units (how stage 3 gathers)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import nn

from zcomm.memory.sizes import as_nbytes
from zcomm.zero.loss_scale import LossScale, LossScaler

Tier = Literal["cpu", "nvme"]
GradientTier = Literal["device", "cpu", "nvme"]
TIERS = ("cpu", "nvme")
PLACES = (None, "device", *TIERS)
Placement = Callable[[str, torch.nn.Parameter], str | None]
UnitLike = nn.Module | type[nn.Module] | str


class StoredForm(Protocol):
    """Another form of weights in their tiers than their own dtype; zcomm.inference has one."""

    def nbytes(self, bucket: Any, geometry: Any, names: Sequence[str], itemsize: int) -> int:
        """Return the bytes of this rank's shard of a bucket."""

    def sources(self, geometry: Any, names: Sequence[str], *arguments: Any) -> dict[int, Any]:
        """Build the sources of buckets, as ``host_sources``."""


@dataclass(frozen=True)
class Offload:
    """Placement of state between its uses.

    optimizer: tier of the optimizer state: None (device), "cpu" (host memory) or "nvme" (swap files).
    params: tier of the sharded parameters, frozen ones included; stage 3 only.
    Either may be a function of a parameter's name and the parameter, which returns its tier: "device" (or None), "cpu"
    or "nvme". It must be equal on every rank. (Names are the model's; "parameter.N" without a model.)
    fraction: part of the optimizer state that is offloaded; 1.0 is all of it. The rest stays one tier up: on the device
    with optimizer="cpu", in host memory with optimizer="nvme". The bits are the same. On a device whole buckets are
    offloaded. The first ones stay, as many as fit into 1 - fraction of the state (a smaller bucket_mb is finer). State
    on a device is updated there: with the CPU's bits, and by torch's own classes with torch's numbers.
    step_behind_forward: True is update="forward".
    gradients: tier of the fp32 sums of gradients. None or "cpu" is memory: the host's, or a device's if the state stays
    on it. On "nvme" 4 bytes per element of the shards are written and read in each micro-step. Memory has three shards
    of the largest bucket. "device", for one rank with a model on a device: gradients that leave it are added up there.
    Only the last micro-step of a step copies them to the host, 4 bytes per element, and the device squares them for the
    norm. This takes 4 bytes of the device's memory per element, and pays with grad_accum > 1. The bits are the same.
    update: when updates run; the bits are the same. "auto", the default, is "forward" in stage 3 by units with trained
    weights or state on a drive. Otherwise, or if optimizer or modules forbid it, it is "step". Rank 0 logs why.
    "step": ``step()`` updates all weights. "forward": it computes the norm and counts, and updates run before the next
    forward needs them. In stage 3 by units that forward updates a unit while it gathers it, which saves a read of the
    weights. This requires optimizers that update element by element. On the CPU it requires parameters on a drive, or
    ranks without shared memory. On a device all parameters and state are offloaded. A module must not change its own
    weights while it runs (``nn.Embedding(max_norm=)``). In stages 0 to 2, for a model on a device, updates run on a
    thread, and modules wait for their new weights. Until that forward has ended, or ``opt.join()`` was called,
    parameters are only read as attributes of their modules. Sums are not on "nvme" then.
    "backward", for weights that are whole on the device of one rank: each gradient is used up in its host slot.
    Host memory holds no others. It needs one backward pass per step, and the step's options at its beginning. It
    excludes gradients=, clip_norm, grad_accum, fp16 and skip_nonfinite. Until ``step()`` the program must not look at
    state or gradients, or change weights or options: it gets an error.
    "backward", for units: from the third step on a bucket is updated in backward. Its sum is not stored. It also needs
    gradients="nvme" (sums of the first two steps), one backward pass per step, and none of clip_norm, grad_accum, fp16
    and skip_nonfinite. Between backward and ``step()`` the program must not look at weights, state or gradients, or
    change options. Backward must not reach a weight twice, or use a unit again after its gradients. A program that does
    so gets an error: in the first two steps before anything has changed.
    atomic: a step happens on all ranks or on none. An error during its updates undoes it, and StepUndoneError is
    raised. Weights, state and counters have their earlier values, and training can go on. With updates in forward the
    next forward raises it. Weights and state count twice in their tiers: on the drive the space for both is reserved at
    construction. No more bytes move. With it update="backward" accepts fp16 and skip_nonfinite, and ``zero_grad()``
    before ``step()`` undoes the updates of a backward pass. For stage 3 by units, as update="forward".
    stored: the form of weights in their tiers, for a model that is not trained; None: as they are.
    """

    optimizer: Tier | Placement | None = None
    params: Tier | Placement | None = None
    fraction: float = 1.0
    step_behind_forward: bool = False
    gradients: GradientTier | None = None
    update: Literal["step", "forward", "backward", "auto"] = "auto"
    atomic: bool = False
    stored: StoredForm | None = None

    def __post_init__(self) -> None:
        for name, tier in (("optimizer", self.optimizer), ("params", self.params)):
            if not callable(tier) and tier is not None and tier not in TIERS:
                raise ValueError(f"Offload: {name}={tier!r}; use None, 'cpu' or 'nvme', or a function (see its help)")
        if not isinstance(self.fraction, (int, float)) or not 0.0 <= self.fraction <= 1.0:
            raise ValueError(f"Offload: fraction={self.fraction!r} must be a number in [0, 1]")
        if not isinstance(self.step_behind_forward, bool):
            raise ValueError(f"Offload: step_behind_forward={self.step_behind_forward!r} must be True or False")
        if self.gradients not in PLACES:
            raise ValueError(f"Offload: gradients={self.gradients!r}; use None, 'device', 'cpu' or 'nvme'")
        if self.update not in ("step", "forward", "backward", "auto"):
            raise ValueError(f"Offload: update={self.update!r}; use 'step', 'forward', 'backward' or 'auto'")
        if self.step_behind_forward and self.update == "backward":
            raise ValueError(
                "Offload: step_behind_forward=True is update='forward'; with update='backward' leave it out"
            )
        if not isinstance(self.atomic, bool):
            raise ValueError(f"Offload: atomic={self.atomic!r} must be True or False")
        if self.fraction != 1.0 and callable(self.optimizer):
            raise ValueError(f"Offload: fraction={self.fraction}, but optimizer= gives the tier by parameter")

    @property
    def rest(self) -> str:
        """Tier of the part of the optimizer state that is not offloaded."""
        return "cpu" if self.optimizer == "nvme" else "device"

    def state_tier(self, name: str, param: torch.nn.Parameter) -> str:
        """Return the tier of a parameter's optimizer state. Raises: ValueError for an invalid tier."""
        return _placed("optimizer", self.optimizer, name, param)

    def param_tier(self, name: str, param: torch.nn.Parameter) -> str:
        """Return the tier of a sharded parameter itself. Raises: ValueError for an invalid tier."""
        return _placed("params", self.params, name, param)


def _placed(what: str, place: str | Placement | None, name: str, param: torch.nn.Parameter) -> str:
    tier = place(name, param) if callable(place) else place
    if tier not in PLACES:
        raise ValueError(f"Offload: {what}= gives {tier!r} for {name}; it must be 'device', 'cpu' or 'nvme'")
    return tier or "device"


def as_offload(offload: str | Offload | None, stage: int) -> Offload:
    """Return the meaning of ``offload``: a tier means the optimizer state and, in stage 3, the parameters."""
    if isinstance(offload, Offload):
        if offload.params is not None and stage < 3:
            raise ValueError(f"offload: params={offload.params!r} needs stage=3, but stage={stage}")
        return offload
    if offload is None or offload == "none":
        return Offload()
    if offload == "cpu":
        return Offload("cpu", "cpu" if stage == 3 else None)
    if offload == "nvme":
        return Offload("nvme", "nvme" if stage == 3 else None)
    raise ValueError(f"offload={offload!r}; use None, 'cpu', 'nvme' or zcomm.Offload(...)")


def check_device_sums(offload: Offload, on_device: bool, world_size: int) -> None:
    """Check that ``gradients="device"`` is possible. on_device: the model is on a device. Raises: ValueError."""
    if offload.gradients != "device":
        return
    if not on_device:
        raise ValueError(
            "Offload: gradients='device' needs a model on a device, and this one is on the CPU: leave gradients= out"
        )
    if world_size > 1:
        raise ValueError(
            f"Offload: gradients='device' needs one rank, but world_size={world_size}: the host adds up gradients of "
            "several ranks; leave gradients= out"
        )


DTypeLike = str | torch.dtype
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_DTYPES: dict[Any, torch.dtype] = {
    **{dtype: dtype for dtype in _NAMES},
    **{name: dtype for dtype, name in _NAMES.items()},
    **{str(dtype).removeprefix("torch."): dtype for dtype in _NAMES},
    **{str(dtype): dtype for dtype in _NAMES},
}
_MASTER_NBYTES = {torch.float32: 0, torch.bfloat16: 2, torch.float16: 4}


@dataclass(frozen=True, init=False)
class Precision:
    """Number formats of training, for ``ZeroOptimizer(precision=)``.

    dtype: of parameters and gradients: "fp32", "bf16", "fp16", or torch's dtype or its name ("bfloat16").
    communication_dtype: of gradients in flight to the accumulators; None: ``dtype``. Sums are fp32.
    buffer_dtype: of floating buffers; None: as they are (statistics of norms with weights: as the weights).
    loss_scale: fp16 only: a ``LossScale`` (dynamic), or a number; None: dynamic.
    skip_nonfinite: skip steps with gradients that are not finite; None: in fp16 only, which always does.

    Raises: ValueError naming the argument.
    """

    dtype: torch.dtype
    communication_dtype: torch.dtype
    buffer_dtype: torch.dtype | None
    loss_scale: LossScale | float | None
    skip_nonfinite: bool

    def __init__(
        self,
        dtype: DTypeLike = "fp32",
        *,
        communication_dtype: DTypeLike | None = None,
        buffer_dtype: DTypeLike | None = None,
        loss_scale: LossScale | float | None = None,
        skip_nonfinite: bool | None = None,
    ) -> None:
        found = _dtype_of("precision", dtype)
        fp16 = found == torch.float16
        if loss_scale is not None and not fp16:
            raise ValueError(f"loss_scale={loss_scale} needs precision='fp16', but precision={_NAMES[found]!r}")
        if skip_nonfinite is not None and not isinstance(skip_nonfinite, bool):
            raise ValueError(f"skip_nonfinite={skip_nonfinite!r} must be True, False or None (in fp16 only)")
        if fp16 and skip_nonfinite is False:
            raise ValueError("skip_nonfinite=False: precision='fp16' skips such steps, its loss scale is found by them")
        travels = found
        if communication_dtype is not None:
            travels = _dtype_of("communication_dtype", communication_dtype, "None (that of training), ")
        buffers = None
        if buffer_dtype is not None:
            buffers = _dtype_of("buffer_dtype", buffer_dtype, "None (as they are), ")
        if fp16:
            LossScaler(loss_scale or LossScale())  # raises
        for name, value in (
            ("dtype", found),
            ("communication_dtype", travels),
            ("buffer_dtype", buffers),
            ("loss_scale", loss_scale),
            ("skip_nonfinite", bool(skip_nonfinite) or fp16),
        ):
            object.__setattr__(self, name, value)

    @property
    def name(self) -> str:
        """Short name of the dtype: fp32, bf16 or fp16."""
        return _NAMES[self.dtype]

    @property
    def param_nbytes(self) -> int:
        """Bytes per parameter of the parameters."""
        return self.dtype.itemsize

    @property
    def master_nbytes(self) -> int:
        """Bytes per parameter of the master next to the parameters."""
        return _MASTER_NBYTES[self.dtype]

    @property
    def grad_nbytes(self) -> int:
        """Bytes per parameter of the accumulators: fp32."""
        return 4


def _dtype_of(what: str, value: Any, others: str = "") -> torch.dtype:
    try:
        return _DTYPES[value]
    except (KeyError, TypeError):
        raise ValueError(f"{what}={value!r}; use {others}'fp32', 'bf16' or 'fp16', or torch's dtype") from None


def as_precision(precision: DTypeLike | Precision, **options: Any) -> Precision:
    """Return ``precision`` as a Precision. options: its other arguments, if it is a dtype; None: not given."""
    if not isinstance(precision, Precision):
        return Precision(precision, **options)
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{name}={value!r} is given together with precision=Precision(...): give it there")
    return precision


def check_stage(stage: int) -> int:
    if not isinstance(stage, int) or isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise ValueError(f"stage={stage!r}; use 0 (replicated), 1, 2 or 3")
    return stage


def shares_weights(stage: int, share_parameters: bool) -> bool:
    """Return True if ranks of a host may have one copy of the weights: stage 0 is stage 1 with private copies."""
    return share_parameters and stage > 0


# --- stage 3 by units: which modules are units, which stay whole, how far ahead they are gathered -----------------


@dataclass(frozen=True)
class Units:
    """Gathers of a model in stage 3 by units. No bit depends on it.

    blocks: None: the outermost repeated blocks (children of ModuleList and Sequential; see layout/unit_policy.py).
    Or modules, classes of modules, or names (of a class, or of a module in the model): the outermost of these are the
    units.
    All other parameters are in the root unit, which stays gathered during a step.
    Sizes are bytes of parameters in training, as a number or text such as "64MiB"; padding comes on top.
    min_bytes: join neighbours of one list until a unit has at least this size. None or 0: never.
    resident: the units (as in ``blocks``; True: all) that stay gathered from their first use in a step until
    ``step()``. They own their memory, and do not release it after forward.
    prefetch_bytes: gather as many units ahead as have this size; None: ``prefetch`` units, whatever their size.
    max_bytes: split units, and the root, at modules inside of them until each has at most this size. Resident units are
    not split. None: never.
    rows: gather the weight of an nn.Linear or nn.Embedding that is larger than ``max_bytes`` in blocks of about 1024
    rows. Buckets hold blocks of the weight and of its gradient: no buffer grows with the weight. The gradient of a
    Linear's input is then summed block by block, and has other last bits.
    leaf: modules (as in ``blocks``, or the model) that are gathered with all modules inside of them, and never split.
    Ranks may then run different modules inside of one (experts, which tokens choose). All ranks call the leaf itself.
    indexed: modules (as in ``blocks``) with weights of three dimensions that are not trained. A forward on one rank
    gathers only the matrices that it indexes (``w[i]``); other uses gather the whole weight.
    """

    blocks: Sequence[UnitLike] | None = None
    min_bytes: int | str | None = None
    resident: Sequence[UnitLike] | bool = ()
    prefetch_bytes: int | str | None = None
    max_bytes: int | str | None = None
    rows: bool = False
    leaf: Sequence[UnitLike] = ()
    indexed: Sequence[UnitLike] = ()

    def __post_init__(self) -> None:
        for name, given in (
            ("blocks", self.blocks),
            ("resident", self.resident),
            ("leaf", self.leaf),
            ("indexed", self.indexed),
        ):
            if (name, given) == ("blocks", None) or (name == "resident" and isinstance(given, bool)):
                continue
            if not _is_list(given):
                raise ValueError(f"Units: {name}={given!r} must be a list of modules, classes of modules, or names")
        if self.blocks is not None and not self.blocks:
            raise ValueError("Units: blocks=[] would leave all in the root unit; give modules, or None")
        if not isinstance(self.rows, bool):
            raise ValueError(f"Units: rows={self.rows!r} must be True or False")
        if self.rows and self.max_bytes is None:
            raise ValueError("Units: rows=True needs max_bytes=: weights that are larger are gathered by rows")
        sizes = self.min_nbytes, self.max_nbytes, self.prefetch_nbytes  # each raises for text that is no size
        if sizes[1] is not None and sizes[0] > sizes[1]:
            raise ValueError(f"Units: min_bytes={self.min_bytes!r} is more than max_bytes={self.max_bytes!r}")

    @property
    def max_nbytes(self) -> int | None:
        """The bytes of ``max_bytes``."""
        return self._nbytes("max_bytes", 1)

    @property
    def min_nbytes(self) -> int:
        """The bytes of ``min_bytes``, 0 if that is None."""
        return self._nbytes("min_bytes") or 0

    @property
    def prefetch_nbytes(self) -> int | None:
        """The bytes of ``prefetch_bytes``."""
        return self._nbytes("prefetch_bytes")

    def _nbytes(self, name: str, least: int = 0) -> int | None:
        size = getattr(self, name)
        if size is None or (type(size) is int and size == 0 and least == 0):
            return size
        try:
            return as_nbytes(size)
        except ValueError as error:
            raise ValueError(f"Units: {name}={error}") from None


def as_units(units: Units | Sequence[UnitLike] | None) -> Units:
    """Return Units; a list means ``blocks``. Raises: ValueError."""
    if units is None or isinstance(units, Units):
        return units or Units()
    if not _is_list(units):
        raise ValueError(f"units={units!r} must be None, a list of modules, of their classes or names, or zero.Units")
    return Units(units)


def slot_count(nbytes: Sequence[int], prefetch: int, prefetch_nbytes: int | None) -> int:
    """Count the slots for units of these sizes, in order: the running one, the last one, and those gathered ahead."""
    ahead = prefetch
    if prefetch_nbytes is not None:
        ahead = max((len(_fitting(nbytes[first:], prefetch_nbytes)) for first in range(len(nbytes))), default=0)
    return min(ahead + 2, len(nbytes))


def slot_sizes(nbytes: Sequence[int], prefetch: int, prefetch_nbytes: int | None) -> list[int]:
    """Return the sizes of these slots: the largest units, because no more are gathered at once."""
    return sorted(nbytes, reverse=True)[: slot_count(nbytes, prefetch, prefetch_nbytes)]


def ahead_of(order: Sequence[int], sizes: Sequence[int], prefetch: int, prefetch_nbytes: int | None) -> Sequence[int]:
    """Choose the units of ``order``, their next uses, to gather now. sizes: of all units."""
    if prefetch_nbytes is None:
        return order[:prefetch]
    return order[: len(_fitting([sizes[unit] for unit in order[: len(sizes)]], prefetch_nbytes))]


def _fitting(nbytes: Sequence[int], limit: int) -> Sequence[int]:
    """Return as many from the first on as ``limit`` holds."""
    for count, size in enumerate(nbytes):
        limit -= size
        if limit < 0:
            return nbytes[:count]
    return nbytes


def _is_list(given: object) -> bool:
    return isinstance(given, Sequence) and not isinstance(given, str) and all(map(_is_unit, given))


def _is_unit(value: object) -> bool:
    return isinstance(value, (str, nn.Module)) or (isinstance(value, type) and issubclass(value, nn.Module))
