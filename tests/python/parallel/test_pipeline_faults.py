"""Faults of a pipeline: all ranks raise one error with its stage and micro-batch, and none waits for ever.

Each job runs in a world of its own.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zcomm

Run = Callable[..., list[Any]]


class Failing(nn.Module):
    """A layer that calls ``fault`` in forward number ``number``."""

    def __init__(self, number: int, fault: Callable[[], None]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.left, self.fault = number, fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.left == 0:
            self.fault()
        self.left -= 1
        return x * self.weight


def fail() -> None:
    raise ValueError("a bad sample")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sleep() -> None:
    time.sleep(6)


def job(sizes: dict[str, int], stage: int, fault: Callable[[], None], timeout: float, schedule: str) -> str:
    """Run two steps; the second fails in forward of micro-batch 2 on ``stage``. Returns: the error."""
    comm = zcomm.init(timeout=timeout)
    mesh = zcomm.ProcessMesh(comm, **sizes)
    at = 6 if mesh.ranks("data")[0] == comm.rank else 100  # one of the replicas fails
    layers = [Failing(at if number == stage else 100, fault) for number in range(mesh.size("pipe"))]
    pipe = zcomm.parallel.pipeline(layers, mesh, 4, schedule, loss=nn.functional.mse_loss, cut="uniform")
    opt = zcomm.ZeroOptimizer(pipe.module, stage=1, mesh=mesh)
    x = torch.ones(8, 4)
    pipe.step(x, x)
    opt.step()
    opt.zero_grad()
    try:
        pipe.step(x, x)
    except Exception as error:
        with pytest.raises(RuntimeError, match="has failed"):
            pipe.step(x, x)
        opt.close()
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_failed_pass_is_the_error_of_all(schedule: str, run_ranks: Run) -> None:
    for stage in (0, 1):
        found = run_ranks(job, 2, {"data": 1, "pipe": 2}, stage, fail, 60.0, schedule)
        wanted = (
            f"RuntimeError: pipeline step 2: rank {stage} failed, ValueError in stage {stage}, micro-batch 2, forward"
        )
        assert all(text == f"{wanted}: a bad sample" for text in found), found


@pytest.mark.slow
def test_a_failed_pass_is_the_error_of_other_replicas(run_ranks: Run) -> None:
    found = run_ranks(job, 4, {"data": 2, "pipe": 2}, 1, fail, 60.0, "1f1b")
    assert all(
        "rank 1 failed, ValueError in stage 1, micro-batch 2, forward: a bad sample" in each for each in found
    ), found


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"data": 1, "pipe": 2}, {"data": 2, "pipe": 2}])
def test_a_dead_stage_is_named(sizes: dict[str, int], run_ranks: Run) -> None:
    start = time.monotonic()
    world = sizes["data"] * sizes["pipe"]
    results = run_ranks(job, world, sizes, 1, die, 60.0, "1f1b", check=False)
    assert results[1].exitcode == -9
    for result in results[:1] + results[2:]:
        assert result.value is not None, result.describe()
        assert "PeerLost" in result.value and "pipeline step 2" in result.value, result.value
        assert "lost: stage 1 (rank 1)" in result.value and "micro-batch" in result.value, result.value
    assert time.monotonic() - start < 60


@pytest.mark.slow
def test_a_late_stage_ends_the_step_at_the_deadline(run_ranks: Run) -> None:
    found = run_ranks(job, 2, {"data": 1, "pipe": 2}, 1, sleep, 2.0, "1f1b", check=False)
    for result in found:
        text = result.value or result.error.message
        assert "stage" in text and "micro-batch" in text, text


def differ() -> None:
    comm = zcomm.init(timeout=60)
    mesh = zcomm.ProcessMesh(pipe=2)
    make = zcomm.parallel.pipeline

    def model() -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    options: dict[str, Any] = {"loss": nn.functional.mse_loss}
    with pytest.raises(ValueError, match=r"microbatches is 5 on stage 1 \(rank 1\), but 4 on stage 0 \(rank 0\)"):
        make(model(), mesh, 4 + comm.rank, **options)
    with pytest.raises(ValueError, match=r"schedule is gpipe on stage 1 \(rank 1\), but 1f1b on stage 0"):
        make(model(), mesh, 4, ["1f1b", "gpipe"][comm.rank], **options)
    with pytest.raises(ValueError, match=r"bounds is \[0, 1, 3\] on stage 1 .* but \[0, 2, 3\] on"):
        make([*model(), nn.Tanh()], mesh, 4, cut=[[0, 2, 3], [0, 1, 3]][comm.rank], **options)
    with pytest.raises(ValueError, match=r"stage 0 and 2 \(rank 0\): 2 layers cannot be cut into 4 stages"):
        make(model(), mesh, 4, "interleaved", **options)
    with pytest.raises(ValueError, match=r"interleaved.* multiple of 2 micro-batches, not 3"):
        make(model(), mesh, 3, "interleaved", **options)
    pipe = make(model(), mesh, 4, **options)
    x = torch.ones(8, 4)
    with pytest.raises(ValueError, match=r"8 samples on stage 0 \(rank 0\), 7 samples on stage 1 \(rank 1\)"):
        pipe.step(x if pipe.is_first else None, x[:7] if pipe.is_last else None)
    with pytest.raises(ValueError, match=r"stage 1 \(rank 1\): the last stage needs a target"):
        pipe.step(x)
    with pytest.raises(ValueError, match=r"stage 0 \(rank 0\): inputs has 3 samples: 4 micro-batches need 4"):
        pipe.step(x[:3] if pipe.is_first else None, x if pipe.is_last else None)
    with pytest.raises(ValueError, match=r"training is False on stage 1 \(rank 1\), but True on stage 0"):
        (pipe.step if pipe.is_first else pipe.eval)(x, x)
    with torch.set_grad_enabled(comm.rank == 0), pytest.raises(ValueError, match=r"stage 1 \(rank 1\): .*no_grad"):
        pipe.step(x, x)
    assert pipe.step(x, x).item() > 0  # none of these errors ends the pipeline
    pipe.close()
    with pytest.raises(RuntimeError, match="closed"):
        pipe.step(x, x)


def no_gradients() -> None:
    """Run a loss without gradients, and outputs that are written to while they are sent: both are errors."""
    comm = zcomm.init(timeout=60)
    mesh = zcomm.ProcessMesh(pipe=2)
    x = torch.ones(8, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = zcomm.parallel.pipeline(model, mesh, 4, loss=lambda output, target: output.detach().sum())
    with pytest.raises(RuntimeError, match=r"stage 1, micro-batch 0, .*the loss depends on no trained weight"):
        pipe.step(x, x)
    pipe.close()
    kept = torch.zeros(1024, 1024)  # too large to be copied before its receiver comes

    def overwrite(_: torch.Tensor) -> torch.Tensor:
        return kept.add_(1)

    pipe = zcomm.parallel.pipeline([overwrite, nn.Linear(1024, 1)], mesh, 4, "gpipe", loss=None, cut="uniform")
    pipe.loss = lambda output, target: output.mean()
    with pytest.raises(RuntimeError, match=r"stage 0, .*changed while they were sent"):
        pipe.step(x, x)
    pipe.close()
    del comm


def test_a_loss_without_gradients_and_outputs_that_change(run_ranks: Run) -> None:
    run_ranks(no_gradients, 2)


def test_stages_that_differ_are_named(run_ranks: Run) -> None:
    run_ranks(differ, 2)
