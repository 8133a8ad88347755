"""Parser from a mapping to the frozen schema: every key known, every value of its type and range, or a ValueError.

Messages begin with the source of the configuration, then name the dotted key, the value and the remedy.
Pure: warnings are returned as notes, so that only one rank prints them.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import json
import math
import os
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from zcomm.config.compression_keys import CompressionTraining, faults
from zcomm.config.foreign import FOREIGN, SECTIONS, names_in
from zcomm.config.keys import ELEMENTS, REQUIRED, Key, Note, Status, asked_by
from zcomm.config.optimizer_keys import NEEDED, OPTIMIZER_PARAMS, SCHEDULER_PARAMS
from zcomm.config.schema import HINTS, Config, OffloadParam
from zcomm.config.source import Source as Source
from zcomm.config.source import read_source as read_source
from zcomm.config.words import OTHER_WORDS, in_todays_words
from zcomm.hints import REFUSED_OPTIMIZERS


def parse(
    data: Mapping[str, Any], source: str = "config", auto: Mapping[str, Any] | None = None
) -> tuple[Config, list[Note]]:
    """Return the checked configuration and one note for each key that is accepted without effect.

    auto: values of "auto" by dotted key; a missing key has its default.
    Raises: ValueError (unknown key, type, range, contradiction), NotImplementedError (refused key).
    """
    reader = _Reader(source, auto or {})
    data, notes = in_todays_words(data, source)
    reader.notes = [Note(text) for text in notes]
    config = reader.without_param_tier(reader.section(Config, data, ""))
    reader.contradictions(config)
    return config, reader.notes


def parse_compression(data: Mapping[str, Any], source: str = "config") -> tuple[CompressionTraining, list[Note]]:
    """Return the section ``compression_training`` of ``data``, all other keys of which are ignored, and its notes.

    Raises: as ``parse``.
    """
    reader = _Reader(source, {})
    given = data.get("compression_training")
    found = reader.section(CompressionTraining, {} if given is None else given, "compression_training")
    reader.check_compression(found)
    return found, reader.notes


def leaf_paths(schema: type = Config, prefix: str = "") -> Iterator[str]:
    """Yield every dotted key, sections included."""
    for name, key in fields_of(schema).items():
        yield f"{prefix}{name}"
        nested, named = section_type(key.kind), named_type(key.kind)
        if named is not None:
            yield from leaf_paths(named, f"{prefix}{name}.*.")
        if nested is not None:
            yield from leaf_paths(nested, f"{prefix}{name}.")
    if not prefix:
        yield from FOREIGN
        yield from sorted(SECTIONS)
        yield from OTHER_WORDS


def fields_of(schema: type | None) -> dict[str, Key]:
    """Return by name the keys and sections that are fields of ``schema``, each with its annotation and default."""
    if schema is None:
        return {}
    hints, found = typing.get_type_hints(schema), {}
    for field in dataclasses.fields(schema):
        section = field.default_factory
        default = field.default if section is dataclasses.MISSING else section()
        plain, optional = _split_optional(hints[field.name])
        key = field.metadata.get("key", Key(""))
        found[field.name] = dataclasses.replace(key, kind=plain, default=default, optional=optional)
    return found


def section_type(kind: Any) -> type | None:
    """Return ``kind`` if it is a section's dataclass, else None."""
    return kind if isinstance(kind, type) and dataclasses.is_dataclass(kind) else None


def named_type(kind: Any) -> type | None:
    """Return the dataclass of sections if ``kind`` maps names, which the file chooses, to such sections, else None."""
    return section_type(typing.get_args(kind)[1]) if typing.get_origin(kind) is dict else None


