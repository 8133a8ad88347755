"""`zcomm plan --hosts`: its bytes equal the table's in docs/clusters.md, its choice has the fewest that fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from zcomm.cli import plan
from zcomm.cli.main import main
from zcomm.planning import estimate
from zcomm.planning.meshes import Cluster, Cut, Traffic, cuts, traffic

N = 1000
ON_CPU, ON_GPU = Cluster(4, 8, shared=True), Cluster(4, 8, shared=False)
UNIT = N * 3 / 32  # N (H - 1) / P, the unit of the table


@pytest.mark.parametrize(
    ("cut", "micro_steps", "units"),
    [
        (Cut(1, 32), 1, 2 * 2 + 4),
        (Cut(1, 32), 4, 4 * (2 * 2 + 4)),
        (Cut(4, 8), 1, 8),
        (Cut(4, 8), 4, 8),
        (Cut(4, 8, hpz=True), 1, 2 + 4),
        (Cut(4, 8, hpz=True), 4, 2 + 4),
        # over 2 of 4 hosts: N/16 to one other host for each micro-step, half of N/16 to one of two copies, out and back
        (Cut(2, 16), 1, (8 / 16 + 8 / 32) * 32 / 3),
        (Cut(2, 16), 4, (32 / 16 + 8 / 32) * 32 / 3),
    ],
)
def test_bytes_between_hosts(cut: Cut, micro_steps: int, units: float) -> None:
    for cluster in (ON_CPU, ON_GPU):
        sent = traffic(cut, cluster, N, weight_nbytes=2, gradient_nbytes=2, micro_steps=micro_steps)
        assert sent.across_nbytes == pytest.approx(units * UNIT)


def test_bytes_inside_of_a_host() -> None:
    for micro_steps in (1, 3):
        gathers, sums = micro_steps * 2 * 4 * N * 7 / 8, micro_steps * 2 * N * 7 / 8
        for cluster, cut, expected in (
            (ON_GPU, Cut(4, 8), gathers + sums),
            (ON_GPU, Cut(1, 32), gathers + sums),
            (ON_CPU, Cut(1, 32), gathers + sums),
            (ON_CPU, Cut(4, 8), sums),  # the ranks of a host have one copy of the weights
        ):
            assert traffic(cut, cluster, N, 4, 2, micro_steps).inside_nbytes == pytest.approx(expected)


def test_gathers_of_a_trace_replace_the_bound() -> None:
    sent = traffic(Cut(1, 32), ON_GPU, N, 4, 2, micro_steps=3, gathered=5 * N)
    assert sent.across_nbytes == pytest.approx((5 * 4 + 3 * 4) * UNIT)
    assert sent.inside_nbytes == pytest.approx((5 * 4 + 3 * 2) * N * 7 / 8)
    assert traffic(Cut(4, 8), ON_GPU, N, 4, 2, gathered=5 * N).across_nbytes == pytest.approx(8 * UNIT)


def test_one_host_and_one_rank() -> None:
    assert list(cuts(Cluster(1, 4, shared=True))) == [Cut(1, 4)]
    assert traffic(Cut(1, 4), Cluster(1, 4, shared=True), N, 4, 4) == Traffic(0, 4 * N * 3 / 4)
    assert traffic(Cut(1, 1), Cluster(1, 1, shared=True), N, 4, 4) == Traffic(0, 0)
    single = Cluster(6, 1, shared=True)
    assert list(cuts(single)) == [Cut(1, 6), Cut(2, 3), Cut(3, 2), Cut(6, 1), Cut(6, 1, hpz=True)]
    assert list(cuts(Cluster(2, 2, shared=False))) == [Cut(1, 4), Cut(2, 2)], "not for GPUs"
    assert traffic(Cut(6, 1), single, N, 4, 4) == Traffic(8 * N * 5 / 6, 0), "an all_reduce"


def rows_of(said: str) -> dict[tuple[str, str], list[str]]:
    """Return the columns behind the offload, by cut and offload."""
    found = {}
    for line in said.splitlines():
        words = [word.strip() for word in line.split("  ") if word.strip()]
        if len(words) > 3 and words[1] in ("none", "cpu", "nvme"):
            found[words[0], words[1]] = words[2:]
    return found


def test_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(plan, "_free", lambda place: 100 << 30)
    command = ["plan", "--params", "7e9", "--precision", "bf16", "--hosts", "4", "--gpus", "8"]
    command += ["--nvme-path", str(tmp_path), "--memory", "64GiB"]
    assert main([*command, "--accum", "4"]) == 0
    said = capsys.readouterr().out
    rows = rows_of(said)
    cut = "replicate=4, shard=8"
    assert said.startswith("7B bf16 on 4 hosts x 8 ranks: take stage 3 hpZ, 4 x 8, offload none: ")
    across = 7e9 * 3 / 32 * 8 / 2**30
    assert rows[cut, "none"][0] == f"{across:.1f} GiB" and rows["over all ranks", "none"][0] == f"{4 * across:.1f} GiB"
    assert rows[cut, "none"][2] == f"{16 * 7e9 / 8 / 2**30:.1f} GiB"
    assert rows["over all ranks", "none"][2] == f"{16 * 7e9 / 32 / 2**30:.1f} GiB"
    hpz = rows["hpZ, 4 x 8", "none"]
    assert hpz[0] == f"{across * 6 / 8:.1f} GiB" and hpz[2] == f"{7e9 * (6 / 8 + 10 / 32) / 2**30:.1f} GiB"
    assert hpz[-1] == "yes"
    assert rows[cut, "none"][-1] == "no: host memory" and rows["replicate=2, shard=16", "none"][-1] == "yes"
    # encoded sums between hosts: int4 has 0.5 bytes and a scale of 2 for each 256, and errors take memory
    assert main([*command, "--accum", "4", "--compression", "int4"]) == 0
    said, int4 = capsys.readouterr().out, 0.5 + 2 / 256
    assert "sums between hosts are int4" in said
    rows = rows_of(said)
    assert rows[cut, "none"][0] == f"{across * 2 * int4 / 8 * 1024:.1f} MiB"
    assert rows[cut, "none"][2] == f"{(16 + 4 + 1) * 7e9 / 8 / 2**30:.1f} GiB"
    hpz = rows["hpZ, 4 x 8", "none"]
    assert hpz[0] == f"{across * (2 + int4) / 8:.1f} GiB" and hpz[2] == f"{7e9 * (10 / 8 + 10 / 32) / 2**30:.1f} GiB"
    assert rows["over all ranks", "none"][2] == f"{(16 + 4 * 4) * 7e9 / 32 / 2**30:.1f} GiB"
    # a GPU for each rank: its memory has the weights, and torch and the driver
    gpu = ["--gpu-memory", "16GiB"]
    assert main([*command, *gpu]) == 0
    said = capsys.readouterr().out
    assert "take stage 3 replicate=4, shard=8, offload none: " in said and "a GPU of 16.0 GiB for each rank" in said
    assert main([*command, "--gpu-memory", "2GiB", "--offload", "none"]) == 0
    said = capsys.readouterr().out
    assert "nothing fits 64.0 GiB of host memory, 100.0 GiB of drive, 2.0 GiB of GPU" in said
    assert "the smallest is stage 3 over all ranks, offload none" in said


def test_a_model_is_laid_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    command = ["plan", "--model", "test_plan:made", "--hosts", "2", "--gpus", "2", "--offload", "none"]
    assert main([*command, "--nvme-path", str(tmp_path), "--activations", "1MiB"]) == 0
    rows = rows_of(capsys.readouterr().out)
    from test_plan import Net

    for cut, world, shared in (("replicate=2, shard=2", 2, True), ("over all ranks", 4, False)):
        found = estimate(Net(), 3, None, world, shared=shared, hops=world == 2)
        assert found.memory["device"]["slots"] > 0
        assert rows[cut, "none"][2] == f"{found.tier('device') / 2**20 + 1:.1f} MiB"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hosts", "2"], "--hosts 2 needs --gpus, the number of ranks on each host"),
        (["--hosts", "0", "--gpus", "2"], "--hosts 0 --gpus 2: give whole numbers above 0"),
        (["--hosts", "2", "--gpus", "0"], "--hosts 2 --gpus 0: give whole numbers above 0"),
        (["--hosts", "2", "--gpus", "2", "--stage", "1,2"], "compares ways to cut stage 3"),
        (["--hosts", "2", "--gpus", "2", "--world", "4"], "leave out --world"),
        (["--world", "4", "--compression", "int8"], "--compression int8 needs --hosts"),
        (
            ["--hosts", "2", "--gpus", "2", "--gpu-memory", "9GiB", "--compression", "int8"],
            "--compression int8: codecs run on the host, and the model is on GPUs",
        ),
    ],
)
def test_errors(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from zcomm.cli import plan_gpu

    def no_gpu(*args: object) -> None:
        return None

    if "needs" in message:
        monkeypatch.setattr(plan_gpu, "host_of", no_gpu)
    assert main(["plan", "--params", "1e9", *arguments]) == 2 and message in capsys.readouterr().err


def test_without_hosts_worlds_are_of_this_host(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--params", "1e9", "--stage", "3", "--offload", "none"]) == 0
    said = capsys.readouterr().out
    assert "1B fp32 on 1 rank:" in said and "1B fp32 on 2 ranks:" in said
