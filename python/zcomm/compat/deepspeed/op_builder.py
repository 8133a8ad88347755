"""``deepspeed.ops.op_builder``: which of DeepSpeed's compiled operations have a counterpart in zcomm.

Nothing is compiled when a program runs. ``is_compatible`` answers whether there is a counterpart; ``load`` gives the
module with it, or raises.
"""

from __future__ import annotations

import importlib
import types
from typing import Any

import torch

from zcomm.compat.deepspeed.table import BUILDERS


class OpBuilder:
    """A compiled operation of DeepSpeed. Subclasses have its name."""

    NAME = ""
    _module: str | None = None
    _reason = "it names no operation"

    @property
    def name(self) -> str:
        """DeepSpeed's name: "cpu_adam" of CPUAdamBuilder."""
        return self.NAME or type(self).__name__

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

    NAME = "utils"
    _module = "torch._utils"

    def load(self, verbose: bool = True) -> Any:
        """Return an object with both functions."""
        utils: Any = torch._utils
        return types.SimpleNamespace(flatten=utils._flatten_dense_tensors, unflatten=utils._unflatten_dense_tensors)


class EvoformerAttnBuilder(OpBuilder):
    """Attention with two biases in bounded memory, by torch's own operations."""

    NAME = "evoformer_attn"
    _module = "zcomm.attention.evoformer"


class AsyncIOBuilder(OpBuilder):
    """Reads and writes of the program's files: ``aio_handle``."""

    NAME = "async_io"
    _module = "zcomm.compat.deepspeed.aio"


for _name, (_operation, _reason) in BUILDERS.items():
    _own = {"NAME": _operation, "_reason": _reason, "_module": None if _reason else "zcomm.optim"}
    globals().setdefault(_name, type(_name, (OpBuilder,), _own))
__op_builders__ = [globals()[name]() for name in BUILDERS]
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
__all__ = ["ALL_OPS", "OpBuilder", *BUILDERS]


def __getattr__(name: str) -> Any:
    raise AttributeError(f"{__name__} has no {name!r}; it has: {', '.join(BUILDERS)}")
