"""Stand-ins: parameters of their true shape without memory. Every operation on them counts or raises.

[Note: stand-ins] In unit-wise stage 3 a parameter is sharded over all ranks. Outside its module's forward and backward
its class is a ``ShardedParameter``, backed by one NaN expanded to the true shape. Reads of metadata succeed, and
requests for addresses raise. Code that bypasses torch's dispatch reads NaN and cannot write. ``.data`` and
``.detach()`` return ``ShardedData``, which stands for the same elements, also for code that bypasses
``__torch_function__`` (torch.func). An operation is one of:
- metadata (shape, dtype, hooks, requires_grad, grad, ...): as for any tensor;
- elementwise in-place with scalars or tensors: acts on this rank's elements, without communication;
- overwriting in-place (``normal_``, ``nn.init``): draws the whole tensor temporarily and keeps this rank's part;
- any other: gathers the whole value (collective), acts on it, and keeps this rank's part of a written value.
A result that is a view of the gathered value is a ``WholeValue``: later writes to it reach the weight, too.
With gradients the gathered value is a function of the parameter, and its backward adds to the parameter's gradient.
Every rank must run the same operations, as with DistributedDataParallel.
Source: the behaviour of FSDP2's DTensor parameters.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from zcomm.comm.dynamo import skip
from zcomm.zero.rows.ops import Rows
from zcomm.zero.sharded.dispatch import (
    AUTOGRAD,
    DEVICE,
    DISTRIBUTED,
    ELEMENTWISE,
    GEOMETRY,
    LIKE,
    MEMORY,
    METADATA,
    OVERWRITES,
    RESHAPED_AS,
    STRIDES,
    unchanged_by,
    writes,
)
from zcomm.zero.sharded.grad import GradStandIn
from zcomm.zero.sharded.source import Keeper, Source, Use, keep, plain
from zcomm.zero.sharded.transposed_rows import TransposedRows, is_transpose, transposed, with_values

_LEAF = "a leaf Variable that requires grad is being used in an in-place operation: change weights in torch.no_grad()"
_tensor: Any = torch.Tensor
_GET_DATA, _SET_DATA = _tensor.data.__get__, _tensor.data.__set__
_GRAD = _tensor.grad
_ASKS_FOR_GRADIENTS = (_tensor.requires_grad_, _tensor.requires_grad.__set__)

_FILLS = frozenset(("copy_", "fill_", "zero_"))

# Functions that use their second argument, a weight, and return no tensor that shares its memory.
_USES = frozenset(("linear", "embedding"))


class _StandIn(torch.Tensor):
    """Base of ShardedParameter and ShardedData."""

    _zcomm_keeper: Keeper

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with plain():
                return func(*args, **kwargs)
        if TransposedRows in types:
            args, kwargs = with_values(args, kwargs)
        return _dispatch(func, args, kwargs)

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override,unused-ignore]
        keeper, param = _origin(self)
        like = keeper.placeholder(param)
        return (
            f"{type(self).__name__}({keeper.name(param)}, shape={tuple(like.shape)}, dtype={like.dtype}: "
            "sharded over the ranks; zcomm.zero.full_param() gives its values)"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        found = memo.get(id(self))
        if found is None:
            found = memo[id(self)] = _real(self, "copy.deepcopy()")
        return found

    def __reduce_ex__(self, proto: Any) -> Any:
        return _real(self, "pickling").__reduce_ex__(proto)

    # These two methods of torch do not call __torch_function__.

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        _may_write(self)
        return _replace("set_", self, *args, **kwargs)

    def as_subclass(self, cls: type) -> Any:
        if cls is torch.Tensor:
            return _by_value(_tensor.view_as, "as_subclass", (self, self), {})
        raise RuntimeError(f"{_called(self)}: as_subclass({cls.__name__}) of a sharded weight: use .clone() first")

    # --- calls of zcomm's comm/tensors.py ---

    def _zcomm_whole(self, why: str) -> torch.Tensor:
        source = _source(self, why, {})
        with plain():
            return _as_whole(source.value, source)

    def _zcomm_called(self) -> str:
        return _called(self)


class ShardedParameter(_StandIn, nn.Parameter):
    """A parameter while its module does not run. It has no instances of its own: parameters change their class
    (``class_for``)."""

    @property  # because a step reads it for every parameter, and __torch_function__ takes 6 times as long
    def grad(self) -> torch.Tensor | None:
        with plain():
            gradient: torch.Tensor | None = _GRAD.__get__(self)
            return gradient

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        with plain():
            _GRAD.__set__(self, gradient)

    def _zcomm_in_use(self) -> Use:
        """Return the use of the weight by a function that has a backward of its own (linear_cross_entropy)."""
        keeper, param = _origin(self)
        return keeper.use(param)

    def _zcomm_rows(self) -> Rows | None:
        """Return the rows of a weight that is gathered in blocks of them; None: it is gathered whole."""
        keeper, param = _origin(self)
        return keeper.by_rows(param)


class ShardedData(_StandIn, torch.Tensor):
    """The ``.data`` or ``.detach()`` of a ShardedParameter."""

    _zcomm_param: nn.Parameter

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ASKS_FOR_GRADIENTS and all(args[1:]) and (kwargs or {}).get("requires_grad", True):
            raise RuntimeError(
                f"{_called(args[0])}: the memory of a sharded weight cannot become another Parameter: "
                "nn.Parameter(p.data.clone()) is one"
            )
        if func in DEVICE:
            return func(_placeholder(args[0]), *args[1:], **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Act on copies of the values, for operations that have called no ``__torch_function__``."""
        wholes: dict[int, torch.Tensor] = {}

        def whole(leaf: Any) -> Any:
            if not isinstance(leaf, ShardedData):
                return leaf
            if id(leaf) not in wholes:
                keeper, param = _origin(leaf)
                wholes[id(leaf)] = keeper.whole(param, f"{func}")
            return wholes[id(leaf)]

        if func is torch.ops.aten.is_pinned.default:
            return False
        kwargs = kwargs or {}
        for position, argument in enumerate(func._schema.arguments):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write:
                for leaf in tree_leaves(value):
                    if isinstance(leaf, ShardedData):
                        raise RuntimeError(
                            f"{_called(leaf)}: {func} cannot write to a sharded weight. (Wrappers such as "
                            "DistributedDataParallel do so: leave them out, ZeroOptimizer takes their place)"
                        )
        return func(*tree_map(whole, args), **tree_map(whole, kwargs))


