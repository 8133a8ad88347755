"""Extra state of modules (``get_extra_state``, ``set_extra_state``): state of a model that is not tensors.

It is kept like values of a program (json_values.py), by its names in ``state_dict``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from zcomm.zero.checkpoint.json_values import Tensors, from_json, to_json
from zcomm.zero.format_names import format_names
from zcomm.zero.layout.sections import NoModel
from zcomm.zero.saved_names import matched


def is_extra(name: str) -> bool:
    """Return True if ``name`` of a state dict is a module's extra state."""
    return name.rpartition(".")[2] == _EXTRA_STATE_KEY_SUFFIX


def extra_names(model: nn.Module) -> list[str]:
    """List the names of the modules' extra states. Collective, because hooks may compute with sharded weights."""
    return list(_modules(model))


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules with extra state by the name that it has in the state dict."""
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            found[f"{path}.{_EXTRA_STATE_KEY_SUFFIX}" if path else _EXTRA_STATE_KEY_SUFFIX] = module
    if not found:
        return found
    new = matched(found, [name for name in model.state_dict(keep_vars=True) if is_extra(name)])
    return {new.get(name, name): module for name, module in found.items()}


def pack(model: nn.Module, values: Tensors, warns: bool) -> dict[str, Any] | None:
    """Return all extra states as JSON; None without a model. values: receives their tensors.

    warns: log extra states that a checkpoint cannot keep. They are omitted, because earlier versions saved without any.
    """
    if isinstance(model, NoModel):
        return None
    kept, lost = packed({name: module.get_extra_state() for name, module in _modules(model).items()}, values)
    for why in lost.values() if warns else ():
        logging.getLogger("zcomm").warning("not saved: %s", why)
    return kept


def packed(states: Mapping[str, Any], values: Tensors) -> tuple[dict[str, Any], dict[str, str]]:
    """Return ``states`` as JSON, and the reasons why states cannot be kept, by name."""
    kept: dict[str, Any] = {}
    lost: dict[str, str] = {}
    for name, state in states.items():
        tensors: dict[str, torch.Tensor] = {}
        try:
            kept[name] = to_json(state, f"extra[{json.dumps(name)}]", tensors)
        except ValueError as error:
            lost[name] = str(error)
        else:
            values.update(tensors)
    return kept, lost


def is_value(name: str) -> bool:
    """Return True if ``name`` names a tensor of extra states among a checkpoint's values."""
    return name.startswith("extra[")


def restored(extra: dict[str, Any], values: dict[str, torch.Tensor], where: str) -> dict[str, Any]:
    """Return the extra states of JSON. Raises: ValueError naming the file, the last argument."""
    try:
        return {name: from_json(state, values) for name, state in extra.items()}
    except ValueError as error:
        raise ValueError(f"{where}: extra: {error}") from error


def restore(model: nn.Module, states: dict[str, Any], warns: bool) -> None:
    """Set each module's extra state from ``states``. warns: log modules without an entry."""
    missing = []
    for name, module in _modules(model).items():
        if name in states:
            module.set_extra_state(states[name])
        else:
            missing.append(name)
    if missing and warns:
        logging.getLogger("zcomm").warning("not in the checkpoint, and left as it is: %s", format_names(missing))
