"""Conversion of a torch.distributed call's tensors to the core's form: dense memory, one address and count each.

A dense tensor is passed unchanged. Others (strided, expanded, conjugated views) go through scratch: inputs are copied
before the operation, outputs after it. An expanded tensor cannot be an output.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Any

import torch

from zcomm import _core
from zcomm.comm.tensors import DTYPES, PLAIN, has_memory
from zcomm.torch_backend.options import name_of

Span = tuple[int, int]


def is_plain(tensor: torch.Tensor) -> bool:
    """Return True if the core can work on its memory."""
    return (
        type(tensor) in PLAIN
        and (tensor.is_cpu or tensor.is_cuda)
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor.is_conj()
        and has_memory(tensor)
    )


def is_sharded_gradient(tensor: torch.Tensor) -> bool:
    """Return True for ``p.grad`` of a ZeroOptimizer (zero/sharded/grad.py), because reads of it are collective."""
    return type(tensor) not in PLAIN and hasattr(tensor, "_zcomm_gradient")


def refuse_sharded_gradients(what: str, tensors: Sequence[torch.Tensor]) -> None:
    """Refuse calls that would read or change a sharded gradient on only one rank. Raises: RuntimeError."""
    for tensor in tensors:
        if is_sharded_gradient(tensor):
            name = tensor._zcomm_gradient()  # type: ignore[attr-defined]
            raise RuntimeError(
                f"{what}: p.grad of {name} is sharded by ZeroOptimizer, so no rank has all of it: use "
                "zcomm.zero.full_grad(p), on all ranks"
            )


def checked(what: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor, of any strides. Raises: NotImplementedError naming device or layout."""
    if hasattr(tensor, "trigger_wait"):  # AsyncCollectiveTensor: the result of a functional collective in flight
        tensor = tensor.trigger_wait()
    if not (tensor.is_cpu or tensor.is_cuda):
        raise NotImplementedError(f'{what}: a tensor is on {tensor.device}; backend "zcomm" moves CPU and CUDA tensors')
    if tensor.layout is not torch.strided:
        raise NotImplementedError(f"{what}: a tensor has layout {tensor.layout}; only dense ones are moved")
    if type(tensor) in PLAIN and tensor.is_contiguous() and not has_memory(tensor):
        raise ValueError(f"{what}: a tensor of shape {tuple(tensor.shape)} has less memory than elements")
    return tensor


def writing_to(tensor: torch.Tensor) -> Any:
    """Return a context in which any thread may write to the tensor, also to a leaf or a tensor of inference mode."""
    return torch.inference_mode() if tensor.is_inference() else torch.no_grad()


