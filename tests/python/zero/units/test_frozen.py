"""Frozen parameters in the shards of stage 3, and tiers chosen parameter by parameter: the same bits in all cases.

The model is fine-tuned as with LoRA: large frozen weights, small trained ones next to some of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import zcomm
from tiers import slow
from zcomm.planning import estimate
from zcomm.zero import full_grad, full_optim_state, full_param, memory_formula, set_full_param
from zcomm.zero.layout.sections import PAGE_NBYTES
from zcomm.zero.sharded.param import ShardedParameter
from zcomm.zero.units.store import UnitStore
from zero_jobs import Case, digest

Run = Callable[..., list[Any]]
WIDTH, BLOCKS = 32, 5
PRIVATE = Case(3, None, 0.01, share_parameters=False, prefetch=0)
CASES = [
    Case(0, None, 0.01), Case(1, None, 25.0, share_parameters=False), Case(2, "nvme", 0.01), Case(3), PRIVATE,
    Case(3, "cpu", 0.01, share_parameters=False, prefetch=2), Case(3, "nvme", 0.01, prefetch=0),
]  # fmt: skip


class LowRank(nn.Module):
    """A frozen linear layer with a trained correction."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, out).requires_grad_(False)
        self.down = nn.Linear(width, 4, bias=False)
        self.up = nn.Linear(4, out, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Block(nn.Module):
    """A block. ``adapted``: "all", only the "last" layer (backward reaches frozen ones after it), or "none"."""

    def __init__(self, adapted: str) -> None:
        super().__init__()
        make: Any = LowRank if adapted == "all" else lambda a, b: nn.Linear(a, b).requires_grad_(False)
        self.first = make(WIDTH, 2 * WIDTH)
        self.middle = nn.Linear(2 * WIDTH, 2 * WIDTH).requires_grad_(False)
        self.last = LowRank(2 * WIDTH, WIDTH) if adapted == "last" else make(2 * WIDTH, WIDTH)
        self.other: list[nn.Module] = []  # modules that run in the middle of this block's forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = torch.tanh(self.first(x))
        for other in self.other:
            x = other(x)
        return x + self.last(torch.tanh(self.middle(inside)))


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(32, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(("all", "none", "last")[i % 3]) for i in range(BLOCKS))
        if kind == "nested":
            self.blocks[2].other.append(self.blocks[1])
        self.soft = nn.Parameter(torch.zeros(WIDTH))
        self.head = nn.Linear(WIDTH, 32, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.zeros(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.soft
        order = {"twice": (0, 1, 2, 1, 3, 4), "nested": (0, 2, 3, 4)}.get(self.kind, range(BLOCKS))
        for index in order:
            block = self.blocks[index]
            if self.kind in ("plain", "twice", "nested"):
                x = block(x)
            elif self.kind == "outside":  # a frozen weight of the next block
                x = block(x) + F.linear(x, self.blocks[(index + 1) % BLOCKS].middle.weight[:WIDTH, :WIDTH]) * 0.1
            else:
                x = checkpoint(block, x, use_reentrant=self.kind == "reentrant")
        return self.head(x)


KINDS = ["plain", "twice", "nested", "outside", "checkpoint", "reentrant"]


def made(kind: str, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net(kind)


def loss_of(net: nn.Module, rank: int, number: int) -> torch.Tensor:
    tokens = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(100 * number + rank))
    return F.cross_entropy(net(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def trained(net: nn.Module) -> list[nn.Parameter]:
    return [param for param in net.parameters() if param.requires_grad]


def steps(net: nn.Module, opt: Any, rank: int, first: int, count: int) -> list[str]:
    losses = []
    for number in range(first, first + count):
        loss = loss_of(net, rank, number)
        loss.backward()
        losses.append(loss.item().hex())
        opt.step()
        opt.zero_grad()
    return losses


def train(case: Case, folder: str, kind: str) -> dict[str, Any]:
    comm = zcomm.init(timeout=60)
    net = made(kind, comm.rank)
    start = made(kind)
    opt = zcomm.ZeroOptimizer(
        net, torch.optim.AdamW(trained(net), lr=1e-2), clip_norm=1.0, nvme_path=folder, **case.arguments()
    )
    losses = steps(net, opt, comm.rank, 0, 3)
    whole = opt.full_state_dict()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[case.precision]
    for name, param in start.named_parameters():
        assert torch.equal(whole[name], param.to(dtype)) == (not param.requires_grad), name
    value = full_param(net.blocks[1].middle.weight)
    assert torch.equal(value, start.blocks[1].middle.weight.to(dtype).float())
    result = {"losses": losses, "weights": digest(whole), "names": sorted(whole)}
    if isinstance(opt._live.store, UnitStore):
        most = case.prefetch + 2 + (kind == "nested")
        assert len(opt._live.store.memory.slots) <= most, "backward holds no unit longer than it needs it"
    opt.close()
    return result


def train_all(folder: str, kinds: list[str], cases: list[Case]) -> dict[str, list[Any]]:
    return {kind: [train(case, folder, kind) for case in cases] for kind in kinds}


@pytest.mark.timeout_s(300)
@pytest.mark.parametrize(
    ("world_size", "kinds", "precision"),
    [slow(1, KINDS, "fp32"), slow(2, KINDS, "fp32"), slow(3, ["plain"], "fp32"), (2, ["plain", "checkpoint"], "bf16")],
)
def test_the_same_bits_in_every_stage_and_tier(
    run_ranks: Run, tmp_path: Path, world_size: int, kinds: list[str], precision: str
) -> None:
    cases = [replace(case, precision=precision) for case in (CASES if world_size > 1 else CASES[::3])]
    for of_rank in run_ranks(train_all, world_size, str(tmp_path), kinds, cases, timeout_s=280):
        for kind, results in of_rank.items():
            assert len(set(results[0]["losses"])) == 3, f"{kind}: it learns"
            for case, result in zip(cases, results, strict=True):
                assert result == results[0], f"{kind} of {case}"


@pytest.mark.slow
def test_compiled_blocks_have_the_same_bits() -> None:
    ends = []
    for compiled in (False, True):
        net = made("plain")
        opt = zcomm.ZeroOptimizer(net, torch.optim.AdamW(trained(net), lr=1e-2), **PRIVATE.arguments())
        for block in net.blocks if compiled else ():
            block.compile(backend="aot_eager")
        ends.append((steps(net, opt, 0, 0, 2), digest(opt.full_state_dict())))
        opt.close()
    assert ends[0] == ends[1]
    zcomm.shutdown()


@pytest.mark.parametrize("stage", [1, 3])
def test_an_optimizer_over_everything(stage: int) -> None:
    net = made("plain")
    opt = zcomm.ZeroOptimizer(net, torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.5), stage=stage)
    steps(net, opt, 0, 0, 1)
    assert torch.equal(full_param(net.blocks[1].middle.weight), made("plain").blocks[1].middle.weight)
    opt.close()
    with pytest.raises(ValueError, match="requires a gradient"):
        zcomm.ZeroOptimizer(net, torch.optim.AdamW(net.requires_grad_(False).parameters()))
    zcomm.shutdown()


# --- memory ---------------------------------------------------------------------------------------------------


def measure(folder: str) -> list[Any]:
    comm = zcomm.init(timeout=60)
    found = []
    for stage, offload in ((0, None), (2, None), (3, None), (3, "cpu"), (3, "nvme")):
        net = made("plain")
        opt = zcomm.ZeroOptimizer(net, stage=stage, offload=offload, nvme_path=folder, bucket_mb=0.01)
        steps(net, opt, comm.rank, 0, 1)
        left = {isinstance(p, ShardedParameter) for p in net.blocks[1].parameters()}
        pages = len(opt._live.geometry.every) * PAGE_NBYTES if (stage, offload) == (3, "nvme") else 0
        found.append((stage, offload, opt.memory(), left, pages))
        opt.close()
    return found


@pytest.mark.parametrize("world_size", [1, 3])
def test_memory_is_planned_and_the_formula(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    with torch.device("meta"):
        net = Net("plain")
    numel = sum(p.numel() for p in trained(net))
    frozen = sum(p.numel() for p in net.parameters()) - numel
    assert frozen > 5 * numel
    for found in run_ranks(measure, world_size, str(tmp_path)):
        for stage, offload, memory, left, pages in found:
            assert memory == estimate(net, stage, offload, world_size, bucket_mb=0.01).memory, (stage, offload)
            formula = memory_formula(numel, world_size, stage, "fp32", offload, frozen=frozen)
            tier = (offload if stage == 3 else None) or "device"
            have, want = memory[tier]["parameters"], formula[tier]["parameters"]
            assert want <= have + 16 and have <= 1.2 * want + pages, f"stage {stage} {offload}: {have}, not {want}"
            by_unit = stage == 3 and offload == "nvme"
            assert by_unit == (left == {True}), f"stage {stage} {offload}: a frozen block is sharded: {left}"


# --- reads and edits ------------------------------------------------------------------------------------------


def look_and_change(folder: str, cases: list[Case]) -> None:
    comm = zcomm.init(timeout=60)
    for case in cases:
        net = made("plain")
        opt = zcomm.ZeroOptimizer(net, nvme_path=folder, **case.arguments())
        weight, bias = net.blocks[1].middle.weight, net.blocks[1].middle.bias
        with pytest.raises(ValueError, match="is not trained"):
            full_grad(weight)
        with pytest.raises(ValueError, match="is not trained"):
            full_optim_state(weight, "exp_avg")
        set_full_param(weight, torch.full((2 * WIDTH, 2 * WIDTH), 0.25))
        assert torch.equal(full_param(weight), torch.full((2 * WIDTH, 2 * WIDTH), 0.25)), case
        with pytest.raises(ValueError, match=r"shape \(3,\)"):
            set_full_param(bias, torch.zeros(3))
        with zcomm.zero.GatheredParameters([bias, net.soft], modifier_rank=comm.world_size - 1):
            if comm.rank == comm.world_size - 1:
                bias.data[3] = 7.0
                net.soft.data[5] = 9.0
        assert full_param(bias)[3] == 7.0 and full_param(net.soft)[5] == 9.0, case
        with zcomm.zero.GatheredParameters(net):
            assert float(net.blocks[1].middle.weight[0, 0]) == 0.25 and float(net.blocks[1].middle.bias[3]) == 7.0
            net(torch.zeros(1, comm.rank + 1, dtype=torch.int64))  # ranks may run different numbers of passes
        assert opt.full_state_dict()["blocks.1.middle.bias"][3] == 7.0
        steps(net, opt, comm.rank, 0, 1)
        opt.close()


def test_looking_and_changing(run_ranks: Run, tmp_path: Path) -> None:
    run_ranks(look_and_change, 2, str(tmp_path), CASES)


def never_whole(folder: str) -> None:
    comm = zcomm.init(timeout=60)
    for case in (Case(0), Case(3), Case(3, "nvme")):
        torch.manual_seed(5)
        with zcomm.zero.Init(min_count=16):
            net = Net("plain")
        assert net.blocks[1].middle.weight.is_meta
        opt = zcomm.ZeroOptimizer(net, nvme_path=folder, **case.arguments())
        want = made("plain", 5)
        whole = opt.full_state_dict()
        for name, param in want.named_parameters():
            assert torch.equal(whole[name], param), f"{name} of {case}"
        steps(net, opt, comm.rank, 0, 1)
        opt.close()


def test_init_makes_frozen_shards(run_ranks: Run, tmp_path: Path) -> None:
    run_ranks(never_whole, 2, str(tmp_path))


# --- checkpoints ----------------------------------------------------------------------------------------------


def save_and_go_on(folder: str, case: Case) -> dict[str, Any]:
    comm = zcomm.init(timeout=60)
    net = made("plain")
    opt = zcomm.ZeroOptimizer(net, lr=1e-2, nvme_path=folder, **case.arguments())
    set_full_param(net.blocks[1].middle.bias, torch.full((2 * WIDTH,), 0.5))
    steps(net, opt, comm.rank, 0, 2)
    opt.save(f"{folder}/checkpoint")
    opt.save(f"{folder}/background", wait=False)
    losses = steps(net, opt, comm.rank, 2, 2)
    result = {"losses": losses, "weights": digest(opt.full_state_dict())}
    opt.close()
    return result


def resume(folder: str, cases: list[Case]) -> list[dict[str, Any]]:
    comm = zcomm.init(timeout=60)
    results = []
    for case in cases:
        net = made("plain", seed=9)
        opt = zcomm.ZeroOptimizer(net, lr=1e-2, nvme_path=folder, **case.arguments())
        opt.load(f"{folder}/checkpoint")
        losses = steps(net, opt, comm.rank, 2, 2)
        results.append({"losses": losses, "weights": digest(opt.full_state_dict())})
        opt.close()
    return results


def test_a_checkpoint_has_them(run_ranks: Run, tmp_path: Path) -> None:
    went_on = run_ranks(save_and_go_on, 2, str(tmp_path), Case(3, "nvme", 0.01))
    manifest = zcomm.zero.checkpoint.read_manifest(tmp_path / "checkpoint")
    other = zcomm.zero.checkpoint.read_manifest(tmp_path / "background")
    assert (manifest.weights, manifest.optimizer) == (other.weights, other.optimizer), "checksums, too"
    assert "blocks.1.middle.weight" in manifest.weights and "blocks.1.middle.weight" not in manifest.parameters
    assert manifest.aliases == {"head.weight": "embed.weight"}
    assert len({entry.file for name, entry in manifest.weights.items() if "middle" in name}) == 2, (
        "ranks share the work"
    )
    for of_rank, want in zip(run_ranks(resume, 2, str(tmp_path), CASES), went_on, strict=True):
        for case, result in zip(CASES, of_rank, strict=True):
            assert result == want, case


def test_a_checkpoint_without_them(tmp_path: Path) -> None:
    small = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    opt = zcomm.ZeroOptimizer(small, stage=0)
    opt.save(tmp_path / "small")
    opt.close()
    for case in (Case(0), Case(3), Case(3, "nvme")):
        more = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False))
        opt = zcomm.ZeroOptimizer(more, nvme_path=str(tmp_path), **case.arguments())
        kept = full_param(more[2].weight)
        with pytest.raises(ValueError, match=r"not in the checkpoint: 2\.weight, 2\.bias"):
            opt.load(tmp_path / "small")
        opt.load(tmp_path / "small", strict=False)
        assert torch.equal(full_param(more[2].weight), kept)
        assert torch.equal(full_param(more[1].weight), small[1].weight)
        opt.close()
    zcomm.shutdown()


# --- tiers parameter by parameter -----------------------------------------------------------------------------


def tier_of(name: str, param: nn.Parameter) -> str | None:
    return "nvme" if param.numel() >= 2 * WIDTH * WIDTH else "cpu" if "bias" in name else None


def place(folder: str) -> list[Any]:
    comm = zcomm.init(timeout=60)
    found = []
    for stage, params in ((0, None), (2, None), (3, None), (3, tier_of), (3, "cpu")):
        net = made("plain").requires_grad_(True)
        net.blocks[0].requires_grad_(False)
        numel: dict[str | None, int] = {None: 0, "cpu": 0, "nvme": 0}
        for name, param in net.named_parameters():
            numel[tier_of(name, param)] += param.numel() * param.requires_grad
        offload = zcomm.Offload(optimizer=tier_of, params=params)
        opt = zcomm.ZeroOptimizer(net, stage=stage, offload=offload, nvme_path=folder, bucket_mb=0.02, lr=1e-2)
        losses = steps(net, opt, comm.rank, 0, 3)
        found.append((stage, params, losses, digest(opt.full_state_dict()), opt.memory(), numel))
        opt.save(f"{folder}/{stage}-{params == tier_of}", wait=False)
        steps(net, opt, comm.rank, 3, 1)
        opt.close()
    return found


@pytest.mark.parametrize("world_size", [slow(1), 2])
def test_a_tier_for_each_parameter(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    with torch.device("meta"):
        net = Net("plain").requires_grad_(True)
        net.blocks[0].requires_grad_(False)
    for found in run_ranks(place, world_size, str(tmp_path)):
        for stage, params, losses, weights, memory, numel in found:
            assert (losses, weights) == found[0][2:4], f"stage {stage}"
            offload = zcomm.Offload(optimizer=tier_of, params=params)
            assert memory == estimate(net, stage, offload, world_size, bucket_mb=0.02).memory, (stage, params)
            for tier, count in numel.items():
                have = memory[tier or "device"]["optimizer"]
                assert 8 * count / world_size <= have <= 8 * count / world_size * 1.5 + 8 * 64 * BLOCKS * 6, (
                    stage,
                    tier,
                )
            if params is tier_of:
                assert all(memory[tier]["parameters"] > 0 for tier in ("device", "cpu", "nvme"))
    saved = [zcomm.zero.checkpoint.read_manifest(tmp_path / name) for name in ("0-False", "2-False", "3-True")]
    sums = [{name: entry.crc32 for name, entry in {**one.weights, **one.optimizer}.items()} for one in saved]
    assert sums[0] == sums[1] == sums[2]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"optimizer": lambda name, param: "disk"}, "gives 'disk' for weight"),
        ({"optimizer": tier_of, "fraction": 0.5}, "fraction=0.5"),
    ],
)
def test_bad_placement(arguments: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=text):
        zcomm.ZeroOptimizer(nn.Linear(4, 4), offload=zcomm.Offload(**arguments), nvme_path=tmp_path)
    zcomm.shutdown()


def differ(folder: str) -> None:
    rank = zcomm.init(timeout=60).rank
    offload = zcomm.Offload(optimizer=lambda name, param: "cpu" if rank == 1 and name == "bias" else None)
    zcomm.ZeroOptimizer(nn.Linear(4, 4), offload=offload)


def test_ranks_must_place_alike(run_ranks: Run, tmp_path: Path) -> None:
    for result in run_ranks(differ, 2, str(tmp_path), check=False):
        assert result.error is not None and result.error.kind == "ValueError", result.describe()
        assert "tier of bias is device (state: cpu), not device (state: device)" in result.error.message


def test_a_callable_that_swaps_needs_the_path() -> None:
    offload = zcomm.Offload(optimizer=lambda name, param: "nvme")
    with pytest.raises(ValueError, match="nvme_path"):
        zcomm.ZeroOptimizer(nn.Linear(4, 4), offload=offload)
    zcomm.shutdown()
