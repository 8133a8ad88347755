"""The computations of benches: exact expected values, bytes, percentiles, predictions, and verdicts."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from places import BENCH

sys.path.insert(0, str(BENCH))

from collective import check, model
from collective.judge import verdicts as judged
from collective.operations import OPERATIONS
from collective.show import page_of
from goals import GOALS
from harness.goal import goal
from harness.program import parse_size, sizes
from harness.timing import interleaved, percentile

QUIET = model.Machine(
    call_s=1e-6, signal_s=1e-7, memory_bps=20e9, cache_bps=80e9, cache_nbytes=32 << 20, link_s=1e-5, link_bps=1e9
)


def everyones_buffers(name: str, world: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [OPERATIONS[name].buffers(count, world, torch.zeros) for _ in range(world)]


def perform(name: str, rank: int, world: int, count: int, out: torch.Tensor) -> None:
    """Write the operation's correct result of `rank`, computed from the inputs that the check gives to all ranks."""
    operation, part = OPERATIONS[name], count // world

    def of(q: int, begin: int, n: int) -> torch.Tensor:
        return check.value(operation, q, torch.arange(begin, begin + n)).float()

    if name == "all_reduce":
        out[:] = sum(of(q, 0, count) for q in range(world))
    elif name == "reduce_scatter":
        out[:] = sum(of(q, rank * part, part) for q in range(world))
    elif name == "all_gather":
        out[:] = torch.cat([of(q, q * part, part) for q in range(world)])
    elif name == "broadcast":
        out[:] = of(0, 0, count)
    elif name == "all_to_all":
        out[:] = torch.cat([of(q, rank * part, part) for q in range(world)])
    else:
        out[:] = of((rank - 1) % world, 0, count)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("world", [2, 3])
def test_check_counts_what_is_wrong(name: str, world: int) -> None:
    count = 12 * world
    for rank, (inp, out) in enumerate(everyones_buffers(name, world, count)):
        good = lambda out=out, rank=rank: perform(name, rank, world, count, out)  # noqa: E731
        assert check.wrong(OPERATIONS[name], "sum", inp, out, good, rank, world) == 0

        def bad(out: torch.Tensor = out, good: Any = good) -> None:
            good()
            out[3] += 1
            out[-1] = 0

        assert check.wrong(OPERATIONS[name], "sum", inp, out, bad, rank, world) == 2
        moved = lambda out=out, good=good: (good(), out.copy_(out.roll(1)))  # noqa: E731
        assert check.wrong(OPERATIONS[name], "sum", inp, out, moved, rank, world) > 0


def test_worst_ulp_sees_a_second_rounding() -> None:
    """Half an ulp is the exact sum rounded once; rounding on the way, as accumulating in bf16 does, shows."""
    world, n = 3, 4096
    inp = torch.zeros(n, dtype=torch.bfloat16)
    inputs = [torch.randn(n, generator=torch.Generator().manual_seed(q)).to(torch.bfloat16) for q in range(world)]
    once = lambda: inp.copy_(sum(t.float() for t in inputs).to(torch.bfloat16))  # noqa: E731
    twice = lambda: inp.copy_(inputs[0] + inputs[1] + inputs[2])  # noqa: E731
    assert 0.4 < check.worst_ulp(inp, once, 0, world) <= 0.5 + 2**-16
    assert check.worst_ulp(inp, twice, 0, world) > 0.6


def test_sizes() -> None:
    assert [parse_size(text) for text in ("8", "64K", "1.5M", "1G")] == [8, 65536, 3 << 19, 1 << 30]
    assert list(sizes(8, 64, 2)) == [8, 16, 32, 64] and list(sizes(8, 20, 2, 4)) == [8, 12, 16, 20]
    for text in ("", "-8", "8Q", "0"):
        with pytest.raises(ValueError, match="size"):
            parse_size(text)


def test_interleaved_takes_turns_and_the_slowest_rank() -> None:
    turns: list[str] = []
    calls = {name: (lambda name=name: turns.append(name)) for name in ("a", "b")}
    slow = lambda mine: [mine, [10 * value for value in mine]]  # noqa: E731  the other rank takes ten times as long
    result = interleaved(calls, 7, 2, 1, lambda: None, slow)
    assert turns[:2] == ["a", "b"]
    rounds = ["".join(turns[at : at + 4]) for at in range(2, 30, 4)]
    assert set(rounds) == {"aabb", "bbaa"} and len(turns) == 30
    alone = interleaved(calls, 7, 2, 0, lambda: None, lambda mine: [mine])
    assert result["a"].median > alone["a"].median
    assert [percentile(list(range(1, 101)), p) for p in (50, 95, 99, 100)] == [50, 95, 99, 100]
    assert percentile([5.0], 50) == 5.0