def check_writable(what: str, tensor: torch.Tensor) -> None:
    """Refuse an expanded tensor, as torch does, because its elements share memory. Raises: ValueError."""
    if tensor.numel() and any(size > 1 and step == 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ValueError(
            f"{what}: a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is to be written to, but "
            "more than one of its elements refers to a single memory location; pass tensor.clone()"
        )


def check_apart(what: str, tensors: Sequence[torch.Tensor]) -> None:
    """Check a list of results. Raises: ValueError naming two that overlap."""
    ends: list[tuple[int, int, int]] = []
    for index, tensor in enumerate(tensors):
        if tensor.numel():
            nbytes = tensor.numel() * tensor.element_size() if tensor.is_contiguous() else 1  # strided ones may mesh
            ends.append((tensor.data_ptr(), tensor.data_ptr() + nbytes, index))
    ends.sort()
    for (_, end, one), (begin, _, other) in pairwise(ends):
        if begin < end:
            first, second = sorted((one, other))
            raise ValueError(
                f"{what}: outputs {first} and {second} lie at one place, at addresses {tensors[first].data_ptr():#x} "
                f"and {tensors[second].data_ptr():#x}; each must have memory of its own"
            )


def wire(dtype: torch.dtype) -> tuple[_core.DType, int, str]:
    """Return the core's dtype for ``dtype``, its count per element, and a name that ranks compare.

    A dtype that the core lacks moves as bytes, and the name is torch's; otherwise the name is "".
    """
    core = DTYPES.get(dtype)
    return (core, 1, "") if core is not None else (_core.DType.uint8, dtype.itemsize, name_of(dtype))


def mixed(tensors: Sequence[torch.Tensor]) -> str:
    """Return the dtypes of a list, in order, which ranks compare; "" for a single dtype, which is compared anyway."""
    runs = [(name_of(dtype), len(list(run))) for dtype, run in groupby(tensor.dtype for tensor in tensors)]
    return "" if len(runs) < 2 else "a list of " + ", ".join(f"{count} {name}" for name, count in runs)


def spans(tensors: Sequence[torch.Tensor], width: int) -> list[Span]:
    return [(tensor.data_ptr(), tensor.numel() * width) for tensor in tensors]


def parts(tensor: torch.Tensor, counts: Sequence[int], width: int) -> list[Span]:
    """Return the consecutive pieces of a dense tensor, of ``counts`` elements."""
    address, itemsize = tensor.data_ptr(), tensor.element_size()
    result = []
    for count in counts:
        result.append((address, count * width))
        address += count * itemsize
    return result


def flat_view(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return one flat tensor over all, if they are adjacent in one storage, as chunks of a flat tensor are; else None.

    Separate storages may have adjacent addresses, but no tensor can cover two of them.
    """
    if not all(is_plain(tensor) for tensor in tensors):
        return None
    first, end = tensors[0].detach(), tensors[0].data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != end or tensor.dtype != first.dtype:
            return None
        end += tensor.nbytes
    storage = first.untyped_storage()
    if end > storage.data_ptr() + storage.nbytes():
        return None
    return first.as_strided((sum(tensor.numel() for tensor in tensors),), (1,))


class Staging:
    """The scratch of one call. ``finish`` copies results back; call it after the operation has ended."""

    __slots__ = ("_back", "what")

    def __init__(self, what: str) -> None:
        self.what = what
        self._back: list[tuple[torch.Tensor, torch.Tensor]] = []

    def reads(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return dense memory with its values."""
        if is_plain(tensor):
            return tensor
        tensor = checked(self.what, tensor).detach()
        return tensor if is_plain(tensor) else tensor.contiguous().resolve_conj().resolve_neg()

    def writes(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return dense memory that becomes its values."""
        if is_plain(tensor):
            return tensor
        tensor = checked(self.what, tensor).detach()
        if is_plain(tensor):
            return tensor
        check_writable(self.what, tensor)
        scratch = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        self._back.append((tensor, scratch))
        return scratch

    def updates(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return dense memory with its values, which becomes its values."""
        dense = self.writes(tensor)
        if dense is not tensor and self._back and self._back[-1][1] is dense:
            dense.copy_(self._back[-1][0])
        return dense

    def flat_reads(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return one dense tensor with the values of all; they have one dtype."""
        if (flat := flat_view(tensors)) is not None:
            return flat
        return torch.cat([self.reads(tensor).detach().reshape(-1) for tensor in tensors])

    def flat_writes(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return one dense tensor that becomes the concatenated values of all."""
        if (flat := flat_view(tensors)) is not None:
            return flat
        targets = [checked(self.what, tensor).detach() for tensor in tensors]
        for target in targets:
            check_writable(self.what, target)
        check_apart(self.what, targets)
        flat = torch.empty(sum(tensor.numel() for tensor in targets), dtype=targets[0].dtype, device=targets[0].device)
        pieces = flat.split([tensor.numel() for tensor in targets])
        self._back.extend((target, piece.view(target.shape)) for target, piece in zip(targets, pieces, strict=True))
        return flat

    @property
    def is_used(self) -> bool:
        return bool(self._back)

    def finish(self) -> None:
        for tensor, scratch in self._back:
            with writing_to(tensor):
                tensor.copy_(scratch)
