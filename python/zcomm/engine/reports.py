"""Reports: an engine's output besides its progress lines: events for monitors, FLOPs of a step, collectives.

Names of events are DeepSpeed's (0.19.6). Their step is the number of samples so far, all ranks together.
Thread rule: the engine's thread. All ranks have Reports; only rank 0 writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zcomm.config import Config
from zcomm.engine.autocast import autocast_dtype
from zcomm.engine.tuning_probe import is_probe
from zcomm.monitor import Event, Monitors

if TYPE_CHECKING:
    from zcomm.config.monitor_keys import CommsLogger
    from zcomm.profiling.flops import FlopsReport
    from zcomm.zero.registry import Owner

_PHASES = ("forward", "backward", "step")


class Reports:
    """Reports of one engine, as its configuration asks for them.

    Raises: ImportError for the package of a monitor that is missing.
    """

    def __init__(self, config: Config, module: nn.Module, rank: int, device: torch.device) -> None:
        self.monitors = Monitors(config, rank)
        self._module, self._device, self._section = module, device, config.flops_profiler
        tuning = config.autotuning
        counts = is_probe(config) and tuning.metric == "flops"  # in the last step that is not timed
        self._profiles = (config.flops_profiler.enabled or counts) and rank == 0
        self._profile_step = tuning.start_profile_step - 1 if counts else config.flops_profiler.profile_step
        self.step_flops = 0  # of the forwards of the profiled step, three times: backward has twice as many
        self._scaled = config.fp16.enabled or autocast_dtype(config) == torch.float16
        self._flops: FlopsReport | None = None
        self._losses: list[torch.Tensor] = []
        self._logged: Owner | None = None

    @contextmanager
    def phase(self, name: str, step: int) -> Iterator[None]:
        """Profile a phase of the step after ``step`` others, if it is the step to profile."""
        if not self._profiles or step != self._profile_step:
            yield
            return
        report = self._report()
        with report.forward(self._device) if name == "forward" else report.phase(name, self._device):
            yield

    def loss(self, loss: torch.Tensor) -> None:
        """Keep the loss of a micro-step for the next event."""
        if self.monitors.writers:
            self._losses.append(loss.detach())

    def stepped(self, optimizer: Any, rates: list[float], samples: int, seconds: Mapping[str, float]) -> None:
        """Write the events of an optimizer step. seconds: of the measured phases."""
        losses, self._losses = self._losses, []
        if not self.monitors.writers:
            return
        events: list[Event] = []
        if losses:
            mean = sum(float(loss.float()) for loss in losses) / len(losses)
            events.append(("Train/Samples/train_loss", mean, samples))
        events.append(("Train/Samples/lr", rates[0], samples))
        if self._scaled:
            events.append(("Train/Samples/loss_scale", optimizer.loss_scale, samples))
        times = [(name, seconds[name]) for name in _PHASES if name in seconds]
        events += [(f"Train/Samples/elapsed_time_ms_{name}", value * 1e3, samples) for name, value in times]
        self.monitors.write_events(events)

    def profiled(self, step: int, ranks: int, samples: int) -> None:
        """Write the FLOPs of the step that has just ended, if it is the one to profile. samples: of it, all ranks."""
        report, self._flops = self._flops, None
        self.step_flops = self.step_flops if report is None else 3 * report.flops
        if report is not None and self._section.enabled:
            report.write(report.text(step, ranks, samples), self._section.output_file)

    def log_collectives(self, owner: Owner, section: CommsLogger) -> None:
        """Time the collectives of ``owner`` until ``close``, in the process's own logger."""
        from zcomm.profiling.comms import logger

        logger.enabled, logger.verbose, logger.debug = True, section.verbose, section.debug
        logger.prof_all = section.prof_all
        logger.prof_ops = [section.prof_ops] if isinstance(section.prof_ops, str) else list(section.prof_ops)
        logger.watch(owner)
        self._logged = owner

    def close(self) -> None:
        """Close the monitors, and stop the log of collectives. Call it before the optimizer is closed."""
        self.monitors.close()
        logged, self._logged = self._logged, None
        if logged is not None:
            from zcomm.profiling.comms import logger

            logger.unwatch(logged)

    def _report(self) -> FlopsReport:
        if self._flops is None:
            from zcomm.profiling.flops import FlopsReport

            section = self._section
            self._flops = FlopsReport(self._module, section.module_depth, section.top_modules, section.detailed)
        return self._flops
