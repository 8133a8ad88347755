"""F.embedding of a weight that is gathered by rows reads only blocks in which some rank has indices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import zcomm
from tiers import long
from zcomm.zero import Offload, Units
from zcomm.zero.rows.blocks import row_blocks, used_ranges, used_rows
from zero_jobs import digest

Run = Callable[..., list[Any]]
W, WORDS = 64, 32_768
BLOCK = 1024 * W * 4  # bytes
ROWS = Units(max_bytes=BLOCK, rows=True)


# --- arithmetic -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [7, 1024, 1536, 5000])
@pytest.mark.parametrize("step", [1, 4, 1000, 4096])
def test_ranges_hold_all_indices_and_little_else(rows: int, step: int) -> None:
    generator = torch.Generator().manual_seed(rows + step)
    blocks = list(row_blocks(rows))
    for count in (0, 1, 2, 40):
        of_ranks = [torch.randint(rows, (size,), generator=generator) for size in (count, count // 2)]
        found = list(used_ranges(torch.maximum(*(used_rows(each, rows) for each in of_ranks)), rows, step))
        every = torch.cat(of_ranks).tolist()
        assert [sum(begin <= index < end for begin, end in found) for index in every] == [1] * len(every)
        for begin, end in found:
            inside = [index for index in every if begin <= index < end]
            assert begin % step == 0 or any(begin == low for low, _ in blocks)
            assert inside and min(inside) - begin < step and end - 1 - max(inside) < step
            assert sum(low <= begin and end <= high for low, high in blocks) == 1, "in one block"


# --- bytes ----------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, W, padding_idx=3)
        self.out = nn.Linear(W, 8)
        self.recomputes = recomputes

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.embed, tokens, use_reentrant=False) if self.recomputes else self.embed(tokens)
        return torch.tanh(self.out(x * x)).sum()


def read_nbytes(opt: Any, act: Callable[[], Any]) -> int:
    """Return the bytes that all ranks read from the drive in ``act``."""
    stats = opt._open_parts.swap.stats
    opt._open_parts.store.gather.synchronize()
    before = stats()["read_nbytes"]
    act()
    opt._open_parts.store.gather.synchronize()
    return sum(zcomm.zero.agree.all_values(zcomm.init(), stats()["read_nbytes"] - before, "bytes"))


def count_bytes(folder: str) -> None:
    comm = zcomm.init(timeout=60)
    opt = zcomm.ZeroOptimizer(net := Net(), stage=3, offload="nvme", nvme_path=folder, units=ROWS)
    assert len(list(row_blocks(WORDS))) == 32
    one = torch.arange(5000, 5100) if comm.rank == 0 else torch.empty(0, dtype=torch.int64)
    most = BLOCK if comm.world_size == 1 else 2 * BLOCK  # a block may be split over two ranks' shards
    assert 0 < read_nbytes(opt, lambda: net.embed(one)) <= most
    three = torch.tensor([[9, 30_000, 9], [16_000, 9, 16_001]])
    assert 2 * BLOCK < read_nbytes(opt, lambda: net.embed(three)) <= 3 * most
    every = torch.randint(WORDS, (32,), generator=torch.Generator().manual_seed(comm.rank))
    assert read_nbytes(opt, lambda: net.embed(every)) <= min(32, 32 * comm.world_size) * most
    assert read_nbytes(opt, lambda: net.embed(every[:0])) == 0
    assert net.embed(every[:0].view(2, 0)).shape == (2, 0, W)
    net.recomputes = True
    loss = net(one)
    assert 0 < read_nbytes(opt, loss.backward) <= most + 4096, "the recomputed forward, and what is whole"
    opt.step()
    opt.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_drive_reads_blocks_with_indices(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    run_ranks(count_bytes, world_size, str(tmp_path))


# --- bits -----------------------------------------------------------------------------------------------------------


def tokens_of(step: int, rank: int) -> torch.Tensor:
    """Return other tokens, and another number of them, on each rank; none on some ranks."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    count = (6, 0, 9, 3)[(step + rank) % 4]
    return 7000 * step + torch.randint(2000, (count,), generator=generator, dtype=torch.int32 if step % 2 else None)


def train(folder: str, units: Units, offload: Offload, recomputes: bool, **options: Any) -> tuple[list[str], str]:
    comm = zcomm.init(timeout=60)
    torch.manual_seed(0)
    net = Net(recomputes)
    options = {"share_parameters": False, "bucket_mb": 1.0, **options}
    opt = zcomm.ZeroOptimizer(net, lr=1e-2, stage=3, nvme_path=folder, offload=offload, units=units, **options)
    losses = []
    for step in range(4):
        loss = net(tokens_of(step, comm.rank))
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item().hex())
    found = losses, digest(opt.full_state_dict())
    opt.close()
    return found


def train_all(folder: str) -> None:
    wanted = train(folder, Units([nn.Embedding]), Offload("nvme", "nvme"), False)
    for units in (ROWS, Units(max_bytes=4 * BLOCK, rows=True)):
        for offload in (
            Offload("nvme", "nvme"),
            Offload(),
            Offload("nvme", "nvme", update="forward"),
            Offload("nvme", "nvme", gradients="nvme", update="backward"),
        ):
            for recomputes in (False, True):
                assert train(folder, units, offload, recomputes) == wanted, (offload, recomputes)
    sharing = train(folder, ROWS, Offload("nvme", "nvme", update="forward"), False, share_parameters=True)
    assert sharing == wanted


@pytest.mark.timeout_s(200)
@pytest.mark.parametrize("world_size", [long(1), 2, long(3)])
def test_ranks_with_other_indices_have_the_bits_of_whole_weights(
    run_ranks: Run, tmp_path: Path, world_size: int
) -> None:
    run_ranks(train_all, world_size, str(tmp_path), timeout_s=190)


def diverge(folder: str) -> None:
    """Use an embedding on one rank, and another weight on the other rank."""
    comm = zcomm.init(timeout=5)
    net = nn.ModuleDict({"embed": nn.Embedding(WORDS, W), "head": nn.Linear(W, WORDS, bias=False)})
    opt = zcomm.ZeroOptimizer(net, stage=3, offload="nvme", nvme_path=folder, units=ROWS)
    with pytest.raises((zcomm.CollectiveMismatch, zcomm.PeerLost, TimeoutError), match="all ranks must run the same"):
        net["embed"](torch.arange(4)) if comm.rank == 0 else F.linear(torch.ones(2, W), net["head"].weight)
    opt.close()


def test_ranks_that_use_other_weights_are_found_out(run_ranks: Run, tmp_path: Path) -> None:
    run_ranks(diverge, 2, str(tmp_path))
