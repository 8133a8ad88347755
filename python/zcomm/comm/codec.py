"""Codec and Compression: the form in which collectives and optimizers send elements, as values with checks.

Source: ZeRO++ (arXiv:2306.10209), 1-bit Adam (arXiv:2102.02888), SDP4Bit (arXiv:2410.15526), LoCo (arXiv:2407.04480).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypedDict, cast

import torch

from zcomm import _core
from zcomm.comm.tensors import check_buffers, core_dtype, spans
from zcomm.hints import did_you_mean

CodecName = Literal["int8", "int4", "fp8", "sign"]

_KINDS: dict[str, tuple[_core.CodecKind, int]] = {
    "int8": (_core.CodecKind.block_int, 8),
    "int4": (_core.CodecKind.block_int, 4),
    "fp8": (_core.CodecKind.fp8_e4m3, 8),
    "sign": (_core.CodecKind.sign, 1),
}
BLOCK = 256  # elements that share a scale
ERROR_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}

Errors = torch.Tensor | Sequence[torch.Tensor]


class Coded(TypedDict, total=False):
    """Keywords of all_reduce with a codec; see ``Communicator.all_reduce``."""

    codec: Codec | str | None
    error: tuple[Errors, Errors] | None
    keep: float
    mask: Errors | None


@dataclass(frozen=True)
class Codec:
    """Form in which a collective sends the elements of a tensor.

    name: "int8", "int4": integers, with a scale for each block. "fp8": E4M3, with a scale for each block. "sign": one
        bit, with a scale for each tensor and part. Bytes per element: 1.008, 0.508, 1.008, 0.125.
    block: elements that share a scale; 256.
    rotate: 0, or 32: a Hadamard transform of 32 adjacent elements first, so that a single large one does not coarsen
        its block. Not with "sign".
    stochastic: round up or down by chance, so that the mean is the element. The chances depend on rank, element and the
        number of coded calls before, not on the engine. Not with "sign".
    Raises: ValueError.
    """

    name: CodecName = "int8"
    block: int = BLOCK
    rotate: int = 0
    stochastic: bool = False

    def __post_init__(self) -> None:
        if self.name not in _KINDS:
            hint = did_you_mean(self.name, _KINDS)
            raise ValueError(f"codec {self.name!r} is not one of {', '.join(_KINDS)}{hint}")
        if self.block != BLOCK:
            raise ValueError(f"codec {self.name}: block={self.block!r}; blocks of {BLOCK} elements are implemented")
        _core_codec(self)  # checks the rest

    def __str__(self) -> str:
        return (
            self.name + (f":rotate={self.rotate}" if self.rotate else "") + (":stochastic" if self.stochastic else "")
        )

    def encoded_nbytes(self, numel: int) -> int:
        """Return the bytes of ``numel`` encoded elements: scales and codes, each padded to 64 bytes."""
        return _core_codec(self).encoded_nbytes(numel)


@lru_cache(maxsize=64)
def _core_codec(codec: Codec) -> _core.Codec:
    kind, bits = _KINDS[codec.name]
    return _core.Codec(kind, bits, codec.rotate, codec.stochastic)


def codec_of(codec: Codec | str) -> Codec:
    """Return the codec of that name, or ``codec`` itself. Raises: ValueError, TypeError."""
    if isinstance(codec, Codec):
        return codec
    if isinstance(codec, str):
        return Codec(cast(CodecName, codec))
    raise TypeError(f"codec={codec!r}: pass a zcomm.Codec or one of its names: {', '.join(_KINDS)}")


def zero_error(dtype: torch.dtype, count: int, step: int) -> torch.Tensor:
    """Make an error of zero for ``count`` elements that are encoded in parts of ``step``."""
    return torch.zeros(_core.error_count(core_dtype(dtype), count, step), dtype=dtype)


def factors_of(error: torch.Tensor, count: int, step: int) -> list[torch.Tensor]:
    """Return views of an error from ``zero_error``, which multiply it if they are multiplied: of int8 the scales."""
    if error.dtype != torch.int8:
        return [error]
    begins = range(0, count, step) if count else ()
    parts = error.split([Codec().encoded_nbytes(min(step, count - begin)) for begin in begins])
    scales = [-(-min(step, count - begin) // BLOCK) for begin in begins]
    return [part[: 2 * n].view(torch.bfloat16) for part, n in zip(parts, scales, strict=True)]


def error_list(what: str, error: Errors, device: str) -> list[torch.Tensor]:
    """List error buffers. Raises: TypeError, ValueError for another dtype than float32, bfloat16 or int8."""
    tensors = [error] if isinstance(error, torch.Tensor) else list(error)
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{what}: error: expected tensors, got {type(tensor).__name__}")
    dtype = check_buffers(f"{what} error", tensors, device)
    if dtype not in ERROR_DTYPES.values():
        raise ValueError(f"{what}: error buffers are {dtype}; expected float32, bfloat16 or int8")
    return tensors


def _masks(what: str, mask: Errors, tensors: Sequence[torch.Tensor], device: str) -> list[torch.Tensor]:
    masks = [mask] if isinstance(mask, torch.Tensor) else list(mask)
    if check_buffers(f"{what} mask", masks, device) != torch.uint8:
        raise ValueError(f"{what}: masks are {masks[0].dtype}; expected uint8, eight elements in a byte")
    for index, (bits, tensor) in enumerate(zip(masks, tensors, strict=False)):
        if bits.numel() < (tensor.numel() + 7) // 8:
            raise ValueError(
                f"{what}: mask {index} has {bits.numel()} bytes for {tensor.numel()} elements, expected one for eight"
            )
    return masks


class CodedCall:
    """The codec's arguments of one call: for the core, and the tensors that the call keeps alive and writes."""

    def __init__(
        self,
        what: str,
        codec: Codec | str,
        error: Errors | tuple[Errors, Errors] | None,
        keep: float,
        device: str,
        *,
        tensors: Sequence[torch.Tensor] = (),
        mask: Errors | None = None,
        differences: bool = False,
    ) -> None:
        what = f"{what}, codec {codec_of(codec)}"
        workers: list[torch.Tensor] = []
        servers: list[torch.Tensor] = []
        if error is not None and what.startswith("all_reduce"):
            if not isinstance(error, tuple) or len(error) != 2:
                raise TypeError(f"{what}: error= is a pair (worker, server); see Communicator.codec_errors")
            workers, servers = (error_list(what, each, device) for each in error)
        elif error is not None:
            workers = error_list(what, cast(Errors, error), device)
        self.written = [*workers, *servers]
        dtype = self.written[0].dtype if self.written else torch.float32
        if any(tensor.dtype != dtype for tensor in self.written):
            raise ValueError(f"{what}: worker errors are {dtype}, server errors {servers[0].dtype}; expected one dtype")
        masks = [] if mask is None else _masks(what, mask, tensors, device)
        self.keep_alive = [*self.written, *masks]
        self.coding = _core.Coding(
            _core_codec(codec_of(codec)),
            keep,
            core_dtype(dtype),
            spans(workers),
            spans(servers),
            [each.data_ptr() for each in masks],
            differences,
        )


