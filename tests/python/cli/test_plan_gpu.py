"""`zcomm plan` for machines with GPUs, described in the test: bytes by tier, overlap of transfers, and fit."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fake_nvml import FakeGpu, FakeNvml, bus, one_narrow
from zcomm import Offload
from zcomm.cli import plan_gpu
from zcomm.cli.main import main
from zcomm.cli.sizes import shown
from zcomm.machine import gpus, speeds
from zcomm.machine.gpu_specs import PAYLOAD
from zcomm.planning.gpu_tiers import CONTEXT_NBYTES, MFU, GpuCase, GpuHost, gpu_case
from zcomm.planning.lanes import LaneBytes, Rates

GIB = 1 << 30
RATES = Rates(MFU * 989.4e12, 0.85 * 63e9, 0.85 * 63e9, 200e9, (6e9, 5e9))
H100 = GpuHost(1, 80 * GIB, 128 * GIB, 1000 * GIB, RATES)
P = 7 * 10**9


def bus_s(case: GpuCase) -> float:
    """Return the seconds of the busier direction."""
    return max(case.step.lanes["down"] or 0.0, case.step.lanes["up"] or 0.0)


def update_s(case: GpuCase) -> float:
    """Return the seconds of the host's update without the bus, for ranks on one GPU."""
    late = case.step.late
    return (late.host - late.down - late.up - late.read - late.written) / 200e9


def sums_s(case: GpuCase) -> float:
    """Return the seconds in which host memory takes gradients and adds them up."""
    return (case.step.whole.host - case.step.late.host) / 200e9


def test_bytes_by_tier() -> None:
    whole = gpu_case(P, 2, "none", 1, H100)
    assert whole.gpu_nbytes == 16 * P + CONTEXT_NBYTES and whole.host_nbytes == whole.drive_nbytes == 0
    assert whole.lacks == ("GPU",) and whole.hiding_tokens == 0
    cpu = gpu_case(P, 2, "cpu", 1, H100, activations_nbytes=5 * GIB)
    assert cpu.gpu_nbytes == 2 * P + CONTEXT_NBYTES + 5 * GIB
    assert cpu.host_nbytes == (2 + 10 + 2) * P, "weights, remainder, m, v, and the gradients of one pass"
    for more, nbytes, why in (
        ({"accumulation": 2}, 4 + 2, "their sums, and the last gradients"),
        ({"accumulation": 2, "clips": True}, 4, "their sums"),
        ({"offload": Offload("cpu", update="forward"), "clips": True}, 2, "gradients wait for the norm"),
        ({"offload": Offload("cpu", update="backward")}, 0, "backward uses them up"),
        ({"offload": Offload("cpu", gradients="device"), "accumulation": 2}, 4, "sums of the GPU"),
    ):
        found = gpu_case(P, 2, world_size=1, host=H100, **{"offload": "cpu", **more})
        assert found.host_nbytes == (2 + 10 + nbytes) * P, why
    assert not cpu.lacks
    drive = gpu_case(P, 3, "nvme", 1, H100)
    assert (drive.host_nbytes, drive.drive_nbytes) == (2 * P, 12 * P)
    assert gpu_case(P, 3, "nvme", 1, replace(H100, drive_nbytes=70 * GIB)).lacks == ("drive",)
    assert gpu_case(P, 2, "cpu", 1, replace(H100, host_nbytes=64 * GIB)).lacks == ("host",)
    apart = replace(H100, count=2, reach=False)
    by_host = gpu_case(P, 3, "none", 2, apart)
    assert by_host.gpu_nbytes == 10 * P // 2 + CONTEXT_NBYTES, "shards stay only where GPUs reach each other"
    assert by_host.host_nbytes == (2 + 4) * P
    up = by_host.step.lanes["up"]
    assert up == pytest.approx((2 * 2 + (4 + 2) / 2) * P / (0.85 * 63e9)), "gathered twice, and the step"
    assert gpu_case(P, 3, "none", 2, replace(apart, reach=True)).host_nbytes == 0
    assert gpu_case(P, 3, "none", 2, H100).host_nbytes == 0, "on one GPU they do"
    assert gpu_case(P, 3, "none", 1, H100) == replace(whole, stage=3), "but there are none"


