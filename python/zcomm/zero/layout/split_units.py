"""Units of bounded size: blocks, and the root, are split at module boundaries until each has at most ``limit`` bytes.

[Note: split units] A block that is too large is searched, module by module, until a module fits. Then its forward
gathers it. Parameters of modules that are never called (ParameterList, ModuleList) belong to the module around these. A
gather in pieces has no arithmetic, so no bit changes. The root unit keeps small parameters, and those without a module
of their own, as far as it has room:
- norms and other small modules of a split block, or with only vectors (gathers would cost more than their bytes);
- modules outside of the blocks: the largest leave it first, and are units then (an embedding, a head);
- parameters that several units use (tied weights): their modules become one unit, gathered for each of them.
Weights of Linears and Embeddings that are larger than the limit may be gathered by rows. They are units without
modules: the operations gather them (rows/ops.py).
Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

from zcomm.zero.format_names import format_names
from zcomm.zero.rows.blocks import BLOCK_ROWS, can_be_blocks, largest_block


@dataclass
class UnitChoice:
    """The choice of one unit.

    ``modules``: their forward needs the unit; ``params`` in order of registration. keep: see Units. is_part:
    ``Units(max_bytes=)`` has made it of a part of a block, or of the root. uses: modules that need it one by one, as an
    embedding and the head that it is tied to. by_rows: of one weight, gathered in blocks of rows by the operations
    that use it (rows/ops.py).
    """

    name: str
    modules: list[nn.Module]
    params: list[nn.Parameter] = field(default_factory=list)
    keep: bool = False
    is_part: bool = False
    uses: int = 1
    by_rows: bool = False


def nbytes_of(params: Iterable[nn.Parameter], itemsize: int | None) -> int:
    """Return the bytes of parameters with ``itemsize`` bytes per element; None: as they are."""
    return sum(param.numel() * (itemsize or param.itemsize) for param in params)


_Named = tuple[str, nn.Module]
# Their forward reads the weights of modules inside of them.
_WHOLE = (nn.MultiheadAttention,)
SMALL = 1 / 32  # of the limit


@dataclass
class _Part:
    """Modules that could be a unit. place: the module around them. in_root: they are in the root unit, if they fit."""

    choice: UnitChoice
    place: str
    nbytes: int
    in_root: bool = False

    def take_out(self, params: Sequence[nn.Parameter], item: int) -> None:
        gone = {id(param) for param in params}
        self.choice.params = [param for param in self.choice.params if id(param) not in gone]
        self.nbytes = nbytes_of(self.choice.params, item)


class _Owners:
    """The modules that need parameters in their calls: they have them, or are around modules that are never called."""

    def __init__(self, model: nn.Module, wanted: set[int]) -> None:
        self.own: dict[int, list[nn.Parameter]] = {}  # by id() of the module
        self.of: dict[int, list[nn.Module]] = {}  # by id() of the parameter
        self.names: dict[int, str] = {}
        self._wanted, self._seen = wanted, set[int]()
        self._visit("", model, model)

    def _visit(self, name: str, module: nn.Module, caller: nn.Module) -> None:
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        self.names[id(module)] = name
        caller = module if is_called(module) else caller
        for param in module.parameters(recurse=isinstance(module, _WHOLE)):
            if id(param) in self._wanted and caller not in self.of.setdefault(id(param), []):
                self.of[id(param)].append(caller)
                self.own.setdefault(id(caller), []).append(param)
        if not isinstance(module, _WHOLE):
            for child_name, child in module.named_children():
                self._visit(f"{name}.{child_name}".lstrip("."), child, caller)

    def around(self, param: nn.Parameter) -> tuple[list[nn.Module], list[nn.Parameter]]:
        """Return the modules that use ``param`` or another parameter of these, and all their parameters."""
        modules, params = list(self.of[id(param)]), [param]
        for module in modules:  # both lists grow
            for other in self.own[id(module)]:
                if all(other is not known for known in params):
                    params.append(other)
                    modules += [user for user in self.of[id(other)] if user not in modules]
        return modules, params


class _Split:
    def __init__(
        self,
        model: nn.Module,
        wanted: Sequence[nn.Parameter],
        blocks: set[int],
        kept: set[int],
        limit: int,
        item: int,
        rows: bool,
        leaves: set[int],
    ) -> None:
        self._model, self._blocks, self._kept, self._limit, self._item = model, blocks, kept, limit, item
        self._rows, self._leaves = rows, leaves
        self._in_leaves = {
            id(param) for module in model.modules() if id(module) in leaves for param in module.parameters()
        }
        self._number = {id(param): number for number, param in enumerate(wanted)}
        self._owners = _Owners(model, set(self._number))
        self._seen: set[int] = set()
        self.pinned: list[nn.Parameter] = []  # parameters that only the root can have
        self.parts = list(self._walk("", model, in_block=False))
        self.by_rows = [self._take_rows(param) for param in wanted if rows and self._is_by_rows(param)]
        self._part_shared()

    def _nbytes(self, params: Iterable[nn.Parameter]) -> int:
        return nbytes_of(params, self._item)

    def _part(self, name: str, modules: list[nn.Module], params: Iterable[nn.Parameter], **kind: bool) -> _Part:
        in_root = kind.pop("in_root", False)
        mine = sorted(params, key=lambda param: self._number[id(param)])
        return _Part(UnitChoice(name, modules, mine, **kind), name.rpartition(".")[0], self._nbytes(mine), in_root)

    def _walk(self, name: str, module: nn.Module, in_block: bool, is_cut: bool = False) -> Iterator[_Part]:
        """Yield parts of ``module``. is_cut: it lies in a block that is too large."""
        params = [param for param in module.parameters() if id(param) in self._number]
        if id(module) in self._seen or not params:
            return
        self._seen.add(id(module))
        in_block = in_block or id(module) in self._blocks
        apart = in_block or not any(id(other) in self._blocks for other in module.modules())
        apart = apart and module is not self._model
        own = self._owners.own.get(id(module), [])
        small = is_cut and (all(param.dim() < 2 for param in own) or self._nbytes(own) <= SMALL * self._limit)
        if id(module) in self._kept:
            yield self._part(name, [module], params, keep=True)
        elif id(module) in self._leaves and module is self._model:
            self.pinned += params
        elif id(module) in self._leaves:
            yield self._part(name, [module], params, is_part=is_cut or not in_block)
        elif apart and is_called(module) and (self._nbytes(params) <= self._limit or len(own) == len(params)):
            rests = not in_block or (small and len(own) == len(params))
            yield self._part(name, [module], params, is_part=is_cut or not in_block, in_root=rests)
        else:
            if own and apart:
                yield self._part(name, [module], own, is_part=True, in_root=small)
            else:
                self.pinned += own
            for child_name, child in module.named_children():
                yield from self._walk(f"{name}.{child_name}".lstrip("."), child, in_block, in_block)

    def _is_by_rows(self, param: nn.Parameter) -> bool:
        """Return True for a weight that is too large, and that all its modules can use in blocks that fit."""
        if self._nbytes([param]) <= self._limit or not can_be_blocks(param, self._owners.of[id(param)]):
            return False
        kept = {id(other) for part in self.parts if part.choice.keep for other in part.choice.params} | self._in_leaves
        block = largest_block(param.shape) * param.shape[1] * (self._item or param.itemsize)
        return id(param) not in kept and block <= self._limit

    def _take_rows(self, param: nn.Parameter) -> UnitChoice:
        for part in self.parts:
            if any(param is other for other in part.choice.params):
                part.take_out([param], self._item)
                part.in_root = part.in_root or all(other.dim() < 2 for other in part.choice.params)
        self.pinned = [other for other in self.pinned if other is not param]
        owners = self._owners.of[id(param)]
        for own in self._owners.own.values():
            own[:] = [other for other in own if other is not param]
        name = format_names([f"{self._owners.names[id(module)]}.weight" for module in owners])
        return UnitChoice(name, [], [param], is_part=True, uses=len(owners), by_rows=True)

    def _part_shared(self) -> None:
        """Move parameters that several parts use out of these: with all of their modules, or, if those are too large,
        by themselves."""
        users: dict[int, int] = {}
        for part in self.parts:
            for param in part.choice.params:
                users[id(param)] = users.get(id(param), 0) + 1
        pinned = {id(param) for param in self.pinned}
        shared = [p for p in self._params_of(self.parts) if users[id(p)] > 1 or id(p) in pinned]
        taken: set[int] = set()
        for param in shared:
            if id(param) in taken:
                continue
            modules, params = self._owners.around(param)
            alone = self._nbytes(params) > self._limit or any(id(p) in pinned | self._in_leaves for p in params)
            params = [param] if alone else params
            taken |= {id(p) for p in params}
            for part in self.parts:
                part.take_out(params, self._item)
            if not alone:
                names = [self._owners.names[id(module)] for module in modules]
                made = self._part(format_names(names), modules, params, is_part=True, in_root=True)
                made.choice.uses = len(modules)
                self.parts.append(made)
            elif id(param) not in pinned:
                self.pinned.append(param)

    def _params_of(self, parts: Iterable[_Part]) -> list[nn.Parameter]:
        found = {id(param): param for part in parts for param in part.choice.params}
        return sorted(found.values(), key=lambda param: self._number[id(param)])

    def fill_root(self) -> list[nn.Parameter]:
        """Return the root's parameters; parts that it has no room for become units."""
        inside = [part for part in self.parts if part.in_root]
        while self._nbytes(self.pinned) + sum(part.nbytes for part in inside) > self._limit and inside:
            largest = max(inside, key=lambda part: part.nbytes)
            largest.in_root = False
            inside = [part for part in inside if part.in_root]
        params = [*self.pinned, *self._params_of(inside)]
        return sorted(params, key=lambda param: self._number[id(param)])

    def check(self, root: Sequence[nn.Parameter]) -> None:
        """Raise ValueError if a unit is larger than the limit."""
        found = [
            (part.nbytes, _called(part.choice)) for part in self.parts if not part.in_root and not part.choice.keep
        ]
        names = {id(param): name for name, param in self._model.named_parameters()}
        found.append((self._nbytes(root), f"the root unit ({format_names([names[id(p)] for p in root])})"))
        nbytes, name = max(found, key=lambda each: each[0])
        if nbytes > self._limit:
            less = "or less if rows=True lets Linears and Embeddings be gathered by rows"
            if self._rows:
                less = f"as rows=True gathers at least {BLOCK_ROWS} rows of a weight at a time, or all that it has"
            raise ValueError(
                f"Units: max_bytes={self._limit}, but {name} has {nbytes} bytes of parameters and cannot be split at a "
                f"module inside of it: max_bytes must be at least {nbytes} for this model, {less}"
            )

    def units(self, min_nbytes: float) -> list[UnitChoice]:
        """Return the units, neighbours in one module joined until each has ``min_nbytes``; never beyond the limit."""
        joined: list[_Part] = []
        for part in self.parts:
            last = joined[-1] if joined else None
            if part.in_root or not part.choice.params:
                continue
            if (
                last is not None
                and last.nbytes < min_nbytes
                and last.nbytes + part.nbytes <= self._limit
                and (last.place, last.choice.keep) == (part.place, part.choice.keep)
            ):
                last.choice.modules += part.choice.modules
                last.choice.params += part.choice.params
                last.choice.name = f"{last.choice.name.split(' ')[0]} to {part.choice.name}"
                last.nbytes += part.nbytes
            else:
                joined.append(part)
        found = [*(part.choice for part in joined), *self.by_rows]
        return sorted(found, key=lambda choice: self._number[id(choice.params[0])])


