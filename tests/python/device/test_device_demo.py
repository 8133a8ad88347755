"""`zcomm demo --device cuda`: the choice of the GPU, and whole runs with losses, tiers and report.

Each run also has the CPU as the device ("played"), so that a GPU run differs only in the device.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import simulated
from test_gpu_programs import WHERE
from tiers import slow
from zcomm import _core
from zcomm.cli.main import build_parser
from zcomm.cli.plan_compare import compare
from zcomm.demo import place, train
from zcomm.demo.command import make_config
from zcomm.demo.options import DemoConfig
from zcomm.launch.errors import UserError

Run = Callable[..., list[Any]]
STEPS, ACCUM = 6, 2
LLAMA = ("--size", "300m", "--layers", "2", "--width", "64", "--heads", "8", "--context", "32")


class PlayedGpu(place.Place):
    """A GPU with the host's memory. waits: how often it was waited for."""

    gpu = "played GPU"
    waits = 0

    def wait(self) -> None:
        self.waits += 1

    def peak_nbytes(self) -> int:
        return 3 << 20


def config_of(folder: Path, *options: str) -> DemoConfig:
    given = ("--steps", str(STEPS), "--accum", str(ACCUM), "--quiet", *options)
    config = make_config(build_parser().parse_args(["demo", *given]))
    config.check()
    folder.mkdir(parents=True)
    (folder / "text").write_text("to be or not to be, that is the question. " * 400)
    run = {"run_dir": str(folder), "nvme_path": [str(folder)], "data": str(folder / "text")}
    return dataclasses.replace(config, **run, evaluations=1, windows=16, sample_nbytes=8)


def run(where: str, config: DemoConfig) -> list[dict[str, Any]]:
    """Return the records of a run on the "cpu", "played" or "cuda". A job for ranks."""
    opened = PlayedGpu(torch.device("cpu"))
    if where == "played":
        simulated.play(0.0005)
        train.open_place = lambda wanted, local_rank: opened
    try:
        train.run(config)
    finally:
        simulated.stop()
    assert where != "played" or opened.waits == 3 * STEPS * ACCUM, "each phase ends with the GPU's work"
    return [json.loads(line) for line in (config.directory / "metrics.jsonl").read_text().splitlines()]


def losses(records: list[dict[str, Any]]) -> list[float]:
    return [record["loss"] for record in records if record["kind"] in ("step", "validation")]


def summary_of(records: list[dict[str, Any]]) -> dict[str, Any]:
    (found,) = (record for record in records if record["kind"] == "summary")
    return found


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(
    "options",
    [
        ("--size", "tiny"),
        slow((*LLAMA, "--memory", "8GiB")),
        slow(("--size", "tiny", "--stage", "2", "--offload", "cpu", "--precision", "bf16")),
        slow(("--size", "tiny", "--stage", "1", "--offload", "none")),
        slow((*LLAMA, "--stage", "2", "--offload", "cpu")),
        slow(("--size", "tiny", "--np", "2")),
    ],
)
def test_a_run(
    run_ranks: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], where: str
) -> None:
    config = config_of(tmp_path / where, *options, "--device", "cuda")
    ranks = 2 if "--np" in options else 1
    assert (config.world_size, config.device) == (ranks, "cuda"), "one rank, unless the user asks for more"
    records = run_ranks(run, ranks, where, config)[0]
    other = dataclasses.replace(config_of(tmp_path / "cpu", *options), world_size=ranks)
    on_cpu = run_ranks(run, ranks, "cpu", other)[0]
    if where == "played":
        assert losses(records) == losses(on_cpu), "the bits do not depend on the device"
    elif config.model == "gpt":  # its weights are drawn on the host
        assert losses(records) == pytest.approx(losses(on_cpu), rel=0.02)
    assert losses(records)[STEPS - 1] < losses(records)[0]

    summary = summary_of(records)
    assert summary["gpu"] and summary["gpu_peak_nbytes"] > 0 and summary_of(on_cpu)["gpu"] is None
    for tier, purposes in summary["formula"].items():
        for purpose, formula in purposes.items():
            if purpose != "slots" and config.memory is None:
                held = summary["memory"][tier][purpose]
                assert formula <= held <= 1.1 * formula + 65536, (tier, purpose)
    assert summary["planned"] is None and summary_of(on_cpu)["planned"] is not None, "the plan is of CPU ranks"

    assert compare(config.directory / "metrics.jsonl") == 0
    assert "time per step is not planned for a GPU" in capsys.readouterr().out

    page = (config.directory / "report.html").read_text()
    assert '<polyline class="training"' in page and summary["gpu"] in page
    assert "GPU peak" in page and "GPU optimizer" in page
    assert "GPU peak" not in (tmp_path / "cpu" / "report.html").read_text()


def test_ranks_take_the_gpus_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    found = as_if(monkeypatch, count=2)
    assert [str(place.open_place("cuda", rank).device) for rank in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert str(place.open_place("cuda:1", 0).device) == "cuda:1" and found == [0, 1, 0, 1]
    assert place.open_place("cpu", 5).gpu is None


@pytest.mark.parametrize(
    ("lacking", "wanted", "words"),
    [
        ({"torch_cuda": None}, "cuda", "--device cuda: torch .* is built without CUDA; install a torch with CUDA"),
        ({"info": "built without CUDA"}, "cuda", "--device cuda: zcomm is built without CUDA; .*ZCOMM_CUDA=ON"),
        ({"count": 0}, "cuda:0", "--device cuda:0: no CUDA device is found; `zcomm doctor`"),
        ({"count": 2}, "cuda:2", "--device cuda:2: the GPUs of this process are cuda:0 to cuda:1"),
    ],
)
def test_a_missing_gpu_is_named_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, lacking: dict[str, Any], wanted: str, words: str
) -> None:
    as_if(monkeypatch, **lacking)
    with pytest.raises(UserError, match=f"{words}.*, or leave --device out to train on the CPU$"):
        place.open_place(wanted, 0)


def as_if(
    monkeypatch: pytest.MonkeyPatch, count: int = 1, torch_cuda: str | None = "13.0", info: str = "CUDA 13.0"
) -> list[int]:
    """Let torch and zcomm have CUDA and ``count`` GPUs. Returns: the list of the GPUs that become current."""
    current: list[int] = []
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    monkeypatch.setattr(_core, "cuda_info", lambda: info)
    monkeypatch.setattr(_core, "cuda_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.append(device.index))
    return current
