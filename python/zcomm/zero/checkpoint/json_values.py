"""Values of a program (numbers, strings, bytes, tensors, arrays, lists, dicts, Namespaces) as JSON and back.

A value is restored with its type, or refused: subclasses have methods and fields that JSON does not keep.
Tensors and numpy arrays are returned to the caller, which writes them as safetensors; the JSON names them. A tensor or
an array that occurs twice is restored as one object; lists and dicts that occur twice are restored as copies. No value
is pickled.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import json
import os
import sys
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

from zcomm.zero.files.tensor_file import bytes_of, holds

_TUPLE, _SIZE, _ITEMS, _NAMESPACE = "__tuple__", "__size__", "__items__", "__namespace__"
_COUNTS, _ORDERED, _DEFAULTS = "__counts__", "__ordered__", "__defaults__"  # Counts: MultiStepLR's
_TENSOR, _LEAF, _PARAMETER, _ARRAY, _SCALAR = "__tensor__", "__leaf__", "__parameter__", "__array__", "__scalar__"
_BYTES = "__bytes__"
_KINDS = {dict: _ITEMS, Counter: _COUNTS, OrderedDict: _ORDERED, defaultdict: _DEFAULTS}
_FACTORIES = {each.__name__: each for each in (bool, int, float, str, list, tuple, set, dict, Counter, OrderedDict)}
_MAX_BITS = 13_000  # of an integer: Python reads 4300 digits

Tensors = MutableMapping[str, torch.Tensor]


def to_json(value: Any, where: str, tensors: Tensors | None = None) -> Any:
    """Return ``value`` in types of JSON. The second argument is the path to it in a program's syntax ("": its keys
    begin the path).

    tensors: receives tensors and arrays by their paths; None: only those of one element are kept, as Python's numbers.
    Raises: ValueError naming the path to a value that cannot be kept.
    """
    try:
        return _Writer(tensors).value(value, where)
    except RecursionError:
        raise ValueError(f"{where or 'the value'} contains itself, or is nested too deeply to be saved") from None


class _Writer:
    """One call of ``to_json``, with the names of the tensors and arrays so far."""

    def __init__(self, tensors: Tensors | None) -> None:
        self._tensors = tensors
        self._met: dict[int, Any] = {}  # by id(): the caller's value keeps them alive

    def value(self, value: Any, where: str) -> Any:
        kind, tensors = type(value), self._tensors
        if isinstance(value, torch.Tensor) or _of_numpy(value):
            if tensors is None:
                return _number(value, where)
            if id(value) not in self._met:
                self._met[id(value)] = _kept(value, where, tensors)
            return self._met[id(value)]
        if kind is int and value.bit_length() > _MAX_BITS:
            raise ValueError(
                f"{where} is an integer of {value.bit_length()} bits; a checkpoint keeps {_MAX_BITS} at most"
            )
        if value is None or kind in (bool, int, float, str):
            return value
        if kind is bytes and tensors is not None:
            name = _free_name(where, tensors)
            tensors[name] = torch.frombuffer(bytearray(value or b" "), dtype=torch.uint8)[: len(value)]
            return {_BYTES: name}
        if kind in (list, tuple, torch.Size):
            items = [self.value(item, f"{where}[{i}]") for i, item in enumerate(value)]
            return items if kind is list else {_TUPLE if kind is tuple else _SIZE: items}
        if kind is Namespace:
            return {_NAMESPACE: self._mapping(vars(value), where, lambda key: f"{where}.{key}")}
        if kind is defaultdict:
            factory = None if value.default_factory is None else getattr(value.default_factory, "__name__", "")
            if factory is not None and _FACTORIES.get(factory) is not value.default_factory:
                raise _refused(value, where, f" with the default_factory {value.default_factory!r}")
            return {_DEFAULTS: [factory, self._pairs(value, where, lambda key: _at(where, key))]}
        if kind in _KINDS:
            return self._mapping(value, where, lambda key: _at(where, key))
        raise _refused(value, where)

    def _mapping(self, value: Mapping[Any, Any], where: str, at: Callable[[Any], str]) -> Any:
        plain = type(value) is dict and _READ.keys().isdisjoint(value)
        if plain and all(type(key) is str for key in value):
            return {key: self.value(item, at(key)) for key, item in value.items()}
        return {_KINDS[type(value)]: self._pairs(value, where, at)}

    def _pairs(self, value: Mapping[Any, Any], where: str, at: Callable[[Any], str]) -> list[Any]:
        return [[_key(key, f"a key of {where}"), self.value(item, at(key))] for key, item in value.items()]


def _key(key: Any, where: str) -> Any:
    """Return the key of a dict as JSON. A loaded key must equal the program's, which tensors and nan do not."""
    if isinstance(key, torch.Tensor):
        raise _refused(key, where)
    if type(key) is tuple:
        return {_TUPLE: [_key(item, f"{where}[{i}]") for i, item in enumerate(key)]}
    if (isinstance(key, float) or _of_numpy(key)) and key != key:
        raise ValueError(f"{where} is nan, which equals no other key; a checkpoint cannot keep it")
    return _kept(key, where, {}) if _of_numpy(key) else _Writer(None).value(key, where)


