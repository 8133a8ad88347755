"""Saving from a drive that fails on one rank: an OSError on every rank, and the job goes on."""

from __future__ import annotations

import errno
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

import zcomm
from test_zero_broken_step import Faults, FaultySwap, build, step
from zcomm._snapshot import Copy
from zcomm.zero.checkpoint import SaveTask
from zcomm.zero.checkpoint.whole_model import save_model
from zcomm.zero.swap import GradualCopy


def fails_once(function: Callable[..., Any]) -> Callable[..., Any]:
    left = [OSError(errno.EIO, "read of a copy: once")]

    def call(*args: Any) -> Any:
        if left:
            raise left.pop()
        return function(*args)

    return call


def saving_where_rank_1_cannot_read(folder: str) -> None:
    comm, base = zcomm.init(), Path(folder)
    with pytest.MonkeyPatch.context() as patch:
        Faults(patch)
        model, opt = build(3, "nvme", base / "drive")
        for number in range(2):
            step(model, opt, number)
        opt.save(base / "good")

        def fails(save: Callable[[], SaveTask]) -> None:
            if comm.rank == 1:
                FaultySwap.good_reads = 1
            before = sorted(base.iterdir())
            comm.barrier()
            with pytest.raises(OSError, match="once" if comm.rank == 1 else "rank 1: .*once") as told:
                save().wait()
            assert told.value.errno == errno.EIO
            comm.barrier()
            after = sorted(base.iterdir())
            comm.barrier()
            assert after == before

        fails(lambda: opt.save(base / "bad"))
        fails(lambda: save_model(opt._live, base / "weights.safetensors", True))
        if comm.rank == 1:
            for copy in (Copy, GradualCopy):  # which of them depends on the file system
                patch.setattr(copy, "load", fails_once(copy.load))
        with pytest.raises(OSError, match="once" if comm.rank == 1 else "rank 1: .*once"):
            opt.save(base / "bad", wait=False).wait()

        FaultySwap.good_reads = None
        step(model, opt, 2)
        opt.save(base / "next")
        kept = opt.full_state_dict()
        step(model, opt, 3)
        opt.load(base / "next")
        now = opt.full_state_dict()
        assert all(torch.equal(now[name], value) for name, value in kept.items())
        opt.close()
    zcomm.shutdown()


def test_all_ranks_are_told(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    run_ranks(saving_where_rank_1_cannot_read, 2, str(tmp_path))


def test_patience_with_a_save() -> None:
    """The built-in TimeoutError, which says that the save goes on; one of the save's own is told as it is."""
    future: Future[None] = Future()
    task = SaveTask(future)
    with pytest.raises(TimeoutError, match=r"not done after 0\.01 s; it goes on"):
        task.wait(0.01)
    assert not task.done()
    future.set_exception(TimeoutError("rank 1 is late"))
    with pytest.raises(TimeoutError, match="rank 1 is late"):
        task.wait(0.01)
    task.end()  # told already
