"""init_inference: DeepSpeed's inference engine over models that are whole on this rank, or streamed.

"zero" with "offload_param" streams the weights (zcomm.inference). There are no kernels: arguments that choose them have
no effect, and arguments for another division of the model are refused. docs/inference.md lists them.
Source: names, aliases and defaults of DeepSpeed 0.19.8's DeepSpeedInferenceConfig.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zcomm.hints import did_you_mean

_ALIASES = {
    "kernel_inject": "replace_with_kernel_inject",
    "tp": "tensor_parallel",
    "tm": "triangular_masking",
    "ckpt_config": "checkpoint_config",
    "injection_dict": "injection_policy",
    "args": "config",
    "max_tokens": "max_out_tokens",
    "min_tokens": "min_out_tokens",
}
_USED: dict[str, Any] = {
    "dtype": torch.float16,
    "zero": {},
    "quant": {},
    "keep_module_on_host": False,
    "max_out_tokens": 1024,
}
_UNUSED: dict[str, Any] = {  # they choose kernels, or the layers that these replace
    "replace_with_kernel_inject": False,
    "triton_autotune": False,
    "triangular_masking": True,
    "return_tuple": True,
    "replace_method": "auto",
    "injection_policy": None,
    "injection_policy_tuple": None,
    "config": None,
    "min_out_tokens": 1,
    "transposed_mode": False,
}
_FOLDER = "pass the model's folder to zcomm.inference.stream(), which never has it whole in memory"
_TENSOR = 'use zcomm.parallel.tensor, or stream the weights by "zero": the ranks of a host keep one copy'
_EXPERTS = "experts are whole on each rank here; zcomm.parallel.divide_experts divides them for training"
_REFUSED: dict[str, tuple[Any, str]] = {
    "tensor_parallel": ({}, _TENSOR),
    "mp_size": (1, _TENSOR),
    "mpu": (None, _TENSOR),
    "training_mp_size": (1, _TENSOR),
    "moe": ({}, _EXPERTS),
    "ep_size": (1, _EXPERTS),
    "ep_group": (None, _EXPERTS),
    "ep_mp_group": (None, _EXPERTS),
    "moe_experts": ([1], _EXPERTS),
    "moe_type": ("standard", _EXPERTS),
    "enable_cuda_graph": (False, "call torch.compile(mode='reduce-overhead') on a model that is whole on its device"),
    "use_triton": (False, "call torch.compile, which makes Triton kernels"),
    "checkpoint": (None, _FOLDER),
    "base_dir": ("", _FOLDER),
    "set_empty_params": (False, _FOLDER),
    "checkpoint_config": ({}, _FOLDER),
    "save_mp_checkpoint_path": (None, "call model.save_pretrained()"),
}
_DEFAULTS = {**_USED, **_UNUSED, **{name: default for name, (default, _) in _REFUSED.items()}}


class DeepSpeedInferenceConfig:
    """The arguments of ``init_inference`` as attributes, checked.

    Raises: ValueError for an unknown name; NotImplementedError naming an argument that is refused.
    """

    dtype: Any
    zero: dict[str, Any]
    quant: dict[str, Any]
    keep_module_on_host: bool
    max_out_tokens: int

    def __init__(self, **given: Any) -> None:
        names = {_ALIASES.get(name, name): value for name, value in given.items()}
        for name in names:
            if name not in _DEFAULTS:
                raise ValueError(f"init_inference: {name!r} is not an argument{did_you_mean(name, _DEFAULTS)}")
        for name, (default, remedy) in _REFUSED.items():
            value = names.get(name, default)
            if value != default and not _of_one_rank(value):
                raise NotImplementedError(f"init_inference: {name}={value!r} is not available: {remedy}")
        idle = [f"{name}={names[name]!r}" for name in _UNUSED if names.get(name, _UNUSED[name]) != _UNUSED[name]]
        if idle:
            logging.getLogger("zcomm").warning(
                "init_inference: without effect, there are no kernels: %s", ", ".join(idle)
            )
        self.dtype_given = "dtype" in names
        vars(self).update({**_DEFAULTS, **names})

    def dict(self) -> dict[str, Any]:
        """Return all arguments."""
        return {name: getattr(self, name) for name in _DEFAULTS}


def _of_one_rank(value: Any) -> bool:
    """Return True for a section that divides nothing, such as {"tp_size": 1}."""
    sizes = {"tp_size": 1, "tp_grain_size": None, "ep_size": 1, "enabled": None}
    if not isinstance(value, dict):
        return value is False
    return all(key in sizes and sizes[key] in (None, each) for key, each in value.items())


class InferenceEngine(nn.Module):
    """``module``, on the accelerator's device, or with streamed weights."""

    def __init__(self, model: nn.Module, config: DeepSpeedInferenceConfig) -> None:
        super().__init__()
        from zcomm.compat.deepspeed.accelerator import get_accelerator
        from zcomm.inference import stream

        self._config, self._times, self._timed = config, list[float](), False
        quantize, dtype = _quantize(config), config.dtype
        zero, device = dict(config.zero), get_accelerator().device_name()
        if dtype not in (torch.int8, "int8") and (config.dtype_given or device != "cpu"):
            model = model.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)
        place = dict(zero.get("offload_param") or {})
        weights, folder = place.get("device", "none"), place.get("nvme_path")
        if zero.get("stage", 0) not in (0, 3) or (weights != "none" and zero.get("stage") != 3):
            raise ValueError(
                f'init_inference: zero={zero!r}: "offload_param" needs "stage": 3, and others have no meaning'
            )
        if weights not in ("none", "cpu", "nvme"):
            raise ValueError(f'init_inference: "offload_param.device": {weights!r}; use "cpu" or "nvme"')
        self.streams = weights != "none" or quantize is not None or zero.get("stage") == 3
        if self.streams:
            self.module = stream(
                model, "nvme" if weights == "nvme" else "cpu", quantize, folder=folder, device=_device_of(device)
            )
        else:
            self.module = model.eval() if config.keep_module_on_host else model.eval().to(device)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        start = time.perf_counter()
        output = self.module(*args, **kwargs)
        if self._timed:
            self._times.append(1e3 * (time.perf_counter() - start))
        return output

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's ``generate``. Raises: RuntimeError for inputs longer than ``max_out_tokens``."""
        tokens = kwargs.get("input_ids", args[0] if args else None)
        most = self._config.max_out_tokens
        if isinstance(tokens, torch.Tensor) and tokens.dim() == 2 and tokens.shape[1] > most:
            raise RuntimeError(
                f"generate: inputs of {tokens.shape[1]} tokens, at most max_out_tokens={most} are allowed"
            )
        module: Any = self.module
        return module.generate(*args, **kwargs)

    def profile_model_time(self, use_cuda_events: bool = True) -> None:
        """Time each forward from now on. use_cuda_events has no effect: the host's clock is read."""
        self._timed = True

    def model_times(self) -> list[float]:
        """Return the milliseconds of the forwards since the last call. Raises: RuntimeError without
        ``profile_model_time``."""
        if not self._timed:
            raise RuntimeError("model_times: call profile_model_time() before the forwards")
        times, self._times = self._times, []
        return times

    def destroy(self) -> None:
        """End streaming; does nothing for a whole model."""
        from zcomm.inference import streamed

        if self.streams:
            streamed(self.module).close()
            self.streams = False


