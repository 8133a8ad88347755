"""Deferred tensors: parameters on the meta device that know how to become real, one at a time.

[Note: recipes] Inside of ``Recorder`` a large floating-point tensor that a constructor makes gets no memory, but a
recipe: the operations that were done to its storage. A random operation is recorded with the generator's state. It is
also carried out once on memory that is dropped at once, so that the generator goes on as in an ordinary construction.
``value_of`` repeats the operations: the same bits, whenever and wherever. ``reader_of`` does so by pieces (replay.py).
A copy from a tensor of a mapped file is a recipe, too: the elements are read from the file (mapped_file.py).
What an operation overwrites whole is forgotten. An operation that reads a deferred tensor and makes another one gets
its value and gives an ordinary tensor.
Recipes belong to storages (views, ``.data`` and ``detach()`` share them), and move to the parameters in ``end``.
Source: the idea is torchdistX's deferred_init.
"""

from __future__ import annotations

import copyreg
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from zcomm.comm.communicator import Communicator
from zcomm.zero.materialize import mapped_file, replay
from zcomm.zero.materialize.mapped_file import FileRange

_aten = torch.ops.aten
_ATTRIBUTE, _OPENED = "_zcomm_deferred", "_zcomm_opened"
_data: Any = torch.Tensor.data
_GET_DATA, _SET_DATA = _data.__get__, _data.__set__
_GET_DEVICE = torch.Tensor.device.__get__
_is_meta: Any = torch.Tensor.is_meta
_GET_IS_META = _is_meta.__get__

# Factory -> what it does to new memory (given the call's arguments after the size).
_FACTORIES: dict[Any, Callable[..., tuple[Any, tuple[Any, ...]] | None]] = {
    _aten.empty.memory_format: lambda: None,
    _aten.empty_like.default: lambda: None,
    _aten.zeros.default: lambda: None,  # new memory is zero
    _aten.ones.default: lambda: (_aten.fill_.Scalar, (1,)),
    _aten.full.default: lambda value: (_aten.fill_.Scalar, (value,)),
    _aten.rand.default: lambda: (_aten.uniform_.default, (0.0, 1.0)),
    _aten.rand.generator: lambda: (_aten.uniform_.default, (0.0, 1.0)),
    _aten.randn.default: lambda: (_aten.normal_.default, (0.0, 1.0)),
    _aten.randn.generator: lambda: (_aten.normal_.default, (0.0, 1.0)),
}
_OVERWRITES = {
    _aten.zero_.default,
    _aten.fill_.Scalar,
    _aten.fill_.Tensor,
    _aten.uniform_.default,
    _aten.normal_.default,
    _aten.copy_.default,
}


def _getter(name: str) -> Any:
    return getattr(torch.Tensor, name).__get__


# What asks nothing of a parameter's value: reads of these attributes, and calls of these methods.
_OF_NO_VALUE = {
    *(_getter(name) for name in "shape dtype grad grad_fn is_leaf layout ndim requires_grad _version".split()),
    *(getattr(torch.Tensor, name) for name in "size dim numel is_floating_point is_complex element_size".split()),
    torch.Tensor.__hash__,
    torch.is_floating_point,
}
_MOVES = {torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda}
_BY_SHAPE = {"view_as", "expand_as", "reshape_as", "type_as", "__set__"}
_COPIES = {_aten.clone.default, _aten._to_copy.default}


@dataclass
class Recipe:
    """The future value of the ``nbytes`` of one storage. ``ops`` in order; a fresh storage is zero."""

    nbytes: int
    ops: list[Op] = field(default_factory=list)

    def replay(self) -> torch.UntypedStorage:
        """Build a new storage with the value. Generators are left as they were."""
        memory = replay.pages(self.nbytes)
        for op in self.ops:
            op.run(memory)
        return memory


