"""iter_state: the values of state_dict and full_state_dict in pieces, on the ranks that request them."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from tiers import slow
from zcomm.zero.checkpoint.state_pieces import StatePiece
from zcomm.zero.tensors import chunks

Run = Callable[..., list[Any]]

CASES: list[dict[str, Any]] = [
    {"stage": 3, "offload": "nvme", "precision": "bf16"},
    {"stage": 3, "offload": zcomm.Offload("nvme", "nvme", gradients="nvme", update="forward")},
    {"stage": 3, "offload": "cpu", "precision": "bf16", "state_dtype": "8bit"},
    {"stage": 2, "precision": "fp16"},
    {"stage": 0, "optimizer": "sgd", "momentum": 0.9},
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(31, 67)
        self.last = nn.Linear(67, 31, bias=False)
        self.frozen = nn.Parameter(torch.randn(67), requires_grad=False)
        self.register_buffer("count", torch.tensor(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x) * self.frozen)


def made(case: dict[str, Any], folder: Path) -> tuple[nn.Module, Any]:
    torch.manual_seed(4)
    model = Net()
    rest = {"optimizer": "adamw", **case}
    return model, zcomm.ZeroOptimizer(model, rest.pop("optimizer"), lr=0.01, nvme_path=folder / "drive", **rest)


def train(model: nn.Module, opt: Any) -> None:
    x = torch.randn(4, 31, generator=torch.Generator().manual_seed(zcomm.init().rank))
    opt.backward(model(x.to(opt.precision.dtype)).float().square().mean())
    opt.step()
    opt.zero_grad()


def whole(pieces: Iterable[StatePiece]) -> dict[tuple[str, str], torch.Tensor]:
    """Concatenate the pieces; check that each begins at the end of its predecessor."""
    parts: dict[tuple[str, str], list[torch.Tensor]] = {}
    shapes: dict[str, torch.Size] = {}
    for piece in pieces:
        shapes[piece.name] = piece.shape
        for key, value in piece.values.items():
            before = parts.setdefault((piece.name, key), [])
            assert sum(part.numel() for part in before) == piece.begin
            before.append(value.clone())
    return {(name, key): torch.cat(part).view(shapes[name]) for (name, key), part in parts.items()}


def compare(folder: str, number: int) -> None:
    comm = zcomm.init()
    model, opt = made(CASES[number], Path(folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK_COUNT", 256)
        train(model, opt)
        train(model, opt)
        root = comm.world_size - 1
        found = whole(opt.iter_state(root=root))
        weights = whole(opt.iter_state("weight", root=root))
    full, state = opt.full_state_dict(), opt.state_dict()
    if comm.rank != root:
        assert found == weights == {}
    else:
        wanted = {(name, "weight"): value for name, value in full.items()}
        assert weights.keys() == wanted.keys()
        names = [name for name, param in model.named_parameters() if param.requires_grad]
        for place, entry in state["state"].items():
            if "scales" in entry:
                entry = {**entry, **zcomm.zero.layout.tiles.decoded(entry)}
            arrays = {key: value for key, value in entry.items() if key not in ("step", "scales")}
            wanted |= {(names[place], key): value for key, value in arrays.items()}
        assert found.keys() == wanted.keys()
        for at, value in wanted.items():
            assert torch.equal(found[at], value.view(found[at].shape)), at
            assert found[at].dtype == value.dtype, at
    opt.close()


@pytest.mark.parametrize("number", range(len(CASES)))
@pytest.mark.parametrize("world", [slow(1), 2])
def test_pieces_are_the_whole(run_ranks: Run, tmp_path: Path, number: int, world: int) -> None:
    run_ranks(compare, world, str(tmp_path), number)


def misuse(folder: str) -> None:
    comm = zcomm.init()
    model, opt = made(CASES[0], Path(folder))
    before = whole(opt.iter_state("exp_avg"))
    assert all(not value.any() for value in before.values())
    with pytest.raises(ValueError, match=r"kept as 'exp_age'; there are weight, master, exp_avg, exp_avg_sq"):
        opt.iter_state("exp_age")
    with pytest.raises(ValueError, match=r"root=7: ranks are 0 to"):
        opt.iter_state(root=7)
    if comm.world_size == 1:
        pieces = opt.iter_state()
        next(pieces)
        train(model, opt)
        with pytest.raises(RuntimeError, match=r"step\(\) was called before the last piece"):
            next(pieces)
    late = opt.iter_state()
    train(model, opt)  # nothing is lost
    with pytest.raises(RuntimeError, match=r"step\(\) was called before the last piece"):
        next(late)
    store, read = opt._parts.store, opt._parts.store.read

    def fails(bucket: Any, part: slice) -> torch.Tensor:
        if comm.rank == comm.world_size - 1:
            raise OSError(errno.EIO, "the drive is gone")
        return read(bucket, part)

    store.read = fails
    with pytest.raises(OSError, match="the drive is gone") as caught:
        whole(opt.iter_state())
    assert caught.value.errno == errno.EIO
    del store.read
    train(model, opt)
    left = opt.iter_state()
    if comm.world_size == 1:
        next(left)
    opt.close()
    with pytest.raises(RuntimeError, match=r"iter_state\(\): the optimizer was closed before the last piece"):
        next(left)
    with pytest.raises(RuntimeError, match="closed"):
        opt.iter_state()


@pytest.mark.parametrize("world", [1, 2])
def test_misuse_and_failures_lose_nothing(run_ranks: Run, tmp_path: Path, world: int) -> None:
    run_ranks(misuse, world, str(tmp_path))


def left_off(folder: str, number: int, begins: bool) -> str:
    """Train after .data was replaced, with an iterator that is dropped after its first piece."""
    model, opt = made(CASES[number], Path(folder))
    train(model, opt)
    for param in model.parameters():
        param.data = torch.full(param.shape, 0.5, dtype=param.dtype)
    pieces = opt.iter_state() if begins else iter(())
    next(pieces, None)
    train(model, opt)
    del pieces
    train(model, opt)
    bits = "".join(value.float().sum().item().hex() for value in opt.full_state_dict().values())
    opt.close()
    return bits


@pytest.mark.parametrize("number", range(len(CASES)))
def test_an_iterator_that_is_left_changes_nothing(run_ranks: Run, tmp_path: Path, number: int) -> None:
    assert run_ranks(left_off, 1, str(tmp_path), number, True) == run_ranks(left_off, 1, str(tmp_path), number, False)
