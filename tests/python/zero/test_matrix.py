"""The bitwise contract over everything at once: a sample in which every pair of values of two factors occurs.

World, kind of model, accumulation, precision, optimizer and the type in which gradients travel decide the bits. Stage,
offload, fraction, bucket size, overlap, prefetch, shared parameters, units and the moment of updates must not. Each row
is compared with a run of stage 0 without any of these.
Source: greedy covering arrays (Cohen, Dalal, Fredman, Patton: the AETG system, 1997).
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from test_corners import KINDS, Net, loss_of
from tiers import long, slow
from zcomm.zero import Units
from zero_jobs import Case, digest, share_small_buckets

Run = Callable[..., list[Any]]
Row = tuple[Any, ...]
FACTORS: dict[str, list[Any]] = {
    "world": [1, 2, 3, 4],
    "kind": KINDS,
    "accum": [1, 2, 3],
    "precision": ["fp32", "bf16", "fp16"],
    "optimizer": ["adamw", "momentum", "lion", "nadam"],
    "communication_dtype": [None, "fp32", "bf16"],
    "stage": [0, 1, 2, 3],
    "offload": [None, "cpu", "nvme"],
    "fraction": [1.0, 0.4],
    "bucket_mb": [0.004, 0.02, 25.0],
    "overlap": [True, False],
    "prefetch": [0, 1, 3],
    "share_parameters": [True, False],
    "gradients": [None, "nvme"],
    "units": [None, Units(min_bytes=15729, resident=("blocks.2",)), Units((nn.Linear,), prefetch_bytes=10486), "split"],
    "update": ["step", "auto"],
}
DECIDES = 6  # so many of the factors decide the bits
STEPS = 3
SIZES = [{"replicate": 2, "shard": 2}, {"shard": 2, "replicate": 3}]


def covering(values: list[list[Any]], seed: int = 1) -> list[Row]:
    """Rows of value numbers such that each pair of values of two factors is in one. Greedy, deterministic."""
    sizes = [len(of_factor) for of_factor in values]
    pairs = list(itertools.combinations(range(len(sizes)), 2))
    left = {((a, i), (b, j)) for a, b in pairs for i in range(sizes[a]) for j in range(sizes[b])}
    draw = random.Random(seed)
    rows = []
    while left:
        best: tuple[int, list[int]] = (-1, [])
        for _ in range(12):  # candidates; each begins with a pair that is left
            (a, i), (b, j) = draw.choice(sorted(left))
            row = {a: i, b: j}
            others = [f for f in range(len(sizes)) if f not in row]
            draw.shuffle(others)
            for factor in others:
                gains = [
                    sum(tuple(sorted(((factor, k), (g, v)))) in left for g, v in row.items())
                    for k in range(sizes[factor])
                ]
                top = [k for k, gain in enumerate(gains) if gain == max(gains)]
                row[factor] = draw.choice(top)
            flat = [row[factor] for factor in range(len(sizes))]
            gain = sum(((a, flat[a]), (b, flat[b])) in left for a, b in pairs)
            best = max(best, (gain, flat))
        flat = best[1]
        left -= {((a, flat[a]), (b, flat[b])) for a, b in pairs}
        rows.append(tuple(flat))
    return rows


def rows() -> list[Row]:
    """Return the sample, with the values themselves."""
    values = list(FACTORS.values())
    return [tuple(of[k] for of, k in zip(values, row, strict=True)) for row in covering(values)]


def waiting() -> list[Row]:
    """Return the rows of stage 3 once more, with updates that wait for the next forward; params are on the drive."""
    names = list(FACTORS)
    stage, offload = names.index("stage"), names.index("offload")
    return [(*row[:offload], "nvme", *row[offload + 1 : -1], "forward") for row in rows() if row[stage] == 3]


def train(
    row: Row,
    folder: str,
    clip_norm: float | None = 1.0,
    steps: int = STEPS,
    losses_of: int = 1,
    sizes: dict[str, int] | None = None,
) -> dict[str, Any]:
    """Train as the row says. losses_of: backward passes of a micro-step. sizes: of a mesh."""
    _, kind, accum, precision, optimizer, travel, stage, offload, fraction, *rest = row
    bucket_mb, overlap, prefetch, share_parameters, gradients, units, update = rest
    fraction = fraction if offload else 1.0
    case = Case(stage, offload, bucket_mb, overlap, precision, prefetch, share_parameters, fraction, gradients, update)
    atomic = (stage, offload) == (3, "nvme") and update != "step" and prefetch == 1
    case = replace(case, atomic=atomic and not sizes)
    if units == "split":  # of a Linear, or two with one bias
        units = Units(max_bytes=1248 * zcomm.zero.Precision(precision).param_nbytes)
    comm = zcomm.init(timeout=60)
    share_small_buckets()
    zcomm.zero.layout.tiles.TILE_COUNT = 192
    zcomm.zero.optim_state.nvme.SPAN_TILES, zcomm.zero.optim_state.nvme.WINDOWS = 2, 4  # more spans than windows
    torch.manual_seed(comm.rank)
    net = Net(kind)
    trained = [p for p in net.parameters() if p.requires_grad]
    chosen: Any = {
        "adamw": lambda: torch.optim.AdamW(trained, lr=1e-2),
        "momentum": lambda: torch.optim.SGD(trained, lr=0.1, momentum=0.9, nesterov=True),
        "nadam": lambda: torch.optim.NAdam(trained, lr=1e-2),
        "lion": lambda: zcomm.optim.CPULion(trained, lr=1e-3),
    }[optimizer]()
    scale = {"loss_scale": zcomm.zero.LossScale(initial_power=10)} if precision == "fp16" else {}
    opt = zcomm.ZeroOptimizer(
        net,
        chosen,
        clip_norm=clip_norm,
        grad_accum=accum,
        nvme_path=folder,
        communication_dtype=travel,
        units=units,
        mesh=zcomm.ProcessMesh(**sizes) if sizes else None,
        **scale,
        **case.arguments(),
    )
    losses, norms, updated = [], [], 0
    for number in range(steps * accum):
        loss = loss_of(net, comm.rank, number)
        opt.backward(loss)
        for other in range(1, losses_of):
            opt.backward(0.5 * loss_of(net, comm.rank, number + 100 * other))
        updated += opt._open_parts.updates.pending
        opt.step()
        opt.zero_grad()
        losses.append(loss.item().hex())
        if (number + 1) % accum == 0:
            norms.append(float(opt.grad_norm).hex())
    arrays = {f"{n}.{k}": v.reshape(-1) for n, e in opt.state_dict()["state"].items() for k, v in e.items()}
    skipped = opt.skipped_steps
    result = {"losses": losses, "norms": norms, "bits": digest({**opt.full_state_dict(), **arrays})}
    opt.close()
    return {**result, "skipped": skipped, "updated": updated}


def train_rows(
    chosen: list[Row], folder: str, sizes: dict[str, int] | None = None
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Train each row and its reference: stage 0, without offload, one bucket, no overlap. sizes: of a mesh."""
    references: dict[Row, dict[str, Any]] = {}
    found = []
    for row in chosen:
        key = row[:DECIDES]
        if key not in references:
            references[key] = train((*key, 0, None, 1.0, 25.0, False, 1, True, None, None, "step"), folder, sizes=sizes)
        found.append((references[key], train(row, folder, sizes=sizes)))
    return found


