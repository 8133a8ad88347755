"""Rows of a large weight that are on their way when an interrupt ends their use."""

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


def left_alone(folder: str, kind: str) -> None:
    """Close on rank 0 while it waits for rank 1, for its rows or to agree on those of an embedding. Rank 1 does not
    come until then."""
    comm, closed = zcomm.init(timeout=60), Path(folder, "closed")
    embeds = kind == "embedding"
    model = nn.Sequential(nn.Embedding(4096, 64) if embeds else nn.Linear(64, 4096, bias=False))
    units = zcomm.zero.Units(max_bytes="256KiB", min_mb=0, rows=True)
    opt = zcomm.ZeroOptimizer(model, stage=3, offload="nvme", nvme_path=folder, units=units)
    if comm.rank == 0:
        signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        with pytest.raises(Stop):
            model(torch.ones(2, 64, dtype=torch.int64 if embeds else torch.float32))
        assert opt._parts.store.is_waiting(), "close() gives the rank up that does not come"
        opt.close()
        closed.touch()
    while not closed.exists():
        time.sleep(0.01)
    opt.close()


@pytest.mark.parametrize("kind", ["linear", "embedding"])
def test_close_does_not_wait_for_rows_of_a_rank_that_does_not_come(run_ranks: Run, tmp_path: Path, kind: str) -> None:
    run_ranks(left_alone, 2, str(tmp_path), kind, timeout_s=100)