def split(
    model: nn.Module,
    wanted: Sequence[nn.Parameter],
    blocks: Sequence[_Named],
    kept: set[int],
    limit: int,
    min_nbytes: float,
    itemsize: int | None,
    rows: bool = False,
    leaves: Collection[int] = (),
) -> tuple[list[UnitChoice], list[nn.Parameter]]:
    """Return units of at most ``limit`` bytes of parameters, in order of registration, and the root's parameters.

    kept: by id(), blocks that stay as they are. min_nbytes: join neighbours up to this. itemsize: see nbytes_of.
    rows: gather larger weights by rows, if possible. leaves: by id(), modules that are not split.

    Raises: ValueError naming a module that is larger and has no smaller ones.
    """
    parts = _Split(model, wanted, {id(block) for _, block in blocks}, kept, limit, itemsize or 0, rows, set(leaves))
    root = parts.fill_root()
    parts.check(root)
    return parts.units(min_nbytes), root


def is_called(module: nn.Module) -> bool:
    """Return True if the module has a forward: the parameters of others are for the module around them."""
    return type(module).forward is not nn.Module.forward


def _called(choice: UnitChoice) -> str:
    kinds = " and ".join(type(module).__name__ for module in choice.modules[:2])
    return f"{choice.name} ({kinds})"
