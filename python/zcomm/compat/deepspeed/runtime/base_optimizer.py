"""A ZeroOptimizer as DeepSpeed's optimizers: their classes for isinstance(), and their attributes.

The classes have no instances: ``initialize`` returns a ZeroOptimizer, and isinstance() follows its stage and precision.
The attributes are ``parameter_offload`` of stage 3, ``offload_states`` and ``reload_states``.

Programs gather all weights, remove the hooks of ``parameter_offload``, generate, and add the hooks again. zcomm does
not remove its hooks. Inside GatheredParameters they find all weights whole, gather nothing, and count nothing. So the
lists of hooks are empty, and there is nothing to add.
Source: the attributes that TRL's unwrap_model_for_generation uses.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zcomm.engine.states import offload_states
from zcomm.zero import GatheredParameters
from zcomm.zero.optimizer import ZeroOptimizer  # the class itself, whatever zcomm.zero.ZeroOptimizer is now
from zcomm.zero.registry import parts_of

DeepSpeedOptimizerCallable = Callable[[Any], Optimizer]
DeepSpeedSchedulerCallable = Callable[[Optimizer], LRScheduler]


class Kind(type):
    """A class that a ZeroOptimizer of these stages, with weights of this dtype (None: any), is an instance of."""

    zcomm_stages: Collection[int]
    zcomm_dtype: torch.dtype | None

    def __instancecheck__(cls, instance: Any) -> bool:
        if not isinstance(instance, ZeroOptimizer) or instance.stage not in cls.zcomm_stages:
            return False
        return cls.zcomm_dtype in (None, instance.precision.dtype)

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"{cls.__name__} is not made by programs: deepspeed.initialize() and zcomm.ZeroOptimizer shard optimizers"
        )


class DeepSpeedOptimizer(metaclass=Kind):
    """Any ZeroOptimizer."""

    zcomm_stages: ClassVar[Collection[int]] = range(4)
    zcomm_dtype: ClassVar[torch.dtype | None] = None


class ZeROOptimizer(DeepSpeedOptimizer):
    """A ZeroOptimizer of stages 1 to 3."""

    zcomm_stages: ClassVar[Collection[int]] = (1, 2, 3)


class DeepSpeedZeroOptimizer(ZeROOptimizer):
    """A ZeroOptimizer of stage 1 or 2."""

    zcomm_stages = (1, 2)


class DeepSpeedZeroOptimizer_Stage3(ZeROOptimizer):
    """A ZeroOptimizer of stage 3."""

    zcomm_stages = (3,)


class BF16_Optimizer(DeepSpeedOptimizer):
    """A ZeroOptimizer of stage 0 in bf16."""

    zcomm_stages = (0,)
    zcomm_dtype = torch.bfloat16


class FP16_Optimizer(DeepSpeedOptimizer):
    """A ZeroOptimizer of stage 0 in fp16."""

    zcomm_stages = (0,)
    zcomm_dtype = torch.float16


class FP16_UnfusedOptimizer(DeepSpeedOptimizer):
    """DeepSpeed's optimizer of whole fp16 parameters; zcomm's stage 0 in fp16 is an FP16_Optimizer."""

    zcomm_stages = ()


# --- attributes -------------------------------------------------------------------------------------------------------


class DeepSpeedZeRoOffload:
    """View of the model of a stage 3. forward_hooks, backward_hooks: empty lists, which programs may replace."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []
        if "ds_external_parameters" not in vars(module):
            vars(module)["ds_external_parameters"] = _no_parameters

    def _register_deepspeed_module(self, module: nn.Module, count: list[int] | None = None) -> None:
        """Only check the module, because its hooks have not been removed.

        Raises: ValueError for another module.
        """
        if module is not self.module:
            raise ValueError(
                f"_register_deepspeed_module() takes the optimizer's own model, not {type(module).__name__}"
            )

    def partition_all_parameters(self) -> NoReturn:
        raise NotImplementedError(
            "partition_all_parameters() is not available: leave the GatheredParameters that made the weights whole"
        )


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """Gather the weights of engine ``model``, once, and yield it. Collective.

    Inside, forwards gather nothing, so ranks may run the model differently often. Changes inside are discarded.
    """
    with GatheredParameters(model.parameters()):
        yield model


def _no_parameters() -> Iterator[tuple[str, nn.Parameter]]:
    """Yield nothing: parameters of other modules need no list (DeepSpeed's ``ds_external_parameters``)."""
    yield from ()


class _Offload:
    """``parameter_offload`` of a ZeroOptimizer; there is none below stage 3."""

    def __get__(self, optimizer: ZeroOptimizer | None, kind: type) -> Any:
        if optimizer is None:
            return self
        model = parts_of(optimizer).model if optimizer.stage == 3 else None
        if model is None:
            raise AttributeError(f"{kind.__name__!r} object has no attribute 'parameter_offload': it is not of stage 3")
        view = vars(optimizer).get("_zcomm_parameter_offload")
        if view is None:
            view = vars(optimizer)["_zcomm_parameter_offload"] = DeepSpeedZeRoOffload(model)
        return view


class _NoModules:
    """``ds_active_sub_modules`` of a parameter: a new empty set. No module keeps a parameter whole by it."""

    def __get__(self, param: nn.Parameter | None, kind: type) -> Any:
        return self if param is None else set()


def _offload_states(
    optimizer: ZeroOptimizer,
    include: Any = None,
    device: Any = "cpu",
    pin_memory: bool = True,
    non_blocking: bool = False,
) -> None:
    """Check as ``engine.offload_states`` does, with its arguments and errors."""
    offload_states(optimizer, parts_of(optimizer).device, include, device)


def _reload_states(optimizer: ZeroOptimizer, non_blocking: bool = False) -> None:
    """Do nothing: ``offload_states`` has moved nothing."""


def install() -> None:
    """Add these attributes to ZeroOptimizer and parameters. Idempotent."""
    for kind, name, view in (
        (ZeroOptimizer, "parameter_offload", _Offload()),
        (ZeroOptimizer, "offload_states", _offload_states),
        (ZeroOptimizer, "reload_states", _reload_states),
        (nn.Parameter, "ds_active_sub_modules", _NoModules()),
    ):
        if name not in vars(kind):
            setattr(kind, name, view)
