"""Fewer layers: a student begins with the weights of some of its teacher's layers. Source: Wu et al., "XTC"
(arXiv:2206.01859), section 3.2, after Sun et al., "Patient Knowledge Distillation" (arXiv:1908.09355).
"""

from __future__ import annotations

import torch
from torch import nn

from zcomm.compression.plan import inner_model
from zcomm.config.compression_keys import LayerReduction


@torch.no_grad()
def take_layers(student: nn.Module, teacher: nn.Module, settings: LayerReduction) -> None:
    """Copy the weights and buffers of the teacher's layers ``teacher_layer`` to the student's first layers, in order.

    ``other_module_name`` modules are copied, too. Both models have whole weights. The teacher does not change.
    Raises: ValueError naming a missing module, a number of layers, or a parameter of another shape; the student is
    unchanged then.
    """
    path = '"compression_training.layer_reduction.'
    student, teacher = inner_model(student), inner_model(teacher)
    prefix, numbers = settings.module_name_prefix, settings.teacher_layer
    layers = _of(student, prefix, f'{path}module_name_prefix"', "student")
    count = sum(1 for _ in layers.children())
    if count != len(numbers):
        raise ValueError(
            f'{path}teacher_layer" has {len(numbers)} numbers, and the student has {count} layers in {prefix}: make it '
            "with as many (config.num_hidden_layers)"
        )
    others = settings.other_module_name
    names = [(f"{prefix}.{mine}", f"{prefix}.{its}") for mine, its in enumerate(numbers)]
    names += [(name, name) for name in ([others] if isinstance(others, str) else others)]
    pairs = []
    for mine, its in names:
        key = f'{path}teacher_layer"' if mine != its or mine.startswith(f"{prefix}.") else f'{path}other_module_name"'
        target, source = _of(student, mine, key, "student"), _of(teacher, its, key, "teacher")
        pairs += _tensors(target, source, mine, its, key)
    for to, value in pairs:
        to.copy_(value)


def _of(model: nn.Module, name: str, key: str, role: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise ValueError(f"{key}: the {role} has no module {name!r}") from None


def _tensors(
    target: nn.Module, source: nn.Module, mine: str, its: str, key: str
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the pairs to copy: equal names and shapes."""
    into = dict(target.named_parameters(remove_duplicate=False)) | dict(target.named_buffers())
    values = dict(source.named_parameters(remove_duplicate=False)) | dict(source.named_buffers())
    if into.keys() != values.keys():
        names = ", ".join(sorted(into.keys() ^ values.keys())[:4])
        raise ValueError(f"{key}: {mine} of the student and {its} of the teacher differ in {names}")
    for name, value in values.items():
        if into[name].shape != value.shape:
            raise ValueError(
                f"{key}: {mine}.{name} has shape {list(into[name].shape)}, and the teacher's {its}.{name} has "
                f"{list(value.shape)}"
            )
    return [(into[name], values[name]) for name in values]
