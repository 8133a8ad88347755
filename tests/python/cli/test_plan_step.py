"""The model of a step on a GPU: bytes and seconds by lane, its bound, timeline, measured seconds, and calibration.

Counts and rates are powers of two, so that all sums of hand-computed numbers are exact.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fake_nvml import FakeGpu, FakeNvml
from test_profile import check_format
from zcomm import Offload
from zcomm.cli import calibrate_gpu, plan_gpu
from zcomm.cli.doctor_gpu import speeds as findings
from zcomm.cli.main import main
from zcomm.machine import gpu_speeds, gpus, speeds
from zcomm.machine.gpu_speeds import GpuSpeeds
from zcomm.planning import drive_nbytes, work_of
from zcomm.planning.gpu_tiers import GpuCase, GpuHost, gpu_case
from zcomm.planning.lanes import LANES, LaneBytes, Rates, bound, scheduled, window
from zcomm.planning.timeline import Work, timeline
from zcomm.profiling.measured import measured_lanes
from zcomm.profiling.trace import Trace
from zcomm.zero.memory.usage import memory_formula

N = 1 << 30  # parameters
RATES = Rates(2.0**40, 2.0**30, 2.0**31, 2.0**34, (2.0**32, 2.0**31))
HOST = GpuHost(1, 1 << 40, 1 << 40, 1 << 50, RATES)
CPU, CPU3, DRIVE3 = Offload("cpu"), Offload("cpu", "cpu"), Offload("nvme", "nvme")


def case(stage: int = 2, offload: Offload | str = CPU, accumulation: int = 1, host: GpuHost = HOST, **more: Any) -> Any:
    """Plan AdamW in bf16: 4 s of computing, a quarter of it forward. The last bucket has an eighth."""
    options: dict[str, Any] = {"flops": 2.0**42, "forward": 0.25, "last_count": N // 8, **more}
    return gpu_case(N, stage, offload, options.pop("world", 1), host, accumulation=accumulation, **options)


def per_param(nbytes: LaneBytes) -> tuple[float, ...]:
    return tuple(each / N for each in (nbytes.down, nbytes.up, nbytes.host, nbytes.read, nbytes.written))


# Bytes per parameter on each lane: down, up, host, read, written. The host's: the update reads and writes state 10 and
# weight 2, and reads the sum 4 (28), the norm reads it again (4). Sums: a gradient 2 read, 4 written or 8 changed. With
# one micro-step the update reads the gradient 2 (26), and nothing adds up. Sums on the GPU come down once, and are
# squared there. Then each byte of bus and drive.
BYTES = [
    (2, CPU, 1, (2, 2, 26 + 4, 0, 0), (0, 2, 26 + 2, 0, 0)),
    (0, CPU, 1, (2, 2, 26 + 4, 0, 0), (0, 2, 26 + 2, 0, 0)),
    (1, CPU, 2, (4, 2, 30 + 6 + 6, 0, 0), (0, 2, 30 + 2, 0, 0)),
    (2, replace(CPU, update="backward"), 1, (2, 2, 26 + 4, 0, 0), (0, 2, 26 + 2, 0, 0)),
    (2, replace(CPU, update="forward"), 4, (8, 2, 32 + 36 + 10, 0, 0), (0, 2, 32 + 2, 0, 0)),
    (2, replace(CPU, gradients="device"), 4, (4, 2, 28 + 6, 0, 0), (0, 2, 28 + 2, 0, 0)),
    (2, Offload("nvme"), 1, (2, 2, 26 + 4 + 20, 10, 10), (0, 2, 26 + 2 + 20, 10, 10)),
    (2, Offload("nvme", gradients="nvme"), 2, (4, 2, 32 + 16 + 6 + 36, 18, 18), (0, 2, 32 + 2 + 24, 14, 10)),
    (3, CPU, 1, (2, 2, 26 + 4, 0, 0), (0, 2, 26 + 2, 0, 0)),
    (3, CPU3, 2, (4, 8, 30 + 6 + 12, 0, 0), (0, 0, 30, 0, 0)),
    (3, replace(CPU3, update="forward"), 1, (2, 4, 26 + 6, 0, 0), (0, 0, 26, 0, 0)),
    (3, DRIVE3, 1, (2, 4, 26 + 4 + 6 + 26, 14, 12), (0, 0, 26 + 22, 10, 12)),  # auto: forward
    (3, replace(DRIVE3, update="step"), 1, (2, 4, 26 + 6 + 28, 16, 12), (0, 0, 26 + 24, 12, 12)),
    (3, replace(DRIVE3, gradients="nvme"), 2, (4, 8, 32 + 16 + 4 + 12 + 46, 26, 20), (0, 0, 32 + 26, 14, 12)),
    (3, replace(DRIVE3, update="backward", gradients="nvme"), 1, (2, 4, 28 + 6 + 6 + 28, 16, 12), (0, 0, 52, 12, 12)),
    (2, "none", 2, (0, 0, 0, 0, 0), (0, 0, 0, 0, 0)),
    (3, "none", 1, (0, 0, 0, 0, 0), (0, 0, 0, 0, 0)),
]


@pytest.mark.parametrize(("stage", "offload", "accumulation", "whole", "late"), BYTES)
def test_bytes_of_each_lane(
    stage: int, offload: Offload | str, accumulation: int, whole: tuple[int, ...], late: tuple[int, ...]
) -> None:
    step = case(stage, offload, accumulation).step
    assert per_param(step.whole) == whole and per_param(step.late) == late


def test_bytes_of_ranks_that_reduce_on_the_host() -> None:
    two = replace(HOST, count=2, reach=False)
    step = case(2, "none", world=2, host=two).step
    # up: half of sums and weights to be updated, and all weights; down: the new half
    assert per_param(step.whole)[:2] == (2 + 1, 2 + 3) and per_param(step.late)[:2] == (1, 5)
    assert per_param(step.whole)[2] == (2 * 2 + 8 - 4) + 2 * (3 + 5), "slots of two ranks, and the bus of two"
    assert per_param(case(0, "none", world=2, host=two).step.whole)[2] == 8 + 4 + 16, "stage 0: weights are gathered"
    shared = case(2, CPU, world=2).step
    assert per_param(shared.whole) == (4, 4, 32 + 8 + 2 * 4, 0, 0), "two ranks on one bus"


@pytest.mark.parametrize(
    ("accumulation", "update", "gradients"),
    [*itertools.product((1, 3), ("step", "forward"), (None, "nvme")), (1, "backward", "nvme")],
)
def test_the_drive_moves_the_bytes_of_the_plan(accumulation: int, update: Any, gradients: Any) -> None:
    where = replace(DRIVE3, update=update, gradients=gradients)
    moved = drive_nbytes(memory_formula(N, 1, 3, "bf16", where), update, accumulation)
    step = case(3, where, accumulation).step
    assert (step.whole.read, step.whole.written) == (moved.read, moved.written)


def test_seconds_and_the_bound() -> None:
    step = case(clips=True).step
    lanes = {"compute": 4, "down": 2, "up": 1, "memory bus": 30 / 16, "drive": 0}
    assert step.lanes == lanes
    last = (2 + 1 + 28 / 16) / 8  # it comes down, is updated, and goes up
    times = step.times()
    assert (times.limit, times.window_s, times.last_s) == ("compute", 0, last)
    assert times.bound_s == bound(lanes, last) == 4 + last
    assert times.step_s == 4 + 28 / 16 + last, "with clipping no update runs before the norm is known"
    swapped = case(2, Offload("nvme")).step
    assert swapped.lanes["drive"] == 10 / 4 + 10 / 2 and swapped.times().limit == "drive"
    assert swapped.times().bound_s == 7.5 + (2 + 1 + 48 / 16 + 7.5) / 8
    alone = case(2, "none").step.times()
    assert alone.bound_s == alone.step_s == 4 and alone.last_s == 0, "nothing leaves the GPU"


def test_windows_of_the_policies() -> None:
    assert window("step", 1, 0.25, 0.0) == 0
    assert window("step", 1, 0.25, 0.5) == 0.375, "half of backward"
    assert window("step", 2, 0.25, 0.5) == 0.1875, "of the last micro-step"
    assert window("forward", 2, 0.25, 0.0) == 0.125
    assert window("backward", 1, 0.25, 1.0) == 0.75
    forward = replace(CPU, update="forward")
    ready = case(2, forward, accumulation=2).step
    assert ready.ready == 0.5, "1 GiB of slots for 2 GiB of gradients"
    assert ready.times().step_s == max(4 - 0.75 - 0.5 + 34 / 16, 4) + ready.times().last_s
    assert gpu_case(N // 4, 2, forward, 1, HOST, accumulation=2).step.ready == 1, "all of them"
    assert case().step.ready == 1, "a single pass needs no slots"
    assert case(accumulation=2).step.ready == 1, "the last pass has slots of its own"
    for none in (case(clips=True), case(3, DRIVE3), case(precision="fp16"), case(2, Offload("nvme", gradients="nvme"))):
        assert none.step.ready == 0
    assert case(3, CPU3).step.ready == 1, "one rank has all weights in memory"
    assert case(3, CPU3, world=2, host=replace(HOST, count=2)).step.ready == 0
    for both in (case(2, forward).step, case(2, replace(CPU, update="backward")).step):
        assert (both.ready, both.times().window_s) == (1, 4), "in backward and in the next forward"
    late = case(2, forward, clips=True).step.times()
    assert (late.window_s, late.step_s) == (1, 4 - 1 + 28 / 16 + late.last_s)
    assert case(3, DRIVE3).step.update == "forward" and case(3, CPU3).step.update == "step", "auto"
    assert scheduled({"compute": 4.0, "up": 1.0}, {"up": 1.0}, 0.5, 0.5) == 4.5, "hidden"
    backward = replace(DRIVE3, update="backward", gradients="nvme")
    assert case(3, backward).step.times().window_s == 3
    for more in ({"clips": True}, {"accumulation": 2}, {"precision": "fp16"}):
        with pytest.raises(ValueError, match=r"update='backward' needs one micro-step.*give update='forward'"):
            case(3, backward, **more)


PLACES: list[tuple[int, Any]] = [
    *itertools.product((0, 1, 2, 3), ("none", "cpu", "nvme")),
    *((stage, replace(CPU, update="forward")) for stage in (0, 1, 2)),
    (2, replace(CPU, gradients="device")),
    (3, CPU),
    (3, replace(CPU3, update="forward")),
    (3, replace(DRIVE3, update="step")),
    (3, replace(DRIVE3, gradients="nvme")),
]


def every() -> Iterator[dict[str, Any]]:
    for (stage, offload), accumulation, clips in itertools.product(PLACES, (1, 2, 4), (False, True)):
        yield {"stage": stage, "offload": offload, "accumulation": accumulation, "clips": clips}


def faster(name: str) -> GpuHost:
    rate = getattr(RATES, name)
    more = tuple(2 * each for each in rate) if isinstance(rate, tuple) else 2 * rate
    return replace(HOST, rates=replace(RATES, **{name: more}))


def test_relations() -> None:
    seen = 0
    for options in every():
        found: GpuCase = case(**options)
        times, whole = found.step.times(), found.step.whole
        assert times.step_s >= times.bound_s >= max(filter(None, found.step.lanes.values()))
        for name in ("flops", "down_bps", "up_bps", "host_bps", "drive_bps"):
            other = case(**options, host=faster(name)).step.times()
            assert other.step_s <= times.step_s and other.bound_s <= times.bound_s, (options, name)
        more = case(**{**options, "accumulation": options["accumulation"] + 1}).step.whole
        if options["offload"] != "none":
            sent = options["offload"] == replace(CPU, gradients="device")  # once
            assert sent or (more.down > whole.down and more.host > whole.host), options
        assert more.up >= whole.up and more.read >= whole.read and more.written >= whole.written
        clipped = case(**{**options, "clips": True}).step.times()
        assert clipped.step_s >= times.step_s
        same = found.step.last == found.step.earlier  # otherwise the norm moves the last addition into backward
        assert clipped.bound_s >= times.bound_s and (clipped.bound_s == times.bound_s or not same)
        seen += 1
    assert seen == 6 * len(PLACES)


@pytest.mark.parametrize(
    "wrong",
    [{"flops": 0.0}, {"down_bps": -1.0}, {"host_bps": math.nan}, {"drive_bps": (1.0, 0.0)}, {"up_bps": math.inf}],
)
def test_a_rate_that_is_not_above_zero(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"{next(iter(wrong))}.* must be above 0: .*zcomm doctor --calibrate"):
        Rates(**wrong)


def test_a_missing_rate_names_its_remedy() -> None:
    unknown = case(2, Offload("nvme"), host=replace(HOST, rates=Rates()), flops=None).step
    assert list(unknown.lanes.values()) == [None] * len(LANES)
    for act in (unknown.times, lambda: timeline(unknown)):
        with pytest.raises(ValueError, match="not known") as raised:
            act()
        words = str(raised.value)
        assert "--tokens" in words and "--dir DIR" in words and words.count("zcomm doctor --calibrate") == len(LANES)
    drive = case(2, Offload("nvme"), host=replace(HOST, rates=replace(RATES, drive_bps=None))).step
    assert drive.missing.startswith("drive: run zcomm doctor --calibrate --dir DIR")
    assert not case(2, CPU, host=replace(HOST, rates=replace(RATES, drive_bps=None))).step.missing, "no byte of it"
    alone = case(2, "none", host=replace(HOST, rates=Rates(2.0**40))).step
    assert alone.times().step_s == 4, "a lane without bytes needs no rate"


# --- the timeline ---------------------------------------------------------------------------------------------------


def test_a_timeline_by_hand() -> None:
    assert timeline(case(clips=True).step, 1) == [
        Work("compute", "forward 0", 0, 1),
        Work("compute", "backward 0", 1, 4),
        Work("down", "gradient 0", 4, 6),
        Work("memory bus", "sum 0", 6, 6.125),
        Work("memory bus", "update 0", 6.125, 6.125 + 28 / 16),
        Work("up", "weights 0", 6.125 + 28 / 16, 7.125 + 28 / 16),
    ]
    forward = case(2, replace(CPU, update="forward"), clips=True).step
    late = [work for work in timeline(forward, 2) if work.begin < 1.5]
    assert late == [
        Work("memory bus", "update 0", 0, 14 / 16),
        Work("up", "weights 0", 14 / 16, 22 / 16),
        Work("compute", "forward 0", 22 / 16, 30 / 16),
        Work("memory bus", "update 1", 14 / 16, 28 / 16),
    ], "the first module waits for its weights"


def end_of(work: list[Work]) -> float:
    return max(each.end for each in work)


@pytest.mark.parametrize("pieces", [1, 8, 32])
def test_timelines_have_the_seconds_of_the_lanes(pieces: int) -> None:
    for options in every():
        step = case(**options).step
        work = timeline(step, pieces)
        lanes = {lane: [each for each in work if each.lane == lane] for lane in LANES}
        for lane, seconds in step.lanes.items():
            assert sum(each.end - each.begin for each in lanes[lane]) == pytest.approx(seconds), (options, lane)
            for one, other in itertools.pairwise(lanes[lane]):
                assert one.end <= other.begin, "a lane does one thing at a time"
        assert max(step.lanes.values()) <= end_of(work) <= sum(step.lanes.values()) + 1e-9
        sums = {each.name[4:]: each.end for each in work if each.name.startswith("sum ")}
        if step.update == "step":  # the sum of the last micro-step comes first
            begins = {each.name[7:]: each.begin for each in work if each.name.startswith("update ")}
            assert all(begins[piece] >= sums[piece] for piece in begins)


def test_the_timeline_ends_as_the_formula_says() -> None:
    """Computing is the longest lane. Pieces and the last bucket are small. In stage 3 gathers wait for slots."""
    rates = Rates(2.0**40, 2.0**33, 2.0**33, 2.0**36, (2.0**35, 2.0**35))
    for options in every():
        step = case(**options, host=replace(HOST, rates=rates), last_count=N // 64).step
        end = end_of(timeline(step, 64))
        assert end == pytest.approx(step.times().step_s, rel=0.1 if options["stage"] == 3 else 0.03), options


def test_when_updates_begin() -> None:
    def begins(step: Any) -> tuple[float, float]:
        """Return when the first update begins, and when backward ends."""
        work = timeline(step, 8)
        first = min(each.begin for each in work if each.name.startswith("update "))
        return first, max(each.end for each in work if each.lane == "compute")

    fast_bus = replace(HOST, rates=replace(RATES, down_bps=2.0**33))  # gradients come while backward computes
    first, backward = begins(case(host=fast_bus, clips=True).step)
    assert first > backward
    rows = [(CPU, 1, "the last gradient is added by the update"), (replace(CPU, gradients="device"), 2, "a sum comes")]
    for offload, amount, why in rows:
        first, backward = begins(case(2, offload, host=fast_bus, accumulation=2).step)
        assert first == 2 + 0.5 + 1.5 / 8 + amount * (1 / 32 + 1 / 64), why
    early, forward = (case(2, replace(CPU, update=update)).step for update in ("backward", "forward"))
    assert timeline(early) == timeline(forward), "in backward, and the rest in the next forward"
    first, backward = begins(case(host=fast_bus).step)
    assert first == 1 + 3 / 8 + 1 / 32 + 1 / 64, "a single pass: with the first gradient"
    first, backward = begins(case(3, replace(DRIVE3, update="backward", gradients="nvme")).step)
    assert 1 < first < backward
    first, _ = begins(case(3, DRIVE3).step)
    assert first == (10 / 4 + 12 / 2) / 8 / 2, "in forward: once the state of the first piece is read"


# --- the measured step ----------------------------------------------------------------------------------------------


def write(path: Path, events: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_measured_lanes_of_our_profile(tmp_path: Path) -> None:
    trace = Trace()
    trace.origin = 0
    for lane, name, begin, end in (
        ("compute", "optimizer step 3", 0, 10),
        ("compute", "update", 2, 8),  # before the first step's end
        ("compute", "optimizer step 4", 18, 30),
        ("compute", "update", 19, 23),
        ("compute", "forward Net", 10, 14),
        ("compute", "optimizer step 5", 40, 50),
        ("compute", "update", 41, 45),
        ("swap", "write 0", 24, 30),
        ("swap", "read 1", 26, 28),  # at the same time
        ("swap", "read 2", 48, 52),
        ("communication", "all_reduce", 30, 31),
    ):
        trace.add(lane, name, begin * 10**9, end * 10**9)
    other = Trace()
    other.origin = 0
    other.add("compute", "update", 11 * 10**9, 49 * 10**9)
    path = write(tmp_path / "trace.json", [*trace.events(0), *other.events(1)])
    assert measured_lanes(path) == {"step": 20, "memory bus": 4, "drive": 4}, "rank 0, two steps from end to end"


def test_measured_lanes_of_torchs_profiler(tmp_path: Path) -> None:
    def event(category: str, name: str, begin_s: int, end_s: int) -> dict[str, Any]:
        return {
            "ph": "X",
            "cat": category,
            "name": name,
            "pid": 77,
            "ts": begin_s * 1e6,
            "dur": (end_s - begin_s) * 1e6,
        }

    events = [
        {"ph": "M", "name": "process_name", "pid": 77},
        event("user_annotation", "zcomm compute: optimizer step 1", 0, 1),
        event("gpu_user_annotation", "zcomm compute: optimizer step 1", 0, 3),  # the device's copy
        event("cpu_op", "aten::mm", 1, 2),
        event("kernel", "gemm", 2, 5),
        event("kernel", "other stream", 4, 6),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 6, 8),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 7, 8),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 7, 9),
        event("user_annotation", "zcomm compute: update", 8, 11),
        event("user_annotation", "my own", 8, 11),
        event("user_annotation", "zcomm compute: optimizer step 2", 7, 11),
        event("kernel", "gemm", 11, 15),
    ]
    found = measured_lanes(write(tmp_path / "torch.json", events))
    assert found == {"step": 10, "compute": 4, "down": 2, "up": 1, "memory bus": 3}


def test_a_file_that_is_no_trace(tmp_path: Path) -> None:
    for text in ("", "[1]", "{}", '{"traceEvents": [{"ph": "X", "ts": "soon"}]}'):
        path = tmp_path / "trace.json"
        path.write_text(text)
        with pytest.raises(ValueError, match=r"is no trace of zcomm\.profile or torch\.profiler"):
            measured_lanes(path)
    one = Trace()
    one.add("compute", "optimizer step 1", 0, 5)
    with pytest.raises(ValueError, match="1 optimizer steps of zcomm: profile two or more"):
        measured_lanes(write(path, one.events(0)))
    with pytest.raises(OSError):
        measured_lanes(tmp_path / "none.json")


# --- calibration, and the command -----------------------------------------------------------------------------------

SPEEDS = GpuSpeeds(4e14, 50e9, 40e9)
PLAN = ["plan", "--params", "1e9", "--precision", "bf16", "--world", "1", "--memory", "128GiB", "--gpu-memory", "80GiB"]
ONE = [*PLAN, "--stage", "2", "--offload", "cpu", "--tokens", "100000"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Play a machine with a calibrated H100, and a host that was not calibrated."""
    monkeypatch.setenv("ZCOMM_TUNING", str(tmp_path / "tuning.json"))
    monkeypatch.setenv("ZCOMM_SWAP_TUNING", str(tmp_path / "swap.json"))
    machine = gpus.read(FakeNvml([FakeGpu()]), Path("/nowhere"))
    monkeypatch.setattr(gpus, "read", lambda: machine)
    gpu_speeds.save(FakeGpu().name, SPEEDS)
    return tmp_path


