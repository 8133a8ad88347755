"""Tensors of the model's state dict that a checkpoint holds in addition to the store's parameters, each once."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from zcomm.zero.checkpoint.extra_state import is_extra
from zcomm.zero.parts import Parts
from zcomm.zero.registry import owned_params
from zcomm.zero.saved_names import state_tensors
from zcomm.zero.sharded.param import original

Named = list[tuple[str, torch.Tensor]]


@dataclass
class ModelTensors:
    """The tensors by name, with this rank's values.

    others: parameters outside all optimizers' stores, and saved buffers. added: tensors that hooks of the model add to
    its state dict. aliases: further names of tensors that are saved once (tied weights). frozen: names of the saved
    parameters that are not trained.
    """

    others: Named = field(default_factory=list)
    added: Named = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    frozen: list[str] = field(default_factory=list)

    @property
    def every(self) -> Named:
        """``others`` and ``added``."""
        return self.others + self.added


def model_tensors(parts: Parts, lean: bool = False) -> ModelTensors:
    """Collect the tensors by one call of state_dict(). Collective, because hooks may compute with sharded weights.

    lean: without frozen parameters.
    """
    found = ModelTensors()
    kept = {number: index for number, index in parts.index_of.items() if not (lean and parts.geometry.is_frozen(index))}
    if not lean:
        found.frozen = [name for index, name in enumerate(parts.names) if parts.geometry.is_frozen(index)]
    first = {number: parts.names[index] for number, index in kept.items()}
    taken = set(first.values())
    skipped = (owned_params() | set(parts.index_of)).difference(first)
    members = {id(tensor) for every in (parts.model.parameters(), parts.model.buffers()) for tensor in every}
    for name, value in state_tensors(parts.model):
        tensor = original(value)
        number = id(tensor)
        if is_extra(name) or number in skipped:
            continue
        if number in first:
            if first[number] != name:
                found.aliases[name] = first[number]
            continue
        frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        if name in taken or (lean and frozen):
            continue
        (found.others if number in members else found.added).append((name, tensor))
        first[number] = name
        if frozen and number in members:
            found.frozen.append(name)
    return found
