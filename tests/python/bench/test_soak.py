"""A short soak: an episode of each kind, and the checks that a long soak relies on."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from places import BENCH

sys.path.append(str(BENCH))

from soaking.growth import WARM, Growth
from soaking.plan import EVENTS, KINDS, draw
from soaking.rank import Footprint

pytestmark = pytest.mark.slow


def soak(*flags: str) -> tuple[int, str]:
    command = [sys.executable, str(BENCH / "soak"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env={**os.environ})
    return done.returncode, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.timeout_s(300)
def test_an_episode_of_each_kind() -> None:
    """Run consecutive seeds that include each kind."""
    count = 10
    first = next(n for n in range(10000) if {draw(n + k).kind for k in range(count)} == KINDS.keys())
    code, text = soak("--seed", str(first), "--episodes", str(count), "--keep-going")
    assert code == 0, text
    assert f"{count} episodes in " in text and "#wrong 0, #hung 0, #grew 0" in text
    assert all(f"seed {first + number}: {draw(first + number).describe()}" in text for number in range(count))


@pytest.mark.parametrize("kind", ["groups", "unequal-rate"])
def test_a_kind_of_its_own(kind: str) -> None:
    """Groups that late ranks make again and ranks with fewer batches join; rates that differ by rank."""
    code, text = soak("--only", kind, "--episodes", "2", "--seed", "5")
    assert code == 0 and "#wrong 0, #hung 0, #grew 0" in text, text


def test_an_episode_that_passes_its_time_is_shown_with_its_stacks() -> None:
    code, text = soak("--seed", "300", "--episodes", "1", "--limit", "0.01")
    assert code == 1 and "HUNG: job 0 rank 0" in text and "again: bench/soak --seed 300 --episodes 1" in text
    assert "#hung 1" in text and "failed: seeds 300" in text


def test_bad_kinds_are_named() -> None:
    code, text = soak("--only", "train,walk")
    assert code == 2 and "--only walk: expected train, collectives" in text


def test_episodes_are_their_seeds() -> None:
    assert [draw(seed) for seed in range(50)] == [draw(seed) for seed in range(50)]
    episodes = [draw(seed) for seed in range(600)]
    assert {e.kind for e in episodes} == KINDS.keys() and {e.world_size for e in episodes} == {2, 3}
    assert {event.what for e in episodes for job in e.jobs for step in job.events for event in step} == EVENTS.keys()
    assert all(draw(seed, frozenset({"kill"})).kind == "kill" for seed in range(20))


@pytest.mark.parametrize(
    ("descriptors", "memory_mb", "says"),
    [
        ([20] * 30, [300.0] * 30, ""),
        ([20, 23] * 15, [300.0 + n % 7 for n in range(30)], ""),
        ([20 + n // 3 for n in range(30)], [300.0] * 30, "descriptors grew from 22 to 29"),
        ([20] * 30, [300.0 + 3 * n for n in range(30)], "memory grew"),
    ],
)
def test_growth_is_told_from_noise(descriptors: list[int], memory_mb: list[float], says: str) -> None:
    growth = Growth()
    for number, resident_mb in zip(descriptors, memory_mb, strict=True):
        growth.add(7, Footprint(number, 5, resident_mb))
    found = growth.verdicts()
    assert len(descriptors) > 2 * WARM and (says in found[0] if says else not found)
