"""``deepspeed.linear.Init``: models that are built inside have ``OptimizedLinear`` in place of torch.nn.Linear."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import torch
from torch import nn

from zcomm.compat.deepspeed.linear.config import LoRAConfig, QuantizationConfig
from zcomm.compat.deepspeed.linear.optimized_linear import LoRAOptimizedLinear, OptimizedLinear

__all__ = ["Init", "init_lora"]


def init_lora(model: nn.Module) -> None:
    """Freeze all parameters of ``model``, and create the adapters."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        if isinstance(module, LoRAOptimizedLinear):
            module.init_lora()
            for adapter in (module.lora_weight_1, module.lora_weight_2) if module._initialized else ():
                adapter.requires_grad_(True)


class Init:
    """Build models with ``OptimizedLinear``; ``init_lora(model)`` afterwards creates the adapters.

    A layer keeps its bias, frozen. If transformers is loaded, ``AutoModelForCausalLM.from_pretrained`` and
    ``from_config`` call ``init_lora``; layers that ``target_mods`` does not name get no adapter.
    Thread rule: one thread builds models meanwhile.
    """

    def __init__(self, lora_config: LoRAConfig | None = None, quant_config: QuantizationConfig | None = None) -> None:
        self.lora_config = None if lora_config is None else dataclasses.replace(lora_config, delay_lora_init=True)
        self.quant_config = quant_config
        self._before: list[tuple[dict[str, Any] | type, str, Any]] = []

    def __enter__(self) -> Init:
        lora, quant, plain = self.lora_config, self.quant_config, nn.Linear

        class Linear(plain):  # type: ignore[misc,valid-type]
            """torch.nn.Linear while the context lasts. isinstance() and subclasses see the real one."""

            def __new__(
                cls,
                in_features: int,
                out_features: int,
                bias: bool = True,
                device: Any = None,
                dtype: torch.dtype | None = None,
            ) -> Any:
                if cls is not Linear:  # a subclass of the program
                    return super().__new__(cls)
                kind = torch.get_default_dtype() if dtype is None else dtype
                return OptimizedLinear(in_features, out_features, bias, lora, quant, device, kind, linear_cls=plain)

        self._replace(vars(torch.nn), "Linear", Linear)
        transformers = sys.modules.get("transformers")
        if transformers is not None and lora is not None:
            auto = transformers.AutoModelForCausalLM
            for name in ("from_pretrained", "from_config"):
                self._replace(auto, name, staticmethod(_Made(getattr(auto, name), lora)))
        return self

    def __exit__(self, *error: object) -> None:
        while self._before:
            owner, name, value = self._before.pop()
            if isinstance(owner, dict):
                owner[name] = value
            elif value is None:
                delattr(owner, name)
            else:
                setattr(owner, name, value)

    def _replace(self, owner: dict[str, Any] | type, name: str, value: Any) -> None:
        values = owner if isinstance(owner, dict) else vars(owner)
        self._before.append((owner, name, values.get(name)))
        if isinstance(owner, dict):
            owner[name] = value
        else:
            setattr(owner, name, value)


class _Made:
    """A constructor of models that creates the adapters of its results."""

    def __init__(self, build: Any, lora: LoRAConfig) -> None:
        self._build, self._lora = build, lora

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._build(*args, **kwargs)
        for name, module in model.named_modules():
            if isinstance(module, LoRAOptimizedLinear) and not any(each in name for each in self._lora.target_mods):
                module.disable()
        init_lora(model)
        return model