def calibrate_host() -> None:
    speeds.save([speeds.Speeds(1, {"fp32": 1e12, "bf16": 1e12, "fp16": 1e12}, 4e11, 1e11, 1e-5, 1e10)])


def test_speeds_of_gpus_are_kept(cache: Path) -> None:
    gpu_speeds.save("another", replace(SPEEDS, flops=1e14))
    assert gpu_speeds.load(FakeGpu().name) == SPEEDS
    other = gpu_speeds.load("another")
    assert other is not None and other.flops == 1e14 and gpu_speeds.load("third") is None
    assert [finding.state for finding in findings(gpus.read())] == ["ok"]
    assert "400 TFLOP/s in blocks, 50.0 GB/s down, 40.0 up" in next(findings(gpus.read())).value
    text = json.loads(gpu_speeds.path().read_text())
    for wrong in ({"machine": "another"}, {"format": 0}, {"gpus": {FakeGpu().name: {"speed": 1}}}, {"gpus": 1}):
        gpu_speeds.path().write_text(json.dumps({**text, **wrong}))
        assert gpu_speeds.load(FakeGpu().name) is None, wrong
    (missing,) = findings(gpus.read())
    assert missing.state == "note" and missing.mend.startswith("zcomm doctor --calibrate")


def test_a_device_is_measured(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = calibrate_gpu.measure(torch.device("cpu"), nbytes=1 << 16, width=32, rounds=1)
    assert min(found.flops, found.down_bps, found.up_bps) > 0
    with torch.device("meta"):
        work = work_of(*calibrate_gpu._blocks(32))
    assert 0 < work.forward_flops < work.flops
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert calibrate_gpu.calibrate() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "mine")
    monkeypatch.setattr(calibrate_gpu, "measure", lambda device: SPEEDS)
    assert calibrate_gpu.calibrate() == gpu_speeds.path() and gpu_speeds.load("mine") == SPEEDS


