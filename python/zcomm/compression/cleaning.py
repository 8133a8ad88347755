"""clean: a compressed model becomes a plain one: values baked into its weights, pruned places cut out.

Weights get their values after the schedule's last step. With related modules pruned rows, heads or channels are cut
out, in these modules, too. Without, they remain as zeros. Quantised inputs remain, because they are no weights.
Invariant: forward has the same results as with the masks, if the functions between
a layer and its related layers have f(0) = 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from zcomm.compression.masks import Mask, Masked
from zcomm.compression.plan import Job, Layer, inner_model, is_gate, plan
from zcomm.compression.schedule import part_of
from zcomm.compression.weights import WeightQuantiser
from zcomm.config import Source, compression_settings
from zcomm.config.compression_keys import CompressionTraining


@torch.no_grad()
def clean(model: nn.Module, config: Source | CompressionTraining) -> nn.Module:
    """Make the prepared ``model`` a plain one, in place, and return it.

    model: or an Engine of it. Its optimizer is closed: the engine can evaluate then, and not train. The parameters of
    stage 3 are gathered first, which is collective and needs memory for the whole model on each rank.
    config: as of ``prepare``. Raises: ValueError if the model is not prepared for it.
    """
    inner = inner_model(model)
    settings = compression_settings(config)
    jobs = plan(inner, settings)
    parts = [(job, layer, part_of(job, layer)) for job in jobs for layer in job.layers]
    _check_all_known(inner, {id(part) for _, _, part in parts})
    _release(inner)
    kept = {id(part): part.kept() for _, _, part in parts if isinstance(part, Mask)}
    for module in list(inner.modules()):
        _bake(module)
    for job, layer, part in parts:
        if layer.related and isinstance(part, Mask):
            _cut(job, layer, kept[id(part)])
    return model


def _check_all_known(model: nn.Module, known: set[int]) -> None:
    for name, module in model.named_modules():
        if isinstance(module, (Mask, WeightQuantiser)) and id(module) not in known:
            raise ValueError(
                f"clean(): {name} is not of this configuration: give the one that prepared the model, with all methods"
            )


def _release(model: nn.Module) -> None:
    """Close the optimizers that have parameters of ``model``, which keeps its weights, whole on each rank."""
    from zcomm.zero.registry import optimizers_of, train_of

    for owner in optimizers_of(model.parameters()):
        opt: Any = owner
        whole = opt.full_state_dict() if train_of(owner).stage == 3 else None
        opt.close()
        if whole is not None:
            model.load_state_dict(whole, strict=False)


def _bake(module: nn.Module) -> None:
    """Put the last values of a parametrized weight or bias into the parameter, and remove the parametrizations."""
    listed = module._modules.get("parametrizations")
    for name in list(listed) if isinstance(listed, nn.ModuleDict) else ():
        chain: Any = listed[name]  # type: ignore[index]
        if not all(isinstance(part, (WeightQuantiser, Masked)) for part in chain):
            continue  # the program's own
        for part in chain:
            if isinstance(part, WeightQuantiser):
                part.finish()
            else:
                part.mask.enabled = True
        _own_class(module)
        parametrize.remove_parametrizations(module, name, leave_parametrized=True)


def _own_class(module: nn.Module) -> None:
    """Give ``module`` a class that copies of it do not have: torch takes the property "weight" out of the class."""
    old = type(module)
    parts = {name: value for name, value in vars(old).items() if name not in ("__dict__", "__weakref__")}
    module.__class__ = type(old.__name__, old.__bases__, parts)


def _cut(job: Job, layer: Layer, kept: torch.Tensor) -> None:
    module: Any = layer.module
    if job.method == "head_pruning":
        inputs = kept.repeat_interleave(module.in_features // job.shared.num_heads)
        _take(module, 1, inputs, "in_features")
        for _, other in layer.related:
            _take(other, 0, inputs, "out_features")
        return
    gates = [job.method == "row_pruning" and is_gate(layer, other) for _, other in layer.related]
    _take(module, 0, kept, "out_channels" if isinstance(module, nn.Conv2d) else "out_features")
    for (_, other), gate in zip(layer.related, gates, strict=True):
        if isinstance(other, nn.BatchNorm2d):
            _take(other, 0, kept, "num_features")
        elif gate:
            _take(other, 0, kept, "out_features")
        else:
            _take(other, 1, kept, "in_channels" if isinstance(other, nn.Conv2d) else "in_features")


def _take(module: Any, dim: int, kept: torch.Tensor, field: str) -> None:
    """Keep the places ``kept`` of dimension ``dim`` of a weight, and of the vectors along its outputs."""
    names = ["weight", "bias", "running_mean", "running_var"] if dim == 0 else ["weight"]
    for name in names:
        old = getattr(module, name, None)
        if old is None:
            continue
        value = old.detach()[:, kept] if dim == 1 else old.detach()[kept]
        if isinstance(old, nn.Parameter):
            setattr(module, name, nn.Parameter(value.contiguous(), requires_grad=old.requires_grad))
        else:
            module._buffers[name] = value
    setattr(module, field, int(kept.sum()))
