"""Options of ZeroOptimizer, checked once: Offload (where state lives), Precision, Units (how stage 3 gathers)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

Tier = Literal["cpu", "nvme"]
TIERS = ("cpu", "nvme")
PLACES = (None, "device", *TIERS)
Placement = Callable[[str, torch.nn.Parameter], str | None]
UnitLike = nn.Module | type[nn.Module] | str


@dataclass(frozen=True)
class Offload:
    """Where state lives between its uses.

    optimizer: tier of the optimizer state: None (device), "cpu" (host memory) or "nvme" (swap files).
    params: tier of the sharded parameters, frozen ones included; stage 3 only.
    Either may be a function of a parameter's name and the parameter, which gives the tier of that one: "device" (or
    None), "cpu" or "nvme"; it must say the same on every rank. (Names are the model's; "parameter.N" without a model.)
    fraction: part of the optimizer state that is offloaded; 1.0 is all of it. The rest stays one tier up: on the
    device beside optimizer="cpu", in host memory beside optimizer="nvme". The bits are the same. On a device it goes by
    whole buckets: the first ones stay, as many as fit into 1 - fraction of the state (a smaller bucket_mb is finer).
    State on a device is stepped there: by the CPU's bits, and by torch's own classes with torch's numbers.
    step_behind_forward: ``step()`` returns before the step is done; modules wait for their new weights in the next
    forward. The bits are the same. For a model on a device in stages 0 to 2. Parameters that are read otherwise than as
    a module's attribute must not be read before that forward has ended, or after ``opt.join()``.
    """

    optimizer: Tier | Placement | None = None
    params: Tier | Placement | None = None
    fraction: float = 1.0
    step_behind_forward: bool = False

    def __post_init__(self) -> None:
        for name, tier in (("optimizer", self.optimizer), ("params", self.params)):
            if not callable(tier) and tier is not None and tier not in TIERS:
                raise ValueError(f"Offload: {name}={tier!r}; use None, 'cpu' or 'nvme', or a function (see its help)")
        if not isinstance(self.fraction, (int, float)) or not 0.0 <= self.fraction <= 1.0:
            raise ValueError(f"Offload: fraction={self.fraction!r} must be a number in [0, 1]")
        if not isinstance(self.step_behind_forward, bool):
            raise ValueError(f"Offload: step_behind_forward={self.step_behind_forward!r} must be True or False")
        if self.fraction != 1.0 and callable(self.optimizer):
            raise ValueError(f"Offload: fraction={self.fraction}, but optimizer= says it parameter by parameter")

    @property
    def rest(self) -> str:
        """Tier of the part of the optimizer state that is not offloaded."""
        return "cpu" if self.optimizer == "nvme" else "device"

    def state_tier(self, name: str, param: torch.nn.Parameter) -> str:
        """Of a parameter's optimizer state. Raises: ValueError for what is no tier."""
        return _placed("optimizer", self.optimizer, name, param)

    def param_tier(self, name: str, param: torch.nn.Parameter) -> str:
        """Of a sharded parameter itself. Raises: ValueError for what is no tier."""
        return _placed("params", self.params, name, param)


def _placed(what: str, place: str | Placement | None, name: str, param: torch.nn.Parameter) -> str:
    tier = place(name, param) if callable(place) else place
    if tier not in PLACES:
        raise ValueError(f"Offload: {what}= gives {tier!r} for {name}; it must be 'device', 'cpu' or 'nvme'")
    return tier or "device"


def as_offload(offload: str | Offload | None, stage: int) -> Offload:
    """The meaning of ``offload``: a tier means the optimizer state and, in stage 3, the parameters."""
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


@dataclass(frozen=True)
class Precision:
    """``dtype`` of parameters and gradients; bytes per parameter: parameters, master beside them, fp32 accumulator.

    travels: dtype of gradients on their way to the accumulators. buffers: dtype of floating buffers; None: as they are.
    """

    name: str
    dtype: torch.dtype
    param_nbytes: int
    master_nbytes: int
    travels: torch.dtype
    grad_nbytes: int = 4
    buffers: torch.dtype | None = None


_PRECISIONS = {
    "fp32": Precision("fp32", torch.float32, 4, 0, torch.float32),
    "bf16": Precision("bf16", torch.bfloat16, 2, 2, torch.bfloat16),
    "fp16": Precision("fp16", torch.float16, 2, 4, torch.float16),
}


def as_precision(precision: str, communication_dtype: str | None = None, buffer_dtype: str | None = None) -> Precision:
    """communication_dtype: of gradients on their way; None: that of training. buffer_dtype: None: as they are."""
    if precision not in _PRECISIONS:
        raise ValueError(f"precision={precision!r}; use 'fp32', 'bf16' or 'fp16'")
    found = _PRECISIONS[precision]
    if buffer_dtype is not None:
        if buffer_dtype not in _PRECISIONS:
            raise ValueError(f"buffer_dtype={buffer_dtype!r}; use None (as they are), 'fp32', 'bf16' or 'fp16'")
        found = replace(found, buffers=_PRECISIONS[buffer_dtype].dtype)
    if communication_dtype is None:
        return found
    if communication_dtype not in _PRECISIONS:
        raise ValueError(
            f"communication_dtype={communication_dtype!r}; use None (that of training), 'fp32', 'bf16' or 'fp16'"
        )
    return replace(found, travels=_PRECISIONS[communication_dtype].dtype)


def check_stage(stage: int) -> int:
    if not isinstance(stage, int) or isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise ValueError(f"stage={stage!r}; use 0 (replicated), 1, 2 or 3")
    return stage


# --- stage 3 by units: which modules are units, which stay whole, how far ahead they are gathered -----------------


@dataclass(frozen=True)
class Units:
    """How stage 3 by units gathers a model. No bit depends on it.

    blocks: None: the outermost repeated blocks (children of ModuleList and Sequential; see layout/unit_policy.py).
    Or modules, classes of modules, or names (of a class, or of a module in the model): the outermost of these are the
    units.
    min_mb: join neighbours of one list until a unit has this many MiB of parameters.
    keep: of the units those (as in ``blocks``; True: all) that stay whole from their first use in a step until
    ``step()``, in memory of their own, instead of giving it to others after forward.
    prefetch_mb: gather as many units ahead as have this many MiB; None: ``prefetch`` units, whatever their size.
    What is in no unit is in the root unit, which stays whole during a step.
    """

    blocks: Sequence[UnitLike] | None = None
    min_mb: float = 0.0
    keep: Sequence[UnitLike] | bool = ()
    prefetch_mb: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("min_mb", self.min_mb), ("prefetch_mb", self.prefetch_mb)):
            if not _is_size(value) and not (value is None and name == "prefetch_mb"):
                raise ValueError(f"Units: {name}={value!r} must be a number of MiB, at least 0")
        for name, given in (("blocks", self.blocks), ("keep", self.keep)):
            if (name, given) == ("blocks", None) or (name == "keep" and isinstance(given, bool)):
                continue
            if not _is_list(given):
                raise ValueError(f"Units: {name}={given!r} must be a list of modules, classes of modules, or names")
        if self.blocks is not None and not self.blocks:
            raise ValueError("Units: blocks=[] would leave all in the root unit; give modules, or None")

    @property
    def prefetch_nbytes(self) -> int | None:
        """``prefetch_mb`` in bytes."""
        return None if self.prefetch_mb is None else int(self.prefetch_mb * 2**20)


