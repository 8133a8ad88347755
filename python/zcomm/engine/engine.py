"""Engine: DeepSpeed's training loop around a model and its ZeroOptimizer.

Words: a micro-step is one forward, backward and step() call; every gradient_accumulation_steps-th one is a boundary,
where the optimizer really steps. Invariants: the engine counts micro-steps and tells the optimizer which one is the
boundary. The optimizer alone divides gradients (by ranks, and by micro-steps where the caller has not).
Thread rule: one thread, the same calls in the same order on every rank.
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zcomm.config import BatchSizes, Config
from zcomm.engine import checkpoints
from zcomm.engine.schedule_watch import ScheduleWatch
from zcomm.engine.timers import PhaseTimers

if TYPE_CHECKING:
    from zcomm.comm.communicator import Communicator
    from zcomm.data import Loader
    from zcomm.memory.activations import offload_activations
    from zcomm.zero import ZeroOptimizer
    from zcomm.zero.checkpoint import SaveTask


class Engine(nn.Module):
    """A model, its sharded optimizer, its learning-rate schedule and the step counters. Made by ``initialize``.

    Attributes: module, optimizer, lr_scheduler, training_dataloader, config, comm; device; local_rank, global_rank,
    world_size; global_steps (optimizer steps, skipped ones included), micro_steps (step() calls), global_samples
    (of the optimizer steps).
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
    ) -> None:
        super().__init__()
        self.module = module
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.training_dataloader = training_dataloader
        self.comm = comm
        self.config = config
        self.device = device
        self.local_rank = comm.local_rank
        self.global_rank = comm.rank
        self.world_size = comm.world_size
        self.global_steps = 0
        self.micro_steps = 0
        self.global_samples = 0
        self._batch = batch
        self._boundary: bool | None = None
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
        self._report_start = (time.perf_counter(), 0)  # when, and at how many samples, the last report was

    # --- the loop ---------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        self._check_alive("forward")
        with self._timers.phase("forward"):
            if not (self.config.activation_checkpointing.cpu_checkpointing and torch.is_grad_enabled()):
                return self.module(*args, **kwargs)
            if self._offload is None:
                from zcomm.memory.activations import offload_activations

                self._offload = offload_activations()
            with self._offload:
                return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Compute gradients of ``loss`` and start reducing them.

        loss: a tensor of one element, the mean over this rank's micro batch; fp16 scales a copy of it.
        scale_wrt_gas: False: ``loss`` is divided by the micro-steps already, so the optimizer does not; the same in all
        micro-steps of one step. Returns: ``loss``, divided by the micro-steps where ``scale_wrt_gas`` is True, for logs
        that add them up. Raises: ValueError where it is not a scalar that needs gradients.
        """
        self._check_alive("backward")
        if not isinstance(loss, torch.Tensor):
            raise ValueError(f"backward() needs the loss as a tensor, got {type(loss).__name__}")
        if loss.numel() != 1:
            raise ValueError(
                f"backward() needs a scalar loss, got shape {list(loss.shape)}; reduce it, e.g. loss.mean()"
            )
        if not loss.requires_grad:
            raise ValueError("backward() needs a loss that depends on trainable parameters (requires_grad is False)")
        if self._averages not in (None, scale_wrt_gas):
            raise ValueError(
                f"backward(): scale_wrt_gas={scale_wrt_gas} after scale_wrt_gas={self._averages} in one accumulation"
            )
        self._averages = self.optimizer.averages = scale_wrt_gas
        # Before backward: with overlap the hooks must know whether this micro-step is the last one.
        self.optimizer.boundary = self.is_gradient_accumulation_boundary()
        with self._timers.phase("backward"):
            self.optimizer.backward(loss, retain_graph=retain_graph)
        self._last_loss = loss.detach()
        self._passes += 1
        return loss / self._batch.accumulation if scale_wrt_gas else loss

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """End the micro-step; at a boundary clip, update the weights, zero the gradients, move the schedule on.

        lr_kwargs: arguments of the schedule's ``step()``.
        Raises: RuntimeError at a boundary without gradients, or where the program has stepped the optimizer itself;
        PeerLost, CollectiveMismatch, TimeoutError, OSError (swap) from the optimizer.
        """
        self._check_alive("step")
        boundary = self.is_gradient_accumulation_boundary()
        before, skipped_before = self.optimizer.updates, self.skipped_steps
        if before != self._updates:
            self._updates = before
            raise RuntimeError(
                "step(): the program has called step() of the engine's optimizer itself, which has used the gradients: "
                "call engine.step() alone"
            )
        self._warn_of_passes()
        self._applied = False
        with self._timers.phase("step"):
            self.optimizer.boundary = boundary
            self.optimizer.step()
            if boundary and self.optimizer.updates == before:
                raise RuntimeError(
                    "step(): no backward pass has given gradients since the last one: call engine.backward(loss) first"
                )
            self.optimizer.zero_grad()
        self._updates = self.optimizer.updates
        self.micro_steps += 1
        if not boundary:
            return
        self._averages = None
        self.global_steps += 1
        self.global_samples += self._batch.train
        self._applied = self.skipped_steps == skipped_before
        # The schedule counts real updates only: a step skipped for non-finite gradients must not use up warm-up.
        if self.lr_scheduler is not None and self._applied:
            self._watch.before(self.lr_scheduler, self.optimizer.param_groups)
            self.lr_scheduler.step(**(lr_kwargs or {}))
            self._watch.after(self.lr_scheduler, self.optimizer.param_groups)
        self._report()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, as the optimizer does it: step() already has, and mid-accumulation it keeps them."""
        self.optimizer.zero_grad(set_to_none=set_to_none)

    # --- gradient accumulation --------------------------------------------------------------------------------

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return True if the coming step() updates the weights."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self._batch.accumulation == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Set the boundary by hand, from now on, instead of having micro-steps counted; None counts again.

        Gradients are still divided by gradient_accumulation_steps().
        """
        self._boundary = is_boundary

    def no_sync(self) -> AbstractContextManager[None]:
        """Keep the gradients of backward passes inside on this rank; see ZeroOptimizer.no_sync."""
        return self.optimizer.no_sync()

    # --- checkpoints ------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        wait: bool = True,
    ) -> bool | SaveTask:
        """Save folder ``save_dir/tag`` (``global_stepN``), and its name in the file ``latest``. All ranks call it.

        client_state: as ZeroOptimizer.save takes it. Given back by load_checkpoint. wait: False writes while training
        goes on, as ZeroOptimizer.save does. The result's ``wait()`` raises if it failed. ``latest`` is written last.
        exclude_frozen_parameters: leave out what needs no gradient; load it with ``load_module_strict=False``.
        Returns: True, or the task. Raises: as ZeroOptimizer.save.
        """
        self._check_alive("save_checkpoint")
        lean = exclude_frozen_parameters
        return checkpoints.save(self, Path(save_dir), tag, client_state or {}, save_latest, wait, lean)

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load ``load_dir/tag``, or what ``latest`` names; (None, None) where there is none. All ranks call it.

        Returns: the folder and the client state. load_module_only: nothing but weights, no counters.
        Raises: as ZeroOptimizer.load.
        """
        self._check_alive("load_checkpoint")
        if custom_load_fn is not None:
            raise NotImplementedError("custom_load_fn= is not available")
        states = load_optimizer_states and not load_module_only
        schedule = load_lr_scheduler_states and not load_module_only
        return checkpoints.load(self, Path(load_dir), tag, load_module_strict, states, schedule, load_module_only)

    def save_16bit_model(
        self, save_dir: str | os.PathLike[str], save_filename: str = "model.safetensors", *, wait: bool = True
    ) -> bool | SaveTask:
        """Write the whole model as one safetensors file (never a pickle), in the precision that it is trained in.

        save_filename: where it ends in ".bin", ".pt" or ".pth", the names of pickles, the file gets another one, and a
        warning is logged. "pytorch_model.bin" becomes "model.safetensors".
        All ranks call it. Rank 0 writes, one tensor at a time. wait: False copies a rank's shards of the weights,
        writes while training goes on, and returns the task. The next save, load and destroy() wait for it.
        Raises: OSError, on every rank.
        """
        self._check_alive("save_16bit_model")
        return checkpoints.save_model(self, Path(save_dir), save_filename, wait)

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Return True: whole weights can be had in stage 3. (Accelerate calls it.)"""
        return True

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """Return the whole model's state dict on rank 0, None elsewhere. All ranks call it. (Accelerate's name.)"""
        self._check_alive("_zero3_consolidated_16bit_state_dict")
        whole = self.optimizer.full_state_dict()
        if self.global_rank != 0:
            return None
        if exclude_frozen_parameters:
            for name, param in self.module.named_parameters(remove_duplicate=False):
                if not param.requires_grad:
                    whole.pop(name, None)
        return whole

    # --- what it is and where it stands -----------------------------------------------------------------------

    def train_batch_size(self) -> int:
        """Return the samples per optimizer step, all ranks together."""
        return self._batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples per rank and micro-step."""
        return self._batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Return the micro-steps per optimizer step."""
        return self._batch.accumulation

    def fp16_enabled(self) -> bool:
        """Return True if weights and gradients are fp16."""
        return self.config.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        """Return True if weights and gradients are bf16."""
        return self.config.bf16.enabled

    def zero_optimization_stage(self) -> int:
        """Return the stage, 0 to 3."""
        return self.config.zero_optimization.stage

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """Return the L2 norm of the averaged gradients at the last optimizer step, before clipping.

        None before the first step.
        """
        return self.optimizer.grad_norm if self.global_steps else None

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps that left the weights alone because gradients were not finite."""
        return self.optimizer.skipped_steps

    def was_step_applied(self) -> bool:
        """Return True if the last ``step()`` changed the weights: at a boundary, with finite gradients."""
        return self._applied

    def destroy(self) -> None:
        """Close the optimizer (its hooks, buffers and swap files). Twice is fine; the job's ranks stay joined."""
        if not self._destroyed:
            self._destroyed = True
            self.optimizer.close()
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

    def _check_alive(self, call: str) -> None:
        if self._destroyed:
            raise RuntimeError(f"{call}() after destroy(): this engine's optimizer is closed")

    def _warn_of_passes(self) -> None:
        """Warn once of a loop for torch, which steps once per accumulation.

        With it this engine would update every n x n-th pass.
        """
        count, self._passes = self._passes, 0
        if self._boundary is None and count == self._batch.accumulation > 1 and not self._warned_of_passes:
            self._warned_of_passes = True
            logging.getLogger("zcomm").warning(
                "engine.step() was called after %d backward() calls, where gradient_accumulation_steps is %d too, and "
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
        every = self.config.steps_per_print or (1 if self.config.wall_clock_breakdown else None)
        if every is None or self.global_steps % every:
            return
        now_s, samples = time.perf_counter(), self.global_samples
        elapsed_s, done = now_s - self._report_start[0], samples - self._report_start[1]
        self._report_start = (now_s, samples)
        seconds = self._timers.take()
        if self.global_rank != 0:
            return
        if self.config.steps_per_print:
            loss = "-" if self._last_loss is None else f"{self._last_loss.item():.4f}"
            rates = ", ".join(f"{rate:.3e}" for rate in self.get_lr())
            norm = "-" if self.optimizer.grad_norm is None else f"{self.optimizer.grad_norm:.3e}"
            print(
                f"step {self.global_steps}: loss {loss}, lr [{rates}], grad norm {norm}, "
                f"{done / elapsed_s:.1f} samples/s, skipped {self.skipped_steps}",
                flush=True,
            )
        if self.config.wall_clock_breakdown:
            phases = ", ".join(f"{name} {seconds.get(name, 0.0):.4g} s" for name in ("forward", "backward", "step"))
            print(f"step {self.global_steps}: {phases} (of {elapsed_s:.4g} s, {every} steps)", flush=True)