def test_nothing_of_the_host_between_gpus_that_reach_each_other() -> None:
    two = gpu_case(P, 2, "none", 2, replace(H100, count=2))
    assert two.host_nbytes == 0 and two.step.whole == two.step.late == LaneBytes()
    assert two.gpu_nbytes == 2 * P + (10 + 4) * P // 2 + CONTEXT_NBYTES, "weights, a half of the state and the sums"
    assert gpu_case(P, 3, "none", 2, replace(H100, count=2)).gpu_nbytes == 16 * P // 2 + CONTEXT_NBYTES


def test_state_that_stays_on_the_gpus() -> None:
    alone, two = (gpu_case(P, 2, "none", n, replace(H100, count=2, reach=False)) for n in (1, 2))
    assert alone.step.whole == LaneBytes()
    assert two.gpu_nbytes == 2 * P + 10 * P // 2 + CONTEXT_NBYTES, "weights and a half of the state"
    assert two.host_nbytes == 2 * (2 * P // 2 + 4 * P // 2), "one copy of the weights, and of the sums of gradients"
    assert two.step.late.host == two.step.late.down * 2 + two.step.late.up * 2, "no update on the host: the bus alone"
    assert two.step.lanes["up"] == pytest.approx((2 + (4 + 2) / 2) * P / (0.85 * 63e9)), (
        "up: all weights, and a half of sums and weights to be stepped"
    )


def test_ranks_share_gpus_and_host() -> None:
    alone = gpu_case(P, 1, "cpu", 1, H100)
    two_on_one = gpu_case(P, 1, "cpu", 2, H100)
    assert two_on_one.gpu_nbytes == 2 * (2 * P + CONTEXT_NBYTES), "each rank has its copy of the weights"
    two_on_two = gpu_case(P, 1, "cpu", 2, replace(H100, count=2))
    assert two_on_two.gpu_nbytes == alone.gpu_nbytes
    assert two_on_two.host_nbytes == alone.host_nbytes + 2 * P, "stage 1: a shard each, one copy of the weights, sums"
    assert gpu_case(P, 0, "cpu", 2, H100).host_nbytes == two_on_two.host_nbytes + 2 * P, "stage 0: two copies"
    assert update_s(two_on_one) == pytest.approx(update_s(alone) * 32 / 26), "one pass in all, and the norm"
    assert update_s(gpu_case(P, 0, "cpu", 2, H100)) == update_s(two_on_one)
    assert bus_s(two_on_two) == bus_s(alone), "each GPU has a line of its own, and all gradients and weights on it"
    assert bus_s(two_on_one) == 2 * bus_s(alone)


def test_seconds_and_the_hiding_rule() -> None:
    case = gpu_case(P, 2, "cpu", 1, H100)
    assert update_s(case) == pytest.approx((2 * (2 + 2 + 8) + 2) * P / 200e9), "weight, state, gradient"
    normed = [gpu_case(P, 2, "cpu", 2, H100), gpu_case(P, 2, "cpu", 1, H100, accumulation=2, clips=True)]
    assert all(update_s(each) == pytest.approx(32 * P / 200e9) for each in normed), "and the norm"
    assert sums_s(case) == pytest.approx(2 * P / 200e9), "the gradient written"
    assert sums_s(normed[1]) == pytest.approx((2 * (2 + 2 + 8) - 4) * P / 200e9), "a slot written and read, and the sum"
    assert bus_s(case) == pytest.approx(2 * P / (0.85 * 63e9))
    assert case.hiding_tokens == pytest.approx((26 + 2 + 2) * MFU * 989.4e12 / (6 * 200e9)), "the rule, CPU-bound"
    swapped = gpu_case(P, 2, "nvme", 1, H100)
    swap_s = 10 * P * (1 / 6e9 + 1 / 5e9)
    assert swapped.step.lanes["drive"] == pytest.approx(swap_s)
    assert swapped.hiding_tokens == pytest.approx(swap_s * MFU * 989.4e12 / (6 * P)), "drive-bound"
    assert update_s(gpu_case(P, 2, "cpu", 1, H100, precision="fp32")) == pytest.approx(28 * P / 200e9)
    more = gpu_case(P, 2, "cpu", 2, H100, accumulation=3)
    assert sums_s(more) == pytest.approx((3 * (2 * 4 + 8) - 4) * P / 200e9), "slots of two ranks, three micro-steps"
    assert sums_s(gpu_case(P, 2, "none", 1, H100)) == 0.0, "nothing of it is on the host"
    whole = gpu_case(P, 0, "none", 2, replace(H100, count=2, reach=False))
    assert bus_s(whole) == pytest.approx((2 + (4 + 2) / 2) * P / (0.85 * 63e9))
    assert sums_s(whole) == pytest.approx((2 * 4 + 8 - 4 + 4) * P / 200e9), "stage 0: ranks gather the weights"
    for missing in ("flops", "host_bps", "down_bps", "up_bps"):
        unknown = replace(H100, rates=replace(RATES, **{missing: None}))
        assert gpu_case(P, 2, "cpu", 1, unknown).hiding_tokens is None
    third = gpu_case(P, 3, "cpu", 1, H100, accumulation=2)
    assert bus_s(third) == pytest.approx(4 * 2 * P / (0.85 * 63e9)), "gathers of two micro-steps, forward and backward"
    with pytest.raises(ValueError, match="adamax"):
        gpu_case(P, 0, "none", 1, H100, optimizer="adamax")


def options(**values: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    plan_gpu.add_arguments(parser)
    given = {"precision": "bf16", "optimizer": "adamw", "accum": 1, "world": [1], "stage": [2], "offload": ["cpu"]}
    given |= {"update": "auto", "gradients": "cpu"}
    return argparse.Namespace(**{**vars(parser.parse_args([])), **given, **values})


def test_what_was_found_counts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(speeds, "load", lambda world: speeds.Speeds(world, {"bf16": 1e12}, 4e11, 1e11, 1e-5, 1e10))
    machine = gpus.read(one_narrow(), Path("/nowhere"))
    host = plan_gpu.host_of(options(), machine, 64 * GIB, 100 * GIB, None)
    assert host is not None and host.gpu_nbytes == 80 * GIB and host.rates.host_bps == 1e11
    assert host.rates.flops == pytest.approx(MFU * 154.8e12)
    for rate in (host.rates.down_bps, host.rates.up_bps):
        assert rate == pytest.approx(PAYLOAD * 8 * 1.969e9), "lanes as they are, best generation"
    mixed = FakeNvml([FakeGpu(bus_id=bus(0)), FakeGpu(bus_id=bus(1), total=40 * GIB), FakeGpu(lost=True)])
    host = plan_gpu.host_of(options(), gpus.read(mixed, Path("/nowhere")), 1, 1, None)
    assert host is not None and (host.count, host.gpu_nbytes) == (2, 40 * GIB)
    plan_gpu.show(options(), plan_gpu.Model(P, None, None, 0), 64 * GIB, 100 * GIB, None, machine)
    said = capsys.readouterr().out
    assert "on 1 x NVIDIA RTX A6000, 80.0 GiB each" in said and "no: host" in said and "26 B" not in said


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "read", lambda: gpus.Machine(absent="no NVIDIA driver here"))
    plan = ["plan", "--params", "7e9", "--precision", "bf16", "--world", "1", "--memory", "128GiB"]
    assert main(plan) == 0
    assert "hidden from" not in capsys.readouterr().out, "no GPU, no table"
    assert main([*plan, "--gpu-memory", "80GiB", "--gpu-name", "H100", "--gpus", "2"]) == 0
    said = capsys.readouterr().out
    assert "7B bf16 on 1 rank: fits with stage 0, offload cpu, which needs" in said
    assert "on 2 x H100, 80.0 GiB each" in said and "no: GPU" in said and "989 TFLOP/s" in said
    one = [*plan, "--gpu-memory", "80GiB", "--stage", "2", "--offload", "cpu"]
    for more, host in (
        ([], 14), (["--accum", "2"], 18), (["--accum", "2", "--clip"], 16), (["--update", "backward"], 12),
        (["--accum", "2", "--gradients", "device"], 16),
    ):  # fmt: skip
        assert main([*one, *more]) == 0
        assert shown(host * 7_000_000_000) in capsys.readouterr().out.split("\non 1 x")[1], more
    assert main([*one, "--gradients", "device", "--update", "backward"]) == 2
    assert "backward, which keeps no sums: leave one out" in capsys.readouterr().err
    assert main([*plan, "--gpu-memory", "80GiB", "--gpu-name", "Voodoo"]) == 0
    assert "the peak of Voodoo is not in the table" in capsys.readouterr().out