def as_units(units: Units | Sequence[UnitLike] | None) -> Units:
    """Return Units, of which a list means ``blocks``. Raises: ValueError."""
    if units is None or isinstance(units, Units):
        return units or Units()
    if not _is_list(units):
        raise ValueError(f"units={units!r} must be None, a list of modules, of their classes or names, or zero.Units")
    return Units(units)


def slot_count(nbytes: Sequence[int], prefetch: int, prefetch_nbytes: int | None) -> int:
    """Count the slots that units of these sizes, in order, need: for what runs, what ran before, what is gathered
    ahead."""
    ahead = prefetch
    if prefetch_nbytes is not None:
        ahead = max((len(_fitting(nbytes[first:], prefetch_nbytes)) for first in range(len(nbytes))), default=0)
    return min(ahead + 2, len(nbytes))


def ahead_of(order: Sequence[int], sizes: Sequence[int], prefetch: int, prefetch_nbytes: int | None) -> Sequence[int]:
    """Choose the units of ``order`` (what comes next) to gather now. sizes: of all units."""
    if prefetch_nbytes is None:
        return order[:prefetch]
    return order[: len(_fitting([sizes[unit] for unit in order[: len(sizes)]], prefetch_nbytes))]


def _fitting(nbytes: Sequence[int], limit: int) -> Sequence[int]:
    """As many from the first on as ``limit`` holds."""
    for count, size in enumerate(nbytes):
        limit -= size
        if limit < 0:
            return nbytes[:count]
    return nbytes


def _is_size(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


def _is_list(given: object) -> bool:
    return isinstance(given, Sequence) and not isinstance(given, str) and all(map(_is_unit, given))


def _is_unit(value: object) -> bool:
    return isinstance(value, (str, nn.Module)) or (isinstance(value, type) and issubclass(value, nn.Module))
