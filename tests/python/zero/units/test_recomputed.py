"""Parameters that one backward pass reaches several times: reentrant checkpoints with a common weight.

Each recomputation is a backward pass within the pass, with its own gradient. torch adds the gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import simulated
import zcomm
from device_jobs import Job, pairs
from test_corners import AGAIN, Net, loss_of
from test_zero_device import DELAY_S, same
from tiers import slow
from zero_jobs import Case, digest

Run = Callable[..., list[Any]]
SMALL, MIDDLE, LARGE = 0.005, 0.02, 25.0  # MiB: a weight in each bucket, a few, one bucket
CASES = [Case(stage, None, size) for stage, size in product(range(4), (SMALL, LARGE))]
CASES += [Case(3, None, size, share_parameters=False, prefetch=prefetch) for size, prefetch in ((SMALL, 0), (LARGE, 1))]
CASES += [Case(2, None, SMALL, overlap=False), Case(2, "nvme", MIDDLE), Case(3, "nvme", MIDDLE, overlap=False)]
STEPS, PASSES = 3, 2


def build(kind: str) -> Net:
    torch.manual_seed(0)
    net = Net(kind)
    torch.nn.init.normal_(net.embed.weight, std=0.5)
    return net


def kind_of(kind: str, rank: int) -> str:
    """Return the kind on this rank. differ: only rank 0 uses a block twice."""
    return "reentrant" if kind == "differ" and rank else kind.replace("differ", "twice+reentrant")


def train(case: Case, folder: str, kind: str, way: str) -> dict[str, torch.Tensor]:
    """Train. way: of the two passes of a step, "both" are reduced, or the "first" or the "last" one is local."""
    comm = zcomm.init(timeout=60)
    net = build(kind_of(kind, comm.rank))
    opt = zcomm.ZeroOptimizer(
        net, "sgd", lr=0.1, momentum=0.9, clip_norm=1.0, grad_accum=PASSES, nvme_path=folder, **case.arguments()
    )
    for number in range(STEPS * PASSES):
        if (number % PASSES, way) in ((0, "first"), (1, "last")):
            with opt.no_sync():
                loss_of(net, comm.rank, number).backward()
        else:
            loss_of(net, comm.rank, number).backward()
        opt.step()
        opt.zero_grad()
    weights = opt.full_state_dict()
    opt.close()
    return weights


def train_all(folder: str, kind: str, way: str) -> tuple[list[str], dict[str, torch.Tensor]]:
    found = [train(case, folder, kind, way) for case in CASES]
    return [digest(weights) for weights in found], found[0]


def by_torch(kind: str, world_size: int) -> dict[str, torch.Tensor]:
    nets = [build(kind_of(kind, rank)) for rank in range(world_size)]
    opt = torch.optim.SGD(nets[0].parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        for rank, net in enumerate(nets):
            for number in range(step * PASSES, (step + 1) * PASSES):
                (loss_of(net, rank, number) / (world_size * PASSES)).backward()
        for net in nets[1:]:
            for mine, other in zip(nets[0].parameters(), net.parameters(), strict=True):
                mine.grad = mine.grad + other.grad
        torch.nn.utils.clip_grad_norm_(nets[0].parameters(), 1.0)
        opt.step()
        for net in nets:
            net.load_state_dict(nets[0].state_dict())
            net.zero_grad()
    return {name: param.detach() for name, param in nets[0].named_parameters()}


@pytest.mark.slow
@pytest.mark.timeout_s(300)
@pytest.mark.parametrize("world_size", [slow(1), 2])
@pytest.mark.parametrize("kind", [*AGAIN, "differ"])
def test_torchs_sum_in_every_stage_and_bucket_size(run_ranks: Run, tmp_path: Path, kind: str, world_size: int) -> None:
    wanted = by_torch(kind, world_size)
    for hashes, weights in run_ranks(train_all, world_size, str(tmp_path), kind, "both", timeout_s=280):
        assert dict(zip(map(str, CASES), hashes, strict=True)) == dict.fromkeys(map(str, CASES), hashes[0])
        for name, value in wanted.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.timeout_s(300)
@pytest.mark.parametrize("way", ["first", slow("last")])
def test_passes_without_sync(run_ranks: Run, tmp_path: Path, way: str) -> None:
    """Also if the last pass of a step is local."""
    wanted = by_torch("twice+reentrant", 2)
    for hashes, weights in run_ranks(train_all, 2, str(tmp_path), "twice+reentrant", way, timeout_s=280):
        assert len(set(hashes)) == 1
        for name, value in wanted.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6)


def read_gradients(stage: int) -> dict[str, torch.Tensor | None]:
    comm = zcomm.init(timeout=60)
    net = build("twice+reentrant")
    opt = zcomm.ZeroOptimizer(net, stage=stage, bucket_mb=SMALL)
    loss_of(net, comm.rank, 0).backward()
    grads = {name: zcomm.zero.full_grad(param) for name, param in net.named_parameters()}
    assert opt._live.reducer.reached == 1 and not opt._live.reducer.local
    for name, param in net.named_parameters():
        assert torch.equal(param.grad.full_tensor(), grads[name])
    opt.close()
    return grads


def test_full_grad_has_all_arrivals(run_ranks: Run) -> None:
    nets = [build("twice+reentrant") for _ in range(2)]
    for rank, net in enumerate(nets):
        (loss_of(net, rank, 0) / 2).backward()
    for stage in (1, 3):
        for grads in run_ranks(read_gradients, 2, stage):
            for (name, first), second in zip(nets[0].named_parameters(), nets[1].parameters(), strict=True):
                torch.testing.assert_close(grads[name], first.grad + second.grad, rtol=1e-4, atol=1e-7)


def test_a_second_arrival_that_is_not_finite_skips_the_step() -> None:
    net = build("twice+reentrant")
    opt = zcomm.ZeroOptimizer(net, stage=2, precision="fp16", bucket_mb=SMALL)
    index = next(n for n, name in enumerate(opt._live.names) if name == "blocks.2.up.weight")
    before = net.blocks[2].up.weight.clone()
    opt.backward(loss_of(net, 0, 0))
    net.blocks[2].up.weight.grad[3, 5] = float("inf")
    opt.step()
    assert opt.skipped_steps == 1 and opt.nonfinite.parameter == opt._live.names[index]
    assert torch.equal(before, net.blocks[2].up.weight)
    opt.close()
    zcomm.shutdown()


TWICE = Job(2, kind="twice+reentrant")
ON_DEVICE = [
    TWICE, replace(TWICE, accum=2), replace(TWICE, clip=0.5, behind=True), replace(TWICE, precision="fp16"),
    replace(TWICE, offload=None), replace(TWICE, offload=None, accum=2, clip=1.0, precision="bf16"),
    replace(TWICE, stage=0, bucket_mb=25.0), replace(TWICE, stage=3, accum=2, clip=0.5),
]  # fmt: skip


@pytest.mark.timeout_s(300)
@pytest.mark.parametrize("world_size", [1, slow(2)])
def test_on_a_device(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    """Resident weights, and steps that begin with gradients in flight."""
    same(ON_DEVICE, run_ranks(pairs, world_size, ON_DEVICE, str(tmp_path), DELAY_S, timeout_s=280))


def begin_late(folder: str) -> str:
    comm = zcomm.init(timeout=20)
    simulated.play(DELAY_S, seed=comm.rank)
    net = build("reentrant")
    opt = Job(2).build(net, folder)
    for number in range(3):
        if number == 2 and comm.rank == 1:
            net.kinds.append("twice")
        opt.backward(loss_of(net, comm.rank, number))
        try:
            opt.step()
        except RuntimeError as error:
            assert number == 2
            return str(error)
        opt.zero_grad()
    return "no error"


def test_a_second_arrival_that_nobody_expects_is_said_on_all_ranks(run_ranks: Run, tmp_path: Path) -> None:
    """Only on a device, because steps begin there before the ranks have compared."""
    for text in run_ranks(begin_late, 2, str(tmp_path)):
        assert "has reached a parameter twice on some rank, in no step before" in text and "use_reentrant=False" in text