@dataclass(frozen=True)
class Compression:
    """Codecs of an optimizer's collectives: weights as they are gathered, gradients as they are summed.

    weights: None or "int8": gathered weights are decode(encode(w)) on all ranks; the master weights stay exact.
        "int4": with differences=True only.
    gradients: None, "int8", "int4" or "fp8". Decoded values are summed in fp32. With a codec each rank keeps the
        residue of its gradients and adds it in the next step (error feedback).
    keep: the residue's moving average (LoCo): error = keep * error + (1 - keep) * residue; in [0, 1).
    reset_steps: None, or the number of steps after which errors restart at zero.
    hops: "across": only the bytes that leave a host are encoded; "all": those inside of a host, too.
    error_tier: where errors are kept: "cpu", in memory; "nvme", in the swap file.
    error_dtype: "fp32", "bf16", or "int8" with a scale for 256 of them: 4, 2 or 1.008 bytes for an element.
    rotate: 0, or 32: gradients are rotated before they are encoded, as by ``Codec(rotate=32)``.
    differences: weights are encoded as differences to the weights that were sent last, and travel once in a step. Each
        rank keeps these for the whole model, in the weights' dtype.
    Raises: ValueError naming the option.
    """

    weights: Literal["int8", "int4"] | None = None
    gradients: Literal["int8", "int4", "fp8"] | None = None
    keep: float = 0.0
    reset_steps: int | None = None
    hops: Literal["across", "all"] = "across"
    error_tier: Literal["cpu", "nvme"] = "cpu"
    rotate: Literal[0, 32] = 0
    differences: bool = False
    error_dtype: Literal["fp32", "bf16", "int8"] = "fp32"

    def __post_init__(self) -> None:
        _one_of("weights", self.weights, (None, "int8", "int4"))
        _one_of("gradients", self.gradients, (None, "int8", "int4", "fp8"))
        _one_of("hops", self.hops, ("across", "all"))
        _one_of("error_tier", self.error_tier, ("cpu", "nvme"))
        _one_of("error_dtype", self.error_dtype, tuple(ERROR_DTYPES))
        if isinstance(self.keep, bool) or not isinstance(self.keep, (int, float)) or not 0 <= self.keep < 1:
            raise ValueError(f"Compression: keep={self.keep!r} is not in [0, 1)")
        steps = self.reset_steps
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
            raise ValueError(f"Compression: reset_steps={steps!r}; expected None or a number of steps from 1 on")
        if isinstance(self.rotate, bool) or self.rotate not in (0, 32):
            raise ValueError(f"Compression: rotate={self.rotate!r}; expected 0 or 32")
        if not isinstance(self.differences, bool):
            raise ValueError(f"Compression: differences={self.differences!r}; expected True or False")
        if self.differences and self.weights is None:
            raise ValueError("Compression: differences=True is of encoded weights; give weights=, too")
        if self.weights == "int4" and not self.differences:
            raise ValueError("Compression: weights='int4' is too coarse for weights; give differences=True, too")
        dtype = self.error_dtype if self.error_dtype != "fp32" else None
        tier = self.error_tier if self.error_tier != "cpu" else None
        for name, value in (
            ("keep", self.keep),
            ("reset_steps", steps),
            ("rotate", self.rotate),
            ("error_dtype", dtype),
            ("error_tier", tier),
        ):
            if value and self.gradients is None:
                raise ValueError(f"Compression: {name}={value!r} is of encoded gradients; give gradients=, too")

    @property
    def gradient_codec(self) -> Codec | None:
        """The codec of gradients; None: they are exact."""
        return None if self.gradients is None else Codec(self.gradients, rotate=self.rotate)


def _one_of(name: str, value: object, known: tuple[str | None, ...]) -> None:
    if value not in known:
        hint = did_you_mean(value, [each for each in known if each is not None])
        raise ValueError(f"Compression: {name}={value!r}; expected one of {', '.join(map(repr, known))}{hint}")
