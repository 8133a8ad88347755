"""Layers of a pipeline: how a list of them is cut into stages, built, and which weights several stages share.

The cut is the same on all ranks; it reads layers and makes no communication. A rank keeps the layers of its own stages.
Layers of a LayerSpec are built with a seed of their own, so that weights do not depend on the cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class LayerSpec:
    """A layer that is built by the ranks of its stage only: ``typename(*args, **kwargs)``."""

    def __init__(self, typename: Callable[..., Any], *module_args: Any, **module_kwargs: Any) -> None:
        if not isinstance(typename, type) or not issubclass(typename, nn.Module):
            raise RuntimeError(f"LayerSpec needs a subclass of torch.nn.Module, got {typename!r}")
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def __repr__(self) -> str:
        words = [*map(repr, self.module_args), *(f"{key}={value!r}" for key, value in self.module_kwargs.items())]
        return f"{self.typename.__name__}({', '.join(words)})"

    def build(self, log: bool = False) -> nn.Module:
        """Return a new layer."""
        module: nn.Module = self.typename(*self.module_args, **self.module_kwargs)
        return module


class TiedLayerSpec(LayerSpec):
    """A LayerSpec; layers of one ``key`` are one layer, of which each of their stages has a copy.

    forward_fn: is called with layer and inputs in place of the layer. tied_weight_attr: DeepSpeed's; all parameters of
    the layer are shared, as they are within a stage.
    """

    def __init__(
        self,
        key: str,
        typename: Callable[..., Any],
        *module_args: Any,
        forward_fn: Callable[..., Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)


def ties_of(layers: Sequence[Any]) -> dict[str, dict[int, list[str]]]:
    """Return which parameters several layers share: by key, the layers and the names of the parameters in each.

    Layers of one TiedLayerSpec key share all (no names are listed); built layers share parameters that are one object.
    """
    ties: dict[str, dict[int, list[str]]] = {}
    objects: dict[int, str] = {}
    for number, layer in enumerate(layers):
        if isinstance(layer, TiedLayerSpec):
            ties.setdefault(layer.key, {})[number] = []
        elif isinstance(layer, nn.Module):
            for name, param in layer.named_parameters():
                key = objects.setdefault(id(param), f"{number}.{name}")
                ties.setdefault(key, {}).setdefault(number, []).append(name)
    return {key: places for key, places in ties.items() if len(places) > 1}


def trained_count(layer: Any) -> int:
    """Return the number of trained elements of a layer, which is not built for it if "meta" tensors suffice."""
    if isinstance(layer, LayerSpec):
        with torch.random.fork_rng(devices=[]):
            try:
                with torch.device("meta"):
                    layer = layer.build()
            except Exception:
                layer = layer.build()
    if not isinstance(layer, nn.Module):
        return 0
    return sum(param.numel() for param in layer.parameters() if param.requires_grad)


def balanced(weights: Sequence[float], parts: int) -> list[int]:
    """Return ``parts`` + 1 bounds, for which the heaviest part is lightest. Each part has an item if they suffice.

    Of equally heavy cuts it returns the one with the fewest items in the last parts.
    """
    count = len(weights)
    if count < parts:
        return [min(part, count) for part in range(parts)] + [count]
    sums = [0.0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    # cost[end] of the current number of parts: (heaviest part, beginning of the last part)
    cost = [sums[end] for end in range(count + 1)]
    begins: list[list[int]] = []
    for part in range(2, parts + 1):
        following, begin_of = [float("inf")] * (count + 1), [0] * (count + 1)
        for end in range(part, count + 1):
            for begin in range(part - 1, end):
                heaviest = max(cost[begin], sums[end] - sums[begin])
                if heaviest <= following[end]:
                    following[end], begin_of[end] = heaviest, begin
        cost = following
        begins.append(begin_of)
    bounds = [count]
    for begin_of in reversed(begins):
        bounds.append(begin_of[bounds[-1]])
    return [0, *reversed(bounds)]


def cut_layers(layers: Sequence[Any], parts: int, cut: str | Sequence[int]) -> list[int]:
    """Return the bounds of ``parts`` stages. cut: "parameters", "uniform", "type:REGEX" (as many matching layers in
    each), or the bounds themselves.

    Raises: ValueError for an unknown cut, bounds that do not fit, fewer layers than stages, or no matching layer.
    """
    count = len(layers)
    if not isinstance(cut, str):
        bounds = [int(bound) for bound in cut]
        if len(bounds) != parts + 1 or bounds[0] != 0 or bounds[-1] != count or sorted(set(bounds)) != bounds:
            raise ValueError(f"cut={bounds}: give {parts + 1} increasing bounds, from 0 to {count}")
        return bounds
    if count < parts:
        raise ValueError(f"{count} layers cannot be cut into {parts} stages")
    kind, _, pattern = cut.partition(":")
    if kind.lower() == "uniform" and not pattern:
        return [part * (count // parts) + min(part, count % parts) for part in range(parts + 1)]
    if kind.lower() == "parameters" and not pattern:
        return balanced([trained_count(layer) for layer in layers], parts)
    if kind.lower() == "type" and pattern:
        matches = [int(bool(re.search(pattern, _type_name(layer), re.IGNORECASE))) for layer in layers]
        if not any(matches):
            raise ValueError(f"cut={cut!r}: no layer's type matches; they are {', '.join(map(_type_name, layers))}")
        return balanced(matches, parts)
    raise ValueError(f"cut={cut!r}; use 'parameters', 'uniform', 'type:REGEX', or a list of bounds")


def _type_name(layer: Any) -> str:
    if isinstance(layer, LayerSpec):
        return layer.typename.__name__
    return type(layer).__name__ if isinstance(layer, nn.Module) else getattr(layer, "__name__", "")


class StageLayers(nn.Module):
    """The layers ``begin`` to ``end`` of a model, as one module with the model's names.

    layers: the layers with numbers from ``begin``, built: modules and functions. names: of these as children. calls:
    functions to call in place of some. every: layers between two activation checkpoints; 0: none.
    """

    def __init__(
        self, begin: int, layers: Sequence[Any], names: Sequence[str], calls: dict[int, Callable[..., Any]], every: int
    ) -> None:
        super().__init__()
        self.begin, self.end, self.every = begin, begin + len(layers), every
        self.calls = [calls.get(number, layer) for number, layer in enumerate(layers, begin)]
        self._names = list(names)
        for name, layer in zip(names, layers, strict=True):
            if isinstance(layer, nn.Module):
                self.add_module(name, layer)

    def layer(self, number: int) -> nn.Module:
        """Return the module with this number of the whole model."""
        return self.get_submodule(self._names[number - self.begin])

    def _run(self, begin: int, end: int, *inputs: Any) -> Any:
        value: Any = inputs[0] if len(inputs) == 1 else inputs
        for call in self.calls[begin:end]:
            value = call(value)
        return value

    def forward(self, *inputs: Any) -> Any:
        """Run the layers one behind the other. Several inputs are a tuple for the first."""
        count, value = len(self.calls), inputs
        if not self.every or not torch.is_grad_enabled():
            return self._run(0, count, *inputs)
        for begin in range(0, count, self.every):
            inputs = value if isinstance(value, tuple) else (value,)
            value = checkpoint(self._run, begin, min(begin + self.every, count), *inputs, use_reentrant=False)
        return value


class SharedWeights(nn.Module):
    """Weights of an earlier stage's layer, of which this stage has copies, under their first names in the model."""