class _Reader:
    """Reader of one source: has its name and collects notes while the schema is walked."""

    def __init__(self, source: str, auto: Mapping[str, Any]) -> None:
        self.source = source
        self.auto = auto
        self.notes: list[Note] = []
        self.without_effect: list[str] = []  # keys behind the notes
        self.unfilled: dict[str, str] = {}  # keys that are "auto" without a value, and the missing source

    def section(self, schema: Any, data: Any, path: str) -> Any:
        """Return an instance of dataclass ``schema`` from the mapping ``data`` at dotted ``path``.

        schema: None for a section in which no key has an effect.
        """
        if not isinstance(data, Mapping):
            raise ValueError(f'{self.source}: "{path}" must be an object {{...}}, got {_shown(data)}')
        prefix = path + "." if path else ""
        fields = fields_of(schema)
        known = [*fields, *(name for name in names_in(prefix) if name not in fields)]
        for name in data:
            if name not in known:
                self._unknown(str(name), prefix, known)
        values = {name: self._value(fields.get(name), raw, prefix + name) for name, raw in data.items()}
        for name, key in fields.items():
            if key.default is REQUIRED and name not in values:
                words = ", ".join(str(choice) for choice in key.choices)
                raise ValueError(f'{self.source}: "{prefix}{name}" is missing; give one of: {words}')
        return None if schema is None else schema(**{name: values[name] for name in fields if name in values})

    def _value(self, described: Key | None, raw: Any, path: str) -> Any:
        raw = raw.value if isinstance(raw, enum.Enum) else raw  # a program's word: OffloadDeviceEnum.cpu
        described = described or FOREIGN.get(path)
        nested = None if described is None else section_type(described.kind)
        if described is None or nested is not None:
            if raw is None:  # DeepSpeed writes null for an absent section
                return None if described is None else described.default
            return self.section(nested, raw, path)
        named = named_type(described.kind)
        if named is not None and isinstance(raw, Mapping):
            return {str(name): self.section(named, each, f"{path}.{name}") for name, each in raw.items()}
        if raw == "auto":
            if not described.auto and described.status is not Status.NO_EFFECT:
                raise ValueError(f'{self.source}: "{path}": "auto" has no meaning here; give a value, or leave it out')
            raw = self.auto.get(path)
            if raw is None:
                self.unfilled[path] = described.auto
                return described.default
        value = self._convert(raw, described, path)
        if isinstance(value, dict) and described.switches:
            switch = asked_by(value, described.switches)
            if switch is None:
                return described.default  # a section of another program, switched off: whatever else is in it
            path, raw = f"{path}.{switch[0]}".rstrip("."), switch[1]
        if described.check is not None and value is not None and not described.check.passes(value):
            raise ValueError(f'{self.source}: "{path}" must be {described.check.words}, got {_shown(raw)}')
        if value != described.default and described.default is not REQUIRED:
            if described.status is Status.REFUSED:
                raise NotImplementedError(f'{self.source}: "{path}": {_shown(raw)} is refused: {described.reason}')
            if described.status is Status.NO_EFFECT:
                text = f'{self.source}: "{path}": {_shown(raw)} has no effect: {described.reason}'
                self.notes.append(Note(text, described.quiet))
                self.without_effect.append(path)
        return value

    def _convert(self, raw: Any, described: Key, path: str) -> Any:
        plain = described.kind
        if raw is None and (described.optional or plain is Any):
            return None
        if raw == math.inf and path == "steps_per_print":  # Accelerate's word for never
            return None
        if plain is int and path.rpartition(".")[2] in ELEMENTS and isinstance(raw, float) and math.isfinite(raw):
            raw = math.floor(raw)  # 0.9 * hidden_size ** 2
        value = None if named_type(plain) is not None else _as_type(raw, plain)
        if value is None:
            raise ValueError(
                f'{self.source}: "{path}" must be {_TYPE_WORDS.get(plain, "an object {...}")}, got {_shown(raw)}'
            )
        if described.choices:
            for choice in described.choices:
                if str(value).lower() == str(choice).lower():
                    return choice
            refused = REFUSED_OPTIMIZERS.items() if path == "optimizer.type" else ()
            for name, why in refused:
                if str(value).lower() == name.lower():
                    raise NotImplementedError(f'{self.source}: "{path}": {_shown(raw)} is refused: {why}')
            words = ", ".join(str(choice) for choice in described.choices)
            raise ValueError(f'{self.source}: "{path}" must be one of {words}, got {_shown(raw)}')
        return value

    def _unknown(self, name: str, prefix: str, siblings: list[str]) -> NoReturn:
        path = prefix + name
        hint = HINTS.get(path)
        if hint is None:
            elsewhere = [known for known in leaf_paths() if known.split(".")[-1] == name]
            near = [prefix + sibling for sibling in difflib.get_close_matches(name, siblings, n=1)]
            others = [known for known in leaf_paths() if not path.startswith(known + ".")]  # its own section is no help
            far = difflib.get_close_matches(path, others, n=1)
            best = (near or elsewhere or far or [""])[0]
            hint = f'did you mean "{best}"?' if best else f"known here: {', '.join(siblings)}"
        raise ValueError(f'{self.source}: unknown key "{path}"; {hint}')

    def without_param_tier(self, config: Config) -> Config:
        """Return ``config`` without an ``offload_param`` that its stage does not have, and note it once."""
        zero = config.zero_optimization
        if zero.stage == 3:
            return config
        path = "zero_optimization.offload_param"
        device = zero.offload_param.device
        if device != "none":
            self.notes = [note for note in self.notes if not note.text.startswith(f'{self.source}: "{path}.')]
            text = (
                f'{self.source}: "{path}.device": "{device}" has no effect: only stage 3 shards parameters, and '
                f'"zero_optimization.stage" is {zero.stage}'
            )
            self.notes.append(Note(text))
        return dataclasses.replace(config, zero_optimization=dataclasses.replace(zero, offload_param=OffloadParam()))

    def contradictions(self, config: Config) -> None:
        """Check the keys against each other. Raises: ValueError."""
        if config.fp16.enabled and config.bf16.enabled:
            raise ValueError(f'{self.source}: "fp16.enabled" and "bf16.enabled" are both true; give one of them')
        if config.bf16.bf16_optimizer_states:
            self._check_bf16_state(config)
        self.check_compression(config.compression_training)
        if config.optimizer is not None:
            self._params("optimizer", config.optimizer, OPTIMIZER_PARAMS[config.optimizer.type])
        if config.scheduler is not None:
            self._params("scheduler", config.scheduler, SCHEDULER_PARAMS[config.scheduler.type])
        self._check_switches(config)
        tuning = config.autotuning
        if tuning.end_profile_step <= tuning.start_profile_step:
            raise ValueError(
                f'{self.source}: "autotuning.end_profile_step": {tuning.end_profile_step} must be above '
                f'"autotuning.start_profile_step": {tuning.start_profile_step}'
            )
        zero = config.zero_optimization
        for name, tier in (("offload_optimizer", zero.offload_optimizer), ("offload_param", zero.offload_param)):
            if tier.device == "nvme" and tier.nvme_path is None:
                raise ValueError(
                    f'{self.source}: "zero_optimization.{name}.device": "nvme" needs '
                    f'"zero_optimization.{name}.nvme_path", the directory to swap to'
                )
        if zero.zeropp_loco_param is not None and not zero.zero_quantized_gradients:
            raise ValueError(
                f'{self.source}: "zero_optimization.zeropp_loco_param" is of quantised gradients: it needs '
                '"zero_optimization.zero_quantized_gradients": true'
            )
        paths = (zero.offload_optimizer.nvme_path, zero.offload_param.nvme_path)
        both_swap = zero.offload_optimizer.device == zero.offload_param.device == "nvme"
        if both_swap and _places(paths[0]) != _places(paths[1]):
            raise ValueError(
                f'{self.source}: "zero_optimization.offload_optimizer.nvme_path": "{paths[0]}" and '
                f'"zero_optimization.offload_param.nvme_path": "{paths[1]}" differ; one rank swaps to one directory'
            )

    def _check_switches(self, config: Config) -> None:
        """Refuse a feature of data_efficiency that is on in a section that is off."""
        whole = config.data_efficiency
        for name, part, feature in (
            ("data_sampling", whole.data_sampling, "curriculum_learning"),
            ("data_routing", whole.data_routing, "random_ltd"),
        ):
            if getattr(part, feature).enabled and not (whole.enabled and part.enabled):
                raise ValueError(
                    f'{self.source}: "data_efficiency.{name}.{feature}.enabled": true needs '
                    f'"data_efficiency.enabled": true and "data_efficiency.{name}.enabled": true'
                )

    def check_compression(self, section: CompressionTraining) -> None:
        """Raise the first of the section's faults, if it has any."""
        for kind, text in faults(section):
            raise kind(f'{self.source}: "compression_training.{text}')

    def _check_bf16_state(self, config: Config) -> None:
        """Refuse bf16 moments of an optimizer that has none."""
        path = f'{self.source}: "bf16.bf16_optimizer_states": true'
        if not config.bf16.enabled:
            raise ValueError(f'{path} needs "bf16.enabled": true')
        if config.optimizer is not None and config.optimizer.type not in ("Adam", "AdamW"):
            raise NotImplementedError(f'{path} needs "optimizer.type" Adam or AdamW, got "{config.optimizer.type}"')

    def _params(self, name: str, section: Any, known: tuple[str, ...]) -> None:
        """Refuse params of another optimizer or schedule than the chosen one, and missing required params."""
        prefix, values = f"{name}.params.", vars(section.params)
        defaults = fields_of(type(section.params))
        changed = [prefix + field for field, value in values.items() if value != defaults[field].default]
        for path in (*changed, *self.without_effect):
            if path.startswith(prefix) and path.removeprefix(prefix) not in known:
                raise ValueError(
                    f'{self.source}: "{path}": {section.type} has no such param; it has {", ".join(known)}'
                )
        for field in NEEDED:
            path = prefix + field
            if field in known and values[field] is None:
                why = f'; "auto" is {self.unfilled[path]}' if path in self.unfilled else ""
                raise ValueError(f'{self.source}: "{name}.type": "{section.type}" needs "{path}"{why}')


