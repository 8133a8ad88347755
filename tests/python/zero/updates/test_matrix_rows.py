"""The bitwise contract of updates outside of step() with weights by rows: each pair of values of two factors.

A row's reference updates in step(), with the same weights by rows, all sums in RAM, and large buckets.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import zcomm
from test_matrix import Row, covering
from tiers import long
from zcomm.memory.linear_cross_entropy import linear_cross_entropy
from zcomm.zero import Offload, Units
from zero_jobs import digest

Run = Callable[..., list[Any]]
W, WORDS, UP = 16, 2600, 2112
FACTORS: dict[str, list[Any]] = {
    "world": [1, 2],
    "update": ["forward", "backward"],
    "gradients": [None, "nvme"],
    "params": ["nvme", None],
    "clip_norm": [None, 1.0],
    "accum": [1, 2],
    "tied": [False, True],
    "checkpoint": ["", "recomputed", "reentrant"],
    "loss": ["module", "blocks"],
    "frozen": [False, True],
    "atomic": [False, True],
    "bucket_mb": [0.05, 25.0],  # the smaller one holds less than a block
    "precision": ["fp32", "bf16"],
}
STEPS = 5  # two of these are watched


class Net(nn.Module):
    """An embedding, a wide Linear and a head, which are gathered by rows, and a block that is whole."""

    def __init__(self, tied: bool, way: str, loss: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, W)
        self.block = nn.Linear(W, W)
        self.up = nn.Linear(W, UP)
        self.head = nn.Linear(W, WORDS, bias=False)
        self.way, self.loss = way, loss
        if tied:
            self.head.weight = self.embed.weight

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.up(x)).unflatten(-1, (-1, W)).mean(-2)

    def end(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        if self.loss == "blocks":
            return linear_cross_entropy(x, self.head.weight, tokens)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())

    def whole(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.wide(self.embed(tokens))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if not self.way:
            x = self.whole(tokens)
            return self.end(x + torch.tanh(self.block(x)), tokens)
        reentrant = self.way == "reentrant"
        if reentrant:
            x = self.embed(tokens)
            x = checkpoint(self.wide, x if x.requires_grad else x.requires_grad_(), use_reentrant=True)
        else:
            x = checkpoint(self.whole, tokens, use_reentrant=False)
        x = x + torch.tanh(self.block(x))
        return checkpoint(self.end, x, tokens, use_reentrant=reentrant)


def tokens_of(step: int, rank: int) -> torch.Tensor:
    """Return tokens of all blocks of rows, or of the first one."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(0, WORDS if step % 2 else 900, (2, 32), generator=generator)


def bits_of(opt: Any) -> str:
    arrays = {f"{n}.{k}": v.reshape(-1) for n, e in opt.state_dict()["state"].items() for k, v in e.items()}
    return digest({**opt.full_state_dict(), **arrays})


def can_update(row: dict[str, Any]) -> bool:
    """Return True if a step of the row can update in backward."""
    allowed = row["gradients"] == "nvme" and row["clip_norm"] is None and row["accum"] == 1
    return row["update"] == "backward" and allowed and not reaches_again(row)


def reaches_again(row: dict[str, Any]) -> bool:
    """Return True if a pass reaches the tied weight twice."""
    return bool(row["tied"] and row["checkpoint"] == "reentrant" and not row["frozen"])


