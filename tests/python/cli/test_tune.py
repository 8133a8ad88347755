"""`zcomm tune`: the order of trials and the choice, both pure; commands, files and ends of probes; one real run."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import zcomm
from zcomm.compat.deepspeed.launcher import runner
from zcomm.planning import estimate
from zcomm.tuning import Autotuner, Candidate, Limits, Outcome, Tuning, probes, search


def tried(limits: Limits, score: Callable[[Candidate], float | None], **more: Any) -> tuple[list[str], str | None]:
    """Return the names in the order of trials, and the best one."""
    found = search(limits, lambda each: Outcome(score(each)), **more)
    assert found.best is None or found.outcomes[found.best].score is not None
    return [each.name for each in found.outcomes], None if found.best is None else found.best.name


def test_micro_batches_double_while_it_helps() -> None:
    peak = {1: 1.0, 2: 2.0, 4: 3.0, 8: 2.5, 6: 3.5, 3: 2.6}
    names, best = tried(Limits([1], 1, 1024), lambda each: peak[each.micro])
    assert names == [f"z1_mbs{size}" for size in (1, 2, 4, 8, 6, 3)] and best == "z1_mbs6"
    flat, best = tried(Limits([0], 1, 1024, close=1), lambda each: 1.0 + each.micro / 1000)  # less than a gain
    assert flat == ["z0_mbs1", "z0_mbs2"] and best == "z0_mbs2"
    whole, best = tried(Limits([0], 3, 20, close=1), lambda each: float(each.micro))
    assert whole == ["z0_mbs3", "z0_mbs6", "z0_mbs12"] and best == "z0_mbs12"


def test_latency_is_a_negative_score() -> None:
    names, best = tried(Limits([2], 1, 8), lambda each: -0.1 * each.micro)
    assert names == ["z2_mbs1", "z2_mbs2"] and best == "z2_mbs1"  # 3 // 2 of 1 is 1 again


def test_failures_and_memory() -> None:
    names, best = tried(
        Limits([0, 1, 2], 1, 64),
        lambda each: None if each.micro > 2 or each.stage == 0 else each.micro + 0.5 * each.stage,
    )
    assert names == ["z0_mbs1", *(f"z{s}_mbs{m}" for s in (1, 2) for m in (1, 2, 4, 3))] and best == "z2_mbs2"
    found = search(Limits([0, 3], 1, 1), lambda each: Outcome(1.0), lambda stage: "" if stage else "needs 9 GiB")
    assert found.left_out == {0: "needs 9 GiB"} and list(found.outcomes) == [Candidate(3, 1)]
    assert tried(Limits([0], 1, 4), lambda each: None) == (["z0_mbs1"], None)


def test_keys_of_communication_and_the_most_trials() -> None:
    def score(each: Candidate) -> float:
        return (
            1.0
            + 0.5 * (("overlap_comm", False) in each.keys)
            + 0.25 * (("reduce_bucket_size", 50_000_000) in each.keys)
        )

    names, best = tried(Limits([1], 1, 1, fast=False), score)
    assert names[0] == "z1_mbs1" and len(names) == 4
    assert best == "z1_mbs1_overlap_comm_false_reduce_bucket_size_50000000"
    found = search(Limits([1], 1, 64, trials=2), lambda each: Outcome(float(each.micro)))
    assert [outcome.reason for outcome in found.outcomes.values()][:3] == ["", "", "not tried: tuner_num_trials"]
    assert found.best == Candidate(1, 2)


CONFIG = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": "all", "overlap_comm": True},
}


def tuning(folder: Path, arguments: list[str] | None = None, ranks: int | None = 4, **section: Any) -> Tuning:
    (folder / "ds.json").write_text(json.dumps(CONFIG | {"autotuning": section}))
    given = arguments or ["--lr", "1", "--deepspeed_config", str(folder / "ds.json"), "--micro=2"]
    return Tuning(["run", "train.py"], given, ranks=ranks)


def test_configuration_and_command_of_a_probe(tmp_path: Path) -> None:
    mapped = {"train_micro_batch_size_per_gpu": "--micro", "gradient_accumulation_steps ": "--accum"}
    made = tuning(tmp_path, max_train_batch_size=64, mp_size=2, arg_mappings=mapped)
    assert made.limits == Limits([0, 1, 2, 3], 2, 1024, 3, True, 50)
    config = made.config_of(Candidate(3, 8, (("overlap_comm", False),)), tmp_path / "m.json")
    assert config == {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 4,  # 64 / (8 samples x 2 data ranks)
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "overlap_comm": False},
        "autotuning": {
            "enabled": True,
            "metric_path": str(tmp_path / "m.json"),
            "start_profile_step": 3,
            "end_profile_step": 5,
            "metric": "throughput",
        },
    }
    words = [
        "run",
        "train.py",
        "--lr",
        "1",
        "--deepspeed_config",
        str(tmp_path / "p.json"),
        "--micro=8",
        "--accum",
        "4",
    ]
    assert made.command_of(tmp_path / "p.json", config) == words
    assert "autotuning" not in made.config_of(Candidate(3, 8))
    equals = tuning(tmp_path, [f"--deepspeed={tmp_path / 'ds.json'}"])
    assert equals.command_of(tmp_path / "p.json", {})[-1] == f"--deepspeed={tmp_path / 'p.json'}"
    assert equals.config_of(Candidate(0, 1))["gradient_accumulation_steps"] == 1


def test_a_stage_that_does_not_fit(tmp_path: Path) -> None:
    made = tuning(tmp_path)
    assert made.fits(0) == ""  # nothing is known yet
    needs = [estimate(10**9, stage, None, 4, "bf16").host_nbytes for stage in (0, 3)]
    assert needs[0] > needs[1]
    made.info = {"num_params": 10**9, "world_size": 4, "device": "cpu", "memory_nbytes": needs[1]}
    assert made.fits(3) == "" and made.fits(0).startswith(f"needs {needs[0] / 2**30:.1f} GiB, a rank has ")


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"enabled": False}, "the command line asks for it"),
        ({"metric": "loss"}, "must be one of throughput, latency, flops"),
        ({"start_profile_step": 5}, '"autotuning.end_profile_step": 5 must be above'),
        ({"max_train_micro_batch_size_per_gpu": 1}, "is below 2"),
    ],
)
def test_wrong_sections(tmp_path: Path, section: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        print(tuning(tmp_path, **section).limits)
    with pytest.raises(ValueError, match="name no configuration"):
        tuning(tmp_path, ["--deepspeed", "--lr"])


def test_a_folder_of_the_program_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("x")
    with pytest.raises(ValueError, match="is not a folder of an earlier tuning"):
        probes.own_folder(tmp_path, overwrite=True)
    mine = tmp_path / "mine"
    probes.own_folder(mine, overwrite=True)
    (mine / "old").write_text("x")
    probes.own_folder(mine, overwrite=False)
    assert (mine / "old").exists() and mine.stat().st_mode & 0o777 == 0o700
    probes.own_folder(mine, overwrite=True)
    assert not (mine / "old").exists()


PROBE = """
import json, os, pathlib, signal, subprocess, sys, time
config = pathlib.Path(sys.argv[sys.argv.index("--deepspeed_config") + 1])
keys = json.loads(config.read_text())
micro, stage = keys["train_micro_batch_size_per_gpu"], keys["zero_optimization"]["stage"]
if stage == 3:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    config.with_name("pids").write_text(f"{os.getpid()} {child.pid}")
    time.sleep(600)