def _of_numpy(value: Any) -> bool:
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))


def _at(where: str, key: Any) -> str:
    if isinstance(key, str):
        return f"{where}[{json.dumps(key, ensure_ascii=False)}]" if where else key
    return f"{where}[{key!r}]"


def _refused(value: Any, where: str, why: str = "") -> ValueError:
    base = next((each for each in (bool, int, float, str, tuple, list, dict) if isinstance(value, each)), None)
    instead = ""
    if isinstance(value, enum.Enum):
        instead = "write its value"
    elif isinstance(value, tuple) and hasattr(value, "_asdict"):
        instead = "write tuple(...) or ..._asdict() of it"
    elif dataclasses.is_dataclass(value):
        instead = "write dataclasses.asdict(...) of it"
    elif isinstance(value, (torch.dtype, torch.device, os.PathLike)):
        instead = "write str(...) of it"
    elif isinstance(value, Mapping):
        instead = "write dict(...) of it"
    elif base is not None:
        instead = f"write {base.__name__}(...) of it"
    if not why and base not in (None, type(value)):
        why = f", a subclass of {base.__name__}"
    kept = (
        "numbers, strings, bytes, tensors, numpy arrays, and lists, tuples, dicts (OrderedDict, Counter, defaultdict "
        "of a builtin type) and argparse Namespaces of them"
    )
    return ValueError(
        f"{where} is {type(value).__name__}{why}, which a checkpoint cannot keep; {instead or f'it keeps {kept}'}"
    )


def _number(value: Any, where: str) -> Any:
    """Return the number in a tensor or array of one element."""
    found = value.item() if (value.numel() if isinstance(value, torch.Tensor) else value.size) == 1 else None
    if not isinstance(found, (bool, int, float, str)):
        raise _refused(value, where, f" of shape {tuple(value.shape)}")
    return found


def _kept(value: Any, where: str, tensors: Tensors) -> Any:
    if isinstance(value, torch.Tensor):
        if type(value) not in (torch.Tensor, nn.Parameter):
            raise _refused(value, where, ", a subclass of Tensor")
        if value.layout != torch.strided or value.is_meta or value.is_quantized or not holds(value.dtype):
            raise _refused(value, where, f" ({value.dtype}, {value.layout}, on {value.device})")
        name = _free_name(where, tensors)
        tensors[name] = value.detach().resolve_conj().resolve_neg()
        if isinstance(value, nn.Parameter):
            return {_PARAMETER: [name, value.requires_grad]}
        return {_LEAF if value.requires_grad and value.is_leaf else _TENSOR: name}
    numpy: Any = sys.modules["numpy"]
    if value.dtype.hasobject or value.dtype.fields is not None:
        raise _refused(value, where, f" of dtype {value.dtype}")
    if isinstance(value, numpy.generic):
        return {_SCALAR: [value.dtype.str, base64.b64encode(value.tobytes()).decode()]}
    if type(value) is not numpy.ndarray:
        raise _refused(value, where, ", a subclass of ndarray")
    name = _free_name(where, tensors)
    tensors[name] = _of_array(value)
    return {_ARRAY: [name, value.dtype.str, list(value.shape)]}