def class_for(own: type, keeper: Keeper) -> type:
    """Return the class that parameters of class ``own`` have while they are stand-ins."""
    return type(f"Sharded{own.__name__}", (ShardedParameter, own), {"_zcomm_keeper": keeper})


def _origin(stand_in: Any) -> tuple[Keeper, nn.Parameter]:
    param = stand_in if isinstance(stand_in, ShardedParameter) else stand_in._zcomm_param
    if not stand_in._zcomm_keeper.has(param):
        raise RuntimeError(
            "this tensor stood for a sharded weight until torch.utils.swap_tensors() put it here, and has no values "
            "now: swap with a copy of the weight (p.clone())"
        )
    return stand_in._zcomm_keeper, param


def original(tensor: torch.Tensor) -> torch.Tensor:
    """Return the parameter of a stand-in, of its data or of a gathered value; any other ``tensor`` itself."""
    if isinstance(tensor, ShardedData):
        return tensor._zcomm_param
    return tensor._zcomm_source.param if isinstance(tensor, WholeValue) else tensor


def _placeholder(stand_in: Any) -> torch.Tensor:
    keeper, param = _origin(stand_in)
    return keeper.placeholder(param)


def _data_of(stand_in: Any) -> ShardedData:
    """Make ``.data``. It is on the meta device, because torch refuses that as the memory of an ordinary tensor
    (``q.data = p.data``)."""
    placeholder = _placeholder(stand_in)
    return _stands_for(stand_in, torch.empty(placeholder.shape, dtype=placeholder.dtype, device="meta"))


