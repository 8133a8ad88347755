"""PipelineEngine: DeepSpeed's engine of a PipelineModule. ``train_batch`` runs a whole step.

Micro-batches are the micro-steps of the configuration: ``gradient_accumulation_steps`` of them make a step.
Thread rule: as Engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from zcomm.config import Config
from zcomm.engine.autocast import autocast, cast_inputs
from zcomm.engine.engine import Engine
from zcomm.engine.pipeline_module import PipelineError, PipelineModule
from zcomm.engine.words import speaks_of_the_engine
from zcomm.zero.agree import all_values

if TYPE_CHECKING:
    from zcomm.comm.mesh import ProcessMesh

_ONLY = "a PipelineEngine has no {}(): call train_batch() or eval_batch()"


def check_pipeline(model: PipelineModule, settings: Config, mesh: Any, mesh_param: Any, trains: bool) -> ProcessMesh:
    """Return the mesh of ``model``. trains: an optimizer is given or configured. Collective.

    Raises: ValueError for another mesh, and on all ranks for a stage without trained parameters. NotImplementedError
    for stage 3.
    """
    if mesh is not None or mesh_param is not None:
        raise ValueError("initialize(): a PipelineModule has its own ranks: leave mesh= and mesh_param= out")
    if settings.zero_optimization.stage == 3:
        raise NotImplementedError('"zero_optimization.stage": 3 with a PipelineModule is not available: use 0, 1 or 2')
    if not settings.managed_gradient_accumulation:
        raise NotImplementedError('"managed_gradient_accumulation": false is not supported with pipeline parallelism')
    counts = all_values(model.mesh.world, sum(p.requires_grad for p in model.parameters()), "parameters of stages")
    if trains and any(counts) and not all(counts):
        raise ValueError(
            f"initialize(): {model.pipeline.where(counts.index(0))} of the pipeline has no trained parameter: choose "
            "another partition_method= or fewer stages"
        )
    return model.mesh


class PipelineEngine(Engine):
    """An Engine of a PipelineModule.

    Attributes: as Engine's, and num_stages, stage_id, micro_batches.
    """

    module: PipelineModule

    def __init__(self, module: PipelineModule, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, **kwargs)
        self.num_stages, self.stage_id = module.num_stages, module.stage_id
        interval = self._config.pipeline.activation_checkpoint_interval
        if interval:
            module.set_checkpoint_interval(interval)
        module.pipeline.called = [self._run_stage]
        self.data_iterator: Iterator[Any] | None = None
        self._reads_loader = False  # data_iterator is the loader's
        self._batch_fn: Callable[[Any], Any] | None = None
        if self.training_dataloader is not None:
            self.set_dataloader(self.training_dataloader)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step."""
        return self._batch.accumulation

    @property
    def is_pipe_parallel(self) -> bool:
        """True if there are several stages."""
        return self.num_stages > 1

    def is_first_stage(self) -> bool:
        """Return True if this rank has the first stage."""
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        """Return True if this rank has the last stage."""
        return self.stage_id == self.num_stages - 1

    def get_pipeline_parallel_rank(self) -> int:
        """Return this rank's stage."""
        return self.stage_id

    # --- data -------------------------------------------------------------------------------------------------------

    def set_dataloader(self, loader: Any) -> None:
        """Read training batches from ``loader``, again and again."""
        if self.is_first_stage() or self.is_last_stage():
            self.training_dataloader = loader
            self.data_iterator, self._reads_loader = _repeated(loader), True

    def set_dataiterator(self, iterator: Any) -> None:
        """Read training batches from an iterator."""
        self.data_iterator = iter(iterator) if self.is_first_stage() or self.is_last_stage() else None
        self._reads_loader = False

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Call ``fn`` with each batch, which returns the inputs and the labels."""
        self._batch_fn = fn

    def set_has_attention_mask(self, value: bool) -> None:
        """Do nothing: tensors of any dtype are sent."""

    def reset_activation_shape(self) -> None:
        """Do nothing: shapes may change at any time."""

    def _read(self, iterator: Iterator[Any] | None, count: int, labels: bool) -> tuple[Any, Any]:
        """Return lists of inputs and labels of ``count`` micro-batches; None on stages that read none."""
        if not (self.is_first_stage() or self.is_last_stage()):
            return None, None
        if iterator is None:
            raise ValueError(
                "the first and the last stage need data: give data_iter=, or training_data to initialize()"
            )
        inputs, targets = [], []
        for _ in range(count):
            try:
                batch = next(iterator)
            except StopIteration:
                raise ValueError(f"the data ends before the {count} micro-batches of a step") from None
            batch = batch if self._batch_fn is None else self._batch_fn(batch)
            if not isinstance(batch, (tuple, list)) or len(batch) != 2:
                raise ValueError("a batch is a pair of inputs and labels; set_batch_fn() may return it")
            inputs.append(_moved(batch[0], self.device))
            targets.append(_moved(batch[1], self.device))
        return inputs if self.is_first_stage() else None, targets if self.is_last_stage() and labels else None

    # --- the loop -----------------------------------------------------------------------------------------------------

    @speaks_of_the_engine
    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Train on the next ``gradient_accumulation_steps`` micro-batches, and update the weights. Collective.

        data_iter: of pairs of inputs and labels; None: the last one, or the loader of ``initialize``.
        Returns: the mean loss, on all ranks. Raises: ValueError on all ranks if the data ends, or a stage has none;
        errors of Pipeline.step and of ``step()``.
        """
        self._check_alive("train_batch")
        optimizer = self._trained("train_batch")
        if not torch.is_grad_enabled():
            raise RuntimeError("train_batch() needs gradients: use eval_batch() instead")
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self.module.train()
        self.tput_timer.start()
        self._averages = optimizer.averages = False  # losses are weighted by the pipeline
        self._boundary = optimizer.boundary = True
        pipe, count = self._pipeline(self.micro_batches), self.micro_batches
        with self._timers.phase("backward"), self._reports.phase("backward", self.global_steps):
            loss, _ = pipe.run(lambda: self._read(self.data_iterator, count, True), trains=True)
        assert isinstance(loss, torch.Tensor)
        loss = loss.float()
        self._last_loss, self._passes = loss, count
        self._reports.loss(loss)
        super().step()
        self.micro_steps += count - 1
        return loss

    @speaks_of_the_engine
    def eval_batch(
        self,
        data_iter: Iterator[Any] | None = None,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Run forward passes of micro-batches, without gradients. Collective.

        num_micro_batches: None: as many as a step has. Returns: the mean loss, on all ranks. compute_loss=False: on the
        last stage the mean of the outputs (with reduce_output=None their list), elsewhere None. With return_logits also
        the last micro-batch's output, on the last stage. bcast_loss: without effect.
        Raises: as ``train_batch``.
        """
        self._check_alive("eval_batch")
        if reduce_output not in ("avg", None):
            raise NotImplementedError(f"eval_batch(reduce_output={reduce_output!r}): expected 'avg' or None")
        self.module.eval()
        count = num_micro_batches or self.micro_batches
        iterator = self.data_iterator if data_iter is None else iter(data_iter)
        with torch.no_grad():
            found, outputs = self._pipeline(count).run(
                lambda: self._read(iterator, count, compute_loss), trains=False, losses=compute_loss
            )
        result: Any = None if found is None else found.float()
        if result is not None:
            event = ("Train/Samples/eval_loss", float(result), self.global_samples)
            self._reports.monitors.write_events([event])  # DeepSpeed's name
        if not compute_loss and outputs is not None:
            result = outputs if reduce_output is None else sum(outputs) / len(outputs)
        return (result, outputs[-1] if outputs else None) if return_logits else result

    def _position_loaded(self) -> None:
        if self._reads_loader:
            self.set_dataloader(self.training_dataloader)

    def _run_stage(self, *inputs: Any) -> Any:
        """Run this rank's stage, with the casts of Engine.forward."""
        with autocast(self._config, self.device):
            return self.module(*cast_inputs(self._config, inputs))

    def _pipeline(self, count: int) -> Any:
        pipe = self.module.pipeline
        pipe.microbatches, pipe.loss = count, self.module.loss_fn
        return pipe

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise PipelineError."""
        raise PipelineError(_ONLY.format("forward"))

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise PipelineError."""
        raise PipelineError(_ONLY.format("backward"))

    def step(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise PipelineError."""
        raise PipelineError(_ONLY.format("step"))

    def destroy(self) -> None:
        """Close the optimizer and the pipeline. Idempotent."""
        super().destroy()
        self.module.pipeline.close()


def _repeated(loader: Any) -> Iterator[Any]:
    while True:
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            return


def _moved(value: Any, device: torch.device) -> Any:
    """Return tensors, or a tuple of them, on ``device``; a list becomes a tuple."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return tuple(_moved(each, device) for each in value) if isinstance(value, (tuple, list)) else value