def test_the_command_prints_one_step(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(ONE) == 0
    said = capsys.readouterr().out
    assert "not known here: memory bus: run zcomm doctor --calibrate" in said and "bound:" not in said
    calibrate_host()
    assert main([*ONE, "--clip"]) == 0
    said = capsys.readouterr().out
    for words in (
        "compute - 400 TFLOP/s 1.5 s",  # 6e14 / 4e14
        "down 1.9 GiB 50 GB/s 40 ms",
        "up 1.9 GiB 40 GB/s 50 ms",
        "memory bus 27.9 GiB 100 GB/s 300 ms",  # 30 bytes per parameter
        "drive - - 0 ms",
        "step - - 1.7",  # 1.5 + 0.28, and the last bucket
    ):
        assert words in " ".join(said.split()), words
    assert "update='step' runs concurrently with 0 ms of computing" in said and "compute is the longest lane" in said
    assert "measured" not in said.splitlines()[-8]
    assert main([*PLAN, "--offload", "cpu", "--update", "forward", "--stage", "2,3", "--tokens", "100000"]) == 0
    said = capsys.readouterr().out
    assert "memory bus" in said and "limit" in said and "lane" not in said.split(), "two cases are rows"


def test_the_command_writes_a_timeline_next_to_a_measured_step(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = cache / "step.json"
    assert main([*ONE, "--timeline", str(file)]) == 2
    assert "memory bus: run zcomm doctor --calibrate" in capsys.readouterr().err and not file.exists()
    calibrate_host()
    trace = Trace()
    trace.origin = 0
    for number, (begin, end) in enumerate(((0, 1), (2, 3))):
        trace.add("compute", f"optimizer step {number}", begin * 10**9, end * 10**9)
    measured = write(cache / "trace.json", trace.events(0))
    assert main([*ONE, "--timeline", str(file), "--measured", str(measured)]) == 0
    said = capsys.readouterr().out
    (row,) = [line for line in said.splitlines() if line.split()[:1] == ["step"]]
    assert row.split()[-2:] == ["2", "s"]
    events = check_format(file.read_text())
    names = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    assert list(names) == list(LANES)
    used = {event["tid"] for event in events if event["ph"] == "X"}
    assert used == {names[lane] for lane in LANES if lane != "drive"}


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--timeline", "x.json"], "--timeline is for one case"),
        (["--measured", "x.json"], "--measured is for one case"),
        (["--stage", "2", "--offload", "cpu", "--measured", "/nowhere/x.json"], "No such file"),
        (["--tokens", "0"], "--tokens 0 is not above 0"),
        (["--stage", "3", "--offload", "nvme", "--update", "backward", "--clip"], "update='backward' needs one"),
    ],
)
def test_refusals(cache: Path, capsys: pytest.CaptureFixture[str], words: list[str], error: str) -> None:
    assert main([*PLAN, *words]) == 2
    assert error in capsys.readouterr().err


