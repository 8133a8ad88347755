"""Accelerate's standard loop over zcomm: its schedule over the program's optimizer counts, skipped steps are known."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import accelerate_dummies
import accelerate_steps
from tiers import slow
from zcomm.schedulers import WarmupDecayLR

SCRIPT = Path(accelerate_steps.__file__)


def run(folder: Path, *options: str, script: Path = SCRIPT) -> tuple[dict[str, Any], str]:
    """Return the results of the script's one rank, and its stderr. (Without GPUs Accelerate runs one process.)"""
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed")
    launcher = [sys.executable, "-m", "zcomm.cli.main", "run", "-n", "1", "--no-prefix", str(script)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run([*launcher, str(folder), *options], capture_output=True, text=True, timeout=110, env=env)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    return json.loads(line.partition(" ")[2]), done.stderr


def by_torch() -> dict[str, torch.Tensor]:
    model = accelerate_steps.network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    x = torch.randn(200, 8, generator=torch.Generator().manual_seed(1))
    for step in range(accelerate_steps.STEPS):
        for micro in range(accelerate_steps.ACCUMULATION):
            batch = x.split(4)[step * accelerate_steps.ACCUMULATION + micro]
            (model(batch).square().mean() / accelerate_steps.ACCUMULATION).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return {name: param.detach().flatten() for name, param in model.named_parameters()}


@pytest.mark.parametrize("offload", [slow("none"), slow("cpu")])
def test_the_schedule_counts(tmp_path: Path, offload: str) -> None:
    result, stderr = run(tmp_path, "fp32", offload)
    steps = accelerate_steps.STEPS
    assert result["rates"] == [0.1 * 0.5 ** (step + 1) for step in range(steps)] and result["steps"] == steps
    assert not any(result["skipped"])
    for name, wanted in by_torch().items():
        torch.testing.assert_close(torch.tensor(result["weights"][name]), wanted, rtol=1e-4, atol=1e-5)
    # With offload Accelerate makes another optimizer of the same groups, so the schedule's optimizer takes no step.
    assert offload == "cpu" or "lr_scheduler.step()" not in stderr


def test_the_schedule_waits_in_a_skipped_step(tmp_path: Path) -> None:
    result, _ = run(tmp_path, "fp16", "none")
    assert result["skipped"] == [step == accelerate_steps.OVERFLOW for step in range(accelerate_steps.STEPS)]
    assert result["rates"] == [0.05, 0.025, 0.025, 0.0125, 0.00625, 0.003125]


@pytest.mark.parametrize("how", [slow("section"), slow("callable"), slow("groups")])
def test_dummies_stand_for_the_configuration(tmp_path: Path, how: str) -> None:
    """DummyOptim passes its parameters to initialize(); DummyScheduler passes nothing, or its callable."""
    result, _ = run(tmp_path, how, script=Path(accelerate_dummies.__file__))
    model = accelerate_steps.network()
    params = list(model.parameters())
    groups = [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.0}] if how == "groups" else params
    rate, decay, rates = accelerate_dummies.RATE, accelerate_dummies.DECAY, []
    optimizer = torch.optim.AdamW(groups, lr=rate, weight_decay=decay)
    schedule: Any = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    if how == "section":
        schedule = WarmupDecayLR(optimizer, 10, 0.0, rate, 3, "linear")
    x = torch.randn(200, 8, generator=torch.Generator().manual_seed(1))
    for batch in x.split(4)[: accelerate_dummies.STEPS]:
        model(batch).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        rates.append(optimizer.param_groups[0]["lr"])
    assert result["rates"] == pytest.approx(rates) and len(set(rates)) > 3
    for name, param in model.named_parameters():
        torch.testing.assert_close(
            torch.tensor(result["weights"][name]), param.detach().flatten(), rtol=1e-4, atol=1e-5
        )
