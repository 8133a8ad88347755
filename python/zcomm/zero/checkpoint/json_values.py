"""Values of a program (numbers, strings, bytes, tensors, arrays, lists, dicts, Namespaces) as JSON and back.

Tuples, keys that are not strings, Counters and numpy's scalars come back as what they were. Tensors and numpy arrays
are left to the caller, which writes them as safetensors; the JSON names them. Nothing is pickled.
"""

from __future__ import annotations

import base64
import json
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

from zcomm.zero.files.tensor_file import bytes_of, holds

_TUPLE, _ITEMS, _COUNTS, _NAMESPACE = "__tuple__", "__items__", "__counts__", "__namespace__"  # Counts: MultiStepLR's
_TENSOR, _PARAMETER, _ARRAY, _SCALAR = "__tensor__", "__parameter__", "__array__", "__scalar__"
_BYTES = "__bytes__"
_MAX_BITS = 13_000  # of an integer: Python reads 4300 digits

Tensors = MutableMapping[str, torch.Tensor]


def to_json(value: Any, where: str, tensors: Tensors | None = None) -> Any:
    """Return ``value`` as JSON can hold it. where: how a program writes the way to it ("": its keys begin the way).

    tensors: takes tensors and arrays by the way to them; None: of these only numbers are kept, as Python's.
    Raises: ValueError naming the way to what cannot be kept.
    """
    try:
        return _to_json(value, where, tensors)
    except RecursionError:
        raise ValueError(f"{where or 'the value'} contains itself, or is nested too deeply to be saved") from None


def _to_json(value: Any, where: str, tensors: Tensors | None) -> Any:
    numpy: Any = sys.modules.get("numpy")
    if isinstance(value, torch.Tensor) or (numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))):
        return _number(value, where) if tensors is None else _kept(value, where, tensors)
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > _MAX_BITS:
        raise ValueError(f"{where} is an integer of {value.bit_length()} bits; a checkpoint keeps {_MAX_BITS} at most")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if type(value) is bytes and tensors is not None:
        name = _free_name(where, tensors)
        tensors[name] = torch.frombuffer(bytearray(value or b" "), dtype=torch.uint8)[: len(value)]
        return {_BYTES: name}
    if isinstance(value, tuple):
        return {_TUPLE: [_to_json(item, f"{where}[{i}]", tensors) for i, item in enumerate(value)]}
    if isinstance(value, list):
        return [_to_json(item, f"{where}[{i}]", tensors) for i, item in enumerate(value)]
    if type(value) is Namespace:
        items = vars(value).items()
        return {_NAMESPACE: {key: _to_json(item, f"{where}.{key}", tensors) for key, item in items}}
    if isinstance(value, Mapping):
        tagged = isinstance(value, Counter) or not _READ.keys().isdisjoint(value)
        if not tagged and all(isinstance(key, str) for key in value):
            return {key: _to_json(item, _at(where, key), tensors) for key, item in value.items()}
        if any(isinstance(key, float) and key != key for key in value):
            raise ValueError(f"a key of {where} is nan, which equals no other key; a checkpoint cannot keep it")
        kind = _COUNTS if isinstance(value, Counter) else _ITEMS
        return {
            kind: [
                [_to_json(key, f"a key of {where}", None), _to_json(item, _at(where, key), tensors)]
                for key, item in value.items()
            ]
        }
    raise _refused(value, where)


def _at(where: str, key: Any) -> str:
    if isinstance(key, str):
        return f"{where}[{json.dumps(key, ensure_ascii=False)}]" if where else key
    return f"{where}[{key!r}]"


def _refused(value: Any, where: str, why: str = "") -> ValueError:
    what = f"{where} is {type(value).__name__}{why}, which a checkpoint cannot keep"
    kept = "numbers, strings, bytes, tensors, numpy arrays, and lists, tuples, dicts and argparse Namespaces of them"
    return ValueError(f"{what}; it keeps {kept}")


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
        return {_PARAMETER: [name, value.requires_grad]} if isinstance(value, nn.Parameter) else {_TENSOR: name}
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
    """Return ``where``, with a number if another tensor has the name: attributes such as "a.b" make two ways look
    alike."""
    name, number = where, 1
    while name in tensors:
        number += 1
        name = f"{where} ({number})"
    return name


def _of_array(value: Any) -> torch.Tensor:
    """Return a copy with the same bytes; of uint8 where torch lacks the dtype."""
    try:
        tensor: torch.Tensor = torch.from_numpy(value.copy(order="C"))
        if holds(tensor.dtype):
            return tensor
    except (TypeError, ValueError):
        pass
    return torch.frombuffer(bytearray(value.tobytes()) or bytearray(1), dtype=torch.uint8)[: value.nbytes]


def from_json(value: Any, tensors: Mapping[str, torch.Tensor] | None = None) -> Any:
    """Restore a value from ``to_json``. Raises: ValueError for what ``to_json`` does not give."""
    try:
        return _from_json(value, tensors or {})
    except (TypeError, LookupError, ValueError, AttributeError, RuntimeError, RecursionError) as error:
        raise ValueError(f"a saved value is not one that a checkpoint keeps: {error!r}") from error


def _from_json(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_from_json(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value)) if len(value) == 1 else None
    if tag not in _READ:
        return {key: _from_json(item, tensors) for key, item in value.items()}
    return _READ[tag](value[tag], tensors)


def _pairs(pairs: Iterable[Any], tensors: Mapping[str, torch.Tensor]) -> list[tuple[Any, Any]]:
    return [(_from_json(key, tensors), _from_json(item, tensors)) for key, item in pairs]


def _read_parameter(inside: Any, tensors: Mapping[str, torch.Tensor]) -> nn.Parameter:
    name, requires_grad = inside
    return nn.Parameter(tensors[name].clone(), requires_grad=bool(requires_grad))


def _read_array(inside: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    import numpy

    name, dtype, shape = inside
    raw = bytes(bytes_of(tensors[name]))
    return numpy.frombuffer(raw, dtype=numpy.dtype(dtype)).reshape(shape).copy()


def _read_scalar(inside: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    import numpy

    dtype, text = inside
    return numpy.frombuffer(base64.b64decode(text, validate=True), dtype=numpy.dtype(dtype))[0]


_READ: dict[str, Callable[[Any, Mapping[str, torch.Tensor]], Any]] = {
    _TUPLE: lambda inside, tensors: tuple(_from_json(inside, tensors)),
    _ITEMS: lambda inside, tensors: dict(_pairs(inside, tensors)),
    _COUNTS: lambda inside, tensors: Counter(dict(_pairs(inside, tensors))),
    _NAMESPACE: lambda inside, tensors: Namespace(**_from_json(inside, tensors)),
    _TENSOR: lambda name, tensors: tensors[name].clone(),
    _PARAMETER: _read_parameter,
    _ARRAY: _read_array,
    _SCALAR: _read_scalar,
    _BYTES: lambda name, tensors: bytes(bytes_of(tensors[name])),
}
