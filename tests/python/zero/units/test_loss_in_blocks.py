"""linear_cross_entropy of a weight that stage 3 has sharded: the bits of an ordinary one, and no copy of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import zcomm
from test_corners import Net, tokens_of
from tiers import slow
from zcomm.zero.options import Units
from zcomm.zero.sharded.param import ShardedParameter
from zcomm.zero.units.weights import UnitWeights
from zero_jobs import digest

Run = Callable[..., list[Any]]
CASES: list[dict[str, Any]] = [
    {"stage": 2},
    {"stage": 3, "share_parameters": False},
    {"stage": 3, "offload": "nvme", "units": Units(max_bytes=4992)},
    {"stage": 3, "offload": "nvme", "units": ["Block", "head", "embed"], "prefetch": 0},
]


def blocked(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return zcomm.linear_cross_entropy(x, weight, target, block_rows=10)


class Trained(Net):
    """Its loss is made of the head's weight, in the model's forward or after it."""

    def __init__(self, kind: str, way: str, loss: Callable[..., torch.Tensor] = blocked) -> None:
        super().__init__(kind)
        self.way, self.made = way, loss

    def lost(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if self.way == "checkpoint":
            return checkpoint(lambda h: self.made(h, self.head.weight, target), x, use_reentrant=False)
        return self.made(x, self.head.weight, target)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens[:, :-1])
        for index in range(5):
            x = self.block(index, x)
        return x if self.way == "after" else self.lost(x.flatten(0, 1), tokens[:, 1:].flatten())

    def loss(self, rank: int, number: int) -> torch.Tensor:
        tokens = tokens_of(rank, number)
        made = self(tokens)
        return self.lost(made.flatten(0, 1), tokens[:, 1:].flatten()) if self.way == "after" else made


def train(
    kind: str, way: str, case: dict[str, Any], folder: str, precision: str = "fp32", loss: Any = blocked
) -> tuple[list[str], str]:
    comm = zcomm.init(timeout=60)
    torch.manual_seed(0)
    net = Trained(kind, way, loss)
    opt = zcomm.ZeroOptimizer(net, lr=1e-2, clip_norm=1.0, nvme_path=folder, precision=precision, **case)
    losses = []
    for step in range(3):
        lost = net.loss(comm.rank, step)
        opt.backward(lost)
        opt.step()
        opt.zero_grad()
        losses.append(lost.item().hex())
    found = losses, digest(opt.full_state_dict())
    opt.close()
    return found


def train_all(folder: str) -> list[list[Any]]:
    jobs = [(kind, way, "fp32") for kind in ("plain", "tied", "reentrant") for way in ("inside", "after", "checkpoint")]
    jobs.append(("tied", "inside", "bf16"))
    return [[train(*job[:2], case, folder, job[2]) for case in CASES] for job in jobs]


@pytest.mark.parametrize("world_size", [slow(1), slow(2)])
def test_the_same_bits_in_every_stage(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    for found in run_ranks(train_all, world_size, str(tmp_path)):
        for number, ends in enumerate(found):
            assert ends == ends[:1] * len(CASES) and len(set(ends[0][0])) == 3, number


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch 2.13")
def test_torchs_own_function_has_its_own_bits(tmp_path: Path) -> None:
    def whole(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.linear_cross_entropy(x, weight, target)

    ends = [train("tied", way, case, str(tmp_path), loss=whole) for way in ("inside", "after") for case in CASES]
    assert ends == ends[:1] * len(ends)
    zcomm.shutdown()


@pytest.mark.parametrize("way", ["inside", "after"])
@pytest.mark.parametrize("kind", ["plain", "tied"])
def test_a_weight_of_the_root_is_not_copied(way: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net = Trained(kind, way)
    opt = zcomm.ZeroOptimizer(net, stage=3, share_parameters=False)
    monkeypatch.setattr(UnitWeights, "whole", lambda *_: pytest.fail("a copy"))
    for step in range(2):
        net.loss(0, step).backward()
        opt.step()
        opt.zero_grad()
    opt.close()
    zcomm.shutdown()


@pytest.mark.parametrize("way", ["inside", "after"])
def test_the_weight_is_gathered_and_not_copied(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net = Trained("plain", way)
    opt = zcomm.ZeroOptimizer(net, stage=3, share_parameters=False, units=["Block", "head", "embed"], prefetch=0)
    store: Any = opt._live.store
    unit = next(unit for unit in store.units if unit.name == "head")
    monkeypatch.setattr(store, "full", lambda param: pytest.fail("a copy"))
    seen: list[str] = []
    fill = store.gather.fill

    def filled(other: Any, *args: Any) -> Any:
        seen.append(other.name)
        return fill(other, *args)

    store.gather.fill = filled
    loss = net.loss(0, 0)
    assert isinstance(net.head.weight, ShardedParameter) and unit.idle
    with torch.no_grad():
        net.blocks[0](torch.ones(1, 24)), net.blocks[1](torch.ones(1, 24))  # the head's memory is theirs
    assert unit.state.name == "SHARDED"
    loss.backward()
    assert seen.count("head") == 2, "for forward, and again for backward"
    opt.step()
    opt.close()
    zcomm.shutdown()


def test_what_is_wrong_leaves_the_weight_as_it_was() -> None:
    net = Trained("plain", "after")
    opt = zcomm.ZeroOptimizer(net, stage=3, share_parameters=False, units=["Block", "head", "embed"])
    x = net(tokens_of(0, 0)).flatten(0, 1)
    with pytest.raises(RuntimeError):
        zcomm.linear_cross_entropy(x, net.head.weight, torch.zeros(x.shape[0], dtype=torch.int64, device="meta"))
    assert isinstance(net.head.weight, ShardedParameter) and opt._live.store.life.running == 0
    net.loss(0, 0).backward()
    opt.step()
    opt._close(keep_weights=False)  # as on one of several ranks
    with pytest.raises(RuntimeError, match="its ZeroOptimizer is closed"):
        zcomm.linear_cross_entropy(x.detach(), net.head.weight, torch.zeros(x.shape[0], dtype=torch.int64))
    zcomm.shutdown()
