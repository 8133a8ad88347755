"""Seconds spent per phase between two reports; off by default, then it costs one branch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class PhaseTimers:
    """Sums of wall-clock seconds of named phases. On CUDA each phase ends with a device synchronisation, when on."""

    def __init__(self, enabled: bool, device: torch.device) -> None:
        self.enabled = enabled
        self._device = device
        self._seconds: dict[str, float] = {}
        self._of_step: dict[str, float] = {}  # since the last call of last()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the block's seconds to phase ``name``."""
        if not self.enabled:
            yield
            return
        start_s = time.perf_counter()
        try:
            yield
        finally:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            passed_s = time.perf_counter() - start_s
            for sums in (self._seconds, self._of_step):
                sums[name] = sums.get(name, 0.0) + passed_s

    def take(self) -> dict[str, float]:
        """Return the seconds by phase since the last call, and start again from zero."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    def last(self) -> dict[str, float]:
        """Return the seconds by phase since the last call of this method."""
        seconds, self._of_step = self._of_step, {}
        return seconds


class ThroughputTimer:
    """Samples per second, from a forward to the end of its step; the time between steps (data) is left out.

    batch_size: samples per optimizer step, all ranks. The first WARMUP steps do not count. Wall-clock time of the host:
    nothing is synchronized for it. The names are DeepSpeed's.
    """

    WARMUP = 2

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.epoch_count = 0
        self.global_step_count = 0
        self.total_elapsed_time = 0.0  # seconds
        self._samples = 0
        self._start_s: float | None = None

    def start(self) -> None:
        """Start the clock, unless it runs."""
        if self._start_s is None:
            self._start_s = time.perf_counter()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """Stop the clock. global_step: an optimizer step has ended. report_speed: without effect: it prints nothing."""
        if self._start_s is None:
            return
        elapsed_s, self._start_s = time.perf_counter() - self._start_s, None
        if self.global_step_count >= self.WARMUP:
            self.total_elapsed_time += elapsed_s
            self._samples += self.batch_size if global_step else 0
        self.global_step_count += global_step

    def update_epoch_count(self) -> None:
        """Count an epoch."""
        self.epoch_count += 1

    def avg_samples_per_sec(self) -> float:
        """Return the mean samples per second of all steps after the first WARMUP; 0.0 before the first of these."""
        return self._samples / self.total_elapsed_time if self._samples else 0.0
