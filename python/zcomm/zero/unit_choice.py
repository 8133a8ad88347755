"""Choice of units: which modules are gathered together in stage 3.

The outermost repeated blocks (children of ModuleList and Sequential) become a unit each; what lies outside of them, and
every parameter that several of them use (tied weights), belongs to the root unit, which stays gathered during a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn


@dataclass
class UnitChoice:
    """``modules`` are those whose forward needs the unit; ``params`` in order of registration."""

    name: str
    modules: list[nn.Module]
    params: list[nn.Parameter] = field(default_factory=list)


def _blocks(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(module, nn.ModuleList | nn.Sequential):
            yield path, child
        else:
            yield from _blocks(child, path + ".")


def choose_units(model: nn.Module, wanted: list[nn.Parameter]) -> list[UnitChoice]:
    """The root unit, then one unit per block, holding the parameters ``wanted`` (each exactly once)."""
    blocks = list(_blocks(model)) or [(name, child) for name, child in model.named_children()]
    users: dict[int, set[int]] = {}
    for number, (_, block) in enumerate(blocks):
        for param in block.parameters():
            users.setdefault(id(param), set()).add(number)
    in_blocks = {id(param) for _, block in blocks for param in block.parameters()}
    for module in _outside(model, {id(block) for _, block in blocks}):
        for param in module.parameters(recurse=False):
            if id(param) in in_blocks:
                users[id(param)].add(-1)  # also used outside of the blocks

    root = UnitChoice("root", [])
    units = [UnitChoice(name, [block]) for name, block in blocks]
    for param in wanted:
        owners = users.get(id(param), set())
        (units[next(iter(owners))] if len(owners) == 1 and -1 not in owners else root).params.append(param)
    rooted = {id(param) for param in root.params}
    root.modules = [m for m in model.modules() if any(id(p) in rooted for p in m.parameters(recurse=False))]
    return [root, *(unit for unit in units if unit.params)]


def _outside(model: nn.Module, blocks: set[int]) -> Iterator[nn.Module]:
    if id(model) in blocks:
        return
    yield model
    for child in model.children():
        yield from _outside(child, blocks)


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """All tensors of a module's output, through tuples, lists, dicts and dataclass-like objects."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from tensors_in(getattr(value, name))
