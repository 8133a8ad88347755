"""``deepspeed.utils.timer``: wall-clock timers by name, samples per second, and ranges in a profiler's trace.

On a CUDA device a timer waits for the device at its start and stop, so that it measures the work launched in between.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from typing_extensions import ParamSpec

from zcomm.compat.deepspeed.accelerator import get_accelerator
from zcomm.compat.deepspeed.utils.logging import log_dist
from zcomm.profiling.comms import trim_mean as trim_mean

FORWARD_MICRO_TIMER = "fwd_microstep"
FORWARD_GLOBAL_TIMER = "fwd"
BACKWARD_MICRO_TIMER = "bwd_microstep"
BACKWARD_GLOBAL_TIMER = "bwd"
BACKWARD_INNER_MICRO_TIMER = "bwd_inner_microstep"
BACKWARD_INNER_GLOBAL_TIMER = "bwd_inner"
BACKWARD_REDUCE_MICRO_TIMER = "bwd_allreduce_microstep"
BACKWARD_REDUCE_GLOBAL_TIMER = "bwd_allreduce"
STEP_MICRO_TIMER = "step_microstep"
STEP_GLOBAL_TIMER = "step"

P = ParamSpec("P")
T = TypeVar("T")


class Timer:
    """One timer. Times are in milliseconds, as in DeepSpeed."""

    def __init__(self, name: str) -> None:
        self.name_ = name
        self.started_ = False
        self._began_s = 0.0
        self._total_ms = 0.0
        self._records: list[float] = []

    def start(self) -> None:
        """Start. Raises: RuntimeError if it runs already."""
        if self.started_:
            raise RuntimeError(f"timer {self.name_} is started already")
        get_accelerator().synchronize()
        self._began_s, self.started_ = time.perf_counter(), True

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """Stop. reset: forget earlier times; record: keep the time for ``mean``. Raises: RuntimeError."""
        if not self.started_:
            raise RuntimeError(f"timer {self.name_} is not started")
        get_accelerator().synchronize()
        passed = (time.perf_counter() - self._began_s) * 1e3
        self._total_ms = passed if reset else self._total_ms + passed
        self.started_ = False
        if record:
            self._records.append(passed)

    def reset(self) -> None:
        """Forget all times, and a start."""
        self.started_, self._total_ms, self._records = False, 0.0, []

    def elapsed(self, reset: bool = True) -> float:
        """Return the milliseconds so far; a running timer continues. reset: restart from 0."""
        running = self.started_
        if running:
            self.stop()
        total = self._total_ms
        if reset:
            self.reset()
        if running:
            self.start()
        return total

    def mean(self) -> float:
        """Return the mean of the recorded times; 0 if there are none."""
        return sum(self._records) / len(self._records) if self._records else 0.0


class SynchronizedWallClockTimer:
    """Timers by name: ``timers("fwd").start()``."""

    def __init__(self) -> None:
        self.timers: dict[str, Timer] = {}

    def get_timers(self) -> dict[str, Timer]:
        """Return all timers by name."""
        return self.timers

    def __call__(self, name: str) -> Timer:
        return self.timers.setdefault(name, Timer(name))

    @staticmethod
    def memory_usage() -> str:
        """Return a line of the device's memory."""
        gib = 2**30
        accelerator = get_accelerator()
        return (
            f" | mem allocated: {accelerator.memory_allocated() / gib:.4f} GB"
            f" | max: {accelerator.max_memory_allocated() / gib:.4f} GB"
        )

    def log(
        self,
        names: Sequence[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Log the times of ``names`` that there are, divided by ``normalizer``, on ``ranks`` (None: rank 0)."""
        if normalizer <= 0:
            raise ValueError(f"normalizer={normalizer} must be above 0")
        shown = " | ".join(
            f"{name}: {self.timers[name].elapsed(reset) / normalizer:.2f}" for name in names if name in self.timers
        )
        log_dist(f"time (ms) | {shown}{self.memory_usage() if memory_breakdown else ''}", ranks or [0])

    def get_mean(self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Return the mean of the recorded times of ``names`` that there are."""
        if normalizer <= 0:
            raise ValueError(f"normalizer={normalizer} must be above 0")
        found = {name: self.timers[name].mean() / normalizer for name in names if name in self.timers}
        if reset:
            for name in found:
                self.timers[name].reset()
        return found


class NoopTimer:
    """A timer, and timers by name, that measure nothing."""

    def __call__(self, name: str) -> NoopTimer:
        return self

    def get_timers(self) -> dict[str, Any]:
        return {}

    def get_mean(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        return {}

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    start = stop = reset = log

    def mean(self, **kwargs: Any) -> float:
        return 0.0

    elapsed = mean


class ThroughputTimer:
    """Samples per second of steps between ``start()`` and ``stop()``, without the first ``start_step`` ones.

    config: its ``enabled`` False measures nothing. batch_size: samples per step.
    """

    def __init__(
        self,
        config: Any,
        batch_size: int,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], None] | None = None,
    ) -> None:
        self.enabled = bool(getattr(config, "enabled", True))
        self.batch_size = max(1, batch_size)
        self.start_step, self.steps_per_output = start_step, steps_per_output
        self._log = logging_fn or (lambda text: log_dist(text, [0]))
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.total_elapsed_time = self.step_elapsed_time = 0.0
        self._began_s: float | None = None

    def update_epoch_count(self) -> None:
        """Count an epoch."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """Start a micro-step."""
        if self.enabled and self.global_step_count >= self.start_step:
            get_accelerator().synchronize()
            self._began_s = time.perf_counter()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """End a micro-step. global_step: it ends a step, too; report_speed: log every ``steps_per_output`` steps."""
        if not self.enabled:
            return
        self.micro_step_count += 1
        self.global_step_count += bool(global_step)
        if self._began_s is None:
            return
        get_accelerator().synchronize()
        passed, self._began_s = time.perf_counter() - self._began_s, None
        self.total_elapsed_time += passed
        self.step_elapsed_time += passed
        if not global_step:
            return
        if report_speed and self.steps_per_output and self.global_step_count % self.steps_per_output == 0:
            now = self.batch_size / self.step_elapsed_time if self.step_elapsed_time else 0.0
            self._log(
                f"epoch={self.epoch_count}/micro_step={self.micro_step_count}/global_step={self.global_step_count}, "
                f"RunningAvgSamplesPerSec={self.avg_samples_per_sec():.4f}, CurrSamplesPerSec={now:.4f}"
            )
        self.step_elapsed_time = 0.0

    def avg_samples_per_sec(self) -> float:
        """Return samples per second of the measured steps; -inf before the first of them, as in DeepSpeed."""
        steps = self.global_step_count - self.start_step
        if steps <= 0 or not self.total_elapsed_time:
            return float("-inf")
        return self.batch_size * steps / self.total_elapsed_time


def instrument_w_nvtx(func: Callable[P, T]) -> Callable[P, T]:
    """Make calls of ``func`` a range under its name, for NVTX on a CUDA device and for torch.profiler."""

    @functools.wraps(func)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        name = f"DeepSpeed:{func.__qualname__}"
        on_device = torch.cuda.is_available() and torch.cuda.is_initialized()
        if on_device:
            torch.cuda.nvtx.range_push(name)
        try:
            with torch.profiler.record_function(name):
                return func(*args, **kwargs)
        finally:
            if on_device:
                torch.cuda.nvtx.range_pop()

    return wrapped
