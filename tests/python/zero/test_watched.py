"""Numbers of an optimizer on its rank's page equal its memory(), its stats() and ZeRO's formula."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from zcomm.watch import rank as watch
from zcomm.watch.page import TIERS
from zcomm.zero.memory import probe

Run = Callable[..., list[Any]]


def train(optimizer: zcomm.ZeroOptimizer, model: nn.Module, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(2, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def counted(opt: zcomm.ZeroOptimizer) -> tuple[Any, Any, dict[str, Any]]:
    """Return the page's numbers, memory and stats of one moment, because writes of the last step may be pending."""
    while True:
        before, found, memory, after = opt.stats(), probe.numbers(), opt.memory(), opt.stats()
        if before == after:
            return found, memory, after


def compare(folder: str, stage: int, offload: str | None, share: bool, precision: str) -> None:
    comm = zcomm.init(timeout=60)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
    numel = sum(param.numel() for param in model.parameters())
    opt = zcomm.ZeroOptimizer(
        model, stage=stage, offload=offload, nvme_path=folder, share_parameters=share, precision=precision
    )
    dtype = next(model.parameters()).dtype
    model.register_forward_pre_hook(lambda _, args: tuple(arg.to(dtype) for arg in args))
    train(opt, model, 2)
    found, memory, stats = counted(opt)
    for number, tier in enumerate(TIERS):
        slots = memory[tier].pop("slots")
        assert found.slots[number] == slots and found.memory[number] == sum(memory[tier].values()), tier
    formula = zcomm.zero.memory_formula(
        numel, comm.world_size, stage, precision, offload, share_parameters=share and stage > 0
    )
    assert found.plan == tuple(float(sum(formula[tier].values())) for tier in TIERS)
    assert (found.steps, found.step) == (2, 2)
    assert found.comm_s == pytest.approx(stats["comm_s"]) and found.swap_s == pytest.approx(stats["swap_s"])
    assert sum(drive.read_nbytes for drive in found.drives) == stats["swap_read_nbytes"]
    assert sum(drive.written_nbytes for drive in found.drives) == stats["swap_written_nbytes"]
    assert bool(found.drives) is (offload == "nvme") and all(folder in drive.path for drive in found.drives)

    train(opt, model, 1)
    moved = probe.numbers().link_nbytes - found.link_nbytes
    grads = numel * (4 if precision == "fp32" else 2)
    pages = 4096 * comm.world_size * len(opt._live.geometry.buckets) if stage == 3 and offload == "nvme" else 0
    params = grads if stage == 0 or (stage < 3 and not share) else 0
    whole = grads + params
    assert whole <= moved <= 1.1 * whole + 4096 + pages or (stage == 3 and not share and moved > grads)
    opt.close()
    zcomm.shutdown()


CASES = [
    (0, None, True, "fp32"), (1, None, True, "fp32"), (2, "nvme", True, "fp32"), (2, None, False, "bf16"),
    (3, None, True, "fp32"), (3, None, False, "fp32"), (3, "nvme", True, "bf16"),
]  # fmt: skip


@pytest.mark.parametrize(("stage", "offload", "share", "precision"), CASES)
def test_the_page_has_the_optimizers_own_numbers(
    run_ranks: Run, tmp_path: Any, stage: int, offload: str | None, share: bool, precision: str
) -> None:
    run_ranks(compare, 2, str(tmp_path), stage, offload, share, precision)


@pytest.mark.usefixtures("world_of_one")
def test_optimizers_are_added_up_and_a_closed_one_is_left_out() -> None:
    models = [nn.Linear(64, 64), nn.Linear(64, 32)]
    one, two = (zcomm.ZeroOptimizer(model, stage=1) for model in models)
    train(one, models[0], 3)
    train(two, models[1], 1)
    both = probe.numbers()
    assert both.steps == both.step == 3 and both.link_nbytes == 0, "a world of one moves nothing"
    two.close()
    alone = probe.numbers()
    assert 0 < alone.memory[0] < both.memory[0] and alone.plan[0] < both.plan[0]
    one.close()


@pytest.mark.usefixtures("world_of_one")
def test_tiers_by_parameter_have_no_plan() -> None:
    model = nn.Linear(64, 64)
    opt = zcomm.ZeroOptimizer(model, stage=1, offload=zcomm.Offload(lambda name, param: "cpu"))
    train(opt, model, 1)
    assert all(math.isnan(nbytes) for nbytes in probe.numbers().plan)
    opt.close()


@pytest.mark.usefixtures("world_of_one")
def test_a_page_costs_no_records_between_micro_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(64, 64)
    opt = zcomm.ZeroOptimizer(model, stage=1, grad_accum=4)
    page, calls = watch.current(), []
    assert page is not None
    monkeypatch.setattr(page, "stepped", lambda collect: calls.append(opt.step_count))
    train(opt, model, 8)
    assert calls == [1, 2]
    opt.close()
