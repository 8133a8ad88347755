"""MuonRule: Muon on shards, with AdamW for the param groups that have ``"use_muon": False``.

A matrix's direction is assembled from its parts on one rank, which makes it orthogonal. Neither that nor ``part_of``
changes anything. The update moves the momentum, and changes the weights by its part of the orthogonal matrix.
With AdamW a tile has AdamW's two arrays; Muon uses the first one for its momentum.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from zcomm.optim import muon
from zcomm.optim.muon import Muon, MuonNumbers, check_group, check_matrix, is_muon, numbers_of
from zcomm.zero.layout.tiles import TileForm, TilePart
from zcomm.zero.rules.rule import SWITCHES, FusedRule, Rule

ARGUMENTS = [name for name in inspect.signature(Muon).parameters if name != "params"]
_MOMENTUM = "momentum_buffer"


@dataclass(frozen=True)
class _Hyper:
    """A group of Muon in one step. scale: of the gradients."""

    numbers: MuonNumbers
    scale: float


class MuonRule(Rule):
    """Muon: ``zcomm.optim.Muon`` defines its options. Raises: ValueError for an impossible one."""

    name = "muon"
    indexed = True
    fixed = ("use_muon",)
    on_device = "torch"

    def __init__(self, args: dict[str, Any]) -> None:
        self.defaults = dict(Muon([torch.zeros(1, 1)], **args).defaults)
        self._adamw = FusedRule("adamw", {"lr": self.defaults["lr"]})
        self.arrays = (_MOMENTUM,)

    @property
    def options(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.defaults, *self._adamw.defaults, "use_muon")))

    def adopt(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the caller's groups without torch's switches, AdamW's groups with its options."""
        adopted, others = [], []
        for group in groups:
            options = {key: value for key, value in group.items() if key not in SWITCHES} | {"use_muon": is_muon(group)}
            if not options["use_muon"]:
                (options,) = self._adamw.adopt([{**self._adamw.defaults, **options}])
                if self._adamw.state_dtype != torch.float32:
                    raise ValueError(f"state_dtype={self._adamw.state_dtype}: AdamW has only fp32 state with Muon")
                others.append(options)
            self.check(options)
            adopted.append(options)
        self.whole_matrices = frozenset(number for number, group in enumerate(adopted) if group["use_muon"])
        if others:
            self._adamw.adopt(others)
            self.arrays = self._adamw.arrays
        self.scalars = [None] * len(adopted)
        return adopted

    def check(self, group: dict[str, Any]) -> None:
        if is_muon(group):
            check_group({**self.defaults, **group})
        else:
            self._adamw.check({**self._adamw.defaults, **group})

    def check_now(self, group: dict[str, Any]) -> None:
        self.check(group)
        if not is_muon(group):
            self._adamw.check_now(group)

    def check_param(self, group: int, name: str, param: torch.Tensor) -> None:
        """Check the shape, and that an attribute ``use_muon``, which DeepSpeed reads, is the group's."""
        muon = group in self.whole_matrices
        if muon:
            check_matrix(f"parameter {name}", param.shape)
        if bool(getattr(param, "use_muon", muon)) != muon:
            raise ValueError(
                f"parameter {name} has use_muon={not muon}, and is in param group {group}, which has use_muon={muon}: "
                "put it into another group, or change its attribute"
            )

    def shown(self, group: int) -> dict[str, str]:
        return {_MOMENTUM: self.arrays[0]} if group in self.whole_matrices else super().shown(group)

    def prepare(self, number: int, group: dict[str, Any], grad_scale: float) -> Any:
        if number not in self.whole_matrices:
            return self._adamw.prepare(number, group, grad_scale)
        group["step"] = group.get("step", 0) + 1
        return _Hyper(numbers_of({**self.defaults, **group}), grad_scale)

    def matrix_dtype(self, hyper: Any) -> torch.dtype:
        return muon.dtype_of(hyper.numbers)

    def part_of(
        self, form: TileForm, state: torch.Tensor, grad: torch.Tensor, inside: slice, hyper: Any
    ) -> torch.Tensor:
        momentum = form.array(state, grad.numel(), self.arrays[0])[inside].clone()
        mine = _scaled(grad[inside], hyper)
        muon.move_momentum(momentum, mine, hyper.numbers)
        return muon.direction(momentum, mine, hyper.numbers)

    def whole_update(self, matrix: torch.Tensor, hyper: Any) -> torch.Tensor:
        return muon.orthogonal(matrix, hyper.numbers)

    def matrix_nbytes(self, group: dict[str, Any], shape: torch.Size) -> tuple[int, int]:
        return muon.matrix_nbytes(shape, numbers_of({**self.defaults, **group}))

    def step(self, form: TileForm, part: TilePart, hyper: Any) -> None:
        plain = hyper.hyper
        if not isinstance(plain, _Hyper):
            self._adamw.step(form, part, plain)
            return
        update, shape = hyper.update.elements, hyper.update.shape
        first = part.at + part.begin - hyper.update.begin
        count = min(part.end - part.begin, update.numel() - first)  # behind the last element is padding, of zeros
        if count <= 0:
            return
        inside = slice(part.begin, part.begin + count)
        momentum = form.array(part.state, part.weight.numel(), self.arrays[0])[inside]
        muon.move_momentum(momentum, _scaled(part.grad[inside], plain), plain.numbers)
        weight = form.part_master(part.weight, part.state, inside)
        muon.change_weight(weight, update[first : first + count], muon.rate_of(shape, plain.numbers), plain.numbers)
        form.set_part_master(part.weight, part.state, inside, weight)

    def step_on(self, stream: Any, form: TileForm, part: TilePart, hyper: Any) -> NoReturn:
        raise AssertionError("Muon's state on a device is refused at construction")


def _scaled(grad: torch.Tensor, hyper: _Hyper) -> torch.Tensor:
    return grad if hyper.scale == 1.0 else grad * hyper.scale
