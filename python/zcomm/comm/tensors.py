"""Tensors as arguments of the core (address, count, dtype), and tensors over the core's memory."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from zcomm import _core

DTYPES: dict[torch.dtype, _core.DType] = {
    torch.float32: _core.DType.float32,
    torch.float64: _core.DType.float64,
    torch.float16: _core.DType.float16,
    torch.bfloat16: _core.DType.bfloat16,
    torch.int8: _core.DType.int8,
    torch.uint8: _core.DType.uint8,
    torch.int32: _core.DType.int32,
    torch.int64: _core.DType.int64,
    torch.bool: _core.DType.bool,
}


PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))

# Of a sequence of tensors. Torch's public function takes as long as the whole Python code of a small collective.
increment_versions: Callable[[Sequence[torch.Tensor]], None] = getattr(
    torch._C, "_increment_version", torch.autograd.graph.increment_version
)


def whole(what: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, or, for a sharded weight (zero/sharded/param.py), its gathered value: then collective."""
    if type(tensor) in PLAIN:
        return tensor
    gather = getattr(tensor, "_zcomm_whole", None)
    return tensor if gather is None else gather(f"{what}()")


def refuse_weights(what: str, buckets: object) -> None:
    """Check that ``buckets`` (a tensor or a list) have no sharded weight, which one rank or a later write would change.

    Raises: RuntimeError.
    """
    for tensor in buckets if isinstance(buckets, (list, tuple)) else [buckets]:
        if type(tensor) not in PLAIN and hasattr(tensor, "_zcomm_called"):
            raise RuntimeError(
                f"{what}: {tensor._zcomm_called()} is a weight that is sharded over ranks: use a tensor of your own "
                "(p.clone()), and then p.data.copy_(it) on every rank"
            )


def stands_for_weight(tensor: torch.Tensor) -> bool:
    """Return True for the gathered value of a sharded weight."""
    return type(tensor) not in PLAIN and hasattr(tensor, "_zcomm_written")


def count_written(tensors: Sequence[torch.Tensor], here: bool = True) -> None:
    """Count, for autograd and sharded weights, a write to the memory of ``tensors``.

    here: False if only other ranks wrote: a sharded weight has changed on all ranks.
    """
    if here:
        increment_versions(tensors)
    for tensor in tensors:
        if type(tensor) not in PLAIN and stands_for_weight(tensor):
            tensor._zcomm_written()  # type: ignore[attr-defined]


def has_memory(tensor: torch.Tensor) -> bool:
    """Return True if a dense, contiguous tensor has its elements in its storage."""
    nbytes, offset = tensor.nbytes, tensor.storage_offset()
    if offset:
        offset *= tensor.element_size()
    return nbytes == 0 or offset + nbytes <= tensor.untyped_storage().nbytes()


def is_lazy(tensor: torch.Tensor) -> bool:
    """Return True if memory lacks the values of a dense tensor: a conjugated or negated view, or zeros without memory.

    ``tensor.clone()`` has the values in memory, except for zeros.
    """
    return tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor()


def core_dtype(dtype: torch.dtype) -> _core.DType:
    """Return the core's name of a torch dtype. Raises: ValueError naming an unsupported dtype."""
    try:
        return DTYPES[dtype]
    except KeyError:
        known = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise ValueError(f"dtype {dtype} is not supported; use one of {known}") from None


def check_buffers(
    what: str, tensors: Sequence[torch.Tensor], device: str = "cpu", is_second: bool = False
) -> torch.dtype:
    """Check the tensors of a call, and return their common dtype.

    is_second: other tensors of the same call are already known to be on ``device``.
    Raises: ValueError for none, mixed devices or dtypes, strides, negated views. NotImplementedError for tensors on
    another device.
    """
    if not tensors:
        raise ValueError(f"{what}: the list of tensors is empty")
    dtype = tensors[0].dtype
    on_cpu = device == "cpu"
    for index, tensor in enumerate(tensors):
        # A small message takes less time than formatting a string, so texts are built only for errors.
        here = tensor.is_cpu if on_cpu else str(tensor.device) == device
        is_dense = tensor.layout is torch.strided and tensor.is_contiguous() and not tensor.is_neg()
        if not (here and is_dense and tensor.dtype is dtype):
            _refuse(what, index, tensors, device, is_second)
        if not has_memory(tensor):
            raise ValueError(f"{what}: tensor {index} of shape {tuple(tensor.shape)} has less memory than elements")
    core_dtype(dtype)
    return dtype


def _refuse(what: str, index: int, tensors: Sequence[torch.Tensor], device: str, is_second: bool) -> None:
    tensor, dtype = tensors[index], tensors[0].dtype
    where = f"{what}: tensor {index} of shape {tuple(tensor.shape)}"
    others = [device] if is_second else [str(other.device) for other in tensors]
    if len({str(tensor.device), *others}) > 1:
        other = next(name for name in others if name != str(tensor.device))
        raise ValueError(f"{where} is on {tensor.device}, others are on {other}; one operation has one device")
    if str(tensor.device) != device:
        raise NotImplementedError(f"{where} is on {tensor.device}; this communicator moves tensors on {device} only")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{where} has layout {tensor.layout}; pass a dense tensor")
    if tensor.dtype != dtype:
        raise ValueError(f"{where} is {tensor.dtype}, tensor 0 is {dtype}; one operation has one dtype")
    if not tensor.is_contiguous():
        raise ValueError(f"{where} and strides {tensor.stride()} is not contiguous; pass tensor.contiguous()")
    raise ValueError(f"{where} is a negated view, so that its memory lacks its values; pass tensor.resolve_neg()")


def integers(what: str, values: Iterable[Any]) -> list[int]:
    """Convert integers of any kind (numpy's, a tensor's) to Python's. Raises: ValueError naming another value."""
    result = []
    for value in values:
        try:
            result.append(operator.index(value))
        except TypeError:
            raise ValueError(f"{what}: {value!r} is not an integer") from None
    return result


def spans(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    return [(tensor.data_ptr(), tensor.numel()) for tensor in tensors]


def tensor_of(memory: Any, dtype: torch.dtype, count: int | None = None) -> torch.Tensor:
    """Return a flat tensor over the core's memory, without a copy. The tensor keeps the memory alive."""
    if count is None:
        count = memory.nbytes // dtype.itemsize
    return torch.frombuffer(memory, dtype=dtype, count=count) if count else torch.empty(0, dtype=dtype)
