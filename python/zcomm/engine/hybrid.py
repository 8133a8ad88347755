"""HybridEngine: an Engine that generates between steps, with whole weights (the section "hybrid_engine").

``engine.generate()`` and ``engine.module.generate()`` hold whole weights for the call (``ZeroOptimizer.gathered``), so
ranks generate each by itself. All ranks call it, as often. Other calls are the Engine's.
Thread rule: as Engine.
Source: the interface of DeepSpeed's DeepSpeedHybridEngine; its kernels and layouts of weights are not here.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from zcomm.config import Config
from zcomm.engine.engine import Engine
from zcomm.engine.words import speaks_of_the_engine

NAME = "generate"


def check_hybrid(model: nn.Module, settings: Config) -> None:
    """Raise ValueError for a section "hybrid_engine" that is on, with a model that does not generate."""
    if settings.hybrid_engine.enabled and not callable(getattr(model, NAME, None)):
        raise ValueError(f'"hybrid_engine.enabled": true, but {type(model).__name__} has no method {NAME}()')


class HybridEngine(Engine):
    """An Engine with ``generate()``. The module's own is replaced by it until ``destroy()``; copies and pickles of the
    module have theirs."""

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, **kwargs)
        self._own_generate: Callable[..., Any] = getattr(module, NAME)
        vars(module)[NAME] = _Generate(self, self._own_generate)

    @speaks_of_the_engine
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's ``generate`` with whole weights. Collective; ranks may make different numbers of tokens.

        With ``"pin_parameters": false`` weights are gathered unit by unit for each token, and ranks keep step.
        Returns: as the module's. Raises: RuntimeError for prompts longer than ``max_out_tokens``; as
        ``ZeroOptimizer.gathered``, also MemoryError.
        """
        self._check_alive(NAME)
        section = self._config.hybrid_engine
        tokens = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None))
        if isinstance(tokens, torch.Tensor) and tokens.dim() == 2 and tokens.shape[1] > section.max_out_tokens:
            raise RuntimeError(
                f"generate(): prompts of {tokens.shape[1]} tokens; "
                f'"hybrid_engine.max_out_tokens": {section.max_out_tokens} is the most'
            )
        if section.pin_parameters and "synced_gpus" in inspect.signature(self._own_generate).parameters:
            kwargs["synced_gpus"] = False  # transformers would keep ranks in step, for weights that are gathered
        with self._zero.gathered() if section.pin_parameters else nullcontext():
            result = self._own_generate(*args, **kwargs)
        if section.release_inference_cache:
            self.empty_partition_cache()
        return result

    def destroy(self) -> None:
        """See Engine."""
        if isinstance(vars(self.module).get(NAME), _Generate):
            del vars(self.module)[NAME]
        super().destroy()


class _Generate:
    """The attribute ``generate`` of a module that has a HybridEngine; ``own`` is the module's method. A copy is the
    method of the copied module."""

    def __init__(self, engine: HybridEngine, own: Callable[..., Any]) -> None:
        self._engine = weakref.ref(engine)
        self.__wrapped__, self.__doc__, self.__name__ = own, own.__doc__, NAME

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        engine = self._engine()
        return (self.__wrapped__ if engine is None else engine.generate)(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return copy.deepcopy(self.__wrapped__, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self.__wrapped__,)


def _same(method: Callable[..., Any]) -> Callable[..., Any]:
    return method
