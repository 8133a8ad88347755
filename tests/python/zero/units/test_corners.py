"""Unusual models and training loops, in every stage and tier: the same bits, and torch's numbers.

Parameters read outside of their unit, tied, frozen, LoRA-like, unused, used twice; several backward passes, retained
graphs, sparse gradients, recomputation; evaluation that differs between ranks.
"""

from __future__ import annotations

import logging
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
from tiers import long, slow
from zcomm.zero.sharded.param import ShardedParameter
from zero_jobs import Case, digest

Run = Callable[..., list[Any]]
WIDTH = 24
PRIVATE = Case(3, None, 0.02, share_parameters=False, prefetch=0)
PLACES = [
    Case(0, None, 0.02), Case(1, "cpu", 25.0), Case(2, None, 0.02, overlap=False), Case(2, "nvme", 0.02), Case(3),
    PRIVATE, Case(3, "nvme", 0.02, prefetch=3), Case(3, "nvme", 0.02, gradients="nvme"),
    Case(3, "nvme", 0.02, share_parameters=False, fraction=0.5), Case(2, None, 0.02, gradients="nvme"),
    Case(3, "nvme", 0.02, gradients="nvme", update="forward"), replace(PRIVATE, update="forward"),
]  # fmt: skip


class Block(nn.Module):
    def __init__(self, inner: bool) -> None:
        super().__init__()
        self.inner = inner  # its first half is recomputed, during the unit's own forward and backward
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def first(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.up(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = checkpoint(self.first, x, use_reentrant=True) if self.inner else self.first(x)
        return x + self.down(inside)


class Net(nn.Module):
    """A stack of blocks; ``kind`` names special features, joined by "+"."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kinds = kind.split("+")
        self.embed = nn.Embedding(32, WIDTH, sparse=kind == "sparse")
        self.blocks = nn.ModuleList(Block(kind == "inner") for _ in range(5))
        self.head = nn.Linear(WIDTH, 32, bias=False)
        if "tied" in self.kinds:
            self.head.weight = self.embed.weight
            self.blocks[3].up.weight = self.blocks[1].up.weight
        if kind == "frozen":
            self.embed.weight.requires_grad_(False)
            self.blocks[1].requires_grad_(False)
            self.blocks[2].up.weight.requires_grad_(False)
        if kind == "lora":
            self.requires_grad_(False)
            self.extra = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(5))

    def inside(self, index: int, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[index](x)
        if "outside" in self.kinds:  # weights of other units, before and after their own forward
            x = x + F.linear(x, self.blocks[(index + 2) % 5].up.weight)[..., :WIDTH] * 0.1
        return x

    def block(self, index: int, x: torch.Tensor) -> torch.Tensor:
        if "reentrant" in self.kinds:
            return checkpoint(self.inside, index, x, use_reentrant=True)
        if "checkpoint" in self.kinds:
            return checkpoint(self.inside, index, x, use_reentrant=False)
        if "lora" in self.kinds:
            return self.inside(index, x) + self.extra[index](x)
        return self.inside(index, x)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        early = self.blocks[3].down.weight if "outside" in self.kinds else None
        for index in (0, 1, 2, 2, 3, 4) if "twice" in self.kinds else range(5):
            if "unused" in self.kinds and index == 2:
                continue
            x = self.block(index, x)
        if early is not None:
            x = x + F.linear(F.linear(x, early.t()), early)
        return self.head(x)


AGAIN = ["tied+reentrant", "twice+reentrant", "outside+reentrant"]  # a pass reaches a weight twice
KINDS = ["plain", "tied", "frozen", "lora", "unused", "twice", "outside", "sparse", "checkpoint", "reentrant", "inner"]
KINDS += AGAIN


def tokens_of(rank: int, number: int) -> torch.Tensor:
    return torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(100 * number + rank))


def loss_of(net: nn.Module, rank: int, number: int) -> torch.Tensor:
    tokens = tokens_of(rank, number)
    return F.cross_entropy(net(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def backward(net: nn.Module, rank: int, number: int, way: str, run: Callable[..., None]) -> float:
    """Compute one step's gradients in ``way``."""
    loss = loss_of(net, rank, number)
    if way == "passes":  # three passes, one of them through a part of the net
        run(loss)
        run(0.5 * loss_of(net, rank, number + 50))
        run(net.block(0, net.embed(tokens_of(rank, number))).square().mean())
    elif way == "retain":
        run(loss, retain_graph=True)
        run(0.25 * loss)
    elif way == "penalty":  # a gradient with respect to activations only, then the pass
        x = net.embed(tokens_of(rank, number)).detach().requires_grad_()
        (slope,) = torch.autograd.grad(net.block(0, x).square().sum(), x)
        run(loss + slope.square().mean())
    else:
        run(loss)
    return loss.item()


def train(case: Case, folder: str, kind: str, way: str = "one", steps: int = 4) -> dict[str, Any]:
    comm = zcomm.init(timeout=60)
    torch.manual_seed(comm.rank)
    net = Net(kind)
    if kind != "lora":
        nn.init.normal_(net.embed.weight, std=0.5)
    adamw = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
    opt = zcomm.ZeroOptimizer(net, adamw, clip_norm=1.0, nvme_path=folder, **case.arguments())
    losses, passes = [], []
    for step in range(steps):
        losses.append(backward(net, comm.rank, step, way, lambda loss, **more: loss.backward(**more)).hex())
        passes.append(opt._live.reducer.reached)
        opt.step()
        opt.zero_grad()
    weights = opt.full_state_dict()
    frozen = {n: weights[n] for n, p in net.named_parameters() if not p.requires_grad}
    result = {"losses": losses, "weights": digest(weights), "frozen": digest(frozen), "passes": passes}
    opt.close()
    return result


def train_kinds(folder: str, kinds: list[str], way: str, cases: list[Case]) -> dict[str, list[dict[str, Any]]]:
    return {kind: [train(case, folder, kind, way) for case in cases] for kind in kinds}


def same(per_rank: list[dict[str, list[dict[str, Any]]]], cases: list[Case], passes: int) -> None:
    for rank, kinds in enumerate(per_rank):
        for kind, results in kinds.items():
            assert len(set(results[0]["losses"])) > 3, f"{kind}: it learns"
            for case, result in zip(cases, results, strict=True):
                assert result == results[0], f"rank {rank}: {kind} of {case}"
            assert set(results[0]["passes"]) == {passes}, f"{kind}: {results[0]['passes']} passes"
            assert results[0]["weights"] == per_rank[0][kind][0]["weights"], f"{kind}: ranks disagree"


@pytest.mark.timeout_s(300)
@pytest.mark.parametrize(
    ("world_size", "kinds"), [slow(1, KINDS), slow(2, KINDS), slow(3, ["tied", "outside", "lora", "inner"])]
)
def test_the_same_bits_in_every_stage_and_tier(
    run_ranks: Run, tmp_path: Path, world_size: int, kinds: list[str]
) -> None:
    cases = PLACES if world_size == 2 else PLACES[1::3]
    same(run_ranks(train_kinds, world_size, str(tmp_path), kinds, "one", cases, timeout_s=280), cases, 1)


@pytest.mark.parametrize(("way", "passes"), [slow("passes", 3), slow("retain", 2), slow("penalty", 1)])
def test_backward_passes(run_ranks: Run, tmp_path: Path, way: str, passes: int) -> None:
    kinds = ["plain", "tied", "checkpoint", "frozen"] if way != "retain" else ["plain", "tied"]
    same(run_ranks(train_kinds, 2, str(tmp_path), kinds, way, PLACES), PLACES, passes)


@pytest.mark.parametrize("precision", ["bf16"])
def test_in_bf16(run_ranks: Run, tmp_path: Path, precision: str) -> None:
    cases = [replace(case, precision=precision) for case in PLACES[::2]]
    same(run_ranks(train_kinds, 2, str(tmp_path), ["tied", "outside", "lora", "reentrant"], "one", cases), cases, 1)


@pytest.mark.parametrize("way", ["one", "passes", "penalty"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "unused"])
def test_torch_has_the_same_numbers(tmp_path: Path, kind: str, way: str) -> None:
    if way == "penalty" and ("reentrant" in kind or "inner" in kind):
        pytest.skip("torch: reentrant checkpoints know no autograd.grad()")
    ends = []
    for ours in (False, True):
        torch.manual_seed(0)
        net = Net(kind)
        if kind != "lora":
            nn.init.normal_(net.embed.weight, std=0.5)
        trained = [p for p in net.parameters() if p.requires_grad]
        opt: Any = torch.optim.SGD(trained, lr=0.1)
        if ours:
            case = replace(PRIVATE, prefetch=1)
            opt = zcomm.ZeroOptimizer(net, opt, nvme_path=str(tmp_path), **case.arguments())
        for step in range(4):
            backward(net, 0, step, way, lambda loss, **more: loss.backward(**more))
            opt.step()
            opt.zero_grad()
        whole = opt.full_state_dict() if ours else {name: p.detach().clone() for name, p in net.state_dict().items()}
        ends.append(whole)
        if ours:
            opt.close()
    assert ends[0].keys() == ends[1].keys()
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, rtol=1e-5, atol=1e-6)
    zcomm.shutdown()


@pytest.mark.parametrize("kind", ["reentrant", "inner", "twice+reentrant"])
def test_fp16_counts_recomputed_passes_as_one(kind: str) -> None:
    net = Net(kind)
    opt = zcomm.ZeroOptimizer(net, stage=3, precision="fp16", lr=1e-3)
    for step in range(2):
        opt.backward(loss_of(net, 0, step))
        assert opt._live.reducer.reached == 1
        opt.step()
        opt.zero_grad()
    opt.close()
    zcomm.shutdown()


def test_unused_and_sparse_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    for kind, text in (
        ("unused", "no gradient has reached blocks.2.up.weight, blocks.2.up.bias, blocks.2.down.weight"),
        ("sparse", "the gradient of embed.weight is sparse; it is made dense"),
        ("plain", ""),
    ):
        caplog.clear()
        net = Net(kind)
        opt = zcomm.ZeroOptimizer(net, stage=2)
        with caplog.at_level(logging.WARNING, "zcomm"):
            for step in range(3):
                loss_of(net, 0, step).backward()
                opt.step()
                opt.zero_grad()
        said = [record.getMessage() for record in caplog.records if record.name == "zcomm"]
        assert len(said) == (1 if text else 0), said
        assert not text or said[0].startswith(text)
        opt.close()
    zcomm.shutdown()


def test_parameters_between_passes_are_not_called_unused(caplog: pytest.LogCaptureFixture) -> None:
    net = Net("plain")
    opt = zcomm.ZeroOptimizer(net, stage=2, grad_accum=2)
    with caplog.at_level(logging.WARNING, "zcomm"):
        loss_of(net, 0, 0).backward()
        opt.step()
        opt.zero_grad()
        net.embed(tokens_of(0, 1)).sum().backward()
        opt.step()
        opt.zero_grad()
    assert not caplog.records
    opt.close()
    zcomm.shutdown()


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise KeyError("on purpose")


def fail_and_go_on(folder: str) -> list[str]:
    comm = zcomm.init(timeout=20)
    ends = []
    for case in (Case(2, None, 0.02), PRIVATE):
        for fails in (False, True):
            torch.manual_seed(0)
            net = Net("plain")
            opt = zcomm.ZeroOptimizer(net, nvme_path=folder, **case.arguments())
            for step in range(3):
                if fails and step == 1:
                    handle = net.blocks[2].register_forward_hook(lambda module, args, out: Fails.apply(out))
                    with pytest.raises(KeyError, match="on purpose"):
                        loss_of(net, comm.rank, step).backward()
                    handle.remove()
                    with pytest.raises(RuntimeError, match="the last backward pass ended with an error"):
                        opt.step()
                    opt.zero_grad()
                loss_of(net, comm.rank, step).backward()
                opt.step()
                opt.zero_grad()
            ends.append(digest(opt.full_state_dict()))
            opt.close()
    return ends


def test_a_backward_pass_that_fails_can_be_run_again(run_ranks: Run, tmp_path: Path) -> None:
    for ends in run_ranks(fail_and_go_on, 2, str(tmp_path)):
        assert len(set(ends)) == 1


# --- reads outside of a step, and by ranks that differ ---------------------------------------------------------------


def test_reading_outside_of_a_unit(tmp_path: Path) -> None:
    net = Net("plain")
    plain = {name: p.detach().clone() for name, p in net.named_parameters()}
    opt = zcomm.ZeroOptimizer(net, stage=3, offload="nvme", nvme_path=tmp_path, prefetch=0)
    assert isinstance(net.blocks[0].up.weight, ShardedParameter), "between steps it is a stand-in"
    loss = loss_of(net, 0, 0)
    weight = net.blocks[0].up.weight  # in a step its reader gets it gathered
    assert torch.equal(weight, plain["blocks.0.up.weight"]) and weight.requires_grad
    (loss + 0.1 * weight.square().sum()).backward()
    got = zcomm.zero.full_grad(next(p for n, p in net.named_parameters() if n == "blocks.0.up.weight"))
    other = Net("plain")
    other.load_state_dict(plain)
    (loss_of(other, 0, 0) + 0.1 * other.blocks[0].up.weight.square().sum()).backward()
    torch.testing.assert_close(got, other.blocks[0].up.weight.grad)
    opt.step()
    assert all(isinstance(p, ShardedParameter) for block in net.blocks for p in block.parameters())
    opt.close()
    assert type(net.blocks[0].up._parameters) is dict
    zcomm.shutdown()


def test_what_stands_for_a_parameter_is_taken_for_it(tmp_path: Path) -> None:
    """``.data``, and a gathered value of ``state_dict()``, identify the parameter."""
    net = Net("plain")
    opt = zcomm.ZeroOptimizer(net, stage=3, offload="nvme", nvme_path=tmp_path)
    parameter = dict(net.named_parameters())["blocks.1.up.weight"]
    loss_of(net, 0, 0).backward()
    read = net.blocks[1].up.weight.data
    assert read is not parameter and net.blocks[1].up.weight is parameter
    assert torch.equal(zcomm.zero.full_grad(read), zcomm.zero.full_grad(parameter))
    read = net.state_dict()["blocks.1.up.weight"]
    ones = torch.ones_like(read)
    zcomm.zero.set_full_param(read, ones)
    zcomm.zero.set_full_grad(net.blocks[1].up.weight, 2 * ones)
    zcomm.zero.set_full_optim_state(net.blocks[1].up.weight, 3 * ones, "exp_avg")
    assert torch.equal(zcomm.zero.full_param(parameter), ones)
    assert torch.equal(zcomm.zero.full_grad(parameter), 2 * ones)
    assert torch.equal(zcomm.zero.full_optim_state(parameter, "exp_avg"), 3 * ones)
    with zcomm.zero.GatheredParameters([net.blocks[1].up.weight], modifier_rank=0):
        net.blocks[1].up.weight.data[0] = 7.0
    assert zcomm.zero.full_param(parameter)[0, 0] == 7.0
    with pytest.raises(ValueError, match=r"blocks.1.up.weight: the value is a str, not a tensor"):
        zcomm.zero.set_full_optim_state(parameter, "exp_avg", ones)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is not a parameter of an open ZeroOptimizer"):
        zcomm.zero.full_param(ones)
    opt.close()
    zcomm.shutdown()


def generate(folder: str, case: Case) -> list[int]:
    """Rank r runs 2 + 3 r extra passes in evaluation; then all ranks continue training."""
    comm = zcomm.init(timeout=8)
    torch.manual_seed(0)
    net = Net("plain")
    opt = zcomm.ZeroOptimizer(net, nvme_path=folder, **case.arguments())
    for number in range(2):
        loss_of(net, comm.rank, number).backward()
        opt.step()
        opt.zero_grad()
    net.eval()
    tokens = tokens_of(0, 0)[:1, :2]
    with torch.no_grad():
        for _ in range(2 + 3 * comm.rank):
            tokens = torch.cat([tokens, net(tokens)[:, -1].argmax(-1, keepdim=True)], 1)
    net.train()
    loss_of(net, comm.rank, 5).backward()
    opt.step()
    opt.close()
    return tokens[0].tolist()


def test_generation_of_different_lengths(run_ranks: Run, tmp_path: Path) -> None:
    for case in (Case(3), Case(3, "cpu"), Case(2, None, share_parameters=False)):
        short, long = run_ranks(generate, 2, str(tmp_path), case)
        assert len(short) == 4 and len(long) == 7 and long[:4] == short
    told = []
    for result in run_ranks(generate, 2, str(tmp_path), PRIVATE, check=False):
        assert result.error is not None, "unit by unit the ranks must keep step"
        assert "unit " in result.error.message or result.error.kind == "PeerLost", result.describe()
        told.append("goes inside of zcomm.zero.GatheredParameters(model)" in result.error.message)
    assert any(told), "what to do"


# --- life -----------------------------------------------------------------------------------------------------------


def resident() -> int:
    import ctypes
    import gc

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/status") as status:
        return sum(int(line.split()[1]) * 1024 for line in status if line.startswith(("RssAnon:", "RssShmem:")))


def open_and_close(folder: str, case: Case) -> tuple[list[int], list[Any]]:
    import os
    import threading

    comm = zcomm.init(timeout=60)
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(6)))  # 6 MiB
    weights = [p.detach().clone() for p in net.parameters()]
    sizes, counts = [], []
    for _ in range(20):
        for param, weight in zip(net.parameters(), weights, strict=True):
            param.data = weight.clone()
        opt = zcomm.ZeroOptimizer(net, nvme_path=folder, **case.arguments())
        for _ in range(2):
            net(torch.ones(1, 512)).sum().backward()
            opt.step()
            opt.zero_grad()
        opt.close()
        del opt
        comm.barrier()
        sizes.append(resident())
        counts.append(
            (len(os.listdir("/proc/self/fd")), threading.active_count(), tuple(sorted(comm.memory().items())))
        )
        comm.barrier()
    return sizes, counts


@pytest.mark.parametrize("case", [long(Case(2)), slow(Case(3, "nvme")), long(PRIVATE)])
def test_twenty_optimizers_leave_nothing(run_ranks: Run, tmp_path: Path, case: Case) -> None:
    case = replace(case, bucket_mb=1.0)
    for sizes, counts in run_ranks(open_and_close, 2, str(tmp_path), case):
        grown = min(sizes[14:]) - min(sizes[2:8])  # over about 12 optimizers of 20 MiB and more
        assert grown < 3 * 2**20, [size // 2**10 for size in sizes]
        assert len(set(counts[2:])) == 1, counts
