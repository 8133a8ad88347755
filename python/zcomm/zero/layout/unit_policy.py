"""Choice of units: which modules are gathered together in stage 3.

The outermost repeated blocks (children of ModuleList and Sequential), or those that the caller names, become a unit
each, small neighbours one together. A list without repetition, as Sequential(backbone, head), is searched: if a child
has repeated blocks inside, these are units instead of it. A leaf is a unit with all modules inside of it, unless it
lies in one. Parameters outside of units belong to the root unit, and every parameter that several units use (tied
weights) does, too. The root unit stays gathered during a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from zcomm.zero.layout.split_units import UnitChoice, split
from zcomm.zero.options import UnitLike, Units

_Named = tuple[str, nn.Module]
LARGE_NBYTES, LARGE_SHARE = 64 * 2**20, 1 / 3  # units with more than both are logged


def _blocks(module: nn.Module, prefix: str = "") -> Iterator[_Named]:
    """Yield children of lists; in a list of different modules, the repeated blocks inside of them."""
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)
    whole = is_list and _repeats(module)
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if is_list and (whole or not any(map(_repeats, child.modules()))):
            yield path, child
        else:
            yield from _blocks(child, path + ".")


def repeated_blocks(module: nn.Module, prefix: str = "") -> Iterator[_Named]:
    """Yield the outermost repeated blocks that have parameters, by name."""
    for name, child in module.named_children():
        if not _repeats(module):
            yield from repeated_blocks(child, f"{prefix}{name}.")
        elif any(True for _ in child.parameters()):
            yield f"{prefix}{name}", child


def _repeats(module: nn.Module) -> bool:
    """Return True for a list with two modules of one class and with parameters of the same shapes."""
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return False
    shapes = [(type(child), [(n, p.shape) for n, p in child.named_parameters()]) for child in module.children()]
    kinds = [(kind, tuple(params)) for kind, params in shapes if params]
    return len(set(kinds)) < len(kinds)


def large_units(choices: Sequence[UnitChoice]) -> str:
    """Describe units that are much of the model; "" if there is none."""
    sizes = [sum(param.nbytes for param in choice.params) for choice in choices]
    limit = max(LARGE_NBYTES, LARGE_SHARE * sum(sizes))
    parts = [
        f"unit {choice.name} has {nbytes / 2**20:.0f} MiB of the model's {sum(sizes) / 2**20:.0f}"
        for choice, nbytes in zip(choices, sizes, strict=True)
        if nbytes > limit
    ]
    if not parts:
        return ""
    return (
        f"stage 3: {' and '.join(parts)}; a unit is whole while it is used, the root (all parameters in no other unit) "
        "during the whole step: units= takes modules, their classes or names that divide it"
    )


def choose_units(
    model: nn.Module, wanted: Sequence[nn.Parameter], options: Units | None = None, itemsize: int | None = None
) -> list[UnitChoice]:
    """Return the root unit, then one unit per block or joined blocks. They hold the parameters ``wanted``, each exactly
    once. itemsize: bytes per element in training (None: the parameters' present ones).

    Raises: ValueError for an option that names no module of the model, and for a module that is larger than
    ``max_bytes`` and cannot be split.
    """
    options = options or Units()
    indexed = list(_indexed(model, members(model, options.indexed, "indexed"), {id(param) for param in wanted}))
    apart = {id(param) for choice in indexed for param in choice.params}
    wanted = [param for param in wanted if id(param) not in apart]
    if options.blocks is None:
        blocks = list(_blocks(model)) or list(model.named_children())
    else:
        blocks = list(_named(model, members(model, options.blocks, "blocks")))
    leaves = members(model, options.leaf, "leaf")
    if leaves:
        outermost = leaves | {id(block) for _, block in blocks}
        blocks = [] if id(model) in leaves else list(_named(model, outermost))
    kept = {id(block) for _, block in blocks} if options.resident is True else set()
    if not isinstance(options.resident, bool):
        kept = members(model, options.resident, "resident")
        if not kept <= {id(block) for _, block in blocks}:
            names = ", ".join(name for name, _ in blocks) or "none"
            raise ValueError(
                f"Units: resident={options.resident!r} names modules that are not units; the units are {names}"
            )
    if options.max_nbytes is None:
        units = _joined(blocks, options.min_nbytes, kept)
        in_root = _deal(model, wanted, units, {id(block) for _, block in blocks})
    else:
        limits = (options.max_nbytes, options.min_nbytes)
        units, in_root = split(model, wanted, blocks, kept, *limits, itemsize, options.rows, leaves)
    root = UnitChoice("root", [], in_root)
    rooted = {id(param) for param in root.params}
    root.modules = [m for m in model.modules() if any(id(p) in rooted for p in m.parameters(recurse=False))]
    return [root, *(unit for unit in units if unit.params), *indexed]


def _indexed(model: nn.Module, modules: set[int], wanted: set[int]) -> Iterator[UnitChoice]:
    """Yield a unit for each weight of ``modules`` that is gathered matrix by matrix."""
    for name, module in model.named_modules():
        for own, param in module.named_parameters(recurse=False) if id(module) in modules else ():
            if id(param) in wanted and param.dim() == 3 and not param.requires_grad:
                wanted = wanted - {id(param)}  # tied weights are one
                yield UnitChoice(f"{name}.{own}", [], [param], is_part=True, by_rows=True)


def _deal(
    model: nn.Module, wanted: Sequence[nn.Parameter], units: Sequence[UnitChoice], blocks: set[int]
) -> list[nn.Parameter]:
    """Assign the parameters to units; return the root's."""
    users: dict[int, set[int]] = {}
    for number, unit in enumerate(units):
        for block in unit.modules:
            for param in block.parameters():
                users.setdefault(id(param), set()).add(number)
    in_blocks = set(users)
    for module in _outside(model, blocks):
        for param in module.parameters(recurse=False):
            if id(param) in in_blocks:
                users[id(param)].add(-1)  # also used outside of the blocks
    root: list[nn.Parameter] = []
    for param in wanted:
        owners = users.get(id(param), set())
        (units[next(iter(owners))].params if len(owners) == 1 and -1 not in owners else root).append(param)
    return root


def members(model: nn.Module, wanted: Sequence[UnitLike], option: str) -> set[int]:
    """Return by id() the modules of ``model`` that ``wanted`` means; ``model`` itself only as a leaf."""
    found: set[int] = set()
    for each in wanted:
        named = ((name, module) for name, module in model.named_modules() if name or option == "leaf")
        mine = {id(module) for name, module in named if _is(each, name, module)}
        if not mine:
            shown = type(each).__name__ if isinstance(each, nn.Module) else getattr(each, "__name__", repr(each))
            raise ValueError(
                f"Units: {option}: {shown} is not a module inside of the model; give modules, classes of modules, or "
                "names as in model.named_modules()"
            )
        found |= mine
    return found


def _is(wanted: UnitLike, name: str, module: nn.Module) -> bool:
    if isinstance(wanted, str):
        return wanted in (name, type(module).__name__)
    return isinstance(module, wanted) if isinstance(wanted, type) else module is wanted


def _named(module: nn.Module, members: set[int], prefix: str = "") -> Iterator[_Named]:
    """Yield the outermost of ``members``."""
    for name, child in module.named_children():
        if id(child) in members:
            yield f"{prefix}{name}", child
        else:
            yield from _named(child, members, f"{prefix}{name}.")


def _joined(blocks: Sequence[_Named], nbytes: float, kept: set[int]) -> list[UnitChoice]:
    """Join neighbours of one list, all kept or none, until each unit has ``nbytes``."""
    units: list[UnitChoice] = []
    last, filled = "", nbytes
    for name, block in blocks:
        place, keep = name.rpartition(".")[0], id(block) in kept
        if filled < nbytes and place == last and units[-1].keep == keep:
            units[-1].modules.append(block)
            units[-1].name = f"{units[-1].name.split(' ')[0]} to {name}"
        else:
            units.append(UnitChoice(name, [block], keep=keep))
            last, filled = place, 0
        filled += sum(param.nbytes for param in block.parameters())
    return units


def _outside(model: nn.Module, blocks: set[int]) -> Iterator[nn.Module]:
    if id(model) in blocks:
        return
    yield model
    for child in model.children():
        yield from _outside(child, blocks)


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield all tensors of a module's output, through tuples, lists, dicts and dataclass-like objects."""
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
