"""profile: a context manager that taps all open optimizers, and writes one file for all ranks.

Collective on entry and on exit (the ranks' clocks are set equal by a barrier; rank 0 gathers and writes). A block that
raises is not collective on exit: each rank writes its own file, PATH with ``.rankN`` in it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zcomm.profiling.taps import Taps
from zcomm.profiling.trace import Trace

if TYPE_CHECKING:
    from zcomm.zero.registry import Owner


class Profile:
    """Result of ``profile``. ``steps``: optimizer steps that were seen; ``wall_s``: seconds in the block."""

    def __init__(self, path: Path, trace: Trace) -> None:
        self.path = path
        self.steps = 0
        self.wall_s = 0.0
        self._trace = trace

    def __repr__(self) -> str:
        parts = ", ".join(f"{name} {value:.3g} s" for name, value in self.seconds().items() if value)
        return f"<zcomm.profile {self.path}: {self.steps} steps in {self.wall_s:.3g} s{f'; {parts}' if parts else ''}>"

    def seconds(self) -> dict[str, float]:
        """Return this rank's seconds of compute, waiting, gathering, communication and swap.

        hidden: the part of the last three during which the main thread was not waiting.
        """
        return self._trace.seconds()


@contextmanager
def profile(path: str | os.PathLike[str], optimizers: Sequence[Owner] | None = None) -> Iterator[Profile]:
    """Write a timeline of the block to ``path`` (JSON, for https://ui.perfetto.dev). All ranks call it.

    optimizers: to profile; None: all that are open in this process.
    Raises: ValueError if there is none; OSError on rank 0 if the file cannot be written.
    """
    from zcomm.zero.agree import all_values
    from zcomm.zero.registry import open_optimizers, parts_of, train_of

    tapped = list(open_optimizers() if optimizers is None else optimizers)
    if not tapped:
        raise ValueError("profile(): no ZeroOptimizer is open; make it before the profile")
    comm = parts_of(tapped[0]).comm
    before = sum(train_of(optimizer).step_count for optimizer in tapped)
    comm.barrier(name="a profile begins")
    trace = Trace()  # its origin comes before the taps: threads that gather may begin between two of these
    result = Profile(Path(path), trace)
    whole = False
    try:
        with Taps(trace) as taps:
            taps.backward()
            for optimizer in tapped:
                taps.optimizer(optimizer)
            yield result
            result.wall_s = (time.perf_counter_ns() - trace.origin) / 1e9
        whole = True
    finally:
        result.steps = sum(train_of(optimizer).step_count for optimizer in tapped) - before
        events = trace.events(comm.rank)
        if not whole:
            alone = result.path.with_suffix(f".rank{comm.rank}{result.path.suffix}")
            write_events(alone, events)
    every = all_values(comm, events, "the profile of each rank")
    if comm.rank == 0:
        write_events(result.path, [event for of_rank in every for event in of_rank])


def write_events(path: Path, events: list[dict[str, Any]]) -> None:
    """Write a file for Perfetto, readable only by its owner. events: of all ranks, see Trace. Raises: OSError."""
    from zcomm.zero.files import durable

    durable.make_folders(path.absolute().parent)
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
    durable.write_file(path.absolute(), text.encode())
