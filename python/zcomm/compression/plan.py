"""Plan: which layers of a model each method of a configuration changes, found by patterns of names. Changes nothing.

A pattern is searched in names (``re.search``) of layers that the method knows; "*" finds all of them. A layer may be in
one group of a method only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from zcomm.config.compression_keys import CompressionTraining

LAYERS: dict[str, tuple[type[nn.Module], ...]] = {
    "weight_quantization": (nn.Linear, nn.Conv2d, nn.Embedding),
    "activation_quantization": (nn.Linear, nn.Conv2d),
    "sparse_pruning": (nn.Linear, nn.Conv2d),
    "row_pruning": (nn.Linear,),
    "head_pruning": (nn.Linear,),
    "channel_pruning": (nn.Conv2d,),
}
_RELATED: dict[str, tuple[type[nn.Module], ...]] = {
    "row_pruning": (nn.Linear,),
    "head_pruning": (nn.Linear,),
    "channel_pruning": (nn.Conv2d, nn.BatchNorm2d, nn.Linear),
}


@dataclass(frozen=True)
class Layer:
    """A layer of a job: its name and module, and the layers that lose places with it."""

    name: str
    module: Any
    related: tuple[tuple[str, nn.Module], ...] = ()


@dataclass(frozen=True)
class Job:
    """A method, a group of it, their settings and layers. path: of the group in the configuration."""

    method: str
    path: str
    shared: Any
    params: Any
    layers: tuple[Layer, ...]


def inner_model(model: nn.Module) -> nn.Module:
    """Return the model inside of an Engine or DDP; another ``model`` itself."""
    inner = model._modules.get("module")
    return model if inner is None else inner


def plan(model: nn.Module, settings: CompressionTraining) -> list[Job]:
    """Return the jobs in the order in which they apply to a weight.

    Raises: ValueError for a pattern that is no regular expression or finds no layer. Also for a layer in two groups, or
    if related patterns do not find one layer for each layer.
    """
    jobs: list[Job] = []
    for method, section in settings.enabled().items():
        taken: dict[str, str] = {}
        for group, given in section.different_groups.items():
            path = f'"compression_training.{method}.different_groups.{group}'
            layers: list[Layer] = []
            patterns = _words(given.modules)
            for number, pattern in enumerate(patterns):
                found = _find(model, pattern, LAYERS[method], f'{path}.modules"')
                for name, _ in found:
                    if name in taken:
                        raise ValueError(f'{path}.modules": {pattern!r} finds {name}, which {taken[name]} has already')
                    taken[name] = f"group {group}"
                others = given.related_modules[number] if given.related_modules else ()
                columns = [_related(model, other, method, found, path) for other in others]
                layers += [
                    Layer(name, module, tuple(column[at] for column in columns))
                    for at, (name, module) in enumerate(found)
                ]
            jobs.append(Job(method, path, section.shared_parameters, given.params, tuple(layers)))
    return jobs


def is_gate(layer: Layer, other: Any) -> bool:
    """Return True for a related layer with as many outputs as the pruned one, not inputs: they are multiplied."""
    size = layer.module.out_features
    return bool(other.in_features != size and other.out_features == size)


def _words(modules: str | Sequence[str]) -> Sequence[str]:
    return [modules] if isinstance(modules, str) else modules


def _related(
    model: nn.Module, pattern: str, method: str, found: Sequence[tuple[str, nn.Module]], path: str
) -> list[tuple[str, nn.Module]]:
    others = _find(model, pattern, _RELATED[method], f'{path}.related_modules"')
    if len(others) != len(found):
        raise ValueError(
            f'{path}.related_modules": {pattern!r} finds {len(others)} layers, and its pattern of modules finds '
            f"{len(found)}: each needs its own"
        )
    return others


def _find(model: nn.Module, pattern: str, kinds: tuple[type[nn.Module], ...], path: str) -> list[tuple[str, nn.Module]]:
    try:
        named = list(matching(model, pattern))
    except re.error as error:
        raise ValueError(f"{path}: {pattern!r} is no regular expression: {error}") from None
    found = [(name, module) for name, module in named if isinstance(module, kinds)]
    if not found:
        words = " or ".join(kind.__name__ for kind in kinds)
        others = sorted({type(module).__name__ for _, module in named})
        remedy = ": call convert_conv1d_to_linear first" if "Conv1D" in others else ""
        which = f"only {', '.join(others)}{remedy}" if others else "no module at all"
        raise ValueError(f"{path}: {pattern!r} finds no {words}, {which}")
    return found


def matching(model: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules, except for the model itself, that a pattern finds, each once, by its first name.

    Raises: re.error.
    """
    expression = re.compile("" if pattern == "*" else pattern)
    for name, module in model.named_modules():
        if name and ".parametrizations" not in name and expression.search(name):
            yield name, module