def _stands_for(stand_in: Any, memory: torch.Tensor) -> ShardedData:
    data: ShardedData = memory.as_subclass(ShardedData)
    data._zcomm_keeper, data._zcomm_param = _origin(stand_in)
    return data


def _real(stand_in: Any, why: str) -> torch.Tensor:
    """Return an ordinary tensor, or parameter, with the value, and the attributes that the program has set."""
    keeper, param = _origin(stand_in)
    value = keeper.whole(param, why)
    if not isinstance(stand_in, ShardedParameter):
        return value
    with plain():
        made = nn.Parameter(value, requires_grad=stand_in.requires_grad)
    made.__class__ = keeper.own_class(param)
    made.__dict__.update(vars(stand_in))
    return made


# --- one operation ------------------------------------------------------------------------------------------------


def _dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    name = getattr(func, "__name__", "") if not _is_getter(func) else func.__self__.__name__
    if func == _GET_DATA:
        return _data_of(args[0])
    if name == "detach":
        keeper, param = _origin(args[0])
        keeper.check_open(param)  # so that state_dict() of a closed optimizer raises
        return _stands_for(args[0], keeper.placeholder(param))  # torch.func wants the true device
    if func == _SET_DATA:
        return _replace(name, *args, **kwargs)
    if func in MEMORY:
        raise _no_memory(
            f"{_called(args[0])}: {name}(): a weight that is sharded over ranks has no memory of its own: pass "
            "p.clone() or zcomm.zero.full_param(p), and for a whole model opt.full_state_dict()"
        )
    if getattr(func, "__module__", "") == DISTRIBUTED:
        return _communicate(func, name, args, kwargs)
    if name.startswith("_foreach_"):
        return _each(func, name, args, kwargs)
    if func in AUTOGRAD:
        return _of_autograd(func, args, kwargs)
    first = args[0] if args else None
    mine = isinstance(first, _StandIn)
    if name in GEOMETRY and mine:
        raise RuntimeError(f"{_called(first)}: {name}() would change the form of a weight that is sharded over ranks")
    if mine and name in STRIDES:
        return func(torch.empty(_placeholder(first).shape, device="meta"), *args[1:], **kwargs)
    if mine and unchanged_by(func, name, _placeholder(first), args, kwargs):
        return first
    if mine and name == "type" and len(args) + len(kwargs) == 1:
        return func(_placeholder(first))
    if name in LIKE or (name in RESHAPED_AS and not mine):
        return _by_shape(func, name, args, kwargs)
    if name in ("view_as", "expand_as") and _is_own_view(args, kwargs):
        return _own_view(args[0], name)
    if mine and is_transpose(name, args, kwargs) and isinstance(first, ShardedParameter):
        keeper, param = _origin(first)
        if keeper.by_rows(param) is not None and not torch.compiler.is_compiling():
            return transposed(first, keeper.placeholder(param), lambda: _by_value(_tensor.t, "t", (first,), {}))
    weight = args[1] if len(args) > 1 else None
    of_rows = weight._zcomm_rows() if isinstance(weight, ShardedParameter) else None
    if isinstance(weight, ShardedParameter) and of_rows is not None:
        found = of_rows.run(weight, func, args, kwargs)
        if found is not None:
            return found
    if mine and name == "__getitem__" and isinstance(first, ShardedParameter):
        rows = first._zcomm_rows()
        part = None if rows is None else rows.item(args[1])
        if part is not None:
            return part
    use = None if of_rows is not None else _use_of(name, args)
    if use is not None:
        with use as note:
            note(result := func(*args, **kwargs))
        return result
    if mine and name in ELEMENTWISE:
        return _edit(func, first, args, kwargs)
    if name in OVERWRITES or (name.endswith("_") and getattr(func, "__module__", "") == "torch.nn.init"):
        target = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _StandIn)), None)
        if target is not None:
            return _overwrite(func, target, args, kwargs)
    return _by_value(func, name, args, kwargs)