def train(row: dict[str, Any], folder: str, offload: Offload, bucket_mb: float) -> dict[str, Any]:
    comm = zcomm.init(timeout=60)
    torch.manual_seed(comm.rank)
    net = Net(row["tied"], row["checkpoint"], row["loss"])
    if row["precision"] == "bf16":
        net = net.bfloat16()
    if row["frozen"]:
        net.embed.weight.requires_grad_(False)
    opt = zcomm.ZeroOptimizer(
        net,
        lr=1e-2,
        stage=3,
        offload=offload,
        nvme_path=folder,
        clip_norm=row["clip_norm"],
        grad_accum=row["accum"],
        precision=row["precision"],
        bucket_mb=bucket_mb,
        share_parameters=False,
        units=Units(max_bytes=1088 * W * zcomm.zero.Precision(row["precision"]).param_nbytes, rows=True),
    )
    losses, norms, updated = [], [], 0
    for number in range(STEPS * row["accum"]):
        loss = net(tokens_of(number, comm.rank))
        opt.backward(loss)
        updated += opt._open_parts.updates.pending
        opt.step()
        opt.zero_grad()
        losses.append(loss.item().hex())
        if (number + 1) % row["accum"] == 0:
            norms.append(float(opt.grad_norm).hex())
    with torch.no_grad():  # of the last update, which may wait for it
        losses.append(net(tokens_of(99, comm.rank)).item().hex())
    found = {"losses": losses, "norms": norms, "bits": bits_of(opt)}
    opt.close()
    return {**found, "updated": updated}


def train_both(chosen: list[Row], folder: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    zcomm.zero.layout.sections.PAGE_NBYTES = 512
    zcomm.zero.layout.tiles.TILE_COUNT = 192
    zcomm.zero.optim_state.nvme.SPAN_TILES, zcomm.zero.optim_state.nvme.WINDOWS = 2, 4
    found = []
    for values in chosen:
        row = dict(zip(FACTORS, values, strict=True))
        update = "backward" if can_update(row) else "forward"
        offload = Offload("nvme", row["params"], gradients=row["gradients"], update=update, atomic=row["atomic"])
        plain = Offload("nvme", row["params"], update="step")
        found.append((train(row, folder, plain, 25.0), train(row, folder, offload, row["bucket_mb"])))
    return found


def sample() -> list[Row]:
    values = list(FACTORS.values())
    return [tuple(of[k] for of, k in zip(values, row, strict=True)) for row in covering(values)]


def test_every_pair_of_values_is_in_the_sample() -> None:
    found, names = sample(), list(FACTORS)
    assert found == sample() and len(found) < 30
    for (a, first), (b, second) in itertools.combinations(enumerate(names), 2):
        have = {(str(row[a]), str(row[b])) for row in found}
        assert len(have) == len(FACTORS[first]) * len(FACTORS[second]), f"{first} x {second}"
    assert all(can_update(dict(zip(FACTORS, row, strict=True))) for row in IN_BACKWARD)


@pytest.mark.slow
@pytest.mark.timeout_s(300)
@pytest.mark.parametrize("world_size", [long(1), 2])
def test_the_sample_keeps_the_contract(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    chosen = [row for row in (*sample(), *IN_BACKWARD) if row[0] == world_size]
    per_rank = run_ranks(train_both, world_size, chosen, str(tmp_path), timeout_s=280)
    for rank, found in enumerate(per_rank):
        for values, (wanted, result) in zip(chosen, found, strict=True):
            row, updated = dict(zip(FACTORS, values, strict=True)), result.pop("updated")
            assert wanted.pop("updated") == 0 and result == wanted, f"rank {rank}: {row}"
            assert updated == (STEPS - 2 if can_update(row) else 0), f"{row}: {updated} updates in backward"
            assert len(set(result["losses"])) > STEPS, f"{row}: it learns"
        assert [result["bits"] for _, result in found] == [result["bits"] for _, result in per_rank[0]], "ranks differ"


# Rows that can update in backward, which few of the sample can: with each way to use weights.
IN_BACKWARD = [
    (world, update, "nvme", params, None, 1, tied, way, loss, frozen, atomic, bucket_mb, "fp32")
    for world in FACTORS["world"]
    for update, params, tied, way, loss, frozen, atomic, bucket_mb in [
        ("backward", "nvme", False, "", "module", False, False, 0.05),
        ("backward", "nvme", True, "recomputed", "blocks", False, True, 0.05),
        ("backward", None, False, "recomputed", "blocks", True, False, 0.05),
        ("backward", "nvme", False, "reentrant", "module", False, False, 25.0),
        ("backward", "nvme", True, "", "blocks", False, False, 0.05),
    ]
]