def _device_of(name: str) -> str | None:
    return None if name == "cpu" else name


def _quantize(config: DeepSpeedInferenceConfig) -> Any:
    """Return stream's ``quantize``. Raises: ValueError naming the key."""
    if config.dtype in (torch.int8, "int8"):
        return "int8"
    quant = dict(config.quant)
    if not quant or not quant.get("enabled", True):
        return None
    if quant.get("activation", {}).get("enabled"):
        raise NotImplementedError('init_inference: "quant.activation" is not available: activations keep their dtype')
    bits = quant.get("weight", {}).get("num_bits", 8)
    if bits not in (8, 4):
        raise ValueError(f'init_inference: "quant.weight.num_bits": {bits!r}; use 8 or 4')
    return f"int{bits}"


def init_inference(model: nn.Module, config: str | dict[str, Any] | None = None, **kwargs: Any) -> InferenceEngine:
    """Make an InferenceEngine of ``model``. config: a dict, or the path of a JSON file; kwargs: more of its keys.

    Raises: ValueError for values that differ between both, and unknown keys; NotImplementedError for refused ones.
    """
    if isinstance(config, str):
        config = json.loads(Path(config).read_text(encoding="utf-8"))
    if config is not None and not isinstance(config, dict):
        raise ValueError(f"init_inference: config={config!r}; expected a dict, or the path of a JSON file")
    given = dict(config or {})
    for name, value in kwargs.items():
        if name in given and given[name] != value:
            raise ValueError(f"init_inference: {name} is {given[name]!r} in config, and {value!r} as an argument")
    return InferenceEngine(
        model, DeepSpeedInferenceConfig(**given, **{k: v for k, v in kwargs.items() if k not in given})
    )


def default_inference_config() -> dict[str, Any]:
    """Return all arguments of ``init_inference`` with their defaults."""
    return DeepSpeedInferenceConfig().dict()
