"""The bitwise contract of updates in backward, over all that test_matrix.py varies: each pair of values of two factors.

The bits are those of stage 0. The kinds of models are those that updates in backward can follow.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from test_corners import AGAIN, KINDS
from test_matrix import FACTORS, Row, covering, train
from tiers import long, slow

Run = Callable[..., list[Any]]
EARLY: dict[str, list[Any]] = {
    "world": FACTORS["world"],
    "kind": [kind for kind in KINDS if kind not in (*AGAIN, "outside")],
    "precision": ["fp32", "bf16"],
    "optimizer": FACTORS["optimizer"],
    "communication_dtype": FACTORS["communication_dtype"],
    "fraction": FACTORS["fraction"],
    "bucket_mb": FACTORS["bucket_mb"],
    "overlap": FACTORS["overlap"],
    "prefetch": FACTORS["prefetch"],
    "share_parameters": FACTORS["share_parameters"],
    "units": FACTORS["units"],
}
STEPS = 5  # two of these are watched


def early() -> list[Row]:
    values = list(EARLY.values())
    return [tuple(of[k] for of, k in zip(values, row, strict=True)) for row in covering(values)]


def train_both(row: Row, folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the results of stage 0 and of the row."""
    world, kind, precision, optimizer, travel, fraction, bucket_mb, overlap, prefetch, share, units = row
    decides, more = (world, kind, 1, precision, optimizer, travel), {"clip_norm": None, "steps": STEPS}
    plain = (*decides, 0, None, 1.0, 25.0, False, 1, True, None, None, "step")
    there = (*decides, 3, "nvme", fraction, bucket_mb, overlap, prefetch, share, "nvme", units, "backward")
    return train(plain, folder, **more), train(there, folder, **more)


def train_rows(chosen: list[Row], folder: str) -> list[Any]:
    return [train_both(row, folder) for row in chosen]


def test_every_pair_of_values_is_in_the_sample() -> None:
    sample, names = early(), list(EARLY)
    assert sample == early() and len(sample) < 70
    for (a, first), (b, second) in itertools.combinations(enumerate(names), 2):
        have = {(str(row[a]), str(row[b])) for row in sample}
        assert len(have) == len(set(map(str, EARLY[first]))) * len(set(map(str, EARLY[second]))), f"{first} x {second}"


@pytest.mark.timeout_s(600)
@pytest.mark.parametrize("part", [slow(slice(0, None, 4)), long(slice(2, None, 4)), long(slice(1, None, 2))], ids=str)
@pytest.mark.parametrize("world_size", EARLY["world"])
def test_the_sample_keeps_the_contract(run_ranks: Run, tmp_path: Path, world_size: int, part: slice) -> None:
    chosen = [row for row in early() if row[0] == world_size][part]
    per_rank = run_ranks(train_rows, world_size, chosen, str(tmp_path), timeout_s=580)
    for rank, found in enumerate(per_rank):
        for row, (wanted, result) in zip(chosen, found, strict=True):
            named, updated = dict(zip(EARLY, row, strict=True)), result.pop("updated")
            assert wanted.pop("updated") == 0 and result == wanted, f"rank {rank}: {named}"
            assert updated == STEPS - 2, f"{named}: {updated} updates in backward"
            assert len(set(result["losses"])) == len(result["losses"]), f"{named}: it learns"
