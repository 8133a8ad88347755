"""split_batch with ZeroOptimizer: the bits of a loop by hand in each stage and tier; weights are read once per pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import simulated
import zcomm
from tiers import slow
from zero_jobs import Case, digest

Run = Callable[..., list[Any]]
WIDTH, BLOCKS, PARTS, STEPS = 32, 5, 4, 3
NVME = Case(3, "nvme", 0.02, prefetch=0)
PLACES = [
    Case(3), NVME, Case(3, "nvme", 0.02, gradients="nvme", update="backward"), Case(2, "nvme", 0.02),
    Case(0, None, 0.02), Case(1, "cpu"), Case(3, "cpu", 0.02, share_parameters=False),
    Case(3, None, 0.02, share_parameters=False),
    Case(3, "nvme", 0.02, prefetch=2, update="forward"), Case(3, "nvme", 0.02, max_bytes=4 * 4 * WIDTH * WIDTH),
]  # fmt: skip


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.dropout(torch.tanh(self.up(x)), 0.1, self.training))


class Net(nn.Module):
    """Blocks; the fourth block is frozen and the first one runs twice. by_hand: parts of a loop around each of them."""

    def __init__(self, by_hand: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.blocks[3].requires_grad_(False)
        self.by_hand = by_hand

    def run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if not self.by_hand:
            out: torch.Tensor = block(x)
            return out
        return torch.cat([checkpoint(block, part, use_reentrant=False) for part in x.chunk(self.by_hand)])

    def forward(self, x: torch.Tensor, twice: bool = True) -> torch.Tensor:
        x = self.first(x)
        for block in (*self.blocks, *([self.blocks[0]] * twice)):
            x = self.run(block, x)
        return x.float().square().mean()


def batch(rank: int, number: int, count: int = 2 * PARTS) -> torch.Tensor:
    return torch.randn(count, 3, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank))


def train(case: Case, folder: str, by_hand: bool, before: bool = True, moves: bool = False) -> tuple[list[float], str]:
    """Train, with parts by hand or by split_batch, which is called before or after ZeroOptimizer. moves: the inputs of
    parts go to the drive."""
    comm = zcomm.init(timeout=60)
    net = Net(by_hand=PARTS if by_hand else 0)
    if not by_hand and before:
        zcomm.split_batch(net.blocks, parts=PARTS)
    opt = zcomm.ZeroOptimizer(net, "adamw", lr=1e-2, nvme_path=folder, **case.arguments())
    if not by_hand and not before:
        zcomm.split_batch(net.blocks, parts=PARTS)
    offload = zcomm.offload_activations("nvme", min_nbytes=1, nvme_path=folder)
    losses = []
    torch.manual_seed(comm.rank)
    for number in range(STEPS):
        with offload if moves else nullcontext():
            loss = net(batch(comm.rank, number).to(net.first.weight.dtype))
        loss.backward()
        assert opt._parts is not None and opt._parts.reducer.reached == 1, "one backward pass"
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    assert offload.stats()["offloaded_count"] >= moves * STEPS * PARTS * BLOCKS
    weights = digest(opt.full_state_dict())
    opt.close()
    offload.close()
    return losses, weights


def train_all(cases: Sequence[Case], folder: str) -> list[Any]:
    wanted = {each: train(Case(0, precision=each), folder, by_hand=True) for each in {case.precision for case in cases}}
    found = [train(case, folder, False, number % 2 == 0, moves=number == 1) for number, case in enumerate(cases)]
    return [(str(case), each, wanted[case.precision]) for case, each in zip(cases, found, strict=True)]


@pytest.mark.timeout_s(300)
@pytest.mark.parametrize(
    ("world_size", "precision", "cases"),
    [(1, "fp32", PLACES[:3]), *(slow(size, kind, PLACES) for size in (1, 2) for kind in ("fp32", "bf16"))],
)
def test_bits_of_a_loop_by_hand(
    run_ranks: Run, tmp_path: Path, world_size: int, precision: str, cases: list[Case]
) -> None:
    cases = [replace(case, precision=precision) for case in cases]
    if world_size == 1:
        every = [train_all(cases, str(tmp_path))]
        zcomm.shutdown()
    else:
        every = run_ranks(train_all, world_size, cases, str(tmp_path), timeout_s=280)
    for results in every:
        for case, found, wanted in results:
            assert len(set(wanted[0])) == STEPS and found == wanted, case


@pytest.mark.slow
@pytest.mark.parametrize("moves", [False, True])
def test_on_a_simulated_device(tmp_path: Path, moves: bool) -> None:
    """Copies of weights and of inputs are late."""
    wanted = train(Case(0), str(tmp_path), by_hand=True)
    simulated.play(0.0005)
    for case in (Case(3, "cpu", 0.02, prefetch=0), Case(3, "nvme", 0.02, prefetch=2), Case(2, "cpu", 0.02)):
        assert train(case, str(tmp_path), by_hand=False, moves=moves) == wanted, str(case)
    zcomm.shutdown()


# --- bytes ------------------------------------------------------------------------------------------------------------


def reads(case: Case, folder: str, parts: int, micro_steps: int) -> tuple[float, list[list[int]]]:
    """Return the bytes that a step reads, and the gathers of its units in forward and in backward, first and last."""
    zcomm.init(timeout=60)
    net = Net(by_hand=0 if parts else 1)
    if parts:
        zcomm.split_batch(net.blocks, parts=parts)
    opt = zcomm.ZeroOptimizer(net, "sgd", lr=1e-2, grad_accum=micro_steps, nvme_path=folder, **case.arguments())
    store: Any = opt._live.store
    moved, gathers, fill = [], [], store.life.memory.fill
    store.life.memory.fill = lambda unit: (gathers.append(unit.index), fill(unit))
    found: list[list[int]] = []
    for number in range(6):  # the first steps learn the order; step() alternates its direction
        found.clear()
        for micro_step in range(micro_steps):
            loss = net(batch(0, number + micro_step, count=2 * max(parts, 1)), twice=False)
            found.append(gathers.copy())
            gathers.clear()
            loss.backward()
            assert [unit for unit in store.life.order.trace if unit] == [
                *range(1, BLOCKS + 1),
                *range(BLOCKS - 1, 0, -1),
            ]
            found.append(gathers.copy())
            gathers.clear()
            opt.step()
            opt.zero_grad()
        store.gather.synchronize()
        moved.append(opt.stats()["swap_read_nbytes"])
    opt.close()
    return (moved[-1] - moved[-3]) / 2, found


@pytest.mark.parametrize("case", [NVME, slow(replace(NVME, prefetch=1)), slow(replace(NVME, prefetch=2))])
def test_weights_are_read_once_for_all_parts(tmp_path: Path, case: Case) -> None:
    """A step of M parts reads as much as a step of one micro-step. Each further micro-step reads all weights that have
    lost their slots."""
    one, gathers = reads(case, str(tmp_path), 0, 1)
    for parts in (2, 4):
        assert reads(case, str(tmp_path), parts, 1) == (one, gathers)
    two, four = (reads(case, str(tmp_path), 0, count)[0] for count in (2, 4))
    assert four - two == 2 * (two - one)
    block = 8 * WIDTH * WIDTH * 4
    slots = case.prefetch + 2
    assert two - one == (BLOCKS + BLOCKS - slots - slots) * block
    zcomm.shutdown()


def test_gathers_from_the_host(tmp_path: Path) -> None:
    """In forward each unit once, in backward each once that has lost its slot."""
    case = Case(3, "cpu", 0.02, share_parameters=False, prefetch=0)
    _, (forward, backward) = reads(case, str(tmp_path), PARTS, 1)
    assert forward == [0, *range(1, BLOCKS + 1)] and backward == [3, 2, 1]
    zcomm.shutdown()


def test_a_unit_that_an_activation_enters() -> None:
    """Backward enters a block by an activation that a hook took out of it; the bits are those of a loop by hand."""
    ends = []
    for by_hand in (PARTS, 0):
        net = Net(by_hand)
        if not by_hand:
            zcomm.split_batch(net.blocks, parts=PARTS)
        opt = zcomm.ZeroOptimizer(net, "sgd", lr=0.1, stage=3, share_parameters=False, prefetch=0)
        kept: list[torch.Tensor] = []
        net.blocks[1].up.register_forward_hook(lambda module, args, out, kept=kept: kept.append(out))
        for number in range(2):
            torch.manual_seed(number)
            net(batch(0, number), twice=False)
            outputs = [out for out in kept if out.requires_grad]
            assert len(outputs) == PARTS
            sum(out.square().mean() for out in outputs).backward()
            kept.clear()
            opt.step()
            opt.zero_grad()
        ends.append(digest(opt.full_state_dict()))
        opt.close()
    assert ends[0] == ends[1]
    zcomm.shutdown()
