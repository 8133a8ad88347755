"""zero.Init: a model that never exists whole. Its large parameters have no memory until ZeroOptimizer shards them."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from zcomm.zero.materialize.record import Recorder, ReportsCpu

MIN_COUNT = 1024
_IN_THREADS_NOT = "HF_DEACTIVATE_ASYNC_LOAD"  # otherwise transformers converts in threads, which are not recorded
_entered: list[Init] = []


def end_init() -> None:
    """End the effect of the open contexts of Init: their parameters wait, and new tensors have memory."""
    for init in _entered:
        init._recorder.end(init._params())


def is_inside() -> bool:
    """Return True inside a context of Init."""
    return bool(_entered)


class Init:
    """``with zcomm.zero.Init(): model = Model()`` builds ``model`` without memory for its parameters.

    Parameters of at least ``min_count`` elements are on the meta device (``is_meta``), with their shapes. They report
    the CPU as their ``device``. Smaller ones and buffers are ordinary. ``ZeroOptimizer(model)`` then computes them one
    after the other on rank 0, and each rank keeps its part. They remain the same objects, with the program's
    attributes, classes and hooks.
    Their values, and later random numbers, have the bits of an ordinary construction with rank 0's seed, in every world
    size. That holds for any initialisation inside the context (``reset_parameters``, ``nn.init``,
    ``model.apply(f)``, ``copy_``). The exception: memory that ``torch.empty`` leaves uninitialised is zero.
    A parameter that a constructor computes from other values (``nn.Parameter(a @ b)``, ``nn.init.orthogonal_``) is
    allocated at once, and remains whole until ZeroOptimizer. A random initialisation runs twice, the first time on
    temporary memory.

    ``zcomm.zero.Init(model)`` does the same for a model built on torch's meta device: it calls each module's
    ``reset_parameters()``, or ``init(module)``, in the order of ``model.modules()``. The values have the bits of an
    ordinary construction only if that initialises in the same order. Parameters that have values keep them, so a model
    in memory is unchanged. In a model that is partly on the meta device, only modules with such tensors of their own
    are initialised.

    A ZeroOptimizer that is built inside the context ends it, and the contexts around it.
    enabled: False does nothing. Other keywords of DeepSpeed's Init are accepted, and have no effect: placement and
    precision are ZeroOptimizer's. Not for several threads at once.
    Source: DeepSpeed's zero.Init; recipes as in torchdistX's deferred_init.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        *,
        init: Callable[[nn.Module], None] | None = None,
        min_count: int = MIN_COUNT,
        enabled: bool = True,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
    ) -> None:
        if min_count < 1:
            raise ValueError(f"Init: min_count={min_count} must be at least 1")
        self._enabled = enabled
        self._recorder = Recorder(min_count)
        self._modules: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()  # in order
        self._handles: list[Any] = []
        if module is not None and enabled:
            with self:
                self._reset(module, init or _reset_parameters)

    def _reset(self, model: nn.Module, init: Callable[[nn.Module], None]) -> None:
        self._modules[model] = None
        tensors = [*model.parameters(), *model.buffers()]
        waiting = [tensor for tensor in tensors if tensor.is_meta]
        if not waiting:
            return  # the model keeps its values: ZeroOptimizer shards them
        for tensor in waiting:
            self._recorder.adopt(tensor)
        for module in model.modules():
            own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
            if len(waiting) < len(tensors) and not any(self._recorder.recipe(tensor) is not None for tensor in own):
                continue  # because it would initialise real values again, its own or its children's
            init(module)
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = self._recorder.value(buffer)

    def __enter__(self) -> Init:
        if self._enabled:
            self._handles = [
                torch_module.register_module_parameter_registration_hook(self._module),
                torch_module.register_module_module_registration_hook(self._module),
                torch_module.register_module_buffer_registration_hook(self._buffer),  # type: ignore[arg-type]
            ]
            self._start, self._modes = torch.nn.init._no_grad_trunc_normal_, ExitStack()
            torch.nn.init._no_grad_trunc_normal_ = self._truncated_normal
            self._modes.enter_context(self._recorder)
            self._modes.enter_context(ReportsCpu(self._recorder))
            self._recorder.ended = False
            self._in_threads_not = os.environ.get(_IN_THREADS_NOT)
            os.environ[_IN_THREADS_NOT] = "1"
            _entered.append(self)
        return self

    def _truncated_normal(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Record the draw as one operation, because it redraws depending on values, which a recipe does not have."""
        if self._recorder.recipe(tensor) is None:
            return self._start(tensor, *args, **kwargs)
        with torch._C.DisableTorchFunction():
            self._recorder.record(self._start, (tensor, *args), kwargs, tensor, macro=True)
        return tensor

    def _module(self, module: nn.Module, *_: Any) -> None:
        self._modules.setdefault(module)

    def _buffer(self, module: nn.Module, name: str, buffer: torch.Tensor | None) -> torch.Tensor | None:
        self._module(module)
        return None if buffer is None else self._recorder.value(buffer)

    def __exit__(self, *error: Any) -> None:
        if not self._enabled:
            return
        _entered.remove(self)
        if self._in_threads_not is None:
            os.environ.pop(_IN_THREADS_NOT, None)
        else:
            os.environ[_IN_THREADS_NOT] = self._in_threads_not
        self._modes.close()
        torch.nn.init._no_grad_trunc_normal_ = self._start
        for handle in self._handles:
            handle.remove()
        self._recorder.end(self._params())

    def _params(self) -> Iterator[nn.Parameter]:
        for module in list(self._modules):
            yield from module.parameters()


def _reset_parameters(module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        with torch.no_grad():
            reset()