def _is_own_view(args: Any, kwargs: Any) -> bool:
    """Return True if a parameter is viewed in its own shape, with a node for its gradient."""
    seen = len(args) == 2 and not kwargs and args[0] is args[1] and isinstance(args[0], ShardedParameter)
    if not seen or torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    with plain():
        return torch.is_grad_enabled() and bool(args[0].requires_grad)


def _use_of(name: str, args: Any) -> Use | None:
    """Return the use of a function's weight if the function can read the unit's memory without a copy; else None."""
    weight = args[1] if len(args) > 1 else None
    if not isinstance(weight, ShardedParameter):
        return None
    if name == "linear_cross_entropy":  # torch's: with whole logits
        return weight._zcomm_in_use()
    keeper, param = _origin(weight)
    return keeper.use_part(param) if name in _USES else None


def _is_getter(func: Any) -> bool:
    return getattr(func, "__name__", "") in ("__get__", "__set__") and hasattr(func, "__self__")


def _called(stand_in: Any) -> str:
    keeper, param = _origin(stand_in)
    return keeper.name(param)


def _no_memory(message: str) -> RuntimeError:
    """Return the error. While torch.compile traces, return its own error that leaves the operation uncompiled."""
    if torch._guards.TracingContext.try_get() is None:
        return RuntimeError(message)
    from torch._subclasses.fake_tensor import UnsupportedFakeTensorException

    return UnsupportedFakeTensorException(message)  # type: ignore[no-untyped-call,no-any-return,unused-ignore]


def _may_write(stand_in: Any) -> None:
    with plain():
        if torch.is_grad_enabled() and isinstance(stand_in, ShardedParameter) and stand_in.requires_grad:
            raise RuntimeError(f"{_called(stand_in)}: {_LEAF}")


def _noted(stand_in: Any) -> None:
    """Count a change in autograd's version counter."""
    if isinstance(stand_in, ShardedParameter):
        with plain():
            torch.autograd.graph.increment_version(stand_in)


