"""Rules: one optimizer's arithmetic on the tiles of a shard. FusedRule runs the core's kernels; torch's classes that
have none run through TorchRule (torch_rule.py).

A rule changes a shard element by element, so the boundaries of shards change no bits. It counts steps per param group
(``group["step"]``).
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from zcomm import _core
from zcomm.comm.bucket_layout import ALIGN
from zcomm.optim import CPUSGD, CPUAdagrad, CPUAdam, CPULion
from zcomm.optim.fused import STATE_BLOCK, FusedOptimizer
from zcomm.zero.layout.tiles import TileForm, TilePart, core_shard

SWITCHES = {"foreach", "fused", "capturable", "differentiable"}  # of torch's classes: they choose an implementation


@dataclass(frozen=True)
class Indexed:
    """Hyperparameters of one parameter.

    first: index among all parameters of the shard's element 0 (were it of this one). param: its number. factor:
    measured from the whole parameter, for a rule that has ``sums``. update: of a whole matrix, for a rule that has
    ``whole_matrices``.
    """

    hyper: Any
    first: int
    param: int = 0
    factor: float = 1.0
    update: Update | None = None


@dataclass(frozen=True)
class Update:
    """A shard's part of the update of a whole matrix of ``shape``: flat ``elements``, which begin at element ``begin``
    of the shard."""

    begin: int
    elements: torch.Tensor
    shape: torch.Size


class Rule(ABC):
    """The update of an optimizer, element by element. It may need a number of each whole parameter, too (``sums``), or
    a matrix made of a whole one (``whole_matrices``).

    name: as in messages and checkpoints. arrays, state_dtype: the state of a tile. defaults: of a param group.

    indexed: hyper must be an ``Indexed``, for each parameter its own. align: parameters and shards must begin at
    multiples of so many elements.

    sums: how many sums of squares over whole parameters the update needs first: of ``terms``. ``factor`` computes one
    number from them, which ``step`` receives in its ``Indexed``.

    whole_matrices: numbers of the param groups with an update that needs whole matrices first, made of the results of
    ``part_of``. ``whole_update`` computes it on one rank, and ``step`` receives its part in its ``Indexed``.

    fixed: options that keep their values from construction.

    exchanges: from some step on (``turn``) gradients stay on their rank, and zero/onebit updates by exchanging moments,
    with the rule's ``local_numbers``.
    """

    name: str
    arrays: tuple[str, ...]
    defaults: dict[str, Any]
    state_dtype = torch.float32
    align = ALIGN
    indexed = False
    sums = 0
    whole_matrices: frozenset[int] = frozenset()
    fixed: tuple[str, ...] = ()
    exchanges = False
    spans_tiles = False  # whether one step() may cover several tiles of a shard
    takes_half = False  # whether gradients of a tile may be bf16, fp16, or have an addend; bits as of their fp32 values
    threads = 0  # most threads of the core's pool that a step on the host uses; 0: all
    on_device: str  # how it steps on a device: "stream": kernels, "torch": on torch's stream
    scalars: list[Any]  # of each group: counters next to ``group["step"]``; None: nothing (see counters.py)
    counted: tuple[str, ...] = ()  # names of ``scalars`` in torch's state of a parameter
    master_first = False  # whether ``step_on`` takes fp16's master as the first of a tile

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the options of a param group that an update depends on."""
        return tuple(self.defaults)

    @abstractmethod
    def check(self, group: dict[str, Any]) -> None:
        """Raise ValueError naming a hyperparameter out of range, NotImplementedError for an option not available."""

    @abstractmethod
    def prepare(self, number: int, group: dict[str, Any], grad_scale: float) -> Any:
        """Prepare the input of ``step`` for group ``number`` in this step; counts the step."""

    @abstractmethod
    def step(self, form: TileForm, part: TilePart, hyper: Any) -> None:
        """Update ``part`` in place. hyper: from ``prepare``."""

    @abstractmethod
    def step_on(self, stream: _core.Stream, form: TileForm, part: TilePart, hyper: Any) -> None:
        """Step a part in a device's memory as ``step`` does: queued on ``stream`` (on torch's, if ``on_device`` is
        "torch")."""

    def terms(self, form: TileForm, part: TilePart, hyper: Any) -> tuple[torch.Tensor, ...]:
        """Compute the fp32 elements of ``part`` that are squared and summed. Changes nothing. hyper: an ``Indexed``."""
        raise NotImplementedError

    def factor(self, norms: tuple[float, ...], hyper: Any) -> float:
        """Return the number of a parameter with these norms. hyper: from ``prepare``."""
        raise NotImplementedError

    def matrix_dtype(self, hyper: Any) -> torch.dtype:
        """Return the dtype of ``part_of`` and ``whole_update``. hyper: from ``prepare``."""
        raise NotImplementedError

    def part_of(
        self, form: TileForm, state: torch.Tensor, grad: torch.Tensor, inside: slice, hyper: Any
    ) -> torch.Tensor:
        """Compute the elements ``inside`` a tile that become part of a whole matrix. Changes nothing. grad: of the
        tile. hyper: from ``prepare``."""
        raise NotImplementedError

    def whole_update(self, matrix: torch.Tensor, hyper: Any) -> torch.Tensor:
        """Compute the update of a whole matrix, in its shape. May change ``matrix``. hyper: from ``prepare``."""
        raise NotImplementedError

    def turn(self, groups: Sequence[dict[str, Any]]) -> str:
        """Return the kind of the next step, which zero/onebit updates unless it is "plain".

        "mean": with averaged gradients. Gradients stay on their rank in the others. "signs": moments or gradients are
        exchanged. "apart": each rank updates weights of its own. "join": the same, and the changes are exchanged.
        """
        return "plain"

    def is_local(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Return True if the gradients of the next step stay on their rank."""
        return self.turn(groups) not in ("plain", "mean")

    def begins(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Return True if the next step is the first one that is not "plain", for a rule that prepares its state."""
        return False

    def freezes(self, turn: str) -> bool:
        """Return True if the second moment is frozen in steps with this ``turn``."""
        return turn not in ("plain", "mean")

    def measured(self, factors: Mapping[str, float]) -> None:
        """Note the ``factors`` of a step, by name of the parameter."""
        return

    def scalars_of_param(self, name: str) -> dict[str, float]:
        """Return the rule's scalars of one parameter, which may be changed."""
        return {}

    def local_numbers(self, group: dict[str, Any], steps: int, grad_scale: float) -> Any:
        """Return the numbers of step number ``steps`` of a parameter of ``group``, after the gradients have become
        local. grad_scale: of these gradients."""
        raise NotImplementedError

    def matrices(self, groups: Sequence[dict[str, Any]]) -> dict[int, tuple[int, int]]:
        """Return ``matrix_nbytes`` of the parameters of ``whole_matrices``, by id()."""
        found = {}
        for number in self.whole_matrices:
            for param in groups[number]["params"]:
                found[id(param)] = self.matrix_nbytes(groups[number], param.shape)
        return found

    def matrix_nbytes(self, group: dict[str, Any], shape: torch.Size) -> tuple[int, int]:
        """Return the bytes of a whole matrix for ``whole_update``, and of that call's own memory. group: options."""
        raise NotImplementedError

    def check_param(self, group: int, name: str, param: torch.Tensor) -> None:
        """Raise ValueError for a parameter of group number ``group`` that the rule cannot update."""
        return

    def shown(self, group: int) -> dict[str, str]:
        """Return the arrays that a parameter of group number ``group`` uses, by the names that torch has for them."""
        return {name: name for name in self.arrays}

    def check_fixed(self, group: dict[str, Any], other: dict[str, Any]) -> None:
        """Raise ValueError if ``other`` has another value of a fixed option than ``group``, of construction."""
        for key in self.fixed:
            if key in group and other.get(key, group[key]) != group[key]:
                raise ValueError(f"{key}={other[key]!r}: it was {group[key]!r} at construction, and stays so")

    def check_now(self, group: dict[str, Any]) -> None:
        """Check options before a step; a program may have changed them. Raises: as ``check``."""
        return

    def missing(self, groups: Sequence[dict[str, Any]], saved: Collection[str] = ()) -> tuple[str, ...]:
        """Return the arrays that the options of ``groups`` need now, and did not need before.

        saved: names of arrays that are about to be loaded.
        """
        return ()

    def add_arrays(self, groups: Sequence[dict[str, Any]], saved: Collection[str] = ()) -> None:
        """Add the ``missing`` arrays to ``arrays``, behind the others."""
        self.arrays = tuple(dict.fromkeys((*self.arrays, *self.missing(groups, saved))))

    def begun(self, counters: dict[str, Any]) -> bool:
        """Return True if the arrays of parameters with these counters hold values: not SGD's before momentum."""
        return True

    def initial(self, group: dict[str, Any]) -> float:
        """Return the value that the arrays hold before the first step."""
        return 0.0

    def plain_scalars(self, scalars: Any) -> dict[str, Any] | None:
        """Return the rule's scalars as plain numbers."""
        return None

    def scalars_of(self, saved: dict[str, Any] | None) -> Any:
        """Restore a result of ``plain_scalars``."""
        return None

    def progress(self) -> list[dict[str, Any]] | None:
        """Return the rule's part of a checkpoint, per group, without arrays and ``group["step"]``; plain numbers."""
        return None

    def check_progress(self, progress: list[dict[str, Any]] | None) -> None:
        """Raise ValueError, TypeError or LookupError for progress that ``set_progress`` cannot restore."""
        if progress:
            raise ValueError(f"{self.name} keeps only arrays and options, but progress is {progress!r:.100}")

    def set_progress(self, progress: list[dict[str, Any]] | None) -> None:
        """Restore a result of ``progress``."""
        self.check_progress(progress)


@dataclass(frozen=True)
class _Kind:
    """A name of a fused optimizer: its class, the options that the name fixes, and the kernels."""

    twin: type[FusedOptimizer[Any]]
    kernel: Callable[[_core.OptimShard, Any, int, _core.ExactSum | None], None]
    fixed: dict[str, Any]
    defaults: dict[str, Any]
    stream_kernel: Callable[[_core.Stream, _core.OptimShard, Any], None]  # the same, on a device


KINDS = {
    # AdamW's weight decay is torch.optim.AdamW's.
    "adamw": _Kind(CPUAdam, _core.adam_step, {"adamw": True}, {"weight_decay": 1e-2}, _core.stream_adam_step),
    "adam": _Kind(CPUAdam, _core.adam_step, {"adamw": False}, {}, _core.stream_adam_step),
    "lion": _Kind(CPULion, _core.lion_step, {}, {}, _core.stream_lion_step),
    "sgd": _Kind(CPUSGD, _core.sgd_step, {}, {}, _core.stream_sgd_step),
    "adagrad": _Kind(CPUAdagrad, _core.adagrad_step, {}, {}, _core.stream_adagrad_step),
}


def arguments_of(name: str) -> list[str]:
    """List the options that a caller may give the fused optimizer ``name``."""
    return [key for key in inspect.signature(KINDS[name].twin).parameters if key not in ("params", *KINDS[name].fixed)]


def _check_kind(name: str, key: str, value: Any, default: Any) -> None:
    """Raise ValueError unless the value is a number, or several, as the default is."""
    if isinstance(default, tuple):
        good = isinstance(value, (tuple, list)) and len(value) == len(default) and all(map(_is_number, value))
        wanted = f"{len(default)} numbers"
    else:
        good, wanted = not isinstance(default, float) or _is_number(value), "a number"
    if not good:
        raise ValueError(f"{key}={value!r}: {name} needs {wanted} there")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)


