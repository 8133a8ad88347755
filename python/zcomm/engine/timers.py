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

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what runs inside as part of phase ``name``."""
        if not self.enabled:
            yield
            return
        start_s = time.perf_counter()
        try:
            yield
        finally:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start_s

    def take(self) -> dict[str, float]:
        """Return the seconds by phase since the last call, and start again from zero."""
        seconds, self._seconds = self._seconds, {}
        return seconds
