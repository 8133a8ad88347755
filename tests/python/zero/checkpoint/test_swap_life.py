"""Memory of a swapped optimizer outlives all pending operations of its swap file, after any error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
import zcomm.zero.assemble
import zcomm.zero.layout.tiles
import zcomm.zero.optim_state.nvme
import zcomm.zero.optim_state.ram
from late_swap import LateSwap, watch_leases
from zcomm.zero.cache.span_cache import WorkGroup

WIDTH = 64


@pytest.fixture(autouse=True)
def small_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make 11 spans, of which a step reads 4 ahead."""
    monkeypatch.setattr(zcomm.zero.layout.tiles, "TILE_COUNT", 192)
    monkeypatch.setattr(zcomm.zero.optim_state.nvme, "SPAN_TILES", 2)
    monkeypatch.setattr(zcomm.zero.optim_state.nvme, "WINDOWS", 8)


@pytest.fixture
def swaps(monkeypatch: pytest.MonkeyPatch) -> list[LateSwap]:
    made: list[LateSwap] = []

    class Kept(LateSwap):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(zcomm.zero.assemble, "Swap", Kept)
    return made


def build(folder: Path, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(5)))
    return model, zcomm.ZeroOptimizer(model, lr=0.01, nvme_path=folder, **options)


def step(model: nn.Module, opt: Any) -> None:
    model(torch.ones(4, WIDTH)).square().mean().backward()
    opt.step()
    opt.zero_grad()


@pytest.mark.parametrize("error", [OSError(5, "a drive's error"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_close_after_a_step_that_failed_waits_for_its_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swaps: list[LateSwap], error: BaseException
) -> None:
    """Only the exception's frames keep the reads; the windows must not be freed before they end."""
    at_release = watch_leases(monkeypatch, swaps)
    model, opt = build(tmp_path / "drive", stage=2, offload=zcomm.Offload("nvme"))
    step(model, opt)
    wait, errors = WorkGroup.wait, [error]

    def fail(works: WorkGroup) -> None:
        if swaps[0].pending_reads > 1 and errors:
            raise errors.pop()
        wait(works)

    monkeypatch.setattr(WorkGroup, "wait", fail)
    pending = 0
    with pytest.raises(type(error)):
        try:
            step(model, opt)
        except BaseException:
            pending = swaps[0].pending_reads
            opt.close()
            assert at_release, "the windows are gone"
            raise
    assert pending > 1, "reads were on their way"
    assert not any(at_release)
    assert list((tmp_path / "drive").iterdir()) == []
    zcomm.shutdown()


def test_close_after_a_sweep_that_failed_waits_for_the_shards_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swaps: list[LateSwap]
) -> None:
    """Parameters on NVMe: only the sweep references the next shard's read."""
    model, opt = build(tmp_path / "drive", stage=3, offload=zcomm.Offload("cpu", "nvme", update="step"))
    step(model, opt)

    def interrupt(*args: Any) -> None:
        if swaps[0].pending_reads:
            raise KeyboardInterrupt

    monkeypatch.setattr(zcomm.zero.optim_state.ram.RamState, "_step_tile", interrupt)
    with pytest.raises(KeyboardInterrupt):
        try:
            step(model, opt)
        except BaseException:
            assert swaps[0].pending_reads > 0
            opt.close()
            assert swaps[0].pending_reads == 0
            raise
    zcomm.shutdown()


def test_an_optimizer_that_could_not_be_made_keeps_its_windows_for_its_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swaps: list[LateSwap]
) -> None:
    """Its ``close`` is never called."""
    at_release = watch_leases(monkeypatch, swaps)

    def refuse(*args: Any) -> None:
        raise RuntimeError("after the first weights and state were written")

    monkeypatch.setattr(zcomm.zero.assemble, "GradientReducer", refuse)
    with pytest.raises(RuntimeError, match="after the first"):
        build(tmp_path / "drive", stage=3, offload="nvme")
    swaps[0].close()
    assert at_release and not any(at_release)
    zcomm.shutdown()