def test_model_has_the_limits_of_its_algorithms() -> None:
    """Long messages: bytes over bandwidth. Short ones: steps times latency. Slots cost more than symmetric memory."""
    long, short = 1 << 30, 8
    for name, operation in OPERATIONS.items():
        bytes_time = operation.memory_factor(4) * long / QUIET.memory_bps
        assert model.symmetric(name, long, 4, QUIET) == pytest.approx(bytes_time, rel=0.01)
        assert model.private(name, long, 4, QUIET) > model.symmetric(name, long, 4, QUIET)
        assert model.best_of_host(name, "private", short, 4, QUIET) < 2e-6
    assert model.ring("all_reduce", long, 4, QUIET) == pytest.approx(1.5 * long / QUIET.link_bps, rel=0.01)
    assert model.ring("all_reduce", short, 4, QUIET) == pytest.approx(6 * QUIET.link_s, rel=0.2)
    assert model.halving_doubling("all_reduce", short, 64, QUIET) < model.ring("all_reduce", short, 64, QUIET) / 5
    assert model.hierarchical(long, 8, 4, QUIET) < model.ring("all_reduce", long, 32, QUIET) / 2
    assert model.tree_broadcast(short, 16, QUIET) == pytest.approx(4 * QUIET.link_s, rel=0.1)
    assert model.pairwise_all_to_all(long, 4, QUIET) == pytest.approx(0.75 * long / QUIET.link_bps, rel=0.01)
    assert model.dissemination_barrier(9, QUIET) == pytest.approx(4 * QUIET.link_s, rel=0.1)
    assert model.ring("all_reduce", long, 1, QUIET) == QUIET.call_s


def row(share: float, nbytes: int = 64 << 20, **more: Any) -> dict[str, Any]:
    names = ("symmetric", "private")
    return {
        "kind": "row",
        "part": "bandwidth",
        "op": "all_reduce",
        "type": "float",
        "world_size": 2,
        "backend": "auto",
        "nbytes": nbytes,
        "time_us": {**dict.fromkeys(names, 1.0), "memcpy": share},
        "percentiles_us": {name: {"p50": 1.0, "p95": 1.0, "p99": 1.0} for name in names},
        "share_of_roof": dict.fromkeys(names, 0.7 * share),
        "factor_over_peer": {"gloo": dict.fromkeys(names, 11.0)},
        "wrong": dict.fromkeys(names, 0),
        **more,
    }


def test_goals_have_one_side() -> None:
    """A figure that is better than its goal always holds; one that is worse does up to the tolerance."""
    for name in GOALS:
        wanted = goal(name)
        better = 1 if wanted.sign == ">=" else -1
        assert wanted.holds(wanted.bound + better * 1e6) and not wanted.holds(wanted.bound - better * 1e6), name
    ulp = goal("coll.all_reduce.bf16.ulp")
    assert ulp.holds(0.5 + 2**-17) and not ulp.holds(0.5 + 2**-15) and str(ulp) == "<= 0.5"
    assert str(goal("coll.guard")) == "< 50 ns" and not goal("coll.guard").holds(50)
    assert str(goal("coll.all_reduce.symmetric")) == ">= 0.90" and str(goal("coll.tcp.over.gloo")) == ">= 2.5x"


def test_verdicts() -> None:
    """A goal holds only if every size reaches it, and is open when nothing was measured."""

    def verdicts(records: list[dict[str, Any]]) -> dict[str, bool | None]:
        return {v.what.partition(": ")[2]: v.good for v in judged(records) if "all_reduce fp32" in v.what}

    assert verdicts([row(0.91), row(0.93, 256 << 20)])["symmetric, share of the concurrent memcpy"] is True
    both = verdicts([row(0.91), row(0.85, 256 << 20)])
    assert (
        both["symmetric, share of the concurrent memcpy"] is False
        and both["private, share of the concurrent memcpy"] is True
    )
    assert both["symmetric over gloo"] is True and both["symmetric over openmpi"] is None
    assert set(verdicts([row(0.1, 1024)]).values()) == {None}  # another size decides nothing
    guard = [{"kind": "guard", "part": "guard", "how": "whole", "ns": 51.0}]
    assert next(v for v in judged(guard) if v.measured.startswith("51")).good is False
    page = page_of([row(0.91), {"kind": "failed", "part": "tcp", "step": "ring", "reason": "exit code 1"}])
    assert "| 0.91 (of the fastest copy: 0.64) | holds |" in page and "Failed: tcp, ring (exit code 1)." in page
