"""TorchRule: an elementwise class of torch.optim that has no fused kernel, run on fp32 views of the tiles.

Per tile the class sees one flat parameter, its scaled gradient and its state. State that is not an array of the
parameter's shape (step counts, products of momenta) belongs to the group. It is the same for all tiles.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zcomm import _core
from zcomm.zero.layout.tiles import TileForm, TilePart
from zcomm.zero.rules.rule import SWITCHES, Rule

# Each element's update depends only on that element, unlike updates of LBFGS, SparseAdam, Adafactor and Muon.
ELEMENTWISE: dict[str, type[torch.optim.Optimizer]] = {
    kind.__name__.lower(): kind
    for kind in (
        torch.optim.RMSprop,
        torch.optim.Adadelta,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.ASGD,
        torch.optim.Rprop,
    )
}


@dataclass(frozen=True)
class _Hyper:
    """A group in one step: its options, its scalars before the step (None: first step), its arrays' names."""

    options: dict[str, Any]
    scale: float
    scalars: dict[str, Any] | None
    arrays: tuple[str, ...]


class TorchRule(Rule):
    """A rule by a class of torch: ``kind`` is one of ELEMENTWISE. Raises: ValueError, as the class itself, for its
    arguments."""

    on_device = "torch"

    def __init__(self, kind: type[torch.optim.Optimizer], args: dict[str, Any]) -> None:
        self.name = kind.__name__.lower()
        try:
            self._torch = kind([torch.zeros(1)], **args)
        except TypeError as error:
            raise ValueError(f"{self.name}: {error}") from None
        self.defaults = dict(self._torch.defaults)
        self.arrays = ()
        self._arrays: list[tuple[str, ...]] = []
        self._needs: dict[tuple[int, tuple[str, ...]], tuple[str, ...]] = {}  # by group, and options that are not 0

    def adopt(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the caller's groups without torch's switches, and find out which state they need."""
        adopted = [{key: value for key, value in group.items() if key not in SWITCHES} for group in groups]
        for number, group in enumerate(adopted):
            self.check(group)
            state = self._one_step({**self.defaults, **group}, 1.0, torch.zeros(1), torch.zeros(1), {})
            self._arrays.append(_arrays_in(state))
            self._needs[number, self._switched(group)] = self._arrays[number]
            self.counted = tuple(name for name, value in state.items() if not _is_array(value))
        self.arrays = tuple(dict.fromkeys(name for names in self._arrays for name in names))
        self.scalars = [None] * len(adopted)
        return adopted

    def _switched(self, group: dict[str, Any]) -> tuple[str, ...]:
        options = {**self.defaults, **group}
        return tuple(key for key in self.defaults if isinstance(options[key], (bool, int, float)) and options[key])

    def _needed(self, number: int, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the arrays of group ``number``: with other options RMSprop has other ones."""
        key = number, self._switched(group)
        if key not in self._needs:
            options = {name: value for name, value in group.items() if name in self.defaults}
            self._needs[key] = _arrays_in(self._one_step(options, 1.0, torch.zeros(1), torch.zeros(1), {}))
        return self._needs[key]

    def missing(self, groups: Sequence[dict[str, Any]], saved: Collection[str] = ()) -> tuple[str, ...]:
        needed = [name for number, group in enumerate(groups) for name in self._missing_in(number, group)]
        return tuple(dict.fromkeys(needed))

    def _missing_in(self, number: int, group: dict[str, Any]) -> list[str]:
        return [name for name in self._needed(number, group) if name not in self._arrays[number]]

    def add_arrays(self, groups: Sequence[dict[str, Any]], saved: Collection[str] = ()) -> None:
        super().add_arrays(groups, saved)
        for number, group in enumerate(groups):
            self._arrays[number] += tuple(self._missing_in(number, group))

    def check(self, group: dict[str, Any]) -> None:
        options = {key: value for key, value in group.items() if key in self.defaults}
        type(self._torch)([torch.zeros(1)], **options)

    def prepare(self, number: int, group: dict[str, Any], grad_scale: float) -> Any:
        group["step"] = group.get("step", 0) + 1
        names, before = self._arrays[number], self.scalars[number]
        options = {key: value for key, value in group.items() if key != "params" and key not in SWITCHES}
        # One element on the side moves the scalars, also on a rank that has no element of this group.
        state = {} if before is None else {**before, **{name: torch.zeros(1) for name in names}}
        after = self._one_step(options, 1.0, torch.zeros(1), torch.zeros(1), _cloned(state))
        self.scalars[number] = {name: value for name, value in after.items() if not _is_array(value)}
        return _Hyper(options, grad_scale, before, names)

    def _one_step(
        self, options: dict[str, Any], scale: float, master: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]
    ) -> dict[str, Any]:
        """Run torch's step on one flat parameter, in place; return its state afterwards."""
        param = master.detach()
        param.grad = grad if scale == 1.0 else grad * scale
        # One tensor at a time: on a device, too, the scalars are the host's.
        self._torch.param_groups = [{**self.defaults, **options, "foreach": False, "params": [param]}]
        self._torch.state.clear()
        if state:
            self._torch.state[param] = state
        self._torch.step()
        after: dict[str, Any] = self._torch.state[param]
        self._torch.state.clear()
        return after

    def step(self, form: TileForm, part: TilePart, hyper: Any) -> None:
        weight, inside = part.weight, slice(part.begin, part.end)
        if part.squares is not None:
            part.squares.add_squares(part.grad[inside].data_ptr(), _core.DType.float32, part.end - part.begin)
        master = form.master(weight, part.state)
        views = {name: form.array(part.state, weight.numel(), name)[inside] for name in hyper.arrays}
        before = {} if hyper.scalars is None else {**_cloned(hyper.scalars), **views}
        after = self._one_step(hyper.options, hyper.scale, master[inside], part.grad[inside], before)
        for name, view in views.items():
            if after[name].data_ptr() != view.data_ptr():
                view.copy_(after[name])
        if form.dtype == torch.bfloat16:
            form.set_master(weight, part.state, master)
        elif form.dtype == torch.float16:
            weight[inside].copy_(master[inside])

    def step_on(self, stream: _core.Stream, form: TileForm, part: TilePart, hyper: Any) -> None:
        self.step(form, part, hyper)

    def shown(self, group: int) -> dict[str, str]:
        return {name: name for name in self._arrays[group]}

    def plain_scalars(self, scalars: Any) -> dict[str, Any]:
        return {name: float(value) for name, value in (scalars or {}).items()}

    def scalars_of(self, saved: dict[str, Any] | None) -> Any:
        if not saved:
            return None
        fresh = self._one_step({}, 1.0, torch.zeros(1), torch.zeros(1), {})
        kinds = {name: value for name, value in fresh.items() if not _is_array(value)}
        return {
            name: torch.tensor(saved[name], dtype=value.dtype) if isinstance(value, torch.Tensor) else saved[name]
            for name, value in kinds.items()
        }

    def progress(self) -> list[dict[str, Any]] | None:
        return [self.plain_scalars(scalars) for scalars in self.scalars]

    def check_progress(self, progress: list[dict[str, Any]] | None) -> None:
        if progress and len(progress) != len(self.scalars):
            raise ValueError(f"progress has {len(progress)} groups, this optimizer {len(self.scalars)}")
        for saved in progress or []:
            self.scalars_of(saved)

    def set_progress(self, progress: list[dict[str, Any]] | None) -> None:
        for number, saved in enumerate(progress or []):
            self.scalars[number] = self.scalars_of(saved)


def _arrays_in(state: dict[str, Any]) -> tuple[str, ...]:
    return tuple(name for name, value in state.items() if _is_array(value))


def _is_array(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 1


def _cloned(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()}