@dataclass(frozen=True)
class Ref:
    """A strided view of a storage: of the one being replayed, or of another one as it was then."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    other: Recipe | None = None

    @staticmethod
    def to(tensor: torch.Tensor, other: Recipe | None = None) -> Ref:
        snapshot = None if other is None else Recipe(other.nbytes, list(other.ops))
        return Ref(tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()), snapshot)

    def on(self, memory: torch.UntypedStorage) -> torch.Tensor:
        if self.other is not None:
            memory = self.other.replay()
        return torch.empty(0, dtype=self.dtype).set_(memory, self.offset, self.size, self.stride)

    def by_pieces(self) -> Callable[[int, int], torch.Tensor] | None:
        """Return ``read(begin, end)`` of what it was in another storage; None where that cannot be cut."""
        found = None if self.other is None else _by_pieces(Deferred(self.other, self, 0))
        return None if found is None else found.read

    @property
    def contiguous(self) -> bool:
        """True if its elements follow each other in memory."""
        return replay.contiguous(self.size, self.stride)

    def covers(self, nbytes: int) -> bool:
        return self.size.numel() * self.dtype.itemsize == nbytes and 0 not in self.stride


@dataclass(frozen=True)
class Stored:
    """A contiguous tensor of ``size`` in a file."""

    place: FileRange
    size: torch.Size

    def on(self, memory: torch.UntypedStorage) -> torch.Tensor:
        return self.place.read(0, self.place.count).view(self.size)

    def by_pieces(self) -> Callable[[int, int], torch.Tensor]:
        return self.place.read


@dataclass(frozen=True)
class Op:
    """One recorded operation; ``state`` is that of ``generator`` before it, where it is random."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    generator: torch.Generator | None = None
    state: torch.Tensor | None = None

    def run(self, memory: torch.UntypedStorage) -> None:
        args, kwargs = tree_map(
            lambda leaf: leaf.on(memory) if isinstance(leaf, (Ref, Stored)) else leaf, (self.args, self.kwargs)
        )
        if self.generator is None:
            self.func(*args, **kwargs)
            return
        now = self.generator.get_state()
        self.generator.set_state(self.state)  # type: ignore[arg-type]
        try:
            self.func(*args, **kwargs)
        finally:
            self.generator.set_state(now)


class ValuePart(Protocol):
    """A Part (part.py)."""

    def read(self, comm: Communicator, name: str, begin: int, end: int) -> torch.Tensor:
        """Return flat elements [begin, end) of the whole value. Collective."""

    def gather(self, comm: Communicator, name: str) -> torch.Tensor:
        """Return the whole value. Collective."""


@dataclass(frozen=True)
class Deferred:
    """The future value of a parameter on the meta device. ``read(begin, end)``: flat elements from a file instead.

    part: this rank's elements of a value that was set already, instead.
    """

    recipe: Recipe
    ref: Ref
    version: int
    read: Callable[[int, int], torch.Tensor] | None = None
    part: ValuePart | None = None