def test_every_pair_of_values_is_in_the_sample() -> None:
    sample, names = rows(), list(FACTORS)
    assert sample == rows(), "the same each time"
    assert len(sample) < 70
    for (a, first), (b, second) in itertools.combinations(enumerate(names), 2):
        have = {(row[a], row[b]) for row in sample}
        assert len(have) == len(FACTORS[first]) * len(FACTORS[second]), f"{first} x {second}"


@pytest.mark.timeout_s(300)
@pytest.mark.parametrize(
    ("world_size", "one_in"), [(1, 4), (2, 5), *(slow(size, 1) for size in FACTORS["world"] if size < 4), long(4, 1)]
)
def test_the_sample_keeps_the_contract(run_ranks: Run, tmp_path: Path, world_size: int, one_in: int) -> None:
    chosen = [row for row in (*rows(), *waiting()) if row[0] == world_size][::one_in]
    check(run_ranks(train_rows, world_size, chosen, str(tmp_path), timeout_s=280), chosen)


@pytest.mark.timeout_s(300)
@pytest.mark.parametrize(("sizes", "one_in"), [slow(SIZES[0], 7), *(long(sizes, 1) for sizes in SIZES)])
def test_the_sample_keeps_the_contract_on_a_mesh(
    run_ranks: Run, tmp_path: Path, sizes: dict[str, int], one_in: int
) -> None:
    chosen = [row for row in (*rows(), *waiting()) if row[0] == 4][::one_in]
    check(run_ranks(train_rows, math.prod(sizes.values()), chosen, str(tmp_path), sizes, timeout_s=280), chosen)


def check(per_rank: list[list[tuple[dict[str, Any], dict[str, Any]]]], chosen: list[Row]) -> None:
    for rank, found in enumerate(per_rank):
        for row, (wanted, result) in zip(chosen, found, strict=True):
            named = dict(zip(FACTORS, row, strict=True))
            assert result == wanted, f"rank {rank}: {named}"
            assert len(set(result["losses"])) == len(result["losses"]) and result["skipped"] == 0, f"{named}: it learns"
        assert [result["bits"] for _, result in found] == [result["bits"] for _, result in per_rank[0]], "ranks differ"
