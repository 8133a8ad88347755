"""torch_profiler: zcomm's operations as ranges in the trace of torch.profiler.

Methods are replaced while the block runs, as by ``profile``, so outside of it nothing costs time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zcomm.profiling.taps import COLLECTIVES, Taps

_MESSAGES = ("send", "recv", "empty", "split", "duplicate")
_SWAPS = ("write", "read", "wait", "snapshot")
_OPTIMIZER = ("save", "load", "state_dict", "load_state_dict", "full_state_dict")


class _Ranges:
    """Receiver of spans that forwards them to torch.profiler, if it runs."""

    def span(self, lane: str, name: str) -> torch.profiler.record_function:
        return torch.profiler.record_function(f"zcomm {lane}: {name}")


@contextmanager
def torch_profiler() -> Iterator[None]:
    """Mark zcomm's operations as ranges in the trace of torch.profiler while the block runs. Not collective.

    A range is named "zcomm LANE: WORDS", for example "zcomm communication: all_reduce loss". Lanes are "communication"
    (calls of communicators), "waiting" (for gradients, weights, units, the swap), "compute" (steps of optimizers) and
    "swap" (calls of SwapFile). Optimizers have to be open when the block begins. An asynchronous call is marked while
    it starts; its ``wait()`` is a separate range. Inside the block a call takes some microseconds longer.
    """
    from zcomm.comm.communicator import Communicator
    from zcomm.comm.work import DeviceWork, Work
    from zcomm.memory.swap_file import SwapFile
    from zcomm.zero import ZeroOptimizer
    from zcomm.zero.registry import open_optimizers

    with Taps(_Ranges()) as taps:
        taps.calls(Communicator, (*sorted(COLLECTIVES), *_MESSAGES), "communication")
        for kind in (Work, DeviceWork):
            taps.calls(kind, ("wait",), "waiting")
        taps.calls(SwapFile, _SWAPS, "swap")
        taps.calls(ZeroOptimizer, _OPTIMIZER, "compute")
        for optimizer in open_optimizers():
            taps.optimizer(optimizer)
        yield
