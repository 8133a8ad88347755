"""`zcomm plan`: its bytes equal opt.memory() and the swap file's; its trace, output and refusals."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from tiers import long
from zcomm.cli import plan
from zcomm.cli.main import build_parser, main
from zcomm.planning import estimate, saved_nbytes
from zcomm.zero.memory.usage import memory_formula

Run = Callable[..., list[Any]]
STEPS = 2  # step() goes another way in each


class Net(nn.Module):
    """Blocks, a tied and a frozen parameter, sizes that nothing divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(301, 130)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(130, 517), nn.GELU(), nn.Linear(517, 130)) for _ in range(4)
        )
        self.frozen = nn.Parameter(torch.ones(130), requires_grad=False)
        self.head = nn.Linear(130, 301, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x) * self.frozen
        for block in self.blocks:
            h = h + block(h)
        return self.head(h)


def made() -> tuple[nn.Module, torch.Tensor]:
    """For --model."""
    return Net(), torch.zeros(2, 8, dtype=torch.int64)


UPDATES: list[Any] = ["step", "auto"]
CASES = [
    *((stage, offload, "fp32", "adamw") for stage, offload in product((0, 1, 2, 3), ("none", "cpu", "nvme"))),
    (3, "nvme", "bf16", "lion"),
    (2, "nvme", "fp16", "adamw"),
    (1, "none", "bf16", "sgd"),
    (2, "nvme", "bf16", "adamw-8bit"),
    (1, zcomm.Offload(gradients="nvme"), "fp32", "sgd"),
    (2, zcomm.Offload("nvme", gradients="nvme"), "bf16", "adamw"),
    (3, zcomm.Offload("nvme", "nvme", gradients="nvme"), "bf16", "adamw"),
    (3, zcomm.Offload("nvme", "nvme", gradients="nvme", update="forward"), "bf16", "adamw"),
    (3, zcomm.Offload("nvme", "nvme", gradients="nvme", update="backward"), "bf16", "adamw"),
]


def moved_by(opt: zcomm.ZeroOptimizer) -> dict[str, float]:
    """Return the counters, including the last step's writes and reads ahead."""
    assert opt._parts is not None
    gather = getattr(opt._parts.store, "gather", None)
    if gather is not None:
        gather.synchronize()
    opt._parts.swap.wait()  # of _live an update that waits for a forward would be made
    return opt.stats()


def measure(folder: str) -> list[Any]:
    zcomm.init(timeout=60)
    found = []
    for stage, offload, precision, name in CASES:
        model = Net()
        kind, _, narrow = name.partition("-")
        opt = zcomm.ZeroOptimizer(
            model,
            kind,
            stage=stage,
            offload=offload,
            nvme_path=folder,
            precision=precision,
            bucket_mb=0.3,
            lr=1e-3,
            **({"state_dtype": narrow} if narrow else {}),
        )
        before: dict[str, float] = {}
        first = 3 if isinstance(offload, zcomm.Offload) and offload.update == "backward" else 1  # after watched ones
        for number in range(STEPS + first):
            if number == first:
                before = moved_by(opt)
            x = torch.arange(16).view(2, 8) + zcomm.rank() + number
            opt.backward(nn.functional.cross_entropy(model(x).float().flatten(0, 1), x.flatten()))
            opt.step()
            opt.zero_grad()
        after = moved_by(opt)
        memory = opt.memory()
        opt.close()
        moved = {key: after[key] - before[key] for key in ("swap_read_nbytes", "swap_written_nbytes")}
        found.append((memory, moved))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [long(1), 2, long(3)])
