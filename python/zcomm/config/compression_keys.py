"""Section ``compression_training``: quantisation, pruning and fewer layers (zcomm.compression). See schema.py.

Each method has ``shared_parameters`` and ``different_groups``: groups of modules by name, with ``params`` of their own.
"""
# ruff: noqa: RUF009  (key() and section() are field specifiers, as dataclasses.field is)

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from zcomm.config.keys import (
    ALL_AT_LEAST_0,
    AT_LEAST_0,
    AT_LEAST_1,
    BITS,
    INPUT_BITS,
    LISTS_OF_WORDS,
    RATIO,
    WORDS,
    key,
    section,
)

_KINDS = ("symmetric", "asymmetric")
_METHODS = "l1: by absolute values in the beginning; topk: by scores that are trained"


def _offset(default: int) -> Any:
    return key(default, "optimizer steps before it begins", AT_LEAST_0)


def _modules() -> Any:
    return key("*", "patterns (re.search) of names of modules; `*`: all that the method knows", WORDS)


def _unrelated() -> Any:
    return key(None, "null, because the method changes no shapes", LISTS_OF_WORDS, shown="none")


@dataclass(frozen=True)
class MixedFp16:
    """Section ``fp16_mixed_quantize``."""

    enabled: bool = key(False, "go over to quantised weights in parts")
    quantize_change_ratio: float = key(0.001, "part of each step", RATIO)


@dataclass(frozen=True)
class WeightShared:
    """Section ``compression_training.weight_quantization.shared_parameters``."""

    enabled: bool = key(False, "quantise weights in each forward, with gradients straight through")
    schedule_offset: int = _offset(0)
    quantize_groups: int = key(1, "parts of a weight with a range each; an embedding has one of each row", AT_LEAST_1)
    quantize_verbose: bool = key(False, "log each change of bits")
    quantization_type: str = key("symmetric", "ranges around zero, or from least to largest", choices=_KINDS)
    quantize_weight_in_forward: bool = key(
        False, "true: target_bits from the offset on; false: start_bits first (in the forward, in any precision)"
    )
    rounding: str = key("nearest", "to the nearest; stochastic: in training", choices=("nearest", "stochastic"))
    fp16_mixed_quantize: MixedFp16 = section(MixedFp16)


@dataclass(frozen=True)
class WeightParams:
    """Section ``params`` of a group of weight_quantization."""

    start_bits: int | None = key(None, "bits in the beginning; 2: ternary, 1: binary", BITS, shown="(needed)")
    target_bits: int | None = key(None, "bits in the end", BITS, shown="(needed)")
    quantization_period: int = key(
        1, "steps before the first bit goes; each further bit takes twice as long; 0: a bit each step", AT_LEAST_0
    )


@dataclass(frozen=True)
class WeightGroup:
    """A group of weight_quantization."""

    params: WeightParams = section(WeightParams)
    modules: str | tuple[str, ...] = _modules()
    related_modules: Any = _unrelated()


@dataclass(frozen=True)
class WeightQuantization:
    """Section ``compression_training.weight_quantization``: Linear, Conv2d and Embedding."""

    shared_parameters: WeightShared = section(WeightShared)
    different_groups: dict[str, WeightGroup] = section(dict)


@dataclass(frozen=True)
class InputShared:
    """Section ``compression_training.activation_quantization.shared_parameters``."""

    enabled: bool = key(False, "quantise the inputs of layers, with gradients straight through")
    quantization_type: str = key("symmetric", "ranges around zero, or from least to largest", choices=_KINDS)
    range_calibration: str = key(
        "dynamic", "a range of each token; static: one, a moving average", choices=("dynamic", "static")
    )
    schedule_offset: int = _offset(1000)


@dataclass(frozen=True)
class InputParams:
    """Section ``params`` of a group of activation_quantization."""

    bits: int | None = key(None, "bits of inputs", INPUT_BITS, shown="(needed)")


