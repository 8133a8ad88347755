"""Seconds in `zcomm plan`: the work of a micro-batch, its time at measured speeds, and a run next to its plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zcomm.cli.main import main
from zcomm.machine import speeds, tuning
from zcomm.machine.speeds import Speeds
from zcomm.planning import Work, estimate, step_time, work_of
from zcomm.planning.work import Operation

ROW = Speeds(2, {"fp32": 1e9, "bf16": 2e9, "fp16": 1e8}, near_bps=1e12, far_bps=1e10, start_s=1e-6, reduce_bps=2e9)


def keep(folder: Path, monkeypatch: pytest.MonkeyPatch, rows: list[Speeds]) -> None:
    monkeypatch.setenv("ZCOMM_TUNING", str(folder / "tuning.json"))
    monkeypatch.setenv("ZCOMM_SWAP_TUNING", str(folder / "swap.json"))
    speeds.save(rows)


def made() -> tuple[nn.Module, torch.Tensor]:
    """For --model."""
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)), torch.zeros(32, 64)


def test_work_is_counted_exactly() -> None:
    with torch.device("meta"):
        model, x = made()
        work = work_of(model, x)
    products = [operation for operation in work if operation.flops]
    # forward: 2; backward: both weights' gradients, and that of the second's input
    assert len(products) == 5 and work.flops == 5 * 2 * 32 * 64 * 128
    forward = products[0]
    assert forward == Operation("addmm", 2 * 32 * 64 * 128, 4 * (128 + 32 * 64 + 64 * 128 + 32 * 128))
    assert {"tanh", "tanh_backward"} <= {operation.name for operation in work}
    views = [operation for operation in work if operation.name in ("view", "t", "expand")]
    assert len(views) > 3 and all(one.flops == one.nbytes == 0 for one in views), "views cost their start alone"
    assert "detach" not in {operation.name for operation in work}
    assert all(param.grad is None for param in model.parameters())


def test_recomputation_is_work() -> None:
    with torch.device("meta"):
        model, x = made()
        plain = work_of(model, x).flops

        class Recomputed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = model

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return checkpoint(self.inner, x, use_reentrant=False)

        again = work_of(Recomputed(), x).flops
    assert again >= plain + 2 * 32 * 64 * 128, "the forward is run again, where its results are needed"


def test_an_operation_takes_what_it_lacks_most() -> None:
    work = Work([Operation("mm", 10**9, 1000), Operation("add", 0, 10**10), Operation("mul", 0, 10**6)])
    assert work.seconds(replace(ROW, slowdown=1.5), "fp32") == pytest.approx(1.5 * work.seconds(ROW, "fp32"))
    assert work.seconds(ROW, "fp32") == pytest.approx(1.0 + 1.0 + 1e-6 + 3e-6)
    assert work.seconds(ROW, "bf16") == pytest.approx(0.5 + 1.0 + 1e-6 + 3e-6)


def test_ranks_share_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Speeds(1, {"fp32": 7.0}, 1.0, 1.0, 1.0, 1.0)
    keep(tmp_path, monkeypatch, [alone, ROW])
    assert speeds.load(1) == alone and speeds.load(2) == ROW
    four = speeds.load(4)
    assert four is not None and four.far_bps == ROW.far_bps / 2 and four.flops["fp32"] == ROW.flops["fp32"] / 2
    assert four.start_s == ROW.start_s
    monkeypatch.setattr(tuning, "machine", lambda: "another")
    assert speeds.load(2) is None, "they are of the machine where they were measured"
    speeds.path().write_text("{")
    assert speeds.load(2) is None


@pytest.mark.parametrize(("stage", "offload"), [(0, None), (1, None), (2, "nvme"), (3, "nvme")])
def test_seconds_of_a_step(stage: int, offload: str | None) -> None:
    count, world = 10**9, 2
    found = estimate(count, stage, offload, world, accumulation=3)
    work = Work([Operation("mm", 10**10, 1000)])
    time = step_time(found, ROW, work, "fp32", 3, (4e9, 2e9))
    assert time is not None and time.compute_s == pytest.approx(3 * 10, rel=1e-3)
    reduced = 3 * (4 * count / 2e9 + 8 * count / 1e10 / 2)  # the part that the other rank reduces is copied
    assert time.communication_s == pytest.approx(reduced + (4 * count / 2e9 if stage == 0 else 0))
    # the norm reads gradients; the pass reads gradients, weights, m and v, and writes all but gradients
    assert time.update_s == pytest.approx(count // world * (4 + 28) / 1e10)
    state = 8 * count // world
    params = 4 * count // world if stage == 3 else 0
    of_state = 2 * (state / 4e9 + state / 2e9) if offload else 0.0
    of_params = 2 * (6 * params / 4e9 + params / 2e9)  # the update is in the gather of the next forward
    assert time.swap_s == pytest.approx(of_state + of_params)
    wanted = max(time.compute_s + time.communication_s, of_params) + max(time.update_s, of_state)
    assert time.step_s == pytest.approx(wanted)
    assert step_time(found, ROW, None, "fp32", 3, (4e9, 2e9)).step_s is None  # type: ignore[union-attr]
    assert (step_time(found, ROW, work, "fp32", 3) is None) == (offload == "nvme"), "an unknown drive has no time"


def test_each_gradient_has_a_hook() -> None:
    with torch.device("meta"):
        one, many = nn.Linear(600, 600, bias=False), nn.ParameterList(torch.empty(600) for _ in range(600))
    times = [step_time(estimate(model, 1, None, 2), ROW, None, "fp32", 2) for model in (one, many)]
    assert times[0] is not None and times[1] is not None
    more = times[1].communication_s - times[0].communication_s
    assert more >= 0.99 * 2 * 3 * 599 * ROW.start_s


def test_the_table_has_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keep(tmp_path, monkeypatch, [ROW])
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    command = ["plan", "--model", "test_plan_time:made", "--stage", "1,2", "--offload", "none", "--world", "2"]
    assert main(command) == 0
    said = capsys.readouterr().out
    header = next(line for line in said.splitlines() if line.split()[:1] == ["world"])
    assert header.split()[-5:] == ["compute", "comm", "update", "step", "fits"]
    row = next(line for line in said.splitlines() if line.split()[:2] == ["2", "1,2"])
    assert row.count(" ms") == 4 and "at this machine's measured speeds" in said
    assert main(["plan", "--params", "1e9", "--stage", "1", "--offload", "none", "--world", "2"]) == 0
    assert "compute and step need --model with the inputs" in capsys.readouterr().out
    speeds.path().unlink()
    assert main(command) == 0
    assert "zcomm doctor --calibrate measures this machine" in capsys.readouterr().out


def test_compare_has_the_seconds_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keep(tmp_path, monkeypatch, [ROW])
    config = {
        "kind": "config",
        "world_size": 2,
        "stage": 2,
        "offload": "none",
        "precision": "fp32",
        "nvme_path": None,
        "layers": 2,
        "heads": 2,
        "width": 64,
        "context": 64,
        "batch": 8,
        "accum": 1,
        "bucket_mb": 25.0,
    }
    step = {"kind": "step", "compute_s": 0.5, "comm_s": 0.1, "swap_s": 0.0, "step_s": 0.6}
    late = {**step, "step_s": 9.0}
    summary: dict[str, Any] = {"kind": "summary", "memory": {}, "formula": {}, "stats": {}, "train_s": 1.0}
    summary["memory"] = summary["formula"] = {"device": {"parameters": 4096}}
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(map(json.dumps, [config, late, late, late, step, step, step, summary])))
    assert main(["plan", "--compare", str(path)]) == 0
    rows = {line[:20].strip(): line.split() for line in capsys.readouterr().out.splitlines()}
    found = next(words for name, words in rows.items() if name.endswith("step") and "per" not in name)
    assert found[3:5] == ["600", "ms"], "the median without the first steps"
    assert "planned" in str(rows) and "communication" in str(rows)