if micro > 2:
    sys.exit("out of memory")
path = pathlib.Path(keys["autotuning"]["metric_path"])
path.with_name("model_info.json").write_text(json.dumps({"num_params": 10, "world_size": 1, "memory_nbytes": 2**30}))
path.write_text(json.dumps({"latency": 1.0, "throughput": micro * (1 + stage)}))
"""


def test_probes_that_fail_or_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(probes, "_GRACE_S", 0.3)
    (tmp_path / "probe.py").write_text(PROBE)
    zero = {"zero_optimization": {"stage": [1, 2, 3]}, "train_micro_batch_size_per_gpu": 1}
    (tmp_path / "ds.json").write_text(json.dumps(zero))
    arguments = ["--deepspeed_config", "ds.json"]
    made = Tuning([sys.executable, str(tmp_path / "probe.py")], arguments, limit_s=2.0)
    found = made.tune()
    made.print_tuning_results()
    shown = capsys.readouterr().out
    assert found.best == Candidate(2, 2) and "z2_mbs2" in shown and "best" in shown
    assert "exit code 1: out of memory" in shown and "z3_mbs1" in shown and "killed after 2 s" in shown
    pids = (tmp_path / "autotuning_exps" / "z3_mbs1" / "pids").read_text().split()
    assert not any(_runs(int(pid)) for pid in pids)
    results = tmp_path / "autotuning_results"
    written = [*results.iterdir(), *(tmp_path / "autotuning_exps" / "z3_mbs1").glob("*.*")]
    assert len(written) > 8 and all(path.stat().st_mode & 0o077 == 0 for path in written)
    best = json.loads((results / "ds_config_optimal.json").read_text())
    assert best["zero_optimization"] == {"stage": 2} and best["train_micro_batch_size_per_gpu"] == 2
    assert "autotuning" not in best
    command = shlex.split((results / "cmd_optimal.txt").read_text())
    assert command[2:] == ["--deepspeed_config", str(results / "ds_config_optimal.json")]
    summary = json.loads((results / "summary.json").read_text())
    assert summary["best"] == "z2_mbs2" and len(summary["experiments"]) == len(found.outcomes)
    (tmp_path / "probe.py").write_text("import sys; sys.exit(7)")
    again = Tuning([sys.executable, str(tmp_path / "probe.py")], arguments)
    with pytest.raises(ValueError, match=r"no configuration ran:\n(.|\n)*exit code 7"):
        again.tune()


def _runs(pid: int) -> bool:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return False
        time.sleep(0.02)
    return True


def test_measurements_are_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "probe.py").write_text(PROBE)
    section = {"overwrite": False, "max_train_micro_batch_size_per_gpu": 1}
    (tmp_path / "ds.json").write_text(json.dumps({"autotuning": section}))
    made = Tuning([sys.executable, str(tmp_path / "probe.py")], ["--deepspeed_config", "ds.json"])
    first = made.tune().outcomes
    (tmp_path / "probe.py").write_text("import sys; sys.exit(7)")
    again = Tuning([sys.executable, str(tmp_path / "probe.py")], ["--deepspeed_config", "ds.json"])
    assert again.tune().outcomes == first
    (tmp_path / "ds.json").write_text(json.dumps({"autotuning": section, "bf16": {"enabled": True}}))
    other = Tuning([sys.executable, str(tmp_path / "probe.py")], ["--deepspeed_config", "ds.json"])
    with pytest.raises(ValueError, match="exit code 7"):  # measured again: the configuration is another one
        other.tune()


def test_the_engine_of_a_probe(world_of_one: None, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.json"
    section = {
        "enabled": True,
        "metric_path": str(metrics),
        "start_profile_step": 1,
        "end_profile_step": 3,
        "metric": "flops",
    }
    config = {"train_batch_size": 2, "optimizer": {"type": "Adam"}, "autotuning": section}
    engine = zcomm.initialize(model=nn.Linear(4, 4, bias=False), config=config)[0]
    info = json.loads((tmp_path / "model_info.json").read_text())
    assert info["num_params"] == 16 and info["world_size"] == 1 and info["memory_nbytes"] > 0
    steps = 0
    with pytest.raises(SystemExit) as ended:
        while steps < 10:
            engine.backward(engine(torch.ones(2, 4)).sum())
            engine.step()
            steps += 1
    assert ended.value.code == 0 and steps == 2 and engine.global_steps == 3
    found = json.loads(metrics.read_text())
    assert found["throughput"] == pytest.approx(2 / found["latency"])
    assert found["FLOPS_per_gpu"] == pytest.approx(3 * 2 * 2 * 16 / found["latency"])
    assert metrics.stat().st_mode & 0o077 == 0
    engine.destroy()


def test_without_a_metric_path_training_is_as_usual(world_of_one: None) -> None:
    section = {"enabled": True, "start_profile_step": 1, "end_profile_step": 2}
    config = {"train_batch_size": 2, "optimizer": {"type": "Adam"}, "autotuning": section}
    engine = zcomm.initialize(model=nn.Linear(4, 4), config=config)[0]
    for _ in range(4):
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
    engine.destroy()


def test_the_command_deepspeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"autotuning": {"enabled": True}}))
    words = [
        "--num_gpus",
        "2",
        "--autotuning",
        "run",
        "--master_port",
        "5",
        "x.py",
        "--deepspeed",
        str(tmp_path / "ds.json"),
    ]
    started: list[list[str]] = []
    monkeypatch.setattr(Autotuner, "tune", lambda self: started.append(self.command_of(Path("/a"), {})))
    monkeypatch.setattr(Autotuner, "print_tuning_results", lambda self: None)
    monkeypatch.setattr(Autotuner, "run_after_tuning", lambda self: 3)
    with pytest.raises(SystemExit) as ended:
        runner.main(words)
    assert ended.value.code == 3
    before = [sys.executable, "-m", "zcomm.compat.deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", "5"]
    assert started == [[*before, "x.py", "--deepspeed", "/a"]]
    args = SimpleNamespace(user_script="x.py", user_args=["--deepspeed", str(tmp_path / "ds.json")])
    made = Autotuner(args, {"a": [0, 1, 2], "b": [0]})  # type: ignore[arg-type]
    assert (made.exp_num_nodes, made.exp_num_gpus, made.info) == (2, 1, {"world_size": 4})


TRAIN = """
import argparse, time, torch, zcomm
parser = argparse.ArgumentParser()
parser.add_argument("--deepspeed_config")
parser.add_argument("--batch", type=int)
args = parser.parse_args()
engine = zcomm.initialize(args=args, model=torch.nn.Linear(4, 4))[0]
micro = engine.train_micro_batch_size_per_gpu()
assert micro == args.batch
for _ in range(30):
    time.sleep(0.05 if micro < 2 else 0.01)
    engine.backward(engine(torch.ones(micro, 4)).sum())
    engine.step()
print("trained with", micro)
"""


@pytest.mark.slow
def test_a_real_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    section = {
        "max_train_micro_batch_size_per_gpu": 2,
        "arg_mappings": {"train_micro_batch_size_per_gpu": "--batch"},
    }
    config = {"optimizer": {"type": "Adam"}, "zero_optimization": {"stage": [1]}, "autotuning": section}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    command = [
        sys.executable,
        "-m",
        "zcomm.cli",
        "tune",
        "-n",
        "2",
        "--run",
        "train.py",
        "--deepspeed_config",
        "ds.json",
    ]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    ended = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=200, env=environment, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "z1_mbs2" in ended.stdout and "trained with 2" in ended.stdout
