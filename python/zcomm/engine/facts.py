"""EngineFacts: facts about an engine: batch sizes, precision, stage, rates, ranks. Changes nothing.

Names and values are DeepSpeed's. Thread rule: as Engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from zcomm.config import BatchSizes, Config

if TYPE_CHECKING:
    from zcomm.comm.mesh import ProcessMesh
    from zcomm.engine.data_ranks import DataRanks
    from zcomm.engine.reports import Reports
    from zcomm.monitor import Monitors
    from zcomm.zero import ZeroOptimizer


class EngineFacts:
    """The read-only part of Engine, which has the attributes."""

    optimizer: Any
    client_optimizer: torch.optim.Optimizer | None = None
    global_steps: int
    world_size: int
    mpu: Any  # as it was given
    seq_parallel_group: Any = None  # torch's group of a sequence's ranks, from deepspeed.initialize()
    data_group: Any = None  # torch's group of ranks that read different samples, from there, too
    _batch: BatchSizes
    ranks: DataRanks
    _config: Config
    _zero: ZeroOptimizer
    _applied: bool
    _reports: Reports
    config: dict[str, Any]

    @property
    def sparse_tensor_module_names(self) -> set[str]:
        """Names of the embeddings' weights with gradients that are reduced as rows."""
        from zcomm.zero.registry import train_of

        sparse = train_of(self._zero).sparse
        return set() if sparse is None else set(sparse.names)

    def data_efficiency_enabled(self) -> bool:
        """Return "data_efficiency.enabled" of the configuration."""
        return self._config.data_efficiency.enabled

    def curriculum_learning_enabled(self) -> bool:
        """Return True if samples are chosen by difficulty."""
        return self._config.data_efficiency.data_sampling.curriculum_learning.enabled

    def random_ltd_enabled(self) -> bool:
        """Return True if layers may drop tokens."""
        return self._config.data_efficiency.data_routing.random_ltd.enabled

    def sparse_gradients_enabled(self) -> bool:
        """Return "sparse_gradients" of the configuration."""
        return self._config.sparse_gradients

    def train_batch_size(self) -> int:
        """Return the samples per optimizer step, all ranks together."""
        return self._batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples per rank and micro-step."""
        return self._batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Return the micro-steps per optimizer step."""
        return self._batch.accumulation

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return the samples per step, the samples per rank and micro-step, and the micro-steps per step."""
        return self._batch.train, self._batch.micro, self._batch.accumulation

    def fp16_enabled(self) -> bool:
        """Return True if weights and gradients are fp16."""
        return self._config.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        """Return True if weights and gradients are bf16."""
        return self._config.bf16.enabled

    def zero_optimization(self) -> bool:
        """Return True for stages 1 to 3."""
        return self._config.zero_optimization.stage > 0

    def zero_optimization_stage(self) -> int:
        """Return the stage, 0 to 3."""
        return self._config.zero_optimization.stage

    def gradient_clipping(self) -> float:
        """Return the largest global norm of the gradient that the configuration allows; 0: there is no clipping."""
        return self._config.gradient_clipping

    def loss_scale(self) -> float:
        """Return the configuration's fixed loss scale of fp16; 0: it is dynamic, see ``optimizer.cur_scale``."""
        return self._config.fp16.loss_scale

    def managed_gradient_accumulation(self) -> bool:
        """Return True if the engine counts micro-steps; False: each ``step()`` updates the weights."""
        return self._config.managed_gradient_accumulation

    def dynamic_loss_scale(self) -> bool:
        """Return True if the loss scale of fp16 is not fixed."""
        return self._config.fp16.loss_scale == 0

    def steps_per_print(self) -> int | None:
        """Return the optimizer steps between progress lines; None: there are none."""
        return self._config.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        """Return True if the seconds of forward, backward and step are printed."""
        return self._config.wall_clock_breakdown

    def optimizer_name(self) -> str | None:
        """Return the class of the optimizer that ``initialize`` was given, else the configuration's in lower case."""
        if self.client_optimizer is not None:
            return type(self.client_optimizer).__name__
        name = self._given("optimizer", "type")
        return None if name is None else str(name).lower()

    def optimizer_params(self) -> dict[str, Any] | None:
        """Return the ``params`` of the configuration's optimizer, as they were given."""
        found: dict[str, Any] | None = self._given("optimizer", "params")
        return found

    def scheduler_name(self) -> str | None:
        """Return the type of the configuration's schedule."""
        found: str | None = self._given("scheduler", "type")
        return found

    def scheduler_params(self) -> dict[str, Any] | None:
        """Return the ``params`` of the configuration's schedule, as they were given."""
        found: dict[str, Any] | None = self._given("scheduler", "params")
        return found

    def _given(self, section: str, key: str) -> Any:
        return (self.config.get(section) or {}).get(key)

    @property
    def monitor(self) -> Monitors:
        """The monitors of the configuration: ``enabled``, ``write_events([(name, value, samples), ...])``."""
        return self._reports.monitors

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group; an empty list without an optimizer."""
        return [float(group["lr"]) for group in self._groups()]

    def get_mom(self) -> list[Any]:
        """Return the momentum of each parameter group (SGD, RMSprop), or its betas; 0.0 for a group without."""
        rule = self._zero.rule.name if self.optimizer is not None else ""
        key = "momentum" if rule in ("sgd", "rmsprop") else "betas"
        return [group.get(key, 0.0) for group in self._groups()]

    def _groups(self) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else self._zero.param_groups

    def get_global_grad_norm(self) -> float | None:
        """Return the L2 norm of the averaged gradients at the last optimizer step, before clipping.

        None before the first step.
        """
        return self._zero.grad_norm if self.global_steps else None

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps that did not change the weights because gradients were not finite."""
        return self._zero.skipped_steps

    def was_step_applied(self) -> bool:
        """Return True if the last ``step()`` changed the weights: at a boundary, with finite gradients."""
        return self._applied

    @property
    def dp_world_size(self) -> int:
        """The number of ranks that read different samples."""
        return self.ranks.size

    @property
    def sequence_parallel_size(self) -> int:
        """The number of ranks that read parts of the same samples."""
        return self.ranks.sequence

    @property
    def seq_dp_world_size(self) -> int:
        """The number of ranks that gradients are summed over."""
        return self.ranks.size * self.ranks.sequence

    @property
    def mp_world_size(self) -> int:
        """The number of ranks that divide the tensors of one model: 1 unless a mesh or an mpu has such axes."""
        return self.ranks.model_parallel

    def autotp_size(self) -> int:
        """Return ``tensor_parallel.autotp_size`` of the configuration; 0 or 1: the model is not divided by it."""
        return self._config.tensor_parallel.autotp_size

    @property
    def checkpoint_mp_rank(self) -> int:
        """The rank's number among those that divide the tensors of one model."""
        mesh = self.ranks.mesh
        if mesh is None or self.ranks.model_parallel == 1:
            return 0
        return mesh.ranks(*(axis for axis in mesh.axes if axis in ("tensor", "pipe"))).index(mesh.world.rank)

    @property
    def mesh(self) -> ProcessMesh | None:
        """The mesh that ``initialize`` was given, or made of its arguments and keys; None without."""
        return self.ranks.mesh

    @property
    def data_parallel_group(self) -> torch.distributed.ProcessGroup | None:
        """torch.distributed's default group, if all ranks read different samples, or else a part of it.

        None if torch.distributed is not initialized: it takes None for the default group. Raises: RuntimeError if
        some ranks read the same samples, and neither an ``mpu`` nor ``deepspeed.initialize`` has made their group.
        """
        if self.ranks.size == self.world_size:
            return torch.distributed.group.WORLD if torch.distributed.is_initialized() else None
        if self.data_group is not None:
            return self.data_group  # type: ignore[no-any-return]
        if self.mpu is None:
            raise RuntimeError(
                "data_parallel_group: torch.distributed has no group of the ranks that read different samples; use "
                'engine.mesh.comm("data"), or deepspeed.utils.groups behind deepspeed.initialize()'
            )
        group: torch.distributed.ProcessGroup = self.mpu.get_data_parallel_group()
        return group
