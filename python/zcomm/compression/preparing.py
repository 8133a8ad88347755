"""prepare: methods of a configuration become parametrizations and hooks of the model's layers, in place.

Everything is checked before the first layer changes. A weight passes its quantiser, then the masks: of elements, rows,
heads, channels. Invariants: trained parameters remain the same objects; masks of a layer and of its related layers are
one module.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from zcomm.compression.activations import ActivationQuantiser, quantise_inputs
from zcomm.compression.layers import take_layers
from zcomm.compression.masks import Mask, Masked
from zcomm.compression.plan import Job, Layer, inner_model, is_gate, plan
from zcomm.compression.schedule import Schedule
from zcomm.compression.weights import WeightQuantiser
from zcomm.config import Source, compression_settings
from zcomm.config.compression_keys import CompressionTraining


def prepare(model: nn.Module, config: Source | CompressionTraining, teacher: nn.Module | None = None) -> nn.Module:
    """Prepare ``model`` for compression while it is trained, in place, and return it.

    config: a configuration with the section "compression_training", or that section as an object. Call it before an
    optimizer is made, because "topk" adds parameters, on all ranks. teacher: of "layer_reduction".
    Methods with schedule_offset 0 work at once; ``Schedule`` begins the others.
    Raises: ValueError naming key and value (also if the model is prepared already, or a weight is tied);
    NotImplementedError for snip_momentum. The model is unchanged then.
    """
    settings = compression_settings(config)
    whole, model = model, inner_model(model)
    jobs = plan(model, settings)
    if is_prepared(model):
        raise ValueError("prepare(): the model is prepared for compression already: clean() it, or begin with another")
    if settings.layer_reduction.enabled and teacher is None:
        raise ValueError('"compression_training.layer_reduction" is enabled: give the teacher_model= with its layers')
    for job in jobs:
        for layer in job.layers:
            _CHECKS[job.method](job, layer)
    _check_whole(model, jobs)
    _check_cuts(jobs)
    if teacher is not None and settings.layer_reduction.enabled:
        take_layers(model, teacher, settings.layer_reduction)
    for job in jobs:
        for layer in job.layers:
            _APPLY[job.method](job, layer)
    Schedule(model, settings)
    return whole


def is_prepared(model: nn.Module) -> bool:
    """Return True if a layer of ``model`` has a quantiser or a mask of this package."""
    return any(isinstance(module, (WeightQuantiser, Masked, ActivationQuantiser)) for module in model.modules())


# --- checks ---------------------------------------------------------------------------------------------------------


def _check_weight(job: Job, layer: Layer) -> None:
    count, groups = layer.module.weight.numel(), _groups(job, layer.module)
    if count % groups:
        raise ValueError(
            f'"compression_training.weight_quantization.shared_parameters.quantize_groups": {groups} does not divide '
            f"the {count} elements of {layer.name}.weight"
        )


def _check_nothing(job: Job, layer: Layer) -> None:
    """Any Linear or Conv2d will do."""


def _check_rows(job: Job, layer: Layer) -> None:
    for name, other in layer.related:
        if not is_gate(layer, other):
            _check_size(job, layer, name, "in_features", other, layer.module.out_features)


def _check_heads(job: Job, layer: Layer) -> None:
    inputs, heads = layer.module.in_features, job.shared.num_heads
    if inputs % heads:
        raise ValueError(
            f'"compression_training.head_pruning.shared_parameters.num_heads": {heads} does not divide the {inputs} '
            f"inputs of {layer.name}"
        )
    for name, other in layer.related:
        _check_size(job, layer, name, "out_features", other, inputs)


def _check_channels(job: Job, layer: Layer) -> None:
    channels = layer.module.out_channels
    for name, other in layer.related:
        kind = {nn.Conv2d: "in_channels", nn.BatchNorm2d: "num_features", nn.Linear: "in_features"}
        field = next(field for each, field in kind.items() if isinstance(other, each))
        _check_size(job, layer, name, field, other, channels)
        if isinstance(other, nn.BatchNorm2d) and not other.affine:
            raise ValueError(f'{job.path}.related_modules": {name} has no weight, so its zeros would not remain zeros')
    for name, conv in ((layer.name, layer.module), *layer.related):
        if isinstance(conv, nn.Conv2d) and conv.groups > 1 and layer.related:
            raise ValueError(f'{job.path}.related_modules": {name} has groups={conv.groups}: only 1 can be cut')


def _check_size(job: Job, layer: Layer, name: str, field: str, other: Any, size: int) -> None:
    if getattr(other, field) != size:
        raise ValueError(
            f'{job.path}.related_modules": {name}.{field} is {getattr(other, field)}, and {layer.name} has {size} '
            "places to prune"
        )


_CHECKS = {
    "weight_quantization": _check_weight,
    "activation_quantization": _check_nothing,
    "sparse_pruning": _check_nothing,
    "row_pruning": _check_rows,
    "head_pruning": _check_heads,
    "channel_pruning": _check_channels,
}


def _check_whole(model: nn.Module, jobs: list[Job]) -> None:
    """Refuse weights that another layer has, too, that an optimizer shards, or that have no values yet."""
    from zcomm.zero.registry import owned_params

    places: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for key, param in module._parameters.items():
            places.setdefault(id(param), []).append(f"{name}.{key}")
    owned = owned_params()
    for job in jobs:
        for layer in job.layers if job.method != "activation_quantization" else ():
            for part in (layer, *(Layer(*each) for each in layer.related)):
                weight = part.module._parameters.get("weight")
                if weight is None:
                    raise ValueError(f'{job.path}": {part.name}.weight is no parameter (of another parametrization?)')
                if len(places[id(weight)]) > 1:
                    raise ValueError(
                        f'{job.path}": the weight of {part.name} is tied ({", ".join(places[id(weight)])}), and would '
                        "be changed in one of the places only: untie it first, or leave it out of modules"
                    )
                if id(weight) in owned:
                    raise ValueError(
                        f'{job.path}": {part.name} has an optimizer: prepare the model before initialize()'
                    )
                if weight.is_meta or type(weight.data) is not torch.Tensor:
                    raise ValueError(
                        f'{job.path}": {part.name}.weight ({type(weight).__name__}) has no whole values on this rank: '
                        "prepare the model before it is sharded or divided, and not on the meta device"
                    )


def _check_cuts(jobs: list[Job]) -> None:
    """Refuse a layer that ``clean`` would have to cut twice in one place, as with a layer that is related to itself."""
    cut: dict[tuple[int, str], str] = {}
    for job in jobs:
        heads = job.method == "head_pruning"
        for layer in job.layers:
            places = [(layer.name, layer.module, "inputs" if heads else "outputs")] if layer.related else []
            for name, other in layer.related:
                gate = job.method == "row_pruning" and is_gate(layer, other)
                places.append(
                    (name, other, "outputs" if heads or gate or isinstance(other, nn.BatchNorm2d) else "inputs")
                )
            for name, module, side in places:
                if (id(module), side) in cut:
                    raise ValueError(
                        f'{job.path}.related_modules": {name} would lose {side} twice, for {cut[id(module), side]} and '
                        f"{layer.name} ({job.method})"
                    )
                cut[id(module), side] = f"{layer.name} ({job.method})"


# --- changes --------------------------------------------------------------------------------------------------------


def _groups(job: Job, module: Any) -> int:
    return int(module.num_embeddings if isinstance(module, nn.Embedding) else job.shared.quantize_groups)


def _original(module: Any) -> torch.Tensor:
    """Return the weight before all parametrizations, without a gradient."""
    listed = getattr(module, "parametrizations", {})
    found: torch.Tensor = listed["weight"].original if "weight" in listed else module.weight
    return found.detach()


def _add(module: nn.Module, name: str, part: nn.Module) -> None:
    # unsafe: shapes and dtypes are right by construction, so that nothing is computed now.
    if not parametrize.is_parametrized(module):
        module.register_load_state_dict_pre_hook(_take_plain_names)
    parametrize.register_parametrization(module, name, part, unsafe=True)


def _take_plain_names(module: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
    """Let a state dict of the model from before ``prepare`` load: "weight" is the unquantised weight."""
    listed = module._modules.get("parametrizations")
    for name in list(listed) if isinstance(listed, nn.ModuleDict) else ():
        own = f"{prefix}parametrizations.{name}.original"
        if own not in state and f"{prefix}{name}" in state:
            state[own] = state.pop(f"{prefix}{name}")


def _quantise_weight(job: Job, layer: Layer) -> None:
    shared, params = job.shared, job.params
    mixed = shared.fp16_mixed_quantize
    quantiser = WeightQuantiser(
        params.target_bits if shared.quantize_weight_in_forward else params.start_bits,
        params.target_bits,
        params.quantization_period,
        shared.quantization_type,
        _groups(job, layer.module),
        shared.rounding == "stochastic",
        mixed.quantize_change_ratio if mixed.enabled else None,
    )
    _add(layer.module, "weight", quantiser)


def _quantise_inputs(job: Job, layer: Layer) -> None:
    static, images = job.shared.range_calibration == "static", isinstance(layer.module, nn.Conv2d)
    quantiser = ActivationQuantiser(job.params.bits, job.shared.quantization_type, static, images)
    quantise_inputs(layer.module, quantiser.to(layer.module.weight.device))


def _prune_elements(job: Job, layer: Layer) -> None:
    weight = _original(layer.module)
    mask = Mask(weight.abs(), job.params.dense_ratio, job.shared.method, job.method)
    _add(layer.module, "weight", Masked(mask, weight.shape))


def _prune_outputs(job: Job, layer: Layer) -> None:
    """Prune rows of a Linear, or channels of a Conv2d, with their biases and norms."""
    weight = _original(layer.module)
    mask = Mask(weight.abs().flatten(1).sum(1, keepdim=True), job.params.dense_ratio, job.shared.method, job.method)
    _add(layer.module, "weight", Masked(mask, (-1, *[1] * (weight.dim() - 1))))
    if layer.module.bias is not None:
        _add(layer.module, "bias", Masked(mask, (-1,)))
    for _, other in layer.related:
        if isinstance(other, nn.BatchNorm2d):  # otherwise its bias would fill the zeros
            _add(other, "weight", Masked(mask, (-1,)))
            _add(other, "bias", Masked(mask, (-1,)))


def _prune_heads(job: Job, layer: Layer) -> None:
    weight, heads = _original(layer.module), job.shared.num_heads
    scores = weight.abs().sum(0).view(heads, -1).sum(1).view(1, heads)  # topk draws by this shape
    mask = Mask(scores, job.params.dense_ratio, job.shared.method, job.method)
    _add(layer.module, "weight", Masked(mask, (1, -1), layer.module.in_features // heads))


_APPLY = {
    "weight_quantization": _quantise_weight,
    "activation_quantization": _quantise_inputs,
    "sparse_pruning": _prune_elements,
    "row_pruning": _prune_outputs,
    "head_pruning": _prune_heads,
    "channel_pruning": _prune_outputs,
}
