"""zcomm.profile: the file and its contents; profiling changes no result."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from tiers import slow
from zcomm.profiling.taps import Taps
from zcomm.profiling.trace import Trace, common, length, united
from zcomm.zero.registry import parts_of
from zero_jobs import digest

Run = Callable[..., list[Any]]


def net() -> nn.Sequential:
    torch.manual_seed(1)
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(40, 40), nn.Tanh()) for _ in range(4)))
    return nn.Sequential(nn.Linear(8, 40), blocks, nn.Linear(40, 3))


def train(stage: int, offload: str | None, folder: str, profiled: bool) -> Any:
    zcomm.init(timeout=60)
    zcomm.zero.layout.tiles.TILE_COUNT = 192
    zcomm.zero.optim_state.nvme.SPAN_TILES, zcomm.zero.optim_state.nvme.WINDOWS = 2, 4  # more spans than windows
    model = net()
    opt = zcomm.ZeroOptimizer(
        model, "adamw", stage=stage, offload=offload, nvme_path=folder, lr=0.01, bucket_mb=0.005, clip_norm=1.0
    )

    def steps(count: int) -> None:
        for _ in range(count):
            x = torch.full((4, 8), 0.1 * opt.step_count + zcomm.rank())
            model(x).square().mean().backward()
            opt.step()
            opt.zero_grad()

    steps(2)
    seconds = None
    threads = threading.active_count()
    if profiled:
        with zcomm.profile(f"{folder}/trace.json") as seen:
            steps(3)
        seconds = {**seen.seconds(), "steps": seen.steps, "wall": seen.wall_s}
        assert threading.active_count() == threads, "no watcher is left"
        assert "step" not in vars(opt) and torch.autograd.backward.__module__ == "torch.autograd"
    else:
        steps(3)
    steps(2)
    weights = digest({name: zcomm.zero.full_param(p) for name, p in model.named_parameters()})
    opt.close()
    return weights, seconds


def check_format(text: str) -> list[dict[str, Any]]:
    """Check a trace against Chrome's format, as Perfetto and catapult (chrome://tracing, TensorBoard) read it.

    test_viewers.py runs these programs.
    """

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no JSON")

    whole = json.loads(text, parse_constant=refuse)
    assert set(whole) == {"traceEvents", "displayTimeUnit"} and whole["displayTimeUnit"] in ("ms", "ns")
    begun: dict[tuple[int, str, str], dict[str, Any]] = {}
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in whole["traceEvents"]:
        assert type(event["pid"]) is int and type(event["tid"]) is int and isinstance(event["name"], str)
        assert event["tid"] > 0 or event["name"].startswith("process_"), (
            "Perfetto takes 0 for the thread with the number of the process"
        )
        if event["ph"] == "M":
            given = event["args"]
            assert event["name"] in ("process_name", "thread_name", "process_sort_index")
            assert isinstance(given.get("name", given.get("sort_index")), (str, int))
            continue
        assert isinstance(event["ts"], (int, float)) and event["cat"]
        if event["ph"] == "X":
            assert event["dur"] >= 0
            threads.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
            continue
        assert event["ph"] in "be" and event["id2"]["local"].startswith("0x") and "id" not in event
        key = (event["pid"], event["cat"], event["id2"]["local"])
        if event["ph"] == "b":
            assert key not in begun, "an id is used once"
            begun[key] = event
        else:
            begin = begun[key]
            assert (begin["pid"], begin["name"]) == (event["pid"], event["name"]) and begin["ts"] <= event["ts"]
            begin["ended"] = True
    assert all(begin.pop("ended", False) for begin in begun.values())
    for spans in threads.values():  # complete events of a thread nest
        open_until: list[float] = []
        for begin_us, end_us in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= begin_us:
                open_until.pop()
            assert not open_until or end_us <= open_until[-1] + 1e-3
            open_until.append(end_us)
    return list(whole["traceEvents"])


@pytest.mark.parametrize(("stage", "offload"), [slow(0, None), slow(1, None), slow(2, "nvme"), (3, "nvme")])
def test_a_trace_of_all_ranks_and_the_same_bits(run_ranks: Run, tmp_path: Path, stage: int, offload: str) -> None:
    plain = run_ranks(train, 2, stage, offload, str(tmp_path), False)
    seen = run_ranks(train, 2, stage, offload, str(tmp_path), True)
    assert [weights for weights, _ in seen] == [weights for weights, _ in plain]
    path = tmp_path / "trace.json"
    assert path.stat().st_mode & 0o777 == 0o600
    events = check_format(path.read_text())
    for rank, (_, seconds) in enumerate(seen):
        mine = [event for event in events if event["pid"] == rank]
        named = {event["args"].get("name") for event in mine if event["ph"] == "M"}
        assert {f"rank {rank}", "compute", "communication", "swap", "waiting"} <= named
        names = [event["name"] for event in mine if event["ph"] in "Xb"]
        assert [name for name in names if name.startswith("optimizer step")] == [
            f"optimizer step {n}" for n in (3, 4, 5)
        ]
        assert names.count("forward Sequential") == names.count("backward") == 3
        assert names.count("forward 1.2") == 3
        assert sum("reduce_scatter gradients of bucket 0" in name for name in names) == 3
        assert any(name.startswith("all_reduce gradient norm") for name in names)
        assert any(name.startswith("write state.") for name in names) == (offload == "nvme")  # too small to be read
        assert any(name.startswith("gather ") for name in names) == (stage == 3)
        starts = sorted(event["id2"]["local"] for event in mine if event["ph"] == "b")
        assert starts == sorted(event["id2"]["local"] for event in mine if event["ph"] == "e") and len(
            set(starts)
        ) == len(starts)
        assert all(event["ts"] >= 0 for event in mine if "ts" in event)
        assert all(event["dur"] >= 0 for event in mine if event["ph"] == "X")
        assert seconds["steps"] == 3
        for lane in ("compute", "communication"):
            assert 0 < seconds[lane] <= seconds["wall"]
        assert (seconds["swap"] > 0) == (offload == "nvme")


def fail_inside(folder: str) -> str:
    opt = zcomm.ZeroOptimizer(net(), "sgd", stage=1)
    with pytest.raises(KeyError), zcomm.profile(f"{folder}/trace.json"):
        if zcomm.rank() == 1:
            raise KeyError("only here")
        raise KeyError("and there")
    opt.close()
    return "done"


def test_an_error_leaves_a_file_of_each_rank(run_ranks: Run, tmp_path: Path) -> None:
    assert run_ranks(fail_inside, 2, str(tmp_path)) == ["done", "done"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace.rank0.json", "trace.rank1.json"]
    assert json.loads((tmp_path / "trace.rank1.json").read_text())["traceEvents"]


def test_an_operation_between_two_taps_begins_after_the_origin(
    world_of_one: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opt = zcomm.ZeroOptimizer(net(), "sgd", stage=1)
    tap = Taps.optimizer

    def tap_and_call(taps: Taps, optimizer: zcomm.ZeroOptimizer) -> None:
        tap(taps, optimizer)
        parts_of(optimizer).comm.barrier(name="early")  # like a thread that gathers

    monkeypatch.setattr(Taps, "optimizer", tap_and_call)
    with zcomm.profile(tmp_path / "trace.json"):
        pass
    events = check_format((tmp_path / "trace.json").read_text())
    (early,) = [event for event in events if event["ph"] == "b" and event["name"] == "barrier early"]
    assert early["ts"] >= 0
    opt.close()


def test_without_an_optimizer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no ZeroOptimizer is open"), zcomm.profile(tmp_path / "x.json"):
        pass


def test_intervals() -> None:
    assert united([(5, 7), (0, 2), (1, 3), (7, 8)]) == [(0, 3), (5, 8)]
    assert common([(0, 3), (5, 8)], [(2, 6), (7, 9)]) == [(2, 3), (5, 6), (7, 8)]
    assert length([(0, 3), (5, 8)]) == 6
    trace = Trace()
    for lane, begin, end in (("compute", 0, 10), ("waiting", 4, 6), ("communication", 2, 5), ("swap", 5, 7)):
        trace.add(lane, "x", begin * 10**9, end * 10**9)
    assert trace.seconds() == {
        "compute": 8, "waiting": 2, "gathering": 0, "communication": 3, "swap": 2, "hidden": 3,
    }  # fmt: skip


# --- torch.profiler -------------------------------------------------------------------------------------------------


def traced(folder: str) -> dict[str, int]:
    """Train under torch.profiler with zcomm's ranges, and return how often each range is in rank 0's trace."""
    comm = zcomm.init(timeout=60)
    model = net()
    opt = zcomm.ZeroOptimizer(
        model, "adamw", stage=2, offload="nvme", nvme_path=folder, lr=0.01, bucket_mb=0.005, clip_norm=1.0
    )
    before = (type(comm).all_reduce, zcomm.Work.wait, zcomm.SwapFile.read, dict(vars(opt)))

    def steps() -> None:
        for _ in range(2):
            model(torch.ones(4, 8)).square().mean().backward()
            opt.step()
            opt.zero_grad()
        zcomm.all_reduce(torch.ones(3), name="loss")
        zcomm.all_gather(torch.ones(3), async_op=True)[1].wait()

    steps()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen, zcomm.torch_profiler():
        steps()
    assert (type(comm).all_reduce, zcomm.Work.wait, zcomm.SwapFile.read, dict(vars(opt))) == before
    path = Path(folder) / f"torch{comm.rank}.json"
    seen.export_chrome_trace(str(path))
    events = [
        each for each in json.loads(path.read_text())["traceEvents"] if str(each.get("name")).startswith("zcomm ")
    ]
    assert all(each["ph"] == "X" and each["dur"] >= 0 and each["cat"] == "user_annotation" for each in events)
    opt.close()
    names = [each["name"] for each in events]
    return {name: names.count(name) for name in names}


def test_torch_profiler_has_our_operations_as_ranges(run_ranks: Run, tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(traced, 2, str(tmp_path))):
        assert found["zcomm communication: all_reduce loss"] == 1, rank
        assert found["zcomm communication: all_gather"] == 1
        assert found["zcomm compute: optimizer step 3"] == found["zcomm compute: optimizer step 4"] == 1
        assert found["zcomm waiting: wait"] >= 1 and found["zcomm waiting: wait for gradients"] >= 1
        assert found["zcomm compute: update"] >= 2 and found["zcomm waiting: wait for swap"] >= 1


def test_ranges_end_with_an_error_inside(world_of_one: None) -> None:
    comm = zcomm.init()
    with pytest.raises(ValueError, match="root=7"), zcomm.torch_profiler():
        zcomm.broadcast(torch.ones(1), root=7)
    assert "broadcast" not in vars(type(comm))