class FusedRule(Rule):
    """A rule by one of the core's fused kernels. The kernel's class of zcomm.optim defines its options.

    args: options of all groups, of those in ``arguments_of(name)``. Raises: ValueError for an impossible one,
    NotImplementedError.
    """

    spans_tiles = takes_half = True
    on_device = "stream"
    master_first = True
    fixed: tuple[str, ...] = ("state_dtype",)

    def __init__(self, name: str, args: dict[str, Any]) -> None:
        kind = KINDS[name]
        for key, value in args.items():
            _check_kind(name, key, value, inspect.signature(kind.twin).parameters[key].default)
        self._twin = kind.twin([torch.zeros(1)], **{**kind.defaults, **args}, **kind.fixed)
        self._kernel, self._stream_kernel = kind.kernel, kind.stream_kernel
        self.name = name
        self.defaults = dict(self._twin.defaults)
        self.check(self.defaults)
        self.arrays = self._twin.ARRAYS if name != "sgd" or self.defaults["momentum"] != 0 else ()

    def adopt(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the caller's groups without torch's switches; SGD keeps a buffer if one of them has momentum."""
        adopted = []
        for group in groups:
            options = {key: value for key, value in group.items() if key not in SWITCHES}
            self._twin._adapt_group(options)
            self.check({**self.defaults, **options})
            adopted.append(options)
        dtypes = {group.get("state_dtype", self.defaults.get("state_dtype", torch.float32)) for group in adopted}
        if len(dtypes) > 1:
            raise ValueError(f"param groups have several state_dtype ({dtypes}); ZeroOptimizer keeps one for all")
        self.state_dtype = dtypes.pop() if dtypes else torch.float32
        self.indexed = self.state_dtype != torch.float32
        self.align = STATE_BLOCK if self.state_dtype == torch.uint8 else ALIGN  # a block that has a scale stays whole
        if self.name == "sgd" and any(group.get("momentum", 0) != 0 for group in groups):
            self.arrays = self._twin.ARRAYS
        self.scalars = [None] * len(adopted)
        return adopted

    def check(self, group: dict[str, Any]) -> None:
        for key, parameter in inspect.signature(type(self._twin)).parameters.items():
            if key in group:
                _check_kind(self.name, key, group[key], parameter.default)
        self._twin._check_group(group)

    def check_now(self, group: dict[str, Any]) -> None:
        self._twin._hyper(group)
        if "betas" in self.defaults and not all(0 <= beta < 1 for beta in group["betas"]):  # the kernels refuse it
            raise ValueError(f"betas={group['betas']} must lie in [0, 1)")

    def missing(self, groups: Sequence[dict[str, Any]], saved: Collection[str] = ()) -> tuple[str, ...]:
        if self.name != "sgd" or self.arrays:
            return ()
        names = self._twin.ARRAYS
        wanted = any(float(group.get("momentum", 0)) != 0 for group in groups) or not set(saved).isdisjoint(names)
        return names if wanted else ()

    def begun(self, counters: dict[str, Any]) -> bool:
        return self.name != "sgd" or bool(counters.get("buffered", False))

    def initial(self, group: dict[str, Any]) -> float:
        return self._twin._initial(group)

    def prepare(self, number: int, group: dict[str, Any], grad_scale: float) -> Any:
        group["step"] = group.get("step", 0) + 1
        hyper = self._twin._hyper(group)
        hyper.grad_scale = grad_scale
        if self._twin.COUNTS:
            hyper.step = group["step"]
        if self.name == "sgd":
            hyper.buffer = bool(self.arrays)
            if hyper.momentum != 0:  # as in torch the buffer begins as the gradient of the first step with momentum
                hyper.first = not group.get("buffered", False)
                group["buffered"] = True
        return hyper

    def step(self, form: TileForm, part: TilePart, hyper: Any) -> None:
        fp16 = form.dtype == torch.float16
        master = form.master(part.weight, part.state) if fp16 else part.weight
        shard, hyper = self._core_shard(form, part, master, hyper)
        self._kernel(shard, hyper, self.threads, part.squares)
        if fp16:
            part.weight[part.begin : part.end].copy_(master[part.begin : part.end])

    def step_on(self, stream: _core.Stream, form: TileForm, part: TilePart, hyper: Any) -> None:
        self._stream_kernel(stream, *self._core_shard(form, part, part.weight, hyper))

    def _core_shard(
        self, form: TileForm, part: TilePart, weight: torch.Tensor, hyper: Any
    ) -> tuple[_core.OptimShard, Any]:
        """Return the input of a kernel: the shard and the hyperparameters."""
        first = 0
        if self.indexed:
            hyper, first = hyper.hyper, hyper.first + part.at
        place = part.begin, part.end, form.state_dtype, first
        return core_shard(weight, part.grad, part.state, *place, part.addend), hyper


NO_OPTIMIZER = (
    'there is no optimizer here (optimizer=None, or no section "optimizer"): give one, with parameters that require '
    "gradients, to train"
)


class NoRule(Rule):
    """The rule of a ZeroOptimizer without an optimizer, which keeps and moves the weights: no update, and no state."""

    name = "none"
    arrays = ()
    on_device = "stream"

    def __init__(self) -> None:
        self.defaults = {}
        self.scalars = [None]

    def check(self, group: dict[str, Any]) -> None:
        return

    def prepare(self, number: int, group: dict[str, Any], grad_scale: float) -> NoReturn:
        raise RuntimeError(f"step(): {NO_OPTIMIZER}")

    def step(self, form: TileForm, part: TilePart, hyper: Any) -> NoReturn:
        raise RuntimeError(f"step(): {NO_OPTIMIZER}")

    def step_on(self, stream: Any, form: TileForm, part: TilePart, hyper: Any) -> NoReturn:
        raise RuntimeError(f"step(): {NO_OPTIMIZER}")
