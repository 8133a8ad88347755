"""Saves, loads and first weights in small pieces have the bytes of large pieces, at any world size."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from tiers import slow
from zcomm.zero.layout import tiles
from zcomm.zero.materialize import broadcast, replay
from zcomm.zero.params import shards
from zcomm.zero.tensors import chunks

CASES: list[dict[str, Any]] = [
    {"stage": 3, "offload": "nvme"},
    {"stage": 3, "offload": "nvme", "precision": "bf16"},
    {"stage": 2, "precision": "fp16"},
    {"stage": 3, "offload": "nvme", "precision": "bf16", "state_dtype": "8bit"},
    {"stage": 0, "precision": "bf16"},
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 131, padding_idx=2)
        self.layers = nn.Sequential(nn.Linear(131, 97), nn.Tanh(), nn.Linear(97, 9))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.randn(41, 77), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.embed(x)).float() * self.scale + self.frozen.sum()


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.safetensors"))}


def saved_bytes(folder: str, case: dict[str, Any], small: bool) -> list[dict[str, str]]:
    comm, base, found = zcomm.init(), Path(folder), []
    with pytest.MonkeyPatch.context() as patch:
        if small:
            patch.setattr(chunks, "CHUNK_COUNT", 256)
            patch.setattr(shards, "SPAN_NBYTES", 4096)
            patch.setattr(replay, "PIECE_COUNT", 512)
            patch.setattr(broadcast, "PIECE_TILES", 1)
            patch.setattr(tiles, "TILE_COUNT", 256)
        torch.manual_seed(3 + comm.rank)
        with zcomm.zero.Init():
            model = Net()
        opt = zcomm.ZeroOptimizer(model, lr=0.01, nvme_path=base / "drive", **case)
        opt.save(base / "first")
        for step in range(2):
            generator = torch.Generator().manual_seed(9 * step + comm.rank)
            opt.backward(model(torch.randint(0, 37, (5,), generator=generator)).square().mean() * 1e-3)
            opt.step()
            opt.zero_grad()
        opt.save(base / "c")
        opt.save(base / "background", wait=False).wait()
        opt.load(base / "first")
        opt.save(base / "again")
        opt.load(base / "c")
        opt.save(base / "loaded")
        zcomm.zero.load_weights(opt, base / "first")
        opt.save(base / "weights")
        opt.close()
    comm.barrier()
    if comm.rank == 0:
        found = [hashes(base / name) for name in ("first", "again", "c", "background", "loaded", "weights")]
    zcomm.shutdown()
    return found


@pytest.mark.parametrize(("world_size", "case"), [*(slow(3, case) for case in CASES), (1, CASES[1])], ids=str)
def test_small_pieces_give_the_same_bytes(
    run_ranks: Callable[..., list[Any]], tmp_path: Path, world_size: int, case: dict[str, Any]
) -> None:
    results = []
    for small in (False, True):
        folder = tmp_path / str(small)
        folder.mkdir()
        results.append(run_ranks(saved_bytes, world_size, str(folder), case, small)[0])
    assert results[0] == results[1]
    first, again, c, background, loaded, _ = results[0]
    assert first == again and c == background == loaded and first != c and len(c) == 2 * world_size