def test_what_needs_a_gpu(cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpus, "read", lambda: gpus.Machine(absent="no NVIDIA driver here"))
    assert main([*ONE[:9], "--stage", "2", "--offload", "cpu", "--timeline", "x.json"]) == 2
    assert "--timeline needs a GPU here, or --gpu-memory: no NVIDIA driver here" in capsys.readouterr().err
    gpu_speeds.save("H100", replace(SPEEDS, up_bps=0.0))
    assert main([*ONE, "--gpu-name", "H100"]) == 2
    assert "up_bps=0.0 must be above 0" in capsys.readouterr().err


def test_legal_policies_on_a_gpu() -> None:
    def placed(offload: str, stage: int, update: str, gradients: str = "cpu", world: int = 1) -> Offload:
        return plan_gpu._placed(argparse.Namespace(update=update, gradients=gradients), offload, stage, world)

    assert placed("none", 2, "forward") == Offload()
    assert placed("cpu", 2, "forward") == Offload("cpu", update="forward")
    assert placed("cpu", 3, "backward") == Offload("cpu", "cpu", update="step")
    assert placed("nvme", 2, "forward", "nvme") == Offload("nvme", gradients="nvme", update="step")
    assert placed("nvme", 3, "backward") == Offload("nvme", "nvme", gradients="nvme", update="backward")
    assert placed("nvme", 3, "auto") == Offload("nvme", "nvme")
    assert placed("cpu", 1, "backward") == Offload("cpu", update="backward")
    assert placed("cpu", 1, "backward", world=2) == Offload("cpu", update="step")
    for stage in (2, 3):
        params: Any = "cpu" if stage == 3 else None
        assert placed("cpu", stage, "step", "device") == Offload("cpu", params, gradients="device", update="step")
    assert placed("cpu", 2, "step", "device", world=2) == Offload("cpu", update="step")
