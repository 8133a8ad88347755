"""Streams: torch's streams of one CUDA device, as far as messages and process groups need them.

Thread rule: "current" is the calling thread's.
"""

from __future__ import annotations

from typing import Any

import torch


class Streams:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def current(self) -> Any:
        return torch.cuda.current_stream(self.device)

    def on(self, stream: Any) -> Any:
        """Return a context in which ``stream`` is the current stream."""
        return torch.cuda.stream(stream)

    def record(self) -> Any:
        """Record an event at the end of the current stream."""
        return self.current().record_event()

    def wait(self, event: Any) -> None:
        """Make the current stream wait for ``event``."""
        self.current().wait_event(event)

    def page_locked(self, like: torch.Tensor) -> torch.Tensor:
        """Allocate pinned host memory of this shape and dtype; it may be dropped before its copies have ended."""
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
