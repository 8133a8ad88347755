"""ZcommStrategy: Lightning Fabric's strategy that trains by ``ZeroOptimizer``.

``Fabric(strategy=ZcommStrategy(stage=3, offload="cpu"), devices=2)``; ranks may be started by Fabric, torchrun or
``zcomm run``. It needs the package lightning, or lightning_fabric.

A checkpoint is a folder, as ``ZeroOptimizer.save`` writes it; transformers and ``zcomm ckpt`` read it.
Thread rule: as ZeroOptimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zcomm
import zcomm.torch_backend  # registers "zcomm"
from zcomm.bootstrap.rendezvous import TORCH_DISTRIBUTED
from zcomm.zero import ZeroOptimizer

try:
    from lightning.fabric.plugins.precision import HalfPrecision
    from lightning.fabric.strategies import DDPStrategy
    from lightning.fabric.strategies.strategy import _BackwardSyncControl
except ModuleNotFoundError as error:
    if not (error.name or "").startswith("lightning"):
        raise
    from lightning_fabric.plugins.precision import HalfPrecision
    from lightning_fabric.strategies import DDPStrategy
    from lightning_fabric.strategies.strategy import _BackwardSyncControl

__all__ = ["ZcommStrategy"]

_EXTRA = "fabric"  # key of the client state that is Fabric's


class ZcommStrategy(DDPStrategy):  # type: ignore[misc]
    """Fabric's strategy over ``ZeroOptimizer``: one model and its optimizer are set up together.

    stage, offload, nvme_path, and any other argument of ZeroOptimizer but ``precision``, which is Fabric's:
    "bf16-true" and "16-true" train in that type with an fp32 master.
    timeout: of joining and of torch.distributed's operations, a timedelta.
    """

    def __init__(self, stage: int = 2, *, timeout: Any = None, **zero: Any) -> None:
        for name in ("precision", "comm", "device"):
            if name in zero:
                raise ValueError(f"ZcommStrategy({name}=) is Fabric's to choose; leave it out")
        super().__init__(process_group_backend="zcomm", **({} if timeout is None else {"timeout": timeout}))
        self._zero = {"stage": stage, **zero}
        self._optimizer: ZeroOptimizer | None = None
        self._backward_sync_control = _NoSync(self)

    def setup_environment(self) -> None:
        """Join torch.distributed's group on backend "zcomm", and zcomm's job of the same ranks."""
        super().setup_environment()
        zcomm.init(rank=self.global_rank, world_size=self.world_size, init_method=TORCH_DISTRIBUTED)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Raise RuntimeError: the optimizer belongs to it."""
        raise RuntimeError(self._err_msg_joint_setup_required())

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Raise RuntimeError: the model belongs to it."""
        raise RuntimeError(self._err_msg_joint_setup_required())

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[torch.optim.Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[torch.optim.Optimizer], Any]:
        """Build the ZeroOptimizer from the one instance in ``optimizers``. Its schedules continue to count.

        Raises: ValueError for several optimizers, or a second model.
        """
        if len(optimizers) != 1:
            raise ValueError(f"ZcommStrategy takes one optimizer, got {len(optimizers)}: give one with param groups")
        if self._optimizer is not None:
            raise ValueError("ZcommStrategy has set up a model already; it takes one model and its optimizer")
        kind = "fp32"
        if isinstance(self.precision, HalfPrecision):
            kind = {"bf16-true": "bf16", "16-true": "fp16"}[self.precision.precision]
        device = self.root_device if self.root_device.type == "cuda" else None
        self._optimizer = ZeroOptimizer(module, optimizers[0], precision=kind, device=device, **self._zero)
        return module, [self._optimizer], scheduler

    def module_to_device(self, module: nn.Module) -> None:
        """Do nothing, because ZeroOptimizer moves the module."""

    def backward(self, tensor: torch.Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Run backward; in fp16 with the optimizer's loss scale."""
        if self._optimizer is not None and self._optimizer.scaler is not None:
            self._optimizer.backward(tensor, **kwargs)
            return
        super().backward(tensor, module, *args, **kwargs)

    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Write folder ``path``: the model and its optimizer by ``ZeroOptimizer.save``, and the rest of ``state``.

        Raises: ValueError for a filter, or a model or optimizer that is not this strategy's.
        """
        if storage_options is not None or filter:
            raise ValueError("ZcommStrategy saves whole states: filter= and storage_options= are not available")
        optimizer, rest = self._split(state)
        optimizer.save(Path(path), client_state={_EXTRA: rest})

    def load_checkpoint(
        self, path: str | Path, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load folder ``path`` into the model and the optimizer, and into the objects of ``state``; return the rest."""
        if isinstance(state, (nn.Module, torch.optim.Optimizer)):
            state = {"state": state}
        optimizer, asked = self._split(state or {})
        has_optimizer = state is None or any(isinstance(value, torch.optim.Optimizer) for value in state.values())
        found = dict(optimizer.load(Path(path), optimizer=has_optimizer, strict=strict)[_EXTRA])
        if strict and (missing := [name for name in asked if name not in found]):
            raise KeyError(f"{path}: the checkpoint has no {', '.join(missing)}; strict=False leaves them as they are")
        for name in asked:
            if name not in found:
                continue
            value = found.pop(name)
            if hasattr(state[name], "load_state_dict"):
                state[name].load_state_dict(value)
            else:
                state[name] = value
        return found

    def _split(self, state: Mapping[str, Any]) -> tuple[ZeroOptimizer, dict[str, Any]]:
        """Return the optimizer, and the values of ``state`` that neither it nor its model holds."""
        if self._optimizer is None:
            raise RuntimeError("set up the model and its optimizer by fabric.setup(model, optimizer) first")
        rest = {}
        for name, value in state.items():
            if isinstance(value, torch.optim.Optimizer):
                if getattr(value, "optimizer", value) is not self._optimizer and value is not self._optimizer:
                    raise ValueError(f"{name!r} is another optimizer than the one of fabric.setup()")
            elif not isinstance(value, nn.Module):
                rest[name] = value.state_dict() if hasattr(value, "state_dict") else value
        return self._optimizer, rest

    def teardown(self) -> None:
        """Close the optimizer: its hooks, memory and swap files."""
        if self._optimizer is not None:
            self._optimizer.close()
        super().teardown()


class _NoSync(_BackwardSyncControl):  # type: ignore[misc]
    """Fabric's ``no_backward_sync`` by ``ZeroOptimizer.no_sync``."""

    def __init__(self, strategy: ZcommStrategy) -> None:
        self._strategy = strategy

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Keep gradients on this rank while ``enabled``."""
        optimizer = self._strategy._optimizer
        return optimizer.no_sync() if enabled and optimizer is not None else nullcontext()
