"""``deepspeed.ops.op_builder``: which of DeepSpeed's compiled operations have a counterpart in zcomm.

Nothing is compiled when a program runs. ``is_compatible`` answers whether there is a counterpart; ``load`` gives the
module with it, or raises.
"""

from __future__ import annotations

import importlib
import types
from typing import Any

import torch

# class: the module of its counterpart, or why there is none
_HERE = dict.fromkeys(
    ("CPUAdamBuilder", "CPUAdagradBuilder", "CPULionBuilder", "FusedAdamBuilder", "FusedLambBuilder"), "zcomm.optim"
)
_KERNELS = "zcomm has no kernels of whole layers; use torch's own layer"
_QUANTISED = "there is no quantised communication or storage of weights"
_NOT_HERE = {
    "AsyncIOBuilder": "use zcomm.SwapFile, which reads and writes a drive asynchronously",
    "GDSBuilder": "use zcomm.SwapFile, which reads and writes a drive by way of host memory",
    "PinMemoryBuilder": "use zcomm.pinned_empty",
    "FusedLionBuilder": "there is no kernel of Lion for GPUs; zcomm.optim.CPULion runs on the CPU",
    "CCLCommBuilder": "collectives are zcomm's own",
    "ShareMemCommBuilder": "collectives are zcomm's own",
    "DeepCompileBuilder": "there is no pass over compiled graphs",
    "EvoformerAttnBuilder": "use torch's scaled_dot_product_attention with a bias",
    "SparseAttnBuilder": "use torch.nn.attention.flex_attention with a block mask",
    "RandomLTDBuilder": "there is no random layer-token drop",
    "FPQuantizerBuilder": _QUANTISED,
    "QuantizerBuilder": _QUANTISED,
    **dict.fromkeys(
        (
            *("InferenceBuilder", "InferenceCoreBuilder", "InferenceCutlassBuilder", "RaggedOpsBuilder"),
            *("RaggedUtilsBuilder", "SpatialInferenceBuilder", "StochasticTransformerBuilder", "TransformerBuilder"),
        ),
        _KERNELS,
    ),
}


class OpBuilder:
    """A compiled operation of DeepSpeed. Subclasses have its name."""

    _module: str | None = None
    _reason = "it names no operation"

    @property
    def name(self) -> str:
        """DeepSpeed's name: "cpu_adam" of CPUAdamBuilder."""
        return _NAMES.get(type(self).__name__, type(self).__name__)

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return True if zcomm has a counterpart."""
        return self._module is not None

    def load(self, verbose: bool = True) -> Any:
        """Return the module with the counterpart. Raises: NotImplementedError without one."""
        if self._module is None:
            raise NotImplementedError(f"{type(self).__name__}().load() is not available: {self._reason}")
        return importlib.import_module(self._module)

    jit_load = load


class UtilsBuilder(OpBuilder):
    """``flatten`` and ``unflatten`` of lists of tensors: torch's own."""

    _module = "torch._utils"

    def load(self, verbose: bool = True) -> Any:
        """Return an object with both functions."""
        utils: Any = torch._utils
        return types.SimpleNamespace(flatten=utils._flatten_dense_tensors, unflatten=utils._unflatten_dense_tensors)


_NAMES = {
    "CPUAdamBuilder": "cpu_adam",
    "CPUAdagradBuilder": "cpu_adagrad",
    "CPULionBuilder": "cpu_lion",
    "FusedAdamBuilder": "fused_adam",
    "FusedLionBuilder": "fused_lion",
    "FusedLambBuilder": "fused_lamb",
    "AsyncIOBuilder": "async_io",
    "GDSBuilder": "gds",
    "PinMemoryBuilder": "pin_memory",
    "UtilsBuilder": "utils",
    "CCLCommBuilder": "deepspeed_ccl_comm",
    "ShareMemCommBuilder": "deepspeed_shm_comm",
    "DeepCompileBuilder": "dc",
    "EvoformerAttnBuilder": "evoformer_attn",
    "SparseAttnBuilder": "sparse_attn",
    "RandomLTDBuilder": "random_ltd",
    "FPQuantizerBuilder": "fp_quantizer",
    "QuantizerBuilder": "quantizer",
    "TransformerBuilder": "transformer",
    "InferenceBuilder": "transformer_inference",
    "InferenceCoreBuilder": "inference_core_ops",
    "InferenceCutlassBuilder": "cutlass_ops",
    "RaggedOpsBuilder": "ragged_device_ops",
    "RaggedUtilsBuilder": "ragged_ops",
    "SpatialInferenceBuilder": "spatial_inference",
    "StochasticTransformerBuilder": "stochastic_transformer",
}

globals().update({name: type(name, (OpBuilder,), {"_module": module}) for name, module in _HERE.items()})
globals().update({name: type(name, (OpBuilder,), {"_reason": reason}) for name, reason in _NOT_HERE.items()})
for _builder, _name in _NAMES.items():
    globals()[_builder].NAME = _name
__op_builders__ = [globals()[name]() for name in _NAMES]
ALL_OPS = {builder.name: builder for builder in __op_builders__}

# deepspeed.git_version_info has these.
compatible_ops = installed_ops = {op: builder.is_compatible() for op, builder in ALL_OPS.items()}
torch_info = {
    "version": ".".join(torch.__version__.split(".")[:2]),
    "bf16_support": True,
    "cuda_version": torch.version.cuda or "0.0",
    "nccl_version": "0.0",
    "hip_version": torch.version.hip or "0.0",
}
__all__ = ["ALL_OPS", "OpBuilder", *_NAMES]


def __getattr__(name: str) -> Any:
    raise AttributeError(f"{__name__} has no {name!r}; it has: {', '.join(_NAMES)}")
