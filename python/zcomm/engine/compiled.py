"""Compilation of a model's blocks by torch.compile, so that gathers and hooks run between blocks."""

from __future__ import annotations

from typing import Any

from torch import nn


def compile_blocks(model: nn.Module, by_unit: bool, backend: Any, kwargs: dict[str, Any]) -> list[nn.Module]:
    """Compile the blocks of ``model``. A model without blocks is compiled whole unless ``by_unit`` (stage 3).

    Compilation itself happens in the first forward. Returns: the modules. The hooks of a unit run around its compiled
    code: all weights that the code reads are whole then.
    """
    from zcomm.zero.layout.unit_policy import choose_units

    choices = choose_units(model, list(model.parameters()), None)
    blocks = list(dict.fromkeys(module for choice in choices[1:] for module in choice.modules))
    if not blocks and not by_unit:
        blocks = [model]
    for block in blocks:
        block.compile(backend=backend, **kwargs)
    return blocks
