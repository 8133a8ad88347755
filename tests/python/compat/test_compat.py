"""An unmodified DeepSpeed script runs on zcomm: same losses as DDP with torch.optim; an error names absent parts."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

import zcomm.schedulers
from places import LIBRARIES
from programs import Program, environment_of_no_job
from tiers import slow
from torch_world import world

SCRIPT = LIBRARIES / "deepspeed_script.py"
AS_MODULE = "import runpy; runpy.run_module('zcomm.compat.deepspeed', run_name='__main__', alter_sys=True)"
Run = Callable[..., subprocess.CompletedProcess[str]]


def run_script(ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "zcomm.cli.main", "run", "-n", str(ranks), "--no-prefix", "-m"]
    command = [*launcher, "zcomm.compat.deepspeed", str(SCRIPT), *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=env)


@pytest.fixture
def run_alone(start_program: Callable[..., Program]) -> Run:
    """`run(*arguments)`: the script as the only rank, in a process that has already imported torch."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        env = {**environment_of_no_job(), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        program = start_program(AS_MODULE, SCRIPT, *arguments, env=env)
        out, err = program.communicate()
        return subprocess.CompletedProcess([str(SCRIPT), *arguments], program.wait(), out, err)

    return run


def results(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    return [json.loads(line.partition(" ")[2]) for line in lines]


def by_ddp(epochs: int) -> list[float]:
    """Return the script's losses on this rank, trained only by torch."""
    from zcomm.compat.deepspeed import install

    install()
    script = importlib.import_module("deepspeed_script")
    with world() as (rank, size):
        torch.manual_seed(5)
        model = torch.nn.parallel.DistributedDataParallel(script.Net())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.8, 0.999), weight_decay=3e-7)
        schedule = zcomm.schedulers.WarmupLR(optimizer, 0.0, 0.01, 10)
        data = script.pictures()
        sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=size, rank=rank)
        losses = []
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for inputs, labels in DataLoader(data, batch_size=16 // size, sampler=sampler):
                loss = F.cross_entropy(model(inputs), labels)
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                losses.append(loss.item())
        return losses


@pytest.mark.parametrize("stage", [slow(0), 3])
def test_an_unmodified_script_trains_as_ddp(run_ranks: Callable[..., list[Any]], stage: int) -> None:
    ours = results(run_script(2, "--deepspeed", "--stage", str(stage), "--epochs", "6"))
    theirs = run_ranks(by_ddp, 2, 6)
    for mine, wanted in zip(ours, theirs, strict=True):
        assert mine["world"] == 2
        assert mine["losses"] == pytest.approx(wanted, rel=1e-5, abs=1e-6)  # they fall from 2.3 to almost 0
        assert sum(wanted[-6:]) < 0.5 * sum(wanted[:6]), "it learns"
    assert ours[0]["sum"] == ours[1]["sum"] == pytest.approx(sum(mine["losses"][-1] for mine in ours))


def test_deepspeed_config_names_the_file(run_alone: Run, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": 16, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}))
    (result,) = results(run_alone("--deepspeed", "--deepspeed_config", str(path), "--epochs", "1"))
    assert len(result["losses"]) == 6


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_16_bit_options_train(run_alone: Run, dtype: str) -> None:
    (result,) = results(run_alone("--dtype", dtype, "--epochs", "6"))
    assert sum(result["losses"][-6:]) < 0.8 * sum(result["losses"][:6])


def test_a_layer_of_experts_trains(run_alone: Run) -> None:
    (result,) = results(run_alone("--moe", "--epochs", "6"))
    assert sum(result["losses"][-6:]) < 0.9 * sum(result["losses"][:6])


def test_groups_that_are_split_for_experts_without_any(run_alone: Run) -> None:
    assert results(run_alone("--moe-param-group", "--epochs", "1")) == results(run_alone("--epochs", "1"))


def test_names() -> None:
    import zcomm
    import zcomm.compat.deepspeed as deepspeed

    assert deepspeed.get_accelerator() is deepspeed.accelerator.get_accelerator()
    name = deepspeed.get_accelerator().current_device_name()
    assert str(torch.zeros(1).to(name).device) == name
    assert deepspeed.lr_schedules.WarmupLR is zcomm.schedulers.WarmupLR
    with pytest.raises(AttributeError, match=r"has no 'no_such'; docs/compat.md lists"):
        _ = deepspeed.no_such
    with pytest.raises(AttributeError, match="has no 'no_such'"):
        _ = deepspeed.comm.no_such


def run_as_rank(script: str) -> str:
    """Run the script in this process; return its output."""
    sys.argv = ["python", script]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_module("zcomm.compat.deepspeed", run_name="__main__", alter_sys=True)
    return printed.getvalue()


def test_a_script_finds_optimizers_and_whole_tensors(run_ranks: Callable[..., list[Any]]) -> None:
    printed = "".join(run_ranks(run_as_rank, 2, str(SCRIPT.with_name("deepspeed_names.py"))))
    (result,) = results(subprocess.CompletedProcess([], 0, printed, ""))
    assert result.pop("loggers") == "zcomm"
    for name, of_one in result.items():
        assert all(of_one["true"]), name
    weights = {name: torch.tensor(of_one["weight"]) for name, of_one in result.items()}
    for name, make in (
        ("cpu adam", lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.5)),
        ("adamw", lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5)),
        ("adagrad", lambda p: torch.optim.Adagrad(p, lr=0.1)),
    ):
        torch.manual_seed(1)
        net = torch.nn.Linear(4, 2)
        optimizer = make(net.parameters())
        for _ in range(2):
            net(torch.ones(2, 4)).square().mean().backward()
            net.weight.grad *= 2
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(weights[name], net.weight.detach(), rtol=1e-5, atol=1e-6)
    assert torch.equal(weights["fused adam"], weights["cpu adam"]) and torch.equal(
        weights["lion"], weights["fused lion"]
    )