@dataclass(frozen=True)
class InputGroup:
    """A group of activation_quantization."""

    params: InputParams = section(InputParams)
    modules: str | tuple[str, ...] = _modules()
    related_modules: Any = _unrelated()


@dataclass(frozen=True)
class InputQuantization:
    """Section ``compression_training.activation_quantization``: Linear and Conv2d."""

    shared_parameters: InputShared = section(InputShared)
    different_groups: dict[str, InputGroup] = section(dict)


@dataclass(frozen=True)
class RatioParams:
    """Section ``params`` of a group of a pruning."""

    dense_ratio: float | None = key(None, "share that is kept", RATIO, shown="(needed)")


@dataclass(frozen=True)
class SparseGroup:
    """A group of sparse_pruning."""

    params: RatioParams = section(RatioParams)
    modules: str | tuple[str, ...] = _modules()
    related_modules: Any = _unrelated()


@dataclass(frozen=True)
class PrunedGroup:
    """A group of a pruning that can make layers smaller."""

    params: RatioParams = section(RatioParams)
    modules: str | tuple[str, ...] = _modules()
    related_modules: Any = key(
        None,
        "for each pattern of modules the patterns of layers that lose the same inputs (head_pruning: outputs)",
        LISTS_OF_WORDS,
        shown="none: pruned places remain, as zeros",
    )


@dataclass(frozen=True)
class SparseShared:
    """Section ``compression_training.sparse_pruning.shared_parameters``."""

    enabled: bool = key(False, "zero the least elements of weights")
    method: str = key("l1", f"{_METHODS}; snip_momentum is refused", choices=("l1", "topk", "snip_momentum"))
    schedule_offset: int = _offset(1000)


@dataclass(frozen=True)
class SparsePruning:
    """Section ``compression_training.sparse_pruning``: Linear and Conv2d."""

    shared_parameters: SparseShared = section(SparseShared)
    different_groups: dict[str, SparseGroup] = section(dict)


@dataclass(frozen=True)
class RowShared:
    """Section ``compression_training.row_pruning.shared_parameters``."""

    enabled: bool = key(False, "prune outputs of Linear")
    method: str = key("l1", _METHODS, choices=("l1", "topk"))
    schedule_offset: int = _offset(1000)


@dataclass(frozen=True)
class RowPruning:
    """Section ``compression_training.row_pruning``: Linear."""

    shared_parameters: RowShared = section(RowShared)
    different_groups: dict[str, PrunedGroup] = section(dict)


@dataclass(frozen=True)
class HeadShared:
    """Section ``compression_training.head_pruning.shared_parameters``."""

    enabled: bool = key(False, "prune heads of attention, as inputs of the Linear after it")
    method: str = key("topk", _METHODS, choices=("topk", "l1"))
    schedule_offset: int = _offset(1000)
    num_heads: int | None = key(None, "heads of attention; needed if enabled", AT_LEAST_1)


@dataclass(frozen=True)
class HeadPruning:
    """Section ``compression_training.head_pruning``: Linear."""

    shared_parameters: HeadShared = section(HeadShared)
    different_groups: dict[str, PrunedGroup] = section(dict)


@dataclass(frozen=True)
class ChannelShared:
    """Section ``compression_training.channel_pruning.shared_parameters``."""

    enabled: bool = key(False, "prune output channels of Conv2d")
    method: str = key("l1", _METHODS, choices=("l1", "topk"))
    schedule_offset: int = _offset(1000)


@dataclass(frozen=True)
class ChannelPruning:
    """Section ``compression_training.channel_pruning``: Conv2d."""

    shared_parameters: ChannelShared = section(ChannelShared)
    different_groups: dict[str, PrunedGroup] = section(dict)


