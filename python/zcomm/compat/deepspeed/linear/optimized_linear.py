"""``OptimizedLinear``: a linear layer with a frozen weight, in 16 or 32 bits or quantised, and low-rank adapters.

A quantised weight is a parameter of codes, which checkpoints keep. Codes of int8 have this dtype, others are uint8. The
parameter is whole on each rank: stage 3 shards floating weights only. It is decoded for each forward, and again for
backward, so that no decoded weight is kept.
The output equals a plain layer's with the decoded weight.
Source: LoRA (arXiv:2106.09685); DeepSpeed's arguments, its names of parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import Linear as PlainLinear  # ``Init`` replaces the name in torch.nn
from torch.nn import functional

from zcomm import _core
from zcomm.comm.codec import _core_codec, codec_of
from zcomm.comm.tensors import core_dtype
from zcomm.compat.deepspeed.linear.config import LoRAConfig, QuantizationConfig

__all__ = ["LoRAOptimizedLinear", "OptimizedLinear", "QuantizedLinear"]


class OptimizedLinear(nn.Module):
    """Calling it returns torch.nn.Linear, ``QuantizedLinear`` or ``LoRAOptimizedLinear``, as the configurations say.

    Raises: ValueError for a configuration of another class.
    """

    def __new__(  # type: ignore[misc]
        cls,
        input_dim: int,
        output_dim: int,
        bias: bool = False,
        lora_config: LoRAConfig | None = None,
        quantization_config: QuantizationConfig | None = None,
        device: Any = None,
        dtype: torch.dtype = torch.bfloat16,
        linear_cls: Callable[..., nn.Module] = PlainLinear,
    ) -> nn.Module:
        for config, name in ((lora_config, "LoRAConfig"), (quantization_config, "QuantizationConfig")):
            if config is not None and not is_dataclass(config):
                raise ValueError(f"OptimizedLinear: expected a {name}, got {type(config).__name__}")
        if lora_config is not None:
            return LoRAOptimizedLinear(
                input_dim, output_dim, bias, lora_config, quantization_config, device, dtype, linear_cls
            )
        if quantization_config is not None:
            return QuantizedLinear(input_dim, output_dim, bias, quantization_config, dtype, device)
        return linear_cls(input_dim, output_dim, bias=bias, device=device, dtype=dtype)


class QuantizedLinear(nn.Module):
    """A linear layer with a frozen weight of codes. dtype: of the decoded weight. The bias trains, as DeepSpeed's.

    A state dict may have the codes, or the weight itself, which is then quantised.
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        bias: bool = False,
        quantization_config: QuantizationConfig | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: Any = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.dtype = input_dim, output_dim, dtype
        self.quantization_config = quantization_config or QuantizationConfig()
        plain = PlainLinear(input_dim, output_dim, bias=bias, dtype=dtype, device=device)
        self.weight = nn.Parameter(quantized(plain.weight.detach(), self.quantization_config), requires_grad=False)
        self.bias = plain.bias

    def dequantized(self) -> torch.Tensor:
        """Return the decoded weight, [output_dim, input_dim]."""
        return dequantized(self.weight, self.quantization_config, (self.out_features, self.in_features), self.dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the layer's output."""
        return _linear(input, self, self.quantization_config)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        _encode_given(self, self.quantization_config, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


class LoRAOptimizedLinear(nn.Module):
    """A frozen linear layer ``weight`` and an adapter, ``lora_weight_2(lora_weight_1(x)) * lora_alpha / lora_r``.

    The adapter starts at zero. ``disable()`` leaves only the frozen layer. A state dict has ``weight`` as of a linear
    layer (or its codes).
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        bias: bool = False,
        lora_config: LoRAConfig | None = None,
        quantization_config: QuantizationConfig | None = None,
        device: Any = None,
        dtype: torch.dtype = torch.bfloat16,
        linear_cls: Callable[..., nn.Module] = PlainLinear,
    ) -> None:
        super().__init__()
        if lora_config is None:
            raise ValueError("LoRAOptimizedLinear: lora_config is missing")
        if lora_config.lora_r < 1:
            raise ValueError(f"LoRAConfig: lora_r={lora_config.lora_r} must be at least 1")
        self.in_features, self.out_features, self.dtype, self.device = input_dim, output_dim, dtype, device
        self.lora_config, self.quantization_config, self.linear_cls = lora_config, quantization_config, linear_cls
        self.lora_scaling_factor = lora_config.lora_alpha / lora_config.lora_r
        plain = nn.init.xavier_uniform_(torch.empty(output_dim, input_dim, dtype=dtype, device=device))
        held = plain if quantization_config is None else quantized(plain, quantization_config)
        self.weight = nn.Parameter(held, requires_grad=False)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(torch.zeros(output_dim, dtype=dtype, device=device), requires_grad=False)
        self.disabled = self._initialized = False
        if not lora_config.delay_lora_init:
            self.init_lora()

    def init_lora(self) -> None:
        """Create the adapter, unless it exists or the layer is disabled."""
        if self.disabled or self._initialized:
            return
        rank, where = self.lora_config.lora_r, {"device": self.weight.device, "dtype": self.dtype}
        first = self.linear_cls(self.in_features, rank, bias=False, **where)
        second = self.linear_cls(rank, self.out_features, bias=False, **where)
        nn.init.kaiming_uniform_(first.get_parameter("weight"), a=math.sqrt(5))
        nn.init.zeros_(second.get_parameter("weight"))
        self.lora_weight_1, self.lora_weight_2 = first.requires_grad_(True), second.requires_grad_(True)
        self._initialized = True

    def disable(self) -> None:
        """Be the frozen layer only. Raises: RuntimeError after ``init_lora``."""
        if self._initialized:
            raise RuntimeError("LoRAOptimizedLinear.disable() after init_lora(): the adapter may be in an optimizer")
        self.disabled = True

    def full_weight(self) -> torch.Tensor:
        """Return the frozen weight, decoded, [output_dim, input_dim]."""
        if self.quantization_config is None:
            return self.weight
        return dequantized(self.weight, self.quantization_config, (self.out_features, self.in_features), self.dtype)

    def forward(self, input_tensor: torch.Tensor) -> torch.Tensor:
        """Return the output. Raises: RuntimeError if the adapter is missing (``deepspeed.linear.init_lora(model)``)."""
        if not (self.disabled or self._initialized):
            raise RuntimeError("LoRAOptimizedLinear: call deepspeed.linear.init_lora(model) before the first forward")
        if self.quantization_config is None:
            out = functional.linear(input_tensor, self.weight, self.bias)
        else:
            out = _linear(input_tensor, self, self.quantization_config)
        if self.disabled:
            return out
        return out + self.lora_scaling_factor * self.lora_weight_2(self.lora_weight_1(input_tensor))  # type: ignore[no-any-return]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if self.quantization_config is not None:
            _encode_given(self, self.quantization_config, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _encode_given(layer: Any, config: QuantizationConfig, state_dict: dict[str, Any], prefix: str) -> None:
    """Replace a floating weight in ``state_dict`` by its codes. A wrong shape stays, and torch reports it: codes are
    flat, so that a transposed weight would have as many. Raises: ValueError for codes of another form."""
    given = state_dict.get(f"{prefix}weight")
    if given is not None and not given.is_floating_point() and given.dtype != layer.weight.dtype:
        raise ValueError(
            f"{prefix}weight: codes of {given.dtype}, expected {layer.weight.dtype} ({config.codec}): use the same "
            "QuantizationConfig for both"
        )
    if given is not None and given.is_floating_point() and given.shape == (layer.out_features, layer.in_features):
        state_dict[f"{prefix}weight"] = quantized(given.to(layer.dtype), config)


def _linear(input: torch.Tensor, layer: Any, config: QuantizationConfig) -> torch.Tensor:
    """Return F.linear with the decoded weight, in the input's dtype, or autocast's, which ends before backward."""
    bias, kind = layer.bias, input.device.type
    if torch.is_autocast_enabled(kind) and input.dtype != torch.float64:  # autocast leaves fp64
        input = input.to(torch.get_autocast_dtype(kind))
        bias = None if bias is None else bias.to(input.dtype)
    shape = (layer.out_features, layer.in_features)
    found: torch.Tensor = _Quantized.apply(input, layer.weight, bias, config, shape, input.dtype)  # type: ignore[no-untyped-call]
    return found


class _Quantized(torch.autograd.Function):
    """F.linear with the decoded weight, which backward decodes again."""

    @staticmethod
    def forward(
        ctx: Any, input: Any, codes: Any, bias: Any, config: QuantizationConfig, shape: Any, dtype: torch.dtype
    ) -> Any:
        ctx.save_for_backward(codes)
        ctx.form, ctx.with_bias = (config, shape, dtype), bias is not None
        return functional.linear(input, dequantized(codes, config, shape, dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (codes,) = ctx.saved_tensors
        (grad,) = grads
        of_input = grad @ dequantized(codes, *ctx.form) if ctx.needs_input_grad[0] else None
        of_bias = grad.reshape(-1, grad.shape[-1]).sum(0) if ctx.with_bias and ctx.needs_input_grad[2] else None
        return of_input, None, of_bias, None, None, None


def quantized(weight: torch.Tensor, config: QuantizationConfig) -> torch.Tensor:
    """Return the codes of a weight, flat, on its device: int8 or uint8, so that forms of equal size differ."""
    codec, data = _core_codec(codec_of(config.codec)), weight.detach().cpu().contiguous()
    codes = torch.zeros(codec.encoded_nbytes(data.numel()), dtype=torch.uint8)
    if weight.device.type != "meta":
        _core.encode(codec, codes.data_ptr(), data.data_ptr(), core_dtype(data.dtype), data.numel())
    return codes.view(torch.int8 if config.codec == "int8" else torch.uint8).to(weight.device)


def dequantized(
    codes: torch.Tensor, config: QuantizationConfig, shape: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """Return the weight of these codes. (On a GPU by way of the host.)"""
    codec, data = _core_codec(codec_of(config.codec)), codes.detach().cpu()
    data = data if data.data_ptr() % 64 == 0 else data.clone()
    out = torch.empty(shape, dtype=dtype)
    _core.decode(codec, out.data_ptr(), [data.data_ptr()], out.numel(), core_dtype(dtype))
    return out.to(codes.device)