def add_first_name(model: nn.Module, path: str, param: nn.Parameter) -> None:
    """Give ``param`` also the name ``path``, before its other names, as in the whole model."""
    *parents, name = path.split(".")
    for place, parent in enumerate(parents):
        if parent not in model._modules:
            model.add_module(parent, SharedWeights())
            if place == 0:
                model._modules.update({key: model._modules.pop(key) for key in list(model._modules) if key != parent})
        model = model.get_submodule(parent)
    model.register_parameter(name, param)


def build_stage(
    layers: Sequence[Any],
    names: Sequence[str],
    begin: int,
    end: int,
    seed: int,
    tied: dict[str, nn.Module],
    every: int,
    seed_with: Callable[[int], Any],
) -> StageLayers:
    """Build the layers ``begin`` to ``end``. seed: a layer is built after ``seed_with`` of this plus its number, and
    torch's random state is restored. tied: layers of this rank by key, to which new ones are added."""
    built: list[Any] = []
    calls: dict[int, Callable[..., Any]] = {}
    for number in range(begin, end):
        layer = layers[number]
        if isinstance(layer, LayerSpec):
            key = layer.key if isinstance(layer, TiedLayerSpec) else ""
            module = tied.get(key) if key else None
            if module is None:
                with torch.random.fork_rng():
                    seed_with(seed + number)
                    module = layer.build()
            if isinstance(layer, TiedLayerSpec):
                tied[key] = module
                if layer.forward_fn is not None:
                    calls[number] = partial(layer.forward_fn, module)
            layer = module
        if not callable(layer):
            raise TypeError(f"layer {number} is a {type(layer).__name__}: expected a module, a function or a LayerSpec")
        built.append(layer)
    return StageLayers(begin, built, names[begin:end], calls, every)