def _of_autograd(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a function of autograd, with the gradient edges of stand-ins in their places as inputs."""

    def edge(leaf: Any) -> Any:
        return torch.autograd.graph.get_gradient_edge(leaf) if isinstance(leaf, ShardedParameter) else leaf

    if kwargs.get("materialize_grads"):
        with plain():
            return func(*args, **kwargs)
    with plain():
        args, kwargs = tree_map(edge, (args, kwargs))
    return func(*args, **kwargs)


def _by_shape(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Run a function that needs only the shape, dtype and device of stand-ins."""
    if name in LIKE and name.endswith("_like") and kwargs.get("memory_format") in (None, torch.preserve_format):
        kwargs = {**kwargs, "memory_format": torch.contiguous_format}
    args, kwargs = tree_map(lambda leaf: _placeholder(leaf) if isinstance(leaf, ShardedData) else leaf, (args, kwargs))
    with plain():
        return func(*args, **kwargs)


def _replace(name: str, stand_in: Any, value: Any = None, *rest: Any, **more: Any) -> Any:
    """Copy the values into the weight, for ``p.data = value`` and ``p.set_(value)``."""
    keeper, param = _origin(stand_in)
    placeholder, called = keeper.placeholder(param), keeper.name(param)
    if not isinstance(stand_in, ShardedParameter):
        raise RuntimeError(
            f"{called}: .data and .detach() of a weight that is sharded over ranks cannot get other memory ({name}): "
            "p.data = t and p.data.copy_(t) change the weight"
        )
    if not isinstance(value, torch.Tensor) or rest or more:
        raise RuntimeError(f"{called}: {name}() on storages is not possible for a weight that is sharded over ranks")
    if original(value) is param and isinstance(value, _StandIn):
        return stand_in
    if keeper.closed:
        keeper.revive(param, value.detach())
        return stand_in
    if value.shape != placeholder.shape:
        raise ValueError(
            f"{called}: it cannot become {_form(value)}, as ZeroOptimizer trains it as {_form(placeholder)}: close the "
            "optimizer, change the model, and build another one"
        )
    if value.dtype != placeholder.dtype:
        keeper.set_aside(param, value.detach())
        return stand_in
    with torch.no_grad():
        _edit(_tensor.copy_, stand_in, (stand_in, value), {})
    return stand_in


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _edit(func: Any, target: Any, args: Any, kwargs: Any) -> Any:
    """Run an elementwise operation on this rank's elements of ``target``."""
    _may_write(target)
    keeper, param = _origin(target)
    shape = keeper.placeholder(param).shape
    ready: dict[int, torch.Tensor | None] = {}
    with torch.no_grad():
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                ready[id(leaf)] = _operand(leaf, param, shape)

        def act(piece: torch.Tensor, elements: slice) -> None:
            def part(leaf: Any) -> Any:
                if not isinstance(leaf, torch.Tensor):
                    return leaf
                value = ready[id(leaf)]
                if value is None:
                    return piece
                return value if value.dim() != 1 or value.numel() == 1 else value[elements].to(piece.device)

            new_args, new_kwargs = tree_map(part, (args, kwargs))
            func(*new_args, **new_kwargs)

        keeper.edit(param, act, getattr(func, "__name__", "") in ("copy_", "fill_", "zero_"))
    _noted(target)
    return target


def _operand(leaf: torch.Tensor, param: nn.Parameter, shape: torch.Size) -> torch.Tensor | None:
    """Return an operand, flat or with one element; None for the changed elements themselves."""
    if isinstance(leaf, _StandIn):
        keeper, other = _origin(leaf)
        if other is param:
            return None
        leaf = keeper.whole(other, "the right-hand side of an operation")
    elif isinstance(leaf, GradStandIn):
        leaf = leaf.full_tensor()  # here, because it is collective and ``act`` runs once for each local piece
    elif _is_dtensor(leaf):
        leaf = leaf.full_tensor()  # type: ignore[attr-defined]
    leaf = leaf.detach()
    return leaf.reshape(()) if leaf.numel() == 1 and shape.numel() != 1 else leaf.broadcast_to(shape).reshape(-1)


def _is_dtensor(leaf: torch.Tensor) -> bool:
    """Return True for a DTensor, without importing its module: a program with DTensors has imported it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(leaf, module.DTensor)


def _overwrite(func: Any, target: Any, args: Any, kwargs: Any) -> Any:
    """Run a function that does not read the old values on a whole temporary tensor, and keep this rank's part."""
    if getattr(func, "__module__", "") != "torch.nn.init":  # torch.nn.init disables gradients
        _may_write(target)
    keeper, param = _origin(target)
    placeholder = keeper.placeholder(param)
    made = torch.empty(placeholder.shape, dtype=placeholder.dtype, device=placeholder.device)
    new_args, new_kwargs = tree_map(lambda leaf: made if leaf is target else leaf, (args, kwargs))
    with torch.no_grad():
        func(*new_args, **new_kwargs)
        keep(keeper, param, made)
    _noted(target)
    return target


def _each(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Run a ``torch._foreach`` function tensor by tensor, so that only one is whole at a time."""
    count = len(args[0])

    def nth(value: Any, at: int) -> Any:
        if name.startswith("_foreach_addc") and isinstance(value, torch.Tensor) and value.dim() == 1:
            return [value[at].item()]  # scalars
        return [value[at]] if isinstance(value, list | tuple) and len(value) == count else value

    results: list[Any] = []
    for at in range(count):
        one = [nth(value, at) for value in args]
        options = {key: nth(value, at) for key, value in kwargs.items()}
        target = one[0][0]
        if isinstance(target, _StandIn) and name.removeprefix("_foreach_") in ELEMENTWISE:
            _edit(func, target, one, options)
        else:
            results.extend(_by_value(func, name, one, options) or ())
    return None if name.endswith("_") else results


# --- whole values -------------------------------------------------------------------------------------------------


def _source(stand_in: Any, why: str, known: dict[int, Source]) -> Source:
    """Return the gathered value of ``stand_in``. Collective, unless it is ``known``, by id() of the parameter."""
    keeper, param = _origin(stand_in)
    if id(param) not in known:
        known[id(param)] = Source(keeper, param, keeper.whole(param, why))
    return known[id(param)]


def _by_value(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    sources: dict[int, Source] = {}

    def whole(leaf: Any) -> Any:
        return _source(leaf, f"{name}()", sources).for_use(leaf) if isinstance(leaf, _StandIn) else leaf

    targets = {id(leaf): leaf for leaf in (args[:1] if args else ()) if isinstance(leaf, _StandIn)}
    if writes(name):
        for target in targets.values():
            _may_write(target)
    args, kwargs = tree_map(whole, (args, kwargs))
    with plain():
        result = func(*args, **kwargs)
    for source in sources.values():
        source.write_back(force=writes(name) and any(_origin(t)[1] is source.param for t in targets.values()))
    return _wrapped(result, sources.values(), targets)


def _own_view(param: nn.Parameter, name: str) -> torch.Tensor:
    """Return the gathered value, with a node that is followed directly by the parameter's node.

    Programs find the parameter's node in this way to set hooks: torch.autograd.graph.register_multi_grad_hook, DDP.
    """
    source = _source(param, f"{name}()", {})
    view = source.for_use(param)
    view.__class__ = WholeValue  # because as_subclass would insert a node
    view._zcomm_source = source  # type: ignore[attr-defined]
    return view


def _communicate(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Run a function of torch.distributed on gathered values.

    Backends write by address, possibly later, so this waits for a write. The write changes the weight on every rank,
    also on a rank that has only sent (``broadcast``).
    """
    target = kwargs.get("gather_list", args[1:2]) if name == "gather" else args[:1]
    written = [leaf for leaf in tree_leaves(target) if isinstance(leaf, _StandIn | WholeValue)]
    written = [] if name in ("send", "isend") else written
    if written and (name in ("reduce", "irecv") or torch.distributed.distributed_c10d._world.pg_coalesce_state):
        raise RuntimeError(
            f"{_called(original(written[0]))}: {name}() into a weight that is sharded over ranks"
            f"{', one of several that are coalesced' if name not in ('reduce', 'irecv') else ''}: use a tensor of your "
            "own (p.clone()), and then p.data.copy_(it) on every rank"
        )
    sources: dict[int, Source] = {}

    def whole(leaf: Any) -> Any:
        if isinstance(leaf, WholeValue):
            with plain():
                return leaf.detach()
        return _source(leaf, f"{name}()", sources).value if isinstance(leaf, _StandIn) else leaf

    changed = {id(leaf._zcomm_source): leaf._zcomm_source for leaf in written if isinstance(leaf, WholeValue)}
    args, kwargs = tree_map(whole, (args, kwargs))
    changed |= {id(sources[id(p)]): sources[id(p)] for p in map(original, written) if id(p) in sources}
    with plain():
        work = func(*args, **kwargs)
        if changed and work is not None and not isinstance(work, int):
            work.wait()
    for source in changed.values():
        source.write_back(force=True)
    return work


class WholeValue(torch.Tensor):
    """A gathered value, or a view of one: a write to it reaches this rank's part of the weight."""

    _zcomm_source: Source

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if TransposedRows in types:
            args, kwargs = with_values(args, kwargs)
        if any(isinstance(leaf, _StandIn) for leaf in tree_leaves((args, kwargs))):
            return _dispatch(func, args, kwargs)
        if getattr(func, "__module__", "") == DISTRIBUTED:
            return _communicate(func, func.__name__, args, kwargs)
        with plain():
            if func in METADATA or func in MEMORY:
                return func(*args, **kwargs)
            values = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, WholeValue)]
            first = args[0] if args and isinstance(args[0], WholeValue) else None
            if func == _GET_DATA:
                return _as_whole(args[0].detach(), args[0]._zcomm_source)
            if first is not None and writes(func.__name__) and first.requires_grad and torch.is_grad_enabled():
                raise RuntimeError(f"{first._zcomm_source.keeper.name(first._zcomm_source.param)}: {_LEAF}")
            result = func(*args, **kwargs)
            overwritten = first is not None and func.__name__ in _FILLS and first._zcomm_source.is_covered(first)
        sources = {id(value._zcomm_source): value._zcomm_source for value in values}
        for source in sources.values():
            source.write_back(overwritten=overwritten and first is not None and source is first._zcomm_source)
        return _wrapped(result, sources.values(), {})

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)  # as torch.Tensor does

    def __hash__(self) -> int:
        return id(self)

    def _zcomm_whole(self, why: str) -> torch.Tensor:
        return self

    def _zcomm_called(self) -> str:
        return self._zcomm_source.keeper.name(self._zcomm_source.param)

    def _zcomm_written(self) -> None:
        self._zcomm_source.write_back(force=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        with plain():
            copied: torch.Tensor = memo.setdefault(id(self), self.as_subclass(torch.Tensor).detach().clone())
            return copied

    def __reduce_ex__(self, proto: Any) -> Any:
        with plain():
            return self.as_subclass(torch.Tensor).detach().__reduce_ex__(proto)


def _as_whole(tensor: torch.Tensor, source: Source) -> torch.Tensor:
    wrapped = tensor.as_subclass(WholeValue)
    wrapped._zcomm_source = source
    return wrapped


def _wrapped(result: Any, sources: Iterable[Source], targets: dict[int, Any]) -> Any:
    """Wrap views of gathered values in ``result`` as WholeValue. An operation that returns its target returns the
    stand-in."""

    def wrap(leaf: Any) -> Any:
        if hasattr(leaf, "flags") and hasattr(leaf, "setflags"):  # of numpy: a write to it would be lost
            leaf.setflags(write=False)
            return leaf
        if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided or leaf.is_meta:
            return leaf
        if isinstance(leaf, GradStandIn) or torch._C._functorch.is_functorch_wrapped_tensor(leaf):  # no storage
            return leaf
        with plain():
            for source in sources:
                if source.shares(leaf):
                    target = source.leaves.get(id(leaf))
                    if target is not None and id(target) in targets:
                        return target
                    return leaf if isinstance(leaf, WholeValue) else _as_whole(leaf, source)
        return leaf

    return tree_map(wrap, result)


def stamp_of(stand_in: Any) -> object:
    """Return a stamp that differs after each change of the value."""
    keeper, param = _origin(stand_in)
    return keeper.stamp(param)


def copied_value(stand_in: Any, why: str) -> torch.Tensor:
    """Return an ordinary copy of the value of ``stand_in``, on the CPU. Collective."""
    keeper, param = _origin(stand_in)
    return keeper.whole(param, why).cpu()


def whole_value(stand_in: Any, why: str) -> torch.Tensor:
    """Return the gathered value of ``stand_in``, on the CPU; writing to it reaches the weight. Collective."""
    keeper, param = _origin(stand_in)
    source = Source(keeper, param, keeper.whole(param, why).cpu())
    with plain():
        return _as_whole(source.value, source)


# Their frames are not compiled; their callers may be.
for _class in (_StandIn, ShardedData, WholeValue, TransposedRows):
    skip(_class.__torch_function__.__func__.__code__)  # type: ignore[attr-defined]