class Recorder(TorchDispatchMode):
    """Makes tensors of at least ``min_count`` elements deferred. Not for several threads at once."""

    def __init__(self, min_count: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._min_count = min_count
        self._recipes: dict[int, tuple[torch.UntypedStorage, Recipe]] = {}  # a storage that lives keeps its number
        self.ended = False

    def adopt(self, tensor: torch.Tensor) -> None:
        """Make ``tensor``, on the meta device already, deferred; its value comes from what is done to it now."""
        storage = tensor.untyped_storage()
        self._recipes.setdefault(storage._cdata, (storage, Recipe(storage.nbytes())))

    def recipe(self, tensor: torch.Tensor) -> Recipe | None:
        with torch._C.DisableTorchFunction():  # ReportsCpu must not answer here
            if tensor.device.type != "meta":
                return None
            return self._recipes.get(tensor.untyped_storage()._cdata, (None, None))[1]

    def is_deferred(self, value: object) -> bool:
        return isinstance(value, torch.Tensor) and self.recipe(value) is not None

    def end(self, params: Iterable[nn.Parameter]) -> None:
        """Give the recipes to the parameters that they belong to. No tensor becomes deferred any more."""
        self.ended = True
        for param in params:
            recipe = self.recipe(param)
            if recipe is not None:
                _make_wait(param, Deferred(recipe, Ref.to(param), param._version))
        self._recipes.clear()

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        recipe = self.recipe(tensor)
        return tensor if recipe is None else Ref.to(tensor).on(recipe.replay())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._dispatch(func, args, kwargs or {})

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not any(self.recipe(tensor) is not None for tensor in tensors):
            if self._reads_file(func, args, kwargs):
                return self._copy(args[0], kwargs)
            return self._create(args, kwargs, func) if self._wanted(func, args, kwargs) else func(*args, **kwargs)
        schema = func._schema
        written = [
            args[i] if i < len(args) else kwargs[arg.name]
            for i, arg in enumerate(schema.arguments)
            if arg.alias_info is not None and arg.alias_info.is_write and (i < len(args) or arg.name in kwargs)
        ]
        if len(written) == 1 and self.recipe(written[0]) is not None:
            self.record(func, args, kwargs, written[0])
            return written[0]
        if not written and any(value.alias_info is not None for value in schema.returns):
            return func(*args, **kwargs)  # a view
        if func in _COPIES and kwargs.get("device") in (None, torch.device("cpu")):
            return self._copy(args[0], kwargs)
        args, kwargs = tree_map(
            lambda leaf: self.value(leaf) if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs)
        )
        if isinstance(kwargs.get("device"), torch.device) and kwargs["device"].type == "meta":
            kwargs["device"] = torch.device("cpu")  # new_empty() and its like ask for the tensor's own device
        return func(*args, **kwargs)

    def _reads_file(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Return True for a copy or conversion of a large tensor of a mapped file."""
        if self.ended or func not in _COPIES or kwargs.get("device") not in (None, torch.device("cpu")):
            return False
        source, dtype = args[0], kwargs.get("dtype") or args[0].dtype
        if not (source.is_floating_point() and dtype.is_floating_point and source.numel() >= self._min_count):
            return False
        return mapped_file.file_range(source) is not None

    def _wanted(self, func: Any, args: Any, kwargs: Any) -> bool:
        if self.ended or func not in _FACTORIES or (kwargs.get("device") or torch.get_default_device()).type != "cpu":
            return False
        if func is _aten.empty_like.default:  # beside a tensor of torch's meta device, as for weights of no file
            like = args[0]
            dtype = kwargs.get("dtype") or like.dtype
            return bool(like.is_meta and dtype.is_floating_point and like.numel() >= self._min_count)
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        return bool(dtype.is_floating_point and torch.Size(args[0]).numel() >= self._min_count)

    def _create(self, args: Any, kwargs: Any, func: Any) -> torch.Tensor:
        if func is _aten.empty_like.default:
            tensor = torch.empty(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device="meta")
            self.adopt(tensor)
            return tensor
        tensor = torch.empty(args[0], dtype=kwargs.get("dtype"), device="meta")
        self.adopt(tensor)
        generated = func in (_aten.rand.generator, _aten.randn.generator)
        first = _FACTORIES[func](*(args[1:] if not generated else ()))
        if first is not None:
            generator = {"generator": kwargs.get("generator", args[1] if len(args) > 1 else None)} if generated else {}
            self.record(first[0], (tensor, *first[1]), generator, tensor)
        return tensor

    def _copy(self, source: torch.Tensor, kwargs: Any) -> torch.Tensor:
        tensor = torch.empty_like(source, dtype=kwargs.get("dtype"), device="meta")
        self.adopt(tensor)
        self.record(_aten.copy_.default, (tensor, source), {}, tensor)
        return tensor

    def record(self, func: Any, args: Any, kwargs: Any, written: torch.Tensor, macro: bool = False) -> None:
        """Record that ``func`` writes to a deferred tensor. macro: it is not one of torch's operations, but a random
        start that overwrites all of it."""
        recipe = self.recipe(written)
        assert recipe is not None
        mine = written.untyped_storage()._cdata
        reads_itself = False

        def note(leaf: Any) -> Any:
            nonlocal reads_itself
            if not isinstance(leaf, torch.Tensor):
                return leaf
            own = leaf.is_meta and leaf.untyped_storage()._cdata == mine
            reads_itself = reads_itself or (own and leaf is not written)
            if own:
                return Ref.to(leaf)
            other = self.recipe(leaf)
            if other is not None:
                return Ref.to(leaf, other)
            place = mapped_file.file_range(leaf)
            return leaf.detach().clone() if place is None else Stored(place, leaf.size())

        args, kwargs = tree_map(note, (args, kwargs))
        generator = None
        if macro or torch.Tag.nondeterministic_seeded in func.tags:
            generator = kwargs.get("generator") or torch.default_generator
        op = Op(func, args, kwargs, generator, generator.get_state() if generator is not None else None)
        if (macro or func in _OVERWRITES) and not reads_itself and Ref.to(written).covers(recipe.nbytes):
            recipe.ops.clear()
        recipe.ops.append(op)
        if generator is not None:  # the generator goes on as if the tensor were there
            with _disable_current_modes():
                if not macro and replay.spend(func, written, args[1:], kwargs):
                    return
                memory = replay.pages(recipe.nbytes)
                spent = tree_map(
                    lambda leaf: leaf.on(memory) if isinstance(leaf, (Ref, Stored)) else leaf, (args, kwargs)
                )
                func(*spent[0], **spent[1])


class ReportsCpu(TorchFunctionMode):
    """Mode inside of Init: deferred tensors report the CPU as their device, so that init functions treat them as
    usual. They take memory as their ``.data``, and others take theirs."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        tensor: Any = torch.Tensor
        self._answers = {
            tensor.is_meta.__get__: False,
            tensor.is_cpu.__get__: True,
            tensor.device.__get__: torch.device("cpu"),
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._answers and self._recorder.recipe(args[0]) is not None:
            return self._answers[func]
        if func == _SET_DATA and self._recorder.is_deferred(args[0]) != self._recorder.is_deferred(args[1]):
            return _swap_memory(args[0], args[1], type(args[0]))
        return func(*args, **(kwargs or {}))


# --- parameters that wait -----------------------------------------------------------------------------------------


class Waiting(nn.Parameter):
    """A parameter on the meta device, that reports the CPU: programs put inputs and adapters where parameters are.

    What is done to its ``.data`` counts as done to it: torch would not tell, and it would be lost. A parameter of a
    program's own class has a class that derives from both.
    """

    __slots__ = ()
    becomes: type[nn.Parameter] = nn.Parameter

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func == _GET_DEVICE:
                return torch.device("cpu")
            opened = _opened(func, args, kwargs or {})
            if opened and func == _GET_IS_META:
                return False
            if opened and func == torch.Tensor.copy_ and _copied_from_file(args, kwargs or {}):
                return args[0]
        if opened:
            for param in opened:
                vars(param).pop(_OPENED)()  # real from here on
            return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            if func == _GET_DATA:
                return args[0].detach()  # as .data, but with the parameter's version counter
            if func == _SET_DATA and args[1] is not args[0] and args[1].dtype == args[0].dtype:  # model.to() may
                raise ValueError(
                    f"a parameter of shape {tuple(args[0].shape)} is given other .data after zcomm.zero.Init() had "
                    "ended, where it has no memory: initialise it inside, or inside of zcomm.zero.GatheredParameters"
                )
            if func in _MOVES and isinstance(args[0], Waiting):
                return _converted(args[0], func, args[1:], kwargs or {})
            own: Any = super().__torch_function__
            if own is torch._C._disabled_torch_function_impl:
                return _checked(func(*args, **(kwargs or {})), func, args, kwargs)
        return _checked(own(func, types, args, kwargs or {}), func, args, kwargs)


def open_late(param: nn.Parameter, make_real: Callable[[], None]) -> None:
    """Let a parameter that waits call ``make_real`` where its value is first used. Till then a copy of a tensor of a
    mapped file into it is its future value, and moves nothing."""
    setattr(param, _OPENED, make_real)


def close(param: nn.Parameter) -> None:
    """Undo ``open_late``."""
    vars(param).pop(_OPENED, None)


def future(param: nn.Parameter) -> Deferred:
    """Return the future value of a parameter that waits."""
    found: Deferred = getattr(param, _ATTRIBUTE)
    return found


def set_future(param: nn.Parameter, value: Deferred) -> None:
    """Give a parameter that waits another future value, of its shape."""
    setattr(param, _ATTRIBUTE, dataclasses.replace(value, version=param._version))


def _opened(func: Any, args: Any, kwargs: Any) -> list[Waiting]:
    """Return the parameters that ``func`` makes real."""
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Waiting) and _OPENED in vars(leaf)]
    return [] if func in _OF_NO_VALUE else leaves