def test_every_byte_is_planned(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    with torch.device("meta"):
        model, x = Net(), torch.zeros(2, 8, dtype=torch.int64)
    for results in run_ranks(measure, world_size, str(tmp_path)):
        for case, (memory, moved) in zip(CASES, results, strict=True):
            stage, offload, precision, name = case
            planned = estimate(model, stage, offload, world_size, precision, name, bucket_mb=0.3, inputs=x)
            assert planned.exact and planned.memory == memory, case
            assert abs(moved["swap_written_nbytes"] - STEPS * planned.swap_written_nbytes) <= STEPS * 4096 * 200, case
            read = moved["swap_read_nbytes"] / STEPS
            assert read == pytest.approx(planned.swap_read_nbytes, rel=0.01), case


def test_an_update_moves_no_frozen_weights() -> None:
    net = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    for layer in net[:4]:
        layer.requires_grad_(False)
    found, late = (estimate(net, 3, zcomm.Offload("nvme", "nvme", update=u), 1, optimizer="sgd") for u in UPDATES)
    weights, bucket = 4 * 64 * 64, 4 * 64 * 64  # a bucket of each unit
    assert found.swap_written_nbytes == late.swap_written_nbytes == 4 * weights
    assert found.swap_read_nbytes == 16 * weights + 4 * weights - 3 * bucket, "three windows hold what was written last"
    assert late.swap_read_nbytes == 16 * weights, "the update is in the gather of the next forward"


def test_a_count_is_the_formula() -> None:
    planned = estimate(10**9, 3, "nvme", 4, "bf16", "lion", accumulation=3)
    assert planned.memory == memory_formula(10**9, 4, 3, "bf16", "nvme", state_arrays=1) and not planned.exact
    state, params = 10**9 // 4 * 6, 10**9 // 4 * 2
    assert planned.swap_written_nbytes == state + params
    assert planned.swap_read_nbytes == state + 6 * params, "forward and backward of three micro-steps"
    in_step = estimate(10**9, 3, zcomm.Offload("nvme", "nvme", update="step"), 4, "bf16", "lion", accumulation=3)
    assert in_step.swap_read_nbytes == state + 7 * params, "and the sweep"
    with pytest.raises(ValueError, match="'adamax'"):
        estimate(10, 0, optimizer="adamax")


def test_wear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("ZCOMM_SWAP_TUNING", str(tmp_path / "none.json"))
    command = ["plan", "--params", "3e9", "--precision", "bf16", "--world", "2", "--stage", "3"]
    command += ["--offload", "cpu,nvme"]
    assert main([*command, "--nvme-path", str(tmp_path), "--step-s", "55", "--tbw", "600"]) == 0
    header, on_cpu, on_drive = (
        [word for word in line.split("  ") if word.strip()]
        for line in capsys.readouterr().out.splitlines()
        if line.split()[:1] in (["world"], ["2"])
    )
    row = dict(zip(map(str.strip, header), map(str.strip, on_drive), strict=True))
    assert row["written per step"] == f"{3e9 / 2 * 12 / 2**30:.1f} GiB"
    a_day = 3e9 * 12 / 55 * 86400
    assert row["a day"] == f"{a_day / 1e12:.3g} TB" and row["days of 600 TB"] == f"{600e12 / a_day:.3g}"
    assert [word.strip() for word in on_cpu].count("-") == 4
    assert main([*command, "--nvme-path", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "written per step" in said and "a day" not in said, "the time of a step is not known"
    for bad in ("0", "-1", "inf", "nan", "x"):
        with pytest.raises(SystemExit):
            main([*command, "--tbw", bad])
        assert "not a number above 0" in capsys.readouterr().err


def test_activations_are_what_autograd_keeps() -> None:
    model = nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 3))
    x = torch.zeros(5, 7)
    # inputs of both Linears; Tanh keeps its output, which is the input of the second
    assert saved_nbytes(model, x) == 4 * (5 * 7 + 5 * 11)
    with torch.device("meta"):
        on_meta = nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 3))
        assert saved_nbytes(on_meta, torch.zeros(5, 7)) == saved_nbytes(model, x)


def test_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("ZCOMM_SWAP_TUNING", str(tmp_path / "none.json"))
    command = ["plan", "--params", "7e9", "--precision", "bf16", "--world", "4", "--memory", "64GiB"]
    assert main([*command, "--nvme-path", str(tmp_path), "--activations", "1GiB"]) == 0
    said = capsys.readouterr().out
    rows = {tuple(line.split()[:3]): line for line in said.splitlines() if line.split()[:1] == ["4"]}
    assert len(rows) == 8 and "7000000000 trained parameters, bf16, adamw" in said
    assert ("4", "1,2", "cpu") in rows and ("4", "1,2,3", "none") in rows, "stages with equal bytes are one row"
    header = next(line for line in said.splitlines() if line.split()[:1] == ["world"])
    assert "compute" not in header and "swap per step" not in header, "columns of which nothing is known"
    assert "no: memory" in rows["4", "0", "none"]
    assert rows["4", "3", "nvme"].split()[-1] in ("yes", "drive")
    state, params = 7e9 / 4 * 10, 7e9 / 4 * 2
    assert f"{1000 * (2 * state + 3 * params) / 2**30:.1f} GiB" in rows["4", "3", "nvme"]
    assert "ZeRO's formula" in said and "1.0 GiB of activations" in said and "--calibrate" in said
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    assert main(["plan", "--model", "test_plan:made", "--stage", "2", "--offload", "none", "--world", "2"]) == 0
    said = capsys.readouterr().out
    assert "ZeRO's formula" not in said and "of activations of one micro-batch" in said


def test_what_is_taken_for_auto() -> None:
    def counted(update: Any, stage: int = 3, gradients: Any = "nvme", **more: Any) -> tuple[str, int, int]:
        offload = zcomm.Offload("nvme", "nvme" if stage == 3 else None, gradients=gradients, update=update)
        found = estimate(Net(), stage, offload, 2, **more)
        return found.update, found.swap_read_nbytes, found.swap_written_nbytes

    for more in ({}, {"accumulation": 2}, {"precision": "fp16"}, {"gradients": None}):
        assert counted("auto", **more) == counted("forward", **more) and counted("auto", **more)[0] == "forward"
    assert counted("auto", stage=2) == counted("step", stage=2)