@dataclass(frozen=True)
class LayerReduction:
    """Section ``compression_training.layer_reduction``."""

    enabled: bool = key(False, "begin with some of a teacher's layers; init_compression(teacher_model=) has it")
    keep_number_layer: int | None = key(
        None, "layers of the student; if given, as many as teacher_layer has", AT_LEAST_1, shown="as teacher_layer"
    )
    module_name_prefix: str = key("", "name of the list of layers; needed if enabled")
    teacher_layer: tuple[int, ...] = key(
        (), "numbers of the teacher's layers, from 0; needed if enabled", ALL_AT_LEAST_0
    )
    other_module_name: str | tuple[str, ...] = key((), "modules that begin with the teacher's weights, too")


@dataclass(frozen=True)
class CompressionTraining:
    """Section ``compression_training``."""

    weight_quantization: WeightQuantization = section(WeightQuantization)
    activation_quantization: InputQuantization = section(InputQuantization)
    sparse_pruning: SparsePruning = section(SparsePruning)
    row_pruning: RowPruning = section(RowPruning)
    head_pruning: HeadPruning = section(HeadPruning)
    channel_pruning: ChannelPruning = section(ChannelPruning)
    layer_reduction: LayerReduction = section(LayerReduction)

    def enabled(self) -> dict[str, Any]:
        """Return the sections of enabled methods of layers by name, in the order in which they apply to a weight."""
        return {
            name: part
            for name, part in vars(self).items()
            if name != "layer_reduction" and part.shared_parameters.enabled
        }


def faults(section: CompressionTraining) -> Iterator[tuple[type[Exception], str]]:
    """Yield the faults of a section: the class of an error, and its text, which begins with the key in the section."""
    for name, method in section.enabled().items():
        shared, groups = method.shared_parameters, method.different_groups
        if getattr(shared, "method", "") == "snip_momentum":
            text = '"snip_momentum" is refused: it needs whole gradients at each step, and neural_compressor'
            yield NotImplementedError, f'{name}.shared_parameters.method": {text}; use l1 or topk'
        if name == "head_pruning" and shared.num_heads is None:
            yield ValueError, f'{name}.shared_parameters.num_heads" is missing'
        if not groups:
            yield ValueError, f'{name}.different_groups" is missing: give at least one group of modules'
        for group, given in groups.items():
            path = f"{name}.different_groups.{group}"
            for key_, value in vars(given.params).items():
                if value is None:
                    yield ValueError, f'{path}.params.{key_}" is missing'
            related = given.related_modules or ()
            if related and (isinstance(given, (WeightGroup, InputGroup, SparseGroup))):
                yield ValueError, f'{path}.related_modules": {name} changes no shapes: leave it out'
            count = 1 if isinstance(given.modules, str) else len(given.modules)
            if related and len(related) != count:
                yield ValueError, f'{path}.related_modules" has {len(related)} lists, and modules has {count} patterns'
            if isinstance(given, WeightGroup):
                yield from _faults_of_bits(path, given.params, shared)
    layers = section.layer_reduction
    if layers.enabled:
        for key_ in ("module_name_prefix", "teacher_layer"):
            if not getattr(layers, key_):
                yield ValueError, f'layer_reduction.{key_}" is missing'
        if layers.keep_number_layer not in (None, len(layers.teacher_layer)):
            yield (
                ValueError,
                (
                    f'layer_reduction.keep_number_layer": {layers.keep_number_layer}, but teacher_layer names '
                    f"{len(layers.teacher_layer)} layers"
                ),
            )


def _faults_of_bits(path: str, params: WeightParams, shared: WeightShared) -> Iterator[tuple[type[Exception], str]]:
    start, target = params.start_bits, params.target_bits
    if start is None or target is None:
        return
    if start < target:
        yield ValueError, f'{path}.params.start_bits": {start} is below target_bits: {target}'
    for name, value, needed in (
        ("quantization_type", shared.quantization_type, "symmetric"),
        ("rounding", shared.rounding, "nearest"),
    ):
        if target < 3 and value != needed:
            yield (
                ValueError,
                (
                    f'{path}.params.target_bits": {target} is {"binary" if target == 1 else "ternary"}, which needs '
                    f'"{name}": "{needed}", got "{value}"'
                ),
            )
