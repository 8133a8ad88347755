"""Rows of a large weight that are in flight when an interrupt ends their use."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm

Run = Callable[..., list[Any]]


class Stop(Exception):
    """Error that a signal's handler raises."""


def stop(*_: Any) -> None:
    raise Stop


def left_alone(folder: str, kind: str, update: Any) -> None:
    """Close on rank 0 while it waits for rank 1: for rows, for an agreement on an embedding's rows, or for a unit.

    Rank 1 does not call until then. update: with "forward" the last step's updates are deferred, too."""
    deadline_s = 30.0
    comm, closed = zcomm.init(timeout=deadline_s), Path(folder, "closed")
    embeds = kind == "embedding"
    x = torch.ones(2, 64, dtype=torch.int64 if embeds else torch.float32)
    layer = nn.Embedding(4096, 64) if embeds else nn.Linear(64, 4096 if kind == "linear" else 64, bias=False)
    model = nn.Sequential(layer, *(nn.Linear(64, 64) for _ in range(3 * (kind == "whole"))))
    units = zcomm.zero.Units(max_bytes="256KiB", min_bytes=0, rows=kind != "whole")
    offload = zcomm.zero.Offload("nvme", "nvme", update=update)
    opt = zcomm.ZeroOptimizer(model, stage=3, offload=offload, nvme_path=folder, units=units, prefetch=0)
    if update == "forward":
        model(x).sum().backward()
        opt.step()
    if comm.rank == 0:
        signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        with pytest.raises(Stop):
            model(x)
        assert opt._parts.store.is_waiting(), "close() gives the rank up that does not come"
        begin = time.monotonic()
        opt.close()
        assert time.monotonic() - begin < deadline_s / 2, "it has not waited for the deadline"
        closed.touch()
    while not closed.exists():
        time.sleep(0.01)
    opt.close()


@pytest.mark.parametrize("update", ["step", "forward"])
@pytest.mark.parametrize("kind", ["linear", "embedding", "whole"])
def test_close_does_not_wait_for_a_rank_that_does_not_come(
    run_ranks: Run, tmp_path: Path, kind: str, update: str
) -> None:
    run_ranks(left_alone, 2, str(tmp_path), kind, update)
