"""Extra state of modules (``get_extra_state``, ``set_extra_state``): what a model's state has beside its tensors.

It is kept as values of a program are (json_values.py), by the names that ``state_dict`` has for it.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from zcomm.zero.checkpoint.json_values import Tensors, from_json, to_json


def is_extra(name: str) -> bool:
    """Return True if ``name`` of a state dict is a module's extra state."""
    return name.rpartition(".")[2] == _EXTRA_STATE_KEY_SUFFIX


def extra_names(model: nn.Module | None) -> list[str]:
    """List the modules' extra states by their names, without asking for them."""
    if model is None:
        return []
    asks = nn.Module.get_extra_state
    return [
        f"{name}.{_EXTRA_STATE_KEY_SUFFIX}" if name else _EXTRA_STATE_KEY_SUFFIX
        for name, module in model.named_modules(remove_duplicate=False)
        if type(module).get_extra_state is not asks
    ]


def _module_of(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def pack(model: nn.Module | None, values: Tensors) -> dict[str, Any]:
    """Return all extra states as JSON. values: takes their tensors. Raises: ValueError naming what cannot be kept."""
    names = extra_names(model)
    assert model is not None or not names
    return {name: packed(name, _module_of(model, name).get_extra_state(), values) for name in names}  # type: ignore[arg-type]


def packed(name: str, state: Any, values: Tensors) -> Any:
    """Return one as JSON."""
    return to_json(state, f"extra[{json.dumps(name)}]", values)


def restored(extra: dict[str, Any], values: dict[str, torch.Tensor], where: str) -> dict[str, Any]:
    """Return the extra states of JSON. where: names the file in an error. Raises: ValueError."""
    try:
        return {name: from_json(state, values) for name, state in extra.items()}
    except ValueError as error:
        raise ValueError(f"{where}: extra: {error}") from error


def restore(model: nn.Module | None, states: dict[str, Any]) -> None:
    """Give each module the extra state that it has in ``states``."""
    for name in extra_names(model):
        if name in states:
            assert model is not None
            _module_of(model, name).set_extra_state(states[name])
