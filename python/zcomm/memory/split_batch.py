"""Blocks that run a batch in parts: all parts pass one block before the next block is gathered.

[Note: batch in parts] If weights are on the host or a drive, each micro-step reads all of them. A block that
``split_batch`` has prepared takes the whole batch, and calls itself once for each part. Each call is a checkpoint, so
only the inputs of the parts are kept. Backward runs the parts again, from the last to the first. Stage 3 gathers a
block once for all parts in forward, and once in backward: no other unit takes its slot between two parts.
Autograd adds the gradients of all parts before hooks on a parameter run, so a step has one backward pass.
The first input of a part has its own storage, so that offload_activations moves one part at a time.

The class of a prepared module is a subclass with another ``__call__``, as FSDP2 makes them. Names of parameters, hooks
and ``isinstance`` are unchanged. Copies and pickles of the module are prepared, too.
Thread rule: the thread that runs forward. Source: GreedySnake (arXiv:2512.17570) runs all micro-batches of a layer
before the next layer.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.checkpoint import checkpoint

from zcomm.comm.dynamo import skip
from zcomm.memory import sample_checks
from zcomm.memory.sample_checks import Named

_PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, torch.Size)
_Call = Callable[..., Any]


def split_batch(modules: Iterable[nn.Module], parts: int) -> SplitModules:
    """Let each of ``modules`` run its batch in ``parts`` parts, one after another, under activation checkpointing.

    Use: ``zcomm.split_batch(model.layers, parts=4)``, before or after ZeroOptimizer; then one forward and backward of
    the batch of 4 micro-steps. Weights on the host or a drive are read once per pass, not 4 times. The bits are those
    of a module that loops over the parts and joins their outputs by ``torch.cat``.
    The batch is dim 0 of the first tensor argument, [N, ...]; N must be a multiple of ``parts``. Other tensors with N
    in dim 0 are split too, also in tuples, lists and dicts. All others are passed whole. Outputs are tensors [N, ...],
    or containers of them. In ``eval()`` without gradients a module runs whole. The last call for a module counts.

    Returns: a handle; its ``remove()`` undoes it.
    Raises: ValueError, TypeError for the arguments. In forward: ValueError for a batch that does not divide, an
    ambiguous argument, an output without the batch. TypeError for a value that is neither tensor nor plain.
    RuntimeError for a module that mixes samples, changes a buffer, or keeps a result in an attribute.
    """
    if isinstance(parts, bool) or not isinstance(parts, int) or parts < 1:
        raise ValueError(f"split_batch: parts={parts!r} must be a whole number, at least 1")
    if not isinstance(modules, Iterable):
        raise TypeError(
            f"split_batch: modules is one {type(modules).__name__}: give a list of blocks, such as model.layers"
        )
    blocks = list(modules)
    if not blocks:
        raise ValueError("split_batch: modules is empty")
    for number, block in enumerate(blocks):
        if not isinstance(block, nn.Module):
            raise TypeError(f"split_batch: modules has a {type(block).__name__} at {number}, which is not a module")
        inner = next((name for name, each in block.named_modules() if each is not block and _is_in(each, blocks)), None)
        if inner is not None:
            raise ValueError(f"split_batch: module {number} contains its module {inner}, which is split, too: name one")
    for number, block in enumerate(blocks):
        name = f"split_batch: module {number} ({type(block).__name__})"
        vars(block)["_zcomm_split"] = _Split(parts, name)
        if not hasattr(type(block), "_zcomm_base"):
            base: Any = type(block)
            block.__class__ = _split_class(base)
    return SplitModules(blocks)


def parts_of(model: nn.Module) -> dict[str, int]:
    """Return the parts of the modules in ``model`` that ``split_batch`` has prepared, by the modules' names."""
    split = ((name, vars(module).get("_zcomm_split")) for name, module in model.named_modules())
    return {name: found.parts for name, found in split if found is not None}


