"""``deepspeed.linear.config``: options of ``OptimizedLinear``."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass
class LoRAConfig:
    """Low-rank adapters. lora_r: their rank. lora_alpha: the adapter's output is multiplied by lora_alpha / lora_r.

    delay_lora_init: ``init_lora`` creates the adapters. target_mods: parts of the names of modules that get adapters
    in ``Init``; others are plain frozen layers.
    No effect: base_weight_sharding. Stage 3 shards frozen floating weights, and ranks of one host share them in stages
    1 and 2. No effect: offload and offload_ratio; "zero_optimization.offload_param" moves weights.
    """

    lora_r: int = 64
    lora_alpha: float = 16.0
    base_weight_sharding: int = 1
    offload: bool = False
    offload_ratio: float = 0.0
    delay_lora_init: bool = False
    target_mods: list[str] = field(default_factory=lambda: list(_TARGETS))


@dataclass
class QuantizationConfig:
    """Form of quantised weights, by zcomm's codecs: 256 elements have one scale.

    q_bits: 8 is fp8 E4M3, or int8 with mantissa_bits=0; 4 is int4. Others raise NotImplementedError.
    No effect: group_size (256 is at most as coarse as DeepSpeed's 512), q_dtype (codes are uint8, or int8).
    """

    q_bits: int = 8
    mantissa_bits: int = 3
    group_size: int = 512
    q_dtype: torch.dtype = torch.uint8

    @property
    def codec(self) -> str:
        """The codec's name. Raises: NotImplementedError for other bits."""
        name = {(8, 3): "fp8", (8, 0): "int8"}.get((self.q_bits, self.mantissa_bits))
        if self.q_bits == 4:
            return "int4"
        if name is None:
            raise NotImplementedError(
                f"QuantizationConfig(q_bits={self.q_bits}, mantissa_bits={self.mantissa_bits}) is not available: "
                "q_bits=8 (fp8 with mantissa_bits=3, int8 with 0) and q_bits=4 are"
            )
        return name