def test_units_of_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ZCOMM_SWAP_TUNING", str(tmp_path / "none.json"))
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    command = ["plan", "--model", "test_plan:made", "--stage", "3", "--offload", "nvme", "--world", "1"]
    shown = []
    for size in ([], ["--unit-bytes", "300KB"]):
        assert main([*command, *size]) == 0
        (line,) = (line for line in capsys.readouterr().out.splitlines() if line.split()[:2] == ["1", "3"])
        shown.append(line.split()[3])
    assert float(shown[1]) < float(shown[0]), "slots of a Linear, not of a block"
    assert main([*command, "--unit-bytes", "1KB"]) == 2
    said = capsys.readouterr().err
    assert "--unit-bytes 1000: Units: max_bytes=1000, but blocks.0.0 (Linear) has 270908 bytes" in said


def test_the_recommendation_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan, "_free", lambda place: 50 << 30)
    command = ["plan", "--params", "7B", "--precision", "bf16", "--world", "4", "--nvme-path", str(tmp_path)]
    assert main([*command, "--memory", "24GiB"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(
        "7B bf16 on 4 ranks: nothing fits 24.0 GiB of memory and 50.0 GiB of drive; the smallest is"
    )
    assert "stage 3, offload nvme, which needs 26.1 GiB of memory and 78.2 GiB of drive in all" in first
    assert main([*command, "--memory", "4000GiB"]) == 0
    assert capsys.readouterr().out.startswith("7B bf16 on 4 ranks: fits with stage 0, offload none, which needs ")
    for text, count in (("350M", "350000000"), ("1.3b", "1300000000"), ("7e9", "7000000000")):
        assert main(["plan", "--params", text, "--stage", "1", "--offload", "none", "--world", "1"]) == 0
        assert f"{count} trained parameters" in capsys.readouterr().out


def options_of(parser: argparse.ArgumentParser) -> list[tuple[str, argparse.Action]]:
    found = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                found += options_of(each)
        else:
            found.append((f"{parser.prog} {'/'.join(action.option_strings) or action.dest}", action))
    return found


def test_every_option_of_every_command_has_a_help_text() -> None:
    found = options_of(build_parser())
    assert len(found) > 60 and [name for name, action in found if not action.help] == []


def test_measured_drives_give_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from zcomm.machine import swap_tuning

    monkeypatch.setattr(swap_tuning, "drive", lambda place: "a drive")
    monkeypatch.setenv("ZCOMM_SWAP_TUNING", str(tmp_path / "swap.json"))
    row = {"block_nbytes": 1 << 20, "depth": 8, "read_gbps": 2.0, "write_gbps": 1.0, "time": "today"}
    (tmp_path / "swap.json").write_text(json.dumps({"format": 1, "drives": {"a drive": row}}))
    command = ["plan", "--params", "1e9", "--stage", "2", "--offload", "nvme", "--world", "2"]
    assert main([*command, "--nvme-path", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "12 s" in said and "2.00 GB/s read, 1.00 written" in said  # 8 GB at 2 GB/s, and at 1 GB/s


def test_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    memory = {"device": {"parameters": 4096, "slots": 100}, "nvme": {"optimizer": 9 << 20}}
    formula = {"device": {"parameters": 4000, "slots": 0}, "nvme": {"optimizer": 8 << 20}}
    stats = {"swap_read_nbytes": 5 << 30, "swap_written_nbytes": 0}
    summary = {"kind": "summary", "memory": memory, "formula": formula, "stats": stats, "train_s": 12.5}
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"kind": "step"}) + "\n" + json.dumps(summary) + "\n")
    assert main(["plan", "--compare", str(path)]) == 0
    said = capsys.readouterr().out
    assert "+2.4 %" in said and "+12.5 %" in said and "swap read: 5.0 GiB in 12.5 s" in said
    path.write_text("{}\n")
    assert main(["plan", "--compare", str(path)]) == 2
    assert "not the metrics.jsonl of a run that ended" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--params", "many"], "not a whole number of parameters, such as 7B, 350M or 7e9"),
        (["--params", "7.5"], "not a whole number"),
        (["--params", "B"], "not a whole number"),
        (["--params", "nan"], "not a whole number"),
        (["--params", "1e9", "--nvme-path", "/nope/never"], "--nvme-path /nope/never: no such directory"),
        (["--model", "mynet.py:make"], "give a module, not a file: --model mynet:make"),
        (["--params", "1e9", "--stage", "4"], "not one or more of 0, 1, 2, 3"),
        (["--params", "1e9", "--world", "0"], "whole numbers above 0"),
        (["--model", "nothing"], "is not MODULE:FUNCTION"),
        (["--model", "no_such_module:f"], "No module named 'no_such_module'"),
        ([], "--params, --model or --compare is needed"),
    ],
)
def test_errors(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["plan", *arguments])
    except SystemExit as error:
        code = int(str(error.code))
    assert code == 2 and message in capsys.readouterr().err