def _copied_from_file(args: Any, kwargs: Any) -> bool:
    """Let the first argument become the second one, where that is a tensor of its shape in a mapped file."""
    if len(args) != 2 or kwargs or isinstance(args[1], Waiting) or args[0].shape != args[1].shape:
        return False
    param, place = args[0], mapped_file.file_range(args[1])
    if place is None or not (param.is_floating_point() and place.dtype.is_floating_point):
        return False
    if param.requires_grad and torch.is_grad_enabled():
        return False  # torch's error
    dtype = param.dtype
    _make_wait(param, Deferred(Recipe(0), Ref.to(param), param._version, lambda a, b: place.read(a, b).to(dtype)))
    return True


def _converted(param: Waiting, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """Convert the dtype alone, for ``model.to(device)``: ZeroOptimizer places the parameters."""
    if func is not torch.Tensor.to:
        return param
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    if device is not None and device.type == "meta":
        return param.to(*args, **kwargs)
    return param if dtype in (None, param.dtype) else param.to(dtype)


def _checked(result: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Return ``result``. Raises: RuntimeError where it was computed from a value that is not there.

    torch gives whatever is in memory then: ``F.linear`` with a weight on the meta device does so.
    """
    if getattr(func, "__name__", "") in _BY_SHAPE or not any(_has_values(leaf) for leaf in tree_leaves(result)):
        return result
    leaves = tree_leaves((args, kwargs))
    if any(_has_values(leaf) for leaf in leaves):
        param = next(leaf for leaf in leaves if isinstance(leaf, Waiting))
        raise RuntimeError(
            f"a parameter of shape {tuple(param.shape)} of zcomm.zero.Init() has no value here before ZeroOptimizer is "
            "built: use the model after that, or inside of zcomm.zero.GatheredParameters"
        )
    return result


def _has_values(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not leaf.is_meta


@functools.cache
def _waiting(kind: type[nn.Parameter]) -> type[Waiting]:
    """Return the class of ``kind`` while it waits."""
    if kind is nn.Parameter:
        return Waiting
    return type(f"Waiting{kind.__name__}", (Waiting, kind), {"__slots__": (), "becomes": kind})


def _make_wait(param: torch.Tensor, deferred: Deferred) -> None:
    setattr(param, _ATTRIBUTE, deferred)
    kind = type(param)
    if issubclass(kind, nn.Parameter) and not issubclass(kind, Waiting):
        param.__class__ = _waiting(kind)


def read_from(param: torch.Tensor, read: Callable[[int, int], torch.Tensor]) -> None:
    """Let ``param``, which is on the meta device, become what ``read(begin, end)`` gives of its flat elements."""
    _make_wait(param, Deferred(Recipe(0), Ref.to(param), param._version, read))


def value_of(param: torch.Tensor, name: str, comm: Communicator | None) -> torch.Tensor:
    """Return the whole value of a deferred parameter, in its shape; ``param`` itself where it is real. Collective where
    ranks have parts of it, which alone needs ``comm``.

    Raises: ValueError for one that was changed after ``zero.Init`` had ended (there was no memory to change).
    """
    if not param.is_meta:
        return param
    deferred = check(param, name)
    with torch.no_grad():
        if deferred.part is not None:
            assert comm is not None
            return deferred.part.gather(comm, name).to(param.dtype)
        if deferred.read is not None:
            return deferred.read(0, param.numel()).view(param.shape)
        return deferred.ref.on(deferred.recipe.replay()).to(param.dtype)  # a model.to(dtype) since then


def reader_of(param: torch.Tensor, name: str) -> Callable[[int, int], torch.Tensor]:
    """Return ``read(begin, end)`` of a parameter's flat elements, from front to back. A value that can be made by
    pieces never exists whole. Raises: as ``value_of``, which is for values that ranks have parts of."""
    deferred = check(param, name) if param.is_meta else None
    if deferred is not None and deferred.read is not None:
        return deferred.read
    by_pieces = None if deferred is None else _by_pieces(deferred)
    if by_pieces is not None:
        return by_pieces.read
    mapped = mapped_file.reader_of(param) if deferred is None else None
    if mapped is not None:
        return mapped
    flat: list[torch.Tensor] = []

    def read(begin: int, end: int) -> torch.Tensor:
        if not flat:
            whole = param.detach() if deferred is None else value_of(param, name, None)
            flat.append(whole.reshape(-1))
        return flat[0][begin:end]

    return read


def _by_pieces(deferred: Deferred) -> replay.Replay | None:
    """Return the replay of a recipe by pieces; None where an operation is not known to allow it."""
    ref = deferred.ref
    steps: list[replay.Step | replay.CopyStep] = []
    count = ref.size.numel()
    for op in deferred.recipe.ops:
        to = op.args[0] if op.args else None
        if not isinstance(to, Ref) or to.other is not None or to.dtype != ref.dtype or set(op.kwargs) - {"generator"}:
            return None
        begin = to.offset - ref.offset
        whole = begin == 0 and to.size.numel() == count
        if not to.contiguous:
            return None
        if op.func is _aten.copy_.default:
            source = op.args[1]
            read = source.by_pieces() if isinstance(source, (Ref, Stored)) and source.size == to.size else None
            if read is None:
                return None
            steps.append(replay.CopyStep(read, begin, begin + to.size.numel()))
            continue
        if not replay.Step.known(op.func, op.args[1:], ref.dtype, whole):
            return None
        steps.append(replay.Step(op.func, begin, begin + to.size.numel(), op.args[1:], op.state))
    return replay.Replay(count, ref.dtype, steps) if ref.contiguous else None


def check(param: torch.Tensor, name: str) -> Deferred:
    """Return the deferred value. Raises: ValueError where a parameter on the meta device has no value to come."""
    deferred: Deferred | None = getattr(param, _ATTRIBUTE, None) if param.is_meta else None
    if deferred is None:
        raise ValueError(
            f"{name} is on the meta device and has no value to come: build the model inside of zcomm.zero.Init() (and "
            "copy it there), or call zcomm.zero.Init(model) or zcomm.zero.load_weights(model, path)"
        )
    if param._version != deferred.version or param.shape != deferred.ref.size:
        raise ValueError(
            f"{name} was changed after zcomm.zero.Init() had ended, where it has no memory: initialise it inside, or "
            "inside of zcomm.zero.GatheredParameters"
        )
    return deferred


def materialize(param: nn.Parameter, value: torch.Tensor) -> None:
    """Make a parameter on the meta device an ordinary one with the data ``value``.

    It stays the same object, with its class, attributes, hooks and need of gradients.
    Raises: RuntimeError where something else refers to its memory or, weakly, to it: torch cannot swap it then.
    """
    if not param.is_meta:
        param.data = value
        return
    for name in (_ATTRIBUTE, _OPENED):
        vars(param).pop(name, None)
    kind = type(param)
    if issubclass(kind, Waiting):
        kind = param.__class__ = kind.becomes
    _swap_memory(param, value, kind)


def wait_again(param: nn.Parameter, kept: Deferred, dtype: torch.dtype) -> None:
    """Undo ``materialize``: ``param``, in ``dtype``, has no memory again, and ``kept`` is its future value."""
    memory = torch.empty(kept.ref.size, dtype=dtype, device="meta")
    _swap_memory(param, memory, type(param))
    _make_wait(param, Deferred(kept.recipe, kept.ref, param._version, kept.read, kept.part))


def wait_for_part(param: nn.Parameter, part: ValuePart) -> None:
    """Take the memory of ``param``: its value is ``part``, together with other ranks', from now on."""
    wait_again(param, Deferred(Recipe(0), Ref.to(param), 0, part=part), param.dtype)


def _swap_memory(param: nn.Parameter, value: torch.Tensor, kind: type[nn.Parameter]) -> None:
    """Give ``param`` the memory and device of ``value``. torch swaps all that Python keeps of a tensor, too, but its
    hooks: so the other tensor has the same beforehand."""
    other: Any = torch.Tensor._make_subclass(kind, value.detach(), param.requires_grad)
    vars(other).update(vars(param))
    for slot in copyreg._slotnames(kind):  # type: ignore[attr-defined]
        if hasattr(param, slot):
            setattr(other, slot, getattr(param, slot))
    if weakref.getweakrefs(param):
        raise RuntimeError(
            f"a parameter of shape {tuple(param.shape)} of zcomm.zero.Init() becomes real, and torch cannot swap its "
            "memory while there are weak references to it: make those after ZeroOptimizer"
        )
    torch.utils.swap_tensors(param, other)
    of_program: Any = param
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(param, hooks):
            setattr(of_program, hooks, getattr(param, hooks))  # which registers them with the new memory
