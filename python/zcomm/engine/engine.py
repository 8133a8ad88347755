"""Engine: DeepSpeed's training loop around a model and its ZeroOptimizer.

Words: a micro-step is one forward, backward and step() call; every gradient_accumulation_steps-th one is a boundary, at
which the optimizer updates the weights. Invariants: the engine counts micro-steps and marks the boundary for the
optimizer. Only the optimizer divides gradients (by ranks, and by micro-steps if the caller has not).
Thread rule: one thread, the same calls in the same order on every rank.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zcomm.config import BatchSizes, Config
from zcomm.engine.autocast import autocast, cast_inputs
from zcomm.engine.checkpoints import EngineCheckpoints
from zcomm.engine.compiled import compile_blocks
from zcomm.engine.curriculum import CurriculumScheduler, ForwardArguments, ProgressiveLayerDrop
from zcomm.engine.data_ranks import DataRanks
from zcomm.engine.data_sampling.loader import CurriculumLoader, curriculum_loader
from zcomm.engine.eigenvalue import Eigenvalue, make_eigenvalue, summary_events
from zcomm.engine.raw_config import RawConfig, raw_config
from zcomm.engine.reports import Reports
from zcomm.engine.schedule_watch import ScheduleWatch
from zcomm.engine.states import offload_states
from zcomm.engine.timers import PhaseTimers, ThroughputTimer
from zcomm.engine.token_drop import RandomLayerTokenDrop, RandomLTDScheduler, begin_dropping, make_scheduler
from zcomm.engine.tuning_probe import TuningProbe, is_probe
from zcomm.engine.words import speaks_of_the_engine
from zcomm.watch import rank as watch

if TYPE_CHECKING:
    from zcomm.comm.communicator import Communicator
    from zcomm.compression.schedule import Schedule
    from zcomm.data import Loader
    from zcomm.memory.activations import offload_activations
    from zcomm.zero import ZeroOptimizer


_NO_PIPELINE = (
    "{}() belongs to a PipelineEngine, which initialize() makes of a PipelineModule; call loss = engine(batch), "
    "engine.backward(loss) and engine.step()"
)


class Engine(EngineCheckpoints, nn.Module):
    """A model, its sharded optimizer, its learning-rate schedule and the step counters. Made by ``initialize``.

    Attributes: module, optimizer (None if nothing is trained), lr_scheduler, training_dataloader, comm, device.
    config: a dict, as it was given; its attributes are the values in effect. local_rank, global_rank, world_size.
    global_steps (optimizer steps, skipped ones included), micro_steps (step() calls), global_samples (of the optimizer
    steps). tput_timer (samples per second). compression_scheduler: None unless "compression_training" enables a method.
    ranks: DataRanks, the ranks that read different samples.
    Attributes that the engine lacks are looked up in the model.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: ZeroOptimizer,
        *,
        comm: Communicator,
        config: Config,
        batch: BatchSizes,
        device: torch.device,
        lr_scheduler: Any = None,
        training_dataloader: Loader | None = None,
        raw: RawConfig | None = None,
        trained: bool = True,
        ranks: DataRanks | None = None,
        compression: Schedule | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self._zero = optimizer  # it has the weights, also of a model that is not trained
        self.optimizer = optimizer if trained else None
        self.lr_scheduler = lr_scheduler
        self.training_dataloader = training_dataloader
        self.comm = comm
        self._config = config
        self.config = raw_config(config, config) if raw is None else raw
        self.device = device
        self.local_rank = comm.local_rank
        self.global_rank = comm.rank
        self.world_size = comm.world_size
        self.global_steps = 0
        self.micro_steps = 0
        self.global_samples = 0
        self._batch = batch
        self.ranks = ranks or DataRanks(comm.rank, comm.world_size)
        self.mpu = self.ranks.mpu
        self._boundary: bool | None = None
        self._counted_from = 0  # micro-step from which the boundary is counted
        self._coalesces = False  # inside of coalesce_grad_reduction()
        self._coalesced = False  # the next step() ends such a block
        self._compiled: list[nn.Module] = []
        self._warned_of_passes = False
        self._passes = 0  # backward() calls since the last step()
        self._averages: bool | None = None  # scale_wrt_gas of this accumulation so far
        self._applied = False
        self._updates = optimizer.updates  # after the last step()
        self._watch = ScheduleWatch()
        self._last_loss: torch.Tensor | None = None
        self._destroyed = False
        self._offload: offload_activations | None = None  # of activations; made by the first forward that needs it
        self._timers = PhaseTimers(config.wall_clock_breakdown, device)
        self._reports = Reports(config, module, comm.rank, device)
        self._arguments = ForwardArguments(config)
        self.random_ltd_scheduler: RandomLTDScheduler | None = None
        routing = config.data_efficiency.data_routing.random_ltd
        if routing.enabled:
            seed = config.data_efficiency.seed
            self.random_ltd_scheduler = make_scheduler(routing, batch.train, seed, self.ranks.rank)
        self._warned_of_layers = False
        self.compression_scheduler = compression
        self._probe = TuningProbe(config, comm.rank, device) if is_probe(config) else None
        self.eigenvalue: Eigenvalue | None = None
        self.block_eigenvalue: dict[int, tuple[float, int]] = {}
        if config.eigenvalue.enabled:
            self.eigenvalue = make_eigenvalue(config, self.ranks)
        self._stepping = False  # inside step(), the boundary of unmanaged accumulation
        self.tput_timer = ThroughputTimer(batch.train)
        self._report_start = (time.perf_counter(), 0)  # when, and at how many samples, the last report was

    # --- the loop ---------------------------------------------------------------------------------------------

    @speaks_of_the_engine
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        self._check_alive("forward")
        if self.module.training:
            self.tput_timer.start()
            kwargs |= self._arguments.at(self.global_steps)
            if self.random_ltd_scheduler is not None:
                self._drop_tokens(self.random_ltd_scheduler)
        args = cast_inputs(self._config, args)
        phases = self._timers.phase("forward"), self._reports.phase("forward", self.global_steps)
        with phases[0], phases[1], autocast(self._config, self.device):
            if not (self._config.activation_checkpointing.cpu_checkpointing and torch.is_grad_enabled()):
                return self.module(*args, **kwargs)
            if self._offload is None:
                from zcomm.memory.activations import offload_activations

                self._offload = offload_activations()
            with self._offload:
                return self.module(*args, **kwargs)

    def _drop_tokens(self, scheduler: RandomLTDScheduler) -> None:
        scheduler.begin(self.global_steps, self.micro_steps)
        if not self._warned_of_layers:
            self._warned_of_layers = True
            if not any(isinstance(layer, RandomLayerTokenDrop) for layer in self.module.modules()):
                logging.getLogger("zcomm").warning(
                    "random_ltd is enabled, and no layer drops tokens: call convert_to_random_ltd(engine, class)"
                )

    def random_ltd_initialize(self) -> None:
        """Give the schedule of the section "random_ltd" to the layers that ``convert_to_random_ltd`` has wrapped."""
        if self.random_ltd_scheduler is None:
            raise RuntimeError('random_ltd_initialize(): "data_efficiency.data_routing.random_ltd" is not enabled')
        begin_dropping(self.module, self._config.data_efficiency.data_routing.random_ltd, self.random_ltd_scheduler)

    @property
    def progressive_layer_drop(self) -> ProgressiveLayerDrop | None:
        """The schedule of the section "progressive_layer_drop"; None if it is off."""
        return self._arguments.layer_drop

    @property
    def curriculum_scheduler_legacy(self) -> CurriculumScheduler | None:
        """The schedule of the section "curriculum_learning", at this step; None if it is off."""
        return self._arguments.curriculum

    def get_pld_theta(self) -> float | None:
        """Return the share of layers that the next training forward keeps; None without progressive_layer_drop."""
        found: float | None = self._arguments.at(self.global_steps).get("pld_theta")
        return found

    @speaks_of_the_engine
    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Compute gradients of ``loss`` and start reducing them.

        loss: a tensor of one element, the mean over this rank's micro batch; fp16 scales a copy of it.
        scale_wrt_gas: False: ``loss`` is already divided by the micro-steps, so the optimizer does not divide; the same
        in all micro-steps of one step. Returns: ``loss``, divided by the micro-steps if ``scale_wrt_gas`` is True, for
        logs that add them up. Raises: ValueError if ``loss`` is not a scalar that needs gradients.
        """
        optimizer = self._begin_pass("backward", loss, scale_wrt_gas)
        with self._timers.phase("backward"), self._reports.phase("backward", self.global_steps):
            optimizer.backward(loss, retain_graph=retain_graph)
        self._end_pass(loss)
        return loss / self._batch.accumulation if scale_wrt_gas else loss

    @speaks_of_the_engine
    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return ``loss`` for a ``backward()`` by the program, once, in place of ``engine.backward(loss)``.

        fp16 needs it: the tensor is scaled then. Raises: as ``backward``.
        """
        scaled = self._begin_pass("scale", loss, True).scale(loss)
        self._end_pass(loss)
        return scaled

    def _begin_pass(self, call: str, loss: torch.Tensor, scale_wrt_gas: bool) -> ZeroOptimizer:
        """Check the loss of a backward pass, and set the optimizer's boundary and averaging. Returns: the optimizer."""
        self._check_alive(call)
        optimizer = self._trained(call)
        if not isinstance(loss, torch.Tensor):
            raise ValueError(f"{call}() needs the loss as a tensor, got {type(loss).__name__}")
        if loss.numel() != 1:
            raise ValueError(f"{call}() needs a scalar loss, got shape {list(loss.shape)}; reduce it, e.g. loss.mean()")
        if not loss.requires_grad:
            raise ValueError(f"{call}() needs a loss that depends on trainable parameters (requires_grad is False)")
        if self._averages not in (None, scale_wrt_gas):
            raise ValueError(
                f"{call}(): scale_wrt_gas={scale_wrt_gas} after scale_wrt_gas={self._averages} in one accumulation"
            )
        self._averages = optimizer.averages = scale_wrt_gas
        if self.eigenvalue is not None and self.is_gradient_accumulation_boundary():
            self._find_eigenvalues(self.eigenvalue, loss)
        # Before backward: with overlap the hooks must know whether this micro-step is the last one.
        optimizer.boundary = self.is_gradient_accumulation_boundary()
        return optimizer

    def _find_eigenvalues(self, eigenvalue: Eigenvalue, loss: torch.Tensor) -> None:
        if self.global_steps % eigenvalue.gas_boundary_resolution:
            return
        self.block_eigenvalue = eigenvalue.of_loss(loss, self.module, self.comm if self.world_size > 1 else None)
        if self._reports.monitors.writers:
            events = summary_events(self.block_eigenvalue, self.global_samples)
            self._reports.monitors.write_events(events)

    def _end_pass(self, loss: torch.Tensor) -> None:
        """Count a backward pass."""
        self._last_loss = loss.detach()
        self._reports.loss(loss)
        self._passes += 1

    @speaks_of_the_engine
    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """End the micro-step; at a boundary clip, update the weights, zero the gradients, move the schedule on.

        lr_kwargs: arguments of the schedule's ``step()``.
        Raises: RuntimeError at a boundary without gradients, or if the program has stepped the optimizer itself;
        PeerLost, CollectiveMismatch, TimeoutError, OSError (swap) from the optimizer.
        """
        self._check_alive("step")
        optimizer = self._trained("step")
        if self._coalesces:
            raise RuntimeError("step() inside of coalesce_grad_reduction(): call it after the block")
        managed = self._config.managed_gradient_accumulation
        boundary = not managed or self.is_gradient_accumulation_boundary()
        before, skipped_before = optimizer.updates, self.skipped_steps
        if before != self._updates:
            self._updates = before
            raise RuntimeError(
                "step(): the program has called step() of the engine's optimizer itself, which has used the gradients: "
                "call only engine.step()"
            )
        passes = self._passes
        self._warn_of_passes()
        self._applied, self._stepping = False, True
        try:
            with self._timers.phase("step"), self._reports.phase("step", self.global_steps):
                self._step_optimizer(optimizer, boundary, before)
        finally:
            self._stepping = False
            self._updates = optimizer.updates
        self.micro_steps += 1
        if self._coalesced:
            self._coalesced, self._counted_from = False, self.micro_steps
        self.tput_timer.stop(global_step=boundary)
        if not boundary:
            return
        self._averages = None
        self.global_steps += 1
        samples = self._batch.train if managed else passes * self._batch.micro * self.ranks.size
        self.global_samples += samples
        self._applied = self.skipped_steps == skipped_before
        # Schedules count real updates only: a step skipped for non-finite gradients must not use up warm-up.
        if self.compression_scheduler is not None:
            self.compression_scheduler.average_ranges(self.comm)
            self.compression_scheduler.at(self.compression_scheduler.training_steps + self._applied)
        if self.lr_scheduler is not None and self._applied:
            self._watch.before(self.lr_scheduler, optimizer.param_groups)
            self.lr_scheduler.step(**(lr_kwargs or {}))
            self._watch.after(self.lr_scheduler, optimizer.param_groups)
        self._reports.stepped(optimizer, self.get_lr(), self.global_samples, self._timers.last())
        self._reports.profiled(self.global_steps - 1, self.world_size, samples)
        self._report()
        if self._probe is not None:
            self._probe.stepped(self.global_steps, samples, self._reports.step_flops)

    def _step_optimizer(self, optimizer: ZeroOptimizer, boundary: bool, before: int) -> None:
        """End the micro-step of ``optimizer``. before: its ``updates`` so far."""
        optimizer.boundary = boundary
        page, loss = watch.current(), self._last_loss
        if boundary and page is not None and loss is not None and loss.device.type == "cpu":
            page.log(float(loss), None)  # of a loss on a device the program would have to wait
        optimizer.step()
        if boundary and optimizer.updates == before:
            raise RuntimeError(
                "step(): no backward pass has given gradients since the last one: call engine.backward(loss) first"
            )
        optimizer.zero_grad()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, as the optimizer does it: step() already has, and mid-accumulation it keeps them."""
        if self.optimizer is None:
            self.module.zero_grad(set_to_none=set_to_none)
        else:
            self.optimizer.zero_grad(set_to_none=set_to_none)

    # --- gradient accumulation --------------------------------------------------------------------------------

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return True if the coming step() updates the weights.

        With ``managed_gradient_accumulation: false`` each step() does, and this is True only during step().
        """
        if not self._config.managed_gradient_accumulation:
            return self._stepping
        if self._boundary is not None:
            return self._boundary
        if self._coalesces or self._coalesced:
            return True
        return (self.micro_steps + 1 - self._counted_from) % self._batch.accumulation == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Set the boundary by hand, from now on, instead of having micro-steps counted; None counts again.

        Gradients are still divided by gradient_accumulation_steps(). Raises: RuntimeError with
        ``managed_gradient_accumulation: false``, because each step() is then a boundary.
        """
        if not self._config.managed_gradient_accumulation:
            raise RuntimeError(
                'set_gradient_accumulation_boundary(): with "managed_gradient_accumulation": false each step() updates'
            )
        self._boundary = is_boundary

    def no_sync(self) -> AbstractContextManager[None]:
        """Keep the gradients of the block's backward passes on this rank; see ZeroOptimizer.no_sync."""
        if self._coalesces:
            raise RuntimeError("no_sync() inside of coalesce_grad_reduction(), which keeps gradients already")
        return self._trained("no_sync").no_sync()

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Reduce the gradients of all backward passes inside once, in the ``step()`` after the block.

        That ``step()`` updates the weights, for any number of passes. Their gradients are summed, each divided by
        gradient_accumulation_steps(). Raises: RuntimeError in ``step()`` and ``no_sync()`` inside.
        """
        from zcomm.zero.registry import open_parts

        optimizer = self._trained("coalesce_grad_reduction")
        if self._coalesces:
            raise RuntimeError("coalesce_grad_reduction() inside of itself")
        self._coalesces = True
        try:
            with optimizer.no_sync():
                yield
        finally:
            self._coalesces = False
        self._coalesced = True
        open_parts(optimizer).reducer.consensus.coalesces = True

    @speaks_of_the_engine
    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Do nothing: backward reduces gradients while it runs, and ``step()`` reduces the gradients of ``no_sync()``.

        bucket_size: without effect; set "zero_optimization.reduce_bucket_size".
        """
        self._trained("allreduce_gradients")

    @speaks_of_the_engine
    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples per optimizer step, by the number of micro-steps. Call it between steps, on all ranks.

        Raises: ValueError if micro batch x world size does not divide it; RuntimeError during an accumulation.
        """
        whole = self._batch.micro * self.ranks.size
        count, rest = divmod(train_batch_size, whole)
        if rest or count < 1:
            raise ValueError(
                f"set_train_batch_size({train_batch_size}): it must be a multiple of {self._batch.micro} samples per "
                f"rank x {self.ranks.size} ranks = {whole}"
            )
        self._set_batch(BatchSizes(train_batch_size, self._batch.micro, count), "set_train_batch_size")

    @speaks_of_the_engine
    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the counted samples per rank and micro-step, not the micro-steps per step. Call it between steps.

        A Loader made by ``initialize`` keeps the size of its micro batches; the caller passes others.
        Raises: ValueError; RuntimeError during an accumulation.
        """
        if micro_batch_size < 1:
            raise ValueError(f"set_train_micro_batch_size({micro_batch_size}): it must be at least 1")
        train = micro_batch_size * self._batch.accumulation * self.ranks.size
        self._set_batch(BatchSizes(train, micro_batch_size, self._batch.accumulation), "set_train_micro_batch_size")
        if self.training_dataloader is not None and self.training_dataloader.batch_size != micro_batch_size:
            logging.getLogger("zcomm").warning(
                "set_train_micro_batch_size(%d): the engine's training_dataloader goes on with micro batches of %d",
                micro_batch_size,
                self.training_dataloader.batch_size,
            )

    def _set_batch(self, batch: BatchSizes, call: str) -> None:
        amid = (self.micro_steps - self._counted_from) % self._batch.accumulation if self._boundary is None else 0
        if self._passes or amid:
            raise RuntimeError(f"{call}() during the accumulation of a step: call it right after a step that updates")
        if self.optimizer is not None:
            self.optimizer.grad_accum = batch.accumulation
        self._batch, self._counted_from = batch, self.micro_steps
        if self.random_ltd_scheduler is not None:
            self.random_ltd_scheduler.global_batch_size = batch.train
        if isinstance(self.training_dataloader, CurriculumLoader):
            self.training_dataloader.data_sampler.gradient_accumulation_steps = batch.accumulation
        self.tput_timer.batch_size = batch.train

    # --- the module -------------------------------------------------------------------------------------------

    @speaks_of_the_engine
    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """Return the module's ``state_dict()``, on request without frozen parameters. In stage 3 collective."""
        self._check_alive("module_state_dict")
        kinds = {} if destination is None else {"destination": destination}
        state: dict[str, Any] = self.module.state_dict(prefix=prefix, keep_vars=keep_vars, **kinds)
        for name in self._frozen_names() if exclude_frozen_parameters else ():
            state.pop(prefix + name, None)
        return state

    @speaks_of_the_engine
    def load_module_state_dict(
        self, checkpoint: Mapping[str, Any], strict: bool = True, custom_load_fn: Any = None, **others: Any
    ) -> None:
        """Load whole tensors into the module, the same on all ranks, which all call it.

        checkpoint: a state dict, or a dict that has it as "module", as DeepSpeed's. custom_load_fn: called with
        ``src=`` the state dict and ``dst=`` the module instead. others: DeepSpeed's options of how parameters are
        gathered for it, without effect. Raises: RuntimeError for names and shapes of another model.
        """
        self._check_alive("load_module_state_dict")
        unknown = set(others) - {"fetch_z3_params", "z3_params_to_fetch", "allowed_missing_keys"}
        if unknown or others.get("allowed_missing_keys") is not None:
            raise NotImplementedError(f"load_module_state_dict({', '.join(unknown) or 'allowed_missing_keys'}=)")
        inside = checkpoint.get("module")
        state = inside if isinstance(inside, Mapping) else checkpoint
        if custom_load_fn is not None:
            custom_load_fn(src=state, dst=self.module)
        else:
            self.module.load_state_dict(state, strict=strict)

    @speaks_of_the_engine
    def compile(
        self,
        backend: Any = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the module's blocks by torch.compile, in the next forward. A second call does nothing.

        backend, compile_kwargs: of ``torch.compile``. Blocks are the units of stage 3; a model without blocks is
        compiled whole below stage 3. schedule, compiled_autograd_enabled: DeepCompile's, not available.
        Raises: NotImplementedError.
        """
        self._check_alive("compile")
        for name, value in (("schedule", schedule), ("compiled_autograd_enabled", compiled_autograd_enabled)):
            if value:
                raise NotImplementedError(
                    f"compile({name}={value!r}) is not available: blocks are compiled as they are"
                )
        if not self._compiled:
            kwargs = {key: value for key, value in (compile_kwargs or {}).items() if key != "backend"}
            self._compiled = compile_blocks(self.module, self.zero_optimization_stage() == 3, backend, kwargs)

    @property
    def is_compiled(self) -> bool:
        """True after ``compile()``."""
        return bool(self._compiled)

    # --- memory -----------------------------------------------------------------------------------------------

    @speaks_of_the_engine
    def offload_states(
        self, include: Any = None, device: Any = "cpu", pin_memory: bool = True, non_blocking: bool = False
    ) -> None:
        """Check that the engine's states are on the host; zcomm does not move them while training.

        It does nothing on the CPU, or if the configuration offloads them. include, device: DeepSpeed's words.
        pin_memory, non_blocking: without effect.
        Raises: ValueError for another word; NotImplementedError if some states are on a device.
        """
        self._check_alive("offload_states")
        offload_states(self._zero, self.device, include, device)

    @speaks_of_the_engine
    def reload_states(self, non_blocking: bool = False) -> None:
        """Do nothing: ``offload_states`` has moved nothing."""
        self._check_alive("reload_states")

    def empty_partition_cache(self) -> None:
        """Free cached memory of torch's allocator. The pool of fixed size for gathered weights is not freed, because
        the next unit reuses it."""
        self._check_alive("empty_partition_cache")
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # --- data -------------------------------------------------------------------------------------------------

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Any = None,
        num_local_io_workers: int | None = None,
    ) -> Any:
        """Return an iterable of this rank's micro batches of ``dataset``: a Loader, or torch's for an own sampler.

        route: "train" shuffles; "eval" and "predict" keep the order. pin_memory: without effect, batches stay on the
        CPU. num_local_io_workers: of torch's DataLoader; only with data_sampler. Raises: ValueError.
        """
        if route not in ("train", "eval", "predict"):
            raise ValueError(f'deepspeed_io(route={route!r}): expected "train", "eval" or "predict"')
        size = self._batch.micro if batch_size is None else batch_size
        drop = self._config.dataloader_drop_last
        if data_sampler is not None:
            return torch.utils.data.DataLoader(
                dataset,
                batch_size=size,
                sampler=data_sampler,
                collate_fn=collate_fn,
                drop_last=drop,
                num_workers=num_local_io_workers or 0,
            )
        from zcomm.data import Loader

        if self.curriculum_learning_enabled() and route == "train":
            ranks = (self.ranks, self.comm)
            return curriculum_loader(
                dataset, self._config, BatchSizes(self._batch.train, size, self._batch.accumulation), *ranks, collate_fn
            )
        return Loader(
            dataset,
            size,
            rank=self.ranks.rank,
            world_size=self.ranks.size,
            shuffle=route == "train",
            drop_last=drop,
            collate_fn=collate_fn,
        )

    def set_data_post_process_func(self, post_process_func: Callable[[Any, dict[str, Any]], Any]) -> None:
        """Change each batch of a curriculum's loader by a function of the batch and the sampler's state."""
        self._curriculum_loader("set_data_post_process_func").post_process_func = post_process_func

    def set_custom_curriculum_learning_schedule(self, schedule_func_dict: Mapping[str, Callable[[int], int]]) -> None:
        """Take the difficulties of metrics with schedule_type "custom" from functions of the step, by metric."""
        loader = self._curriculum_loader("set_custom_curriculum_learning_schedule")
        loader.data_sampler.set_custom_curriculum_learning_schedule(schedule_func_dict)

    def _curriculum_loader(self, call: str) -> CurriculumLoader:
        if not isinstance(self.training_dataloader, CurriculumLoader):
            raise RuntimeError(
                f"{call}(): initialize() has made no loader of a curriculum: give training_data=, and enable "
                '"data_efficiency.data_sampling.curriculum_learning"'
            )
        return self.training_dataloader

    def train_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Raise NotImplementedError: it belongs to pipelines."""
        raise NotImplementedError(_NO_PIPELINE.format("train_batch"))

    def eval_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Raise NotImplementedError: it belongs to pipelines."""
        raise NotImplementedError(_NO_PIPELINE.format("eval_batch"))

    # --- life -------------------------------------------------------------------------------------------------

    @speaks_of_the_engine
    def destroy(self) -> None:
        """Close the optimizer (its hooks, buffers and swap files). Idempotent; the job's ranks remain joined."""
        if not self._destroyed:
            self._destroyed = True
            self._reports.close()
            self._zero.close()
            if self._offload is not None:
                self._offload.close()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            modules = self.__dict__.get("_modules") or {}
            if "module" in modules and hasattr(modules["module"], name):
                return getattr(modules["module"], name)
            raise

    # --- inside -----------------------------------------------------------------------------------------------

    def _trained(self, call: str) -> ZeroOptimizer:
        """Return the optimizer. Raises: RuntimeError without one."""
        if self.optimizer is None:
            raise RuntimeError(
                f"{call}(): this engine has no optimizer, because initialize() was given none, and the configuration "
                'has no section "optimizer", or no parameter required a gradient; it only uses and saves its weights'
            )
        return self._zero

    def _warn_of_passes(self) -> None:
        """Warn once of a loop for torch, which steps once per accumulation.

        With it this engine would update every n x n-th pass.
        """
        count, self._passes = self._passes, 0
        if not self._config.managed_gradient_accumulation:
            return
        if (
            self._boundary is None
            and not self._coalesced
            and count == self._batch.accumulation > 1
            and not self._warned_of_passes
        ):
            self._warned_of_passes = True
            logging.getLogger("zcomm").warning(
                "engine.step() was called after %d backward() calls, gradient_accumulation_steps is %d too, and "
                "the engine takes it for one micro-step of %d: call step() after every backward(), or say by "
                "set_gradient_accumulation_boundary() which pass is the last one",
                count,
                count,
                count,
            )

    def _report(self) -> None:
        """Print rank 0's lines every steps_per_print optimizer steps.

        Without steps_per_print the breakdown is printed at every step.
        """
        every = self._config.steps_per_print or (1 if self._config.wall_clock_breakdown else None)
        if every is None or self.global_steps % every:
            return
        now_s, samples = time.perf_counter(), self.global_samples
        elapsed_s, done = now_s - self._report_start[0], samples - self._report_start[1]
        self._report_start = (now_s, samples)
        seconds = self._timers.take()
        if self.global_rank != 0:
            return
        if self._config.steps_per_print:
            loss = "-" if self._last_loss is None else f"{self._last_loss.item():.4f}"
            rates = ", ".join(f"{rate:.3e}" for rate in self.get_lr())
            norm = "-" if self._zero.grad_norm is None else f"{self._zero.grad_norm:.3e}"
            print(
                f"step {self.global_steps}: loss {loss}, lr [{rates}], grad norm {norm}, "
                f"{done / elapsed_s:.1f} samples/s, skipped {self.skipped_steps}",
                flush=True,
            )
        if self._config.wall_clock_breakdown:
            phases = ", ".join(f"{name} {seconds.get(name, 0.0):.4g} s" for name in ("forward", "backward", "step"))
            print(f"step {self.global_steps}: {phases} (of {elapsed_s:.4g} s, {every} steps)", flush=True)
