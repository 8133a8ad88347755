"""Recorder: gives large tensors that constructors create recipes instead of memory ([Note: recipes]).

Thread rule: one thread, because a mode of torch is local to its thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from zcomm.zero.materialize import mapped_file, replay
from zcomm.zero.materialize.deferred import SET_DATA, make_wait, mark_real, swap_memory
from zcomm.zero.materialize.recipe import Deferred, Op, Recipe, Ref, Stored

_aten = torch.ops.aten
_COPIES = {_aten.clone.default, _aten._to_copy.default}

# Factory -> its operation on new memory (given the call's arguments after the size).
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


class Recorder(TorchDispatchMode):
    """Makes tensors of at least ``min_count`` elements deferred. Not for several threads at once."""

    def __init__(self, min_count: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._min_count = min_count
        self._recipes: dict[int, tuple[torch.UntypedStorage, Recipe]] = {}  # holds storages, so that keys stay unique
        self.ended = False

    def adopt(self, tensor: torch.Tensor) -> None:
        """Make ``tensor``, already on the meta device, deferred; the operations from now on define its value."""
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
        """Move the recipes to their parameters. From now on no tensor becomes deferred."""
        first, self.ended = not self.ended, True
        for param in params:
            recipe = self.recipe(param)
            if recipe is not None:
                make_wait(param, Deferred(recipe, Ref.to(param), param._version))
            elif first and not param.is_meta:
                mark_real(param)
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
            kwargs["device"] = torch.device("cpu")  # new_empty() and similar functions pass the tensor's own device
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
        if func is _aten.empty_like.default:  # like a tensor on torch's meta device, as for weights that no file has
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
        """Record that ``func`` writes to a deferred tensor. macro: ``func`` is not an operation of torch, but a random
        initialisation that overwrites all of it."""
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
        if generator is not None:  # the generator advances as if the tensor had memory
            with _disable_current_modes():
                if not macro and replay.spend(func, written, args[1:], kwargs):
                    return
                memory = replay.pages(recipe.nbytes)
                spent = tree_map(
                    lambda leaf: leaf.on(memory) if isinstance(leaf, (Ref, Stored)) else leaf, (args, kwargs)
                )
                func(*spent[0], **spent[1])


class ReportsCpu(TorchFunctionMode):
    """Mode inside Init: deferred tensors report the CPU as their device, so that init functions treat them as usual.
    ``.data`` may be set from a deferred to an ordinary tensor, and vice versa."""

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
        if func == SET_DATA and self._recorder.is_deferred(args[0]) != self._recorder.is_deferred(args[1]):
            return swap_memory(args[0], args[1], type(args[0]))
        return func(*args, **(kwargs or {}))
