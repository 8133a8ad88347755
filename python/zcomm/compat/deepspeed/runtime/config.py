"""``deepspeed.runtime.config``: DeepSpeedConfig, a checked configuration under DeepSpeed's attribute names."""

from __future__ import annotations

import copy
from typing import Any

from zcomm.compat.deepspeed.runtime.sections import DeepSpeedZeroConfig, get_monitor_config
from zcomm.config import load_with_notes, resolve_batch
from zcomm.config.parse import Source, read_source

DeepSpeedConfigError = ValueError  # raised for wrong configurations

__all__ = ["DeepSpeedConfig", "DeepSpeedConfigError"]

ADAM_OPTIMIZER = "adam"
ADAMW_OPTIMIZER = "adamw"
LAMB_OPTIMIZER = "lamb"
MUON_OPTIMIZER = "muon"
ADAGRAD_OPTIMIZER = "adagrad"
LION_OPTIMIZER = "lion"


class DeepSpeedConfig:
    """A configuration: a dict, a path of a JSON file or JSON text. Batch sizes are for this job's ranks.

    Attributes are DeepSpeed's (train_batch_size, zero_config, optimizer_name, ...). Another one is the value in effect
    of that key. Raises: ValueError (DeepSpeedConfigError), NotImplementedError as ``initialize`` does.
    """

    def __init__(self, config: Source, mpu: Any = None, mesh_device: Any = None) -> None:
        for name, value in (("mpu", mpu), ("mesh_device", mesh_device)):
            if value is not None:
                raise NotImplementedError(f"DeepSpeedConfig({name}=) is not available: ranks form one group")
        self._param_dict = copy.deepcopy(dict(read_source(config)[0]))
        self._config, self._notes = load_with_notes(self._param_dict)
        self.world_size = _world_size()
        self.global_rank = _rank()
        batch = resolve_batch(self._config, self.world_size)
        self.train_batch_size = batch.train
        self.train_micro_batch_size_per_gpu = batch.micro
        self.gradient_accumulation_steps = batch.accumulation
        zero = self._config.zero_optimization
        self.zero_config = DeepSpeedZeroConfig(**dict(self._param_dict.get("zero_optimization") or {}))
        self.zero_optimization_stage = zero.stage
        self.zero_enabled = zero.stage > 0
        self.float16_config, self.bfloat16_config = self._config.fp16, self._config.bf16
        self.fp16_enabled, self.bfloat16_enabled = self._config.fp16.enabled, self._config.bf16.enabled
        self.optimizer_name, self.optimizer_params = self._section("optimizer")
        if self.optimizer_name is not None:
            self.optimizer_name = str(self.optimizer_name).lower()
        self.monitor_config = get_monitor_config(self._param_dict)
        self.scheduler_name, self.scheduler_params = self._section("scheduler")

    def _section(self, name: str) -> tuple[Any, Any]:
        section = self._param_dict.get(name) or {}
        return section.get("type"), section.get("params")

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and hasattr(self._config, name):
            return getattr(self._config, name)
        raise AttributeError(f"DeepSpeedConfig has no {name!r} here; ._param_dict is the configuration as it was given")

    def print(self, name: str) -> None:
        """Print the configuration as it was given."""
        print(f"{name}: {self._param_dict}")

    print_user_config = print


def _world_size() -> int:
    from zcomm.comm import job

    return job.current().world_size if job.is_initialized() else _torch("get_world_size", 1)


def _rank() -> int:
    from zcomm.comm import job

    return job.current().rank if job.is_initialized() else _torch("get_rank", 0)


def _torch(name: str, alone: int) -> int:
    import torch.distributed as dist

    return int(getattr(dist, name)()) if dist.is_available() and dist.is_initialized() else alone