def _is_in(module: nn.Module, blocks: Sequence[nn.Module]) -> bool:
    return "_zcomm_split" in vars(module) or any(module is block for block in blocks)


class SplitModules:
    """The modules of a call of ``split_batch``."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules

    def remove(self) -> None:
        """Let the modules run whole batches again, without checkpoints. Idempotent."""
        for module in self._modules:
            vars(module).pop("_zcomm_split", None)
            base = vars(type(module)).get("_zcomm_base")
            if base is not None:  # otherwise another library has changed the class after split_batch
                module.__class__ = base


@functools.cache
def _split_class(base: Any) -> type[nn.Module]:
    """Return the class of prepared modules of class ``base``."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        split: _Split | None = vars(self).get("_zcomm_split")
        whole = functools.partial(base.__call__, self)
        # In training also without gradients: a reentrant checkpoint around the module must draw the same numbers twice.
        if split is None or not (self.training or torch.is_grad_enabled()):
            return whole(*args, **kwargs)
        return split.run(self, whole, args, kwargs)

    def reduce(self: nn.Module, protocol: Any) -> Any:
        reduced: Any = base.__reduce_ex__(self, protocol)
        made = [base if value is type(self) else value for value in (reduced[0], *reduced[1])]
        return (_rebuild, (base, *made), *reduced[2:])

    skip(call.__code__)
    members = {"__call__": call, "__reduce_ex__": reduce, "_zcomm_base": base, "__doc__": base.__doc__}
    members |= {"__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (base,), members)


def _rebuild(base: Any, function: _Call, *values: Any) -> nn.Module:
    """Return a copy of a prepared module, without its state yet."""
    module: nn.Module = function(*values)
    module.__class__ = _split_class(base)
    return module


@dataclass(frozen=True)
class _Place:
    """Place of a tensor in a structure without its tensors."""

    index: int


class _Split:
    """The parts of one module. parts: their number. name: begins each error."""

    def __init__(self, parts: int, name: str) -> None:
        self.parts, self._name = parts, name
        self._checked: set[bool] = set()  # values of ``training``
        self._known: dict[str, bool] = {}  # whether an argument was split when its shape told it

    def run(self, module: nn.Module, whole: _Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``whole`` for each part and join the outputs."""
        inputs: Named = []
        positions = [self._take(value, f"argument {at}", inputs) for at, value in enumerate(args)]
        names = {key: self._take(value, f"argument {key}", inputs) for key, value in kwargs.items()}

        def function(*tensors: torch.Tensor) -> Any:
            return whole(*_fill(positions, tensors), **_fill(names, tensors))

        before = sample_checks.versions(module)
        if self.parts == 1:
            output = checkpoint(function, *(tensor for _, tensor in inputs), use_reentrant=False)
        else:
            output = self._run_parts(module, function, inputs)
        sample_checks.check_buffers(self._name, module, before)
        if self.parts > 1:
            sample_checks.check_attributes(self._name, module)
        return output

    def _run_parts(self, module: nn.Module, function: _Call, inputs: Named) -> Any:
        first, is_split = self._choose(inputs)
        tensors = [tensor for _, tensor in inputs]
        size = tensors[first].shape[0] // self.parts
        if module.training not in self._checked and not tensors[first].is_meta:
            with sample_checks.without_caches(module):
                sample_checks.check_samples(self._name, self._flat(function), tensors, is_split, first, size)
            self._checked.add(module.training)
        pieces = [
            tensor.split(size) if split else (tensor,) * self.parts
            for tensor, split in zip(tensors, is_split, strict=True)
        ]
        outputs: list[Any] = []
        for part in zip(*pieces, strict=True):
            own = [tensor.clone() if at == first else tensor for at, tensor in enumerate(part)]
            outputs.append(checkpoint(function, *own, use_reentrant=False))
        return self._join(outputs, size)

    def _take(self, value: Any, path: str, tensors: Named) -> Any:
        """Return ``value`` with a _Place for each tensor, and append these to ``tensors``."""

        def take(path: str, leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                tensors.append((path, leaf))
                return _Place(len(tensors) - 1)
            if isinstance(leaf, _PLAIN):
                return leaf
            raise TypeError(
                f"{self._name}: {path} is a {type(leaf).__name__}, which may hold values of several "
                "samples: pass tensors, plain values, or tuples, lists and dicts of them (of transformers' models: "
                "use_cache=False)"
            )

        return _map(value, take, path)

    def _choose(self, inputs: Named) -> tuple[int, list[bool]]:
        """Return the number of the first tensor, and for each tensor whether it is split."""
        first = next((at for at, (_, tensor) in enumerate(inputs) if tensor.dim() > 0), None)
        if first is None:
            raise TypeError(f"{self._name} has no tensor argument [N, ...] with a batch to split")
        path, tensor = inputs[first]
        count = tensor.shape[0]
        if count == 0 or count % self.parts:
            raise ValueError(
                f"{self._name}: the batch of {count} (dim 0 of {path}, {list(tensor.shape)}) does not divide into "
                f"parts={self.parts}: leave out incomplete batches (DataLoader(drop_last=True)), or take other parts"
            )
        return first, [other is tensor or self._is_split(path, other, inputs[first]) for path, other in inputs]

    def _is_split(self, path: str, tensor: torch.Tensor, first: tuple[str, torch.Tensor]) -> bool:
        shape, count = first[1].shape, first[1].shape[0]
        if tensor.dim() == 0 or tensor.shape[0] != count:
            self._known[path] = False
        elif tensor.shape == shape or count not in shape[1:]:
            self._known[path] = True
        elif path not in self._known:
            raise ValueError(
                f"{self._name}: {path} {list(tensor.shape)} is ambiguous: its dim 0 may be the batch of "
                f"{first[0]} {list(shape)} or another dimension of it, which is {count}, too. Later batches may have "
                "such shapes; the first batch needs another size"
            )
        return self._known[path]

    def _flat(self, function: _Call) -> Callable[[Sequence[torch.Tensor]], Named]:
        """Return a function that returns the tensors in the outputs of ``function``."""

        def run(inputs: Sequence[torch.Tensor]) -> Named:
            found: Named = []
            self._take(function(*inputs), "output", found)
            return found

        return run

    def _join(self, outputs: Sequence[Any], size: int) -> Any:
        found: list[Named] = [[] for _ in outputs]
        forms = [self._take(output, "output", tensors) for output, tensors in zip(outputs, found, strict=True)]
        if any(form != forms[0] for form in forms):
            raise ValueError(f"{self._name} returns other structures or plain values for other parts")
        for tensors in found:
            for path, tensor in tensors:
                sample_checks.check_rows(self._name, path, tensor, size)
        columns = zip(*([tensor for _, tensor in tensors] for tensors in found), strict=True)
        return _fill(forms[0], [torch.cat(column) for column in columns])


def _map(value: Any, act: Callable[[str, Any], Any], path: str = "") -> Any:
    """Return ``value`` with ``act(path, leaf)`` for each leaf of its tuples, lists and dicts."""
    if isinstance(value, dict):
        items = {key: _map(item, act, f"{path}[{key!r}]") for key, item in value.items()}
        return items if type(value) is dict else type(value)(**items)
    is_named = isinstance(value, tuple) and hasattr(value, "_fields") and not isinstance(value, PackedSequence)
    if type(value) in (tuple, list) or is_named:
        made = [_map(item, act, f"{path}[{at}]") for at, item in enumerate(value)]
        return type(value)(*made) if is_named else type(value)(made)
    return act(path, value)


def _fill(form: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return ``form`` with the tensors at their places."""
    return _map(form, lambda _, leaf: tensors[leaf.index] if isinstance(leaf, _Place) else leaf)