def test_options_without_a_kernel_are_refused() -> None:
    from zcomm.compat.deepspeed import ops

    params = [torch.nn.Parameter(torch.zeros(2))]
    for make, option, value in (
        (ops.adam.DeepSpeedCPUAdam, "amsgrad", True),
        (ops.adam.DeepSpeedCPUAdam, "fp32_optimizer_states", False),
        (ops.adam.FusedAdam, "bias_correction", False),
        (ops.adagrad.DeepSpeedCPUAdagrad, "amsgrad", True),
        (ops.lion.DeepSpeedCPULion, "fp32_optimizer_states", False),
    ):
        with pytest.raises(NotImplementedError, match=rf"{make.__name__}\({option}={value}\) is not available"):
            make(params, **{option: value})


def test_defaults_of_optimizers_are_deepspeeds() -> None:
    from zcomm.compat.deepspeed import ops

    params = [torch.nn.Parameter(torch.zeros(2))]
    for make, lr, betas in (
        (ops.adam.DeepSpeedCPUAdam, 1e-3, (0.9, 0.999)),
        (ops.adam.FusedAdam, 1e-3, (0.9, 0.999)),
        (ops.lion.DeepSpeedCPULion, 1e-3, (0.9, 0.999)),
        (ops.lion.FusedLion, 1e-3, (0.9, 0.999)),
        (ops.adagrad.DeepSpeedCPUAdagrad, 1e-2, None),
    ):
        defaults = make(params).defaults
        assert (defaults["lr"], defaults.get("betas"), defaults["weight_decay"]) == (lr, betas, 0.0), make.__name__


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`choose(torch=, core=, asked=)`: the accelerator of a machine on which torch and the core see these devices."""
    from zcomm.compat.deepspeed import accelerator

    def chosen(*, torch_sees: int, core_sees: int, asked: str | None = None) -> Any:
        monkeypatch.setattr(accelerator, "_accelerator", None)
        monkeypatch.setattr(accelerator, "_torch_has_cuda", lambda: torch_sees > 0)
        monkeypatch.setattr(accelerator, "_core_has_cuda", lambda: core_sees > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: torch_sees)
        if asked is None:
            monkeypatch.delenv("DS_ACCELERATOR", raising=False)
        else:
            monkeypatch.setenv("DS_ACCELERATOR", asked)
        return accelerator.get_accelerator()

    return chosen


def test_the_accelerator_is_cuda_where_both_have_it(choose: Callable[..., Any]) -> None:
    for sees in ((0, 0), (2, 0), (0, 2)):
        assert choose(torch_sees=sees[0], core_sees=sees[1]).device_name(1) == "cpu"
    found = choose(torch_sees=2, core_sees=2)
    assert (found.device_name(), found.device_name(1), found.device(1)) == ("cuda", "cuda:1", torch.device("cuda", 1))
    assert choose(torch_sees=2, core_sees=2, asked="cpu").device_name(1) == "cpu"
    assert choose(torch_sees=2, core_sees=2, asked="cuda").device_name(1) == "cuda:1"
    with pytest.raises(RuntimeError, match="DS_ACCELERATOR='cuda', but zcomm's core found no CUDA device"):
        choose(torch_sees=2, core_sees=0, asked="cuda")
    with pytest.raises(ValueError, match="DS_ACCELERATOR='xpu' is not available; use 'cpu' or 'cuda'"):
        choose(torch_sees=2, core_sees=2, asked="xpu")


def test_initialize_takes_the_model_to_the_ranks_device(
    choose: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import zcomm.compat.deepspeed as deepspeed
    from zcomm import zero

    asked, current = [], []

    class Stop(Exception):
        pass

    def stand_in(*args: Any, device: Any, **kwargs: Any) -> Any:
        asked.append(device)
        raise Stop

    def initialize(**more: Any) -> None:
        config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}}
        with pytest.raises(Stop):
            deepspeed.initialize(model=torch.nn.Linear(2, 2), config=config, **more)

    monkeypatch.setattr(zero, "ZeroOptimizer", stand_in)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    choose(torch_sees=2, core_sees=2)
    for local_rank in ("0", "1", "3"):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        initialize()
    initialize(device="cpu")
    choose(torch_sees=2, core_sees=0)
    initialize()
    assert asked == [torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cuda", 1), "cpu", None]
    assert current == [0, 1, 1], "the current device is it, too"
    zcomm.shutdown()