def _free_name(where: str, tensors: Tensors) -> str:
    """Return the path as a name, with a number if another tensor has the name, because keys such as "a.b" make two
    paths look equal."""
    name, number = where, 1
    while name in tensors:
        number += 1
        name = f"{where} ({number})"
    return name


def _of_array(value: Any) -> torch.Tensor:
    """Return a copy with the same bytes; as uint8 if torch lacks the dtype."""
    try:
        tensor: torch.Tensor = torch.from_numpy(value.copy(order="C"))
        if holds(tensor.dtype):
            return tensor
    except (TypeError, ValueError):
        pass
    return torch.frombuffer(bytearray(value.tobytes()) or bytearray(1), dtype=torch.uint8)[: value.nbytes]


def from_json(value: Any, tensors: Mapping[str, torch.Tensor] | None = None) -> Any:
    """Restore a value from ``to_json``. Raises: ValueError for a value that ``to_json`` does not return."""
    try:
        return _Reader(tensors or {}).value(value)
    except (TypeError, LookupError, ValueError, AttributeError, RuntimeError, RecursionError) as error:
        raise ValueError(f"a saved value is not one that a checkpoint keeps: {error!r}") from error


class _Reader:
    """One call of ``from_json``, with the tensors and arrays restored so far."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self._made: dict[tuple[str, str], Any] = {}

    def value(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if not isinstance(value, dict):
            return value
        tag = next(iter(value)) if len(value) == 1 else None
        if tag not in _READ:
            return {key: self.value(item) for key, item in value.items()}
        inside = value[tag]
        if tag not in (_TENSOR, _LEAF, _PARAMETER, _ARRAY):
            return _READ[tag](inside, self)
        key = tag, inside if isinstance(inside, str) else inside[0]
        if key not in self._made:
            self._made[key] = _READ[tag](inside, self)
        return self._made[key]

    def pairs(self, pairs: Iterable[Any]) -> list[tuple[Any, Any]]:
        return [(self.value(key), self.value(item)) for key, item in pairs]


def _read_parameter(inside: Any, reader: _Reader) -> nn.Parameter:
    name, requires_grad = inside
    return nn.Parameter(reader.tensors[name].clone(), requires_grad=bool(requires_grad))


def _read_array(inside: Any, reader: _Reader) -> Any:
    import numpy

    name, dtype, shape = inside
    raw = bytes(bytes_of(reader.tensors[name]))
    return numpy.frombuffer(raw, dtype=numpy.dtype(dtype)).reshape(shape).copy()


def _read_scalar(inside: Any, reader: _Reader) -> Any:
    import numpy

    dtype, text = inside
    return numpy.frombuffer(base64.b64decode(text, validate=True), dtype=numpy.dtype(dtype))[0]


def _read_defaults(inside: Any, reader: _Reader) -> Any:
    factory, pairs = inside
    return defaultdict(None if factory is None else _FACTORIES[factory], reader.pairs(pairs))


_READ: dict[str, Callable[[Any, _Reader], Any]] = {
    _TUPLE: lambda inside, reader: tuple(reader.value(inside)),
    _SIZE: lambda inside, reader: torch.Size(reader.value(inside)),
    _ITEMS: lambda inside, reader: dict(reader.pairs(inside)),
    _COUNTS: lambda inside, reader: Counter(dict(reader.pairs(inside))),
    _ORDERED: lambda inside, reader: OrderedDict(reader.pairs(inside)),
    _DEFAULTS: _read_defaults,
    _NAMESPACE: lambda inside, reader: Namespace(**reader.value(inside)),
    _TENSOR: lambda name, reader: reader.tensors[name].clone(),
    _LEAF: lambda name, reader: reader.tensors[name].clone().requires_grad_(),
    _PARAMETER: _read_parameter,
    _ARRAY: _read_array,
    _SCALAR: _read_scalar,
    _BYTES: lambda name, reader: bytes(bytes_of(reader.tensors[name])),
}