def _places(paths: str | tuple[str, ...] | None) -> list[Path]:
    return [Path(path) for path in ([paths] if isinstance(paths, str) else paths or ())]


_PATHS = (str, tuple[str, ...])  # one, or several

_TYPE_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    tuple[float, float]: "a list of two numbers",
    tuple[int, ...]: "a list of whole numbers",
    _PATHS: "a string or a list of strings",
    dict[str, Any]: "an object {...}",
}


def _split_optional(annotation: Any) -> tuple[Any, bool]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        parts = tuple(part for part in typing.get_args(annotation) if part is not types.NoneType)
        return parts[0] if len(parts) == 1 else parts, True
    return annotation, False


def _as_type(raw: Any, wanted: Any) -> Any:
    """Return ``raw`` as ``wanted``, or None if it has another type.

    JSON writes 5e8 for a whole number; true is not a number.
    """
    number = isinstance(raw, (int, float)) and not isinstance(raw, bool)
    if wanted is Any:
        return raw
    if wanted == dict[str, Any]:
        return dict(raw) if isinstance(raw, Mapping) else None
    if wanted is bool:
        return bool(raw) if isinstance(raw, (bool, int, float)) and raw in (0, 1) else None
    if wanted is int:
        return int(raw) if number and raw == raw and abs(raw) != float("inf") and raw == int(raw) else None
    if wanted is float:
        return float(raw) if number else None
    if wanted == _PATHS and isinstance(raw, (list, tuple)):
        return tuple(map(os.fspath, raw)) if all(isinstance(item, (str, os.PathLike)) for item in raw) else None
    if wanted in (str, _PATHS):
        return os.fspath(raw) if isinstance(raw, (str, os.PathLike)) else None
    if wanted == tuple[int, ...]:
        whole = [_as_type(item, int) for item in raw] if isinstance(raw, (list, tuple)) else [None]
        return tuple(whole) if None not in whole else None
    pair = isinstance(raw, (list, tuple)) and len(raw) == 2
    numbers = [_as_type(item, float) for item in raw] if pair else [None]
    return tuple(numbers) if None not in numbers else None


def _shown(value: Any) -> str:
    try:
        return json.dumps(value)
    except TypeError:
        return repr(value)
