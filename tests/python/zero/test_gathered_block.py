"""opt.gathered(): whole weights for a block, without communication inside; opt.export(): whole tensors, one by one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zcomm
from zcomm.zero import GatheredParameters, Offload, Units
from zcomm.zero.registry import open_parts
from zcomm.zero.tensors import whole_model
from zcomm.zero.units.store import UnitStore
from zero_jobs import batch, small_gpt

Run = Callable[..., list[Any]]

CASES: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 2, "offload": "cpu", "precision": "bf16"},
    {"stage": 3},
    {"stage": 3, "share_parameters": False, "precision": "bf16"},
    {"stage": 3, "offload": "nvme"},
    {"stage": 3, "offload": Offload("cpu", "nvme"), "precision": "fp16", "prefetch": 0},
    {"stage": 3, "offload": Offload("nvme", "nvme", update="forward")},
    {"stage": 3, "share_parameters": False, "compression": zcomm.Compression(weights="int8")},
]


class Tied(nn.Module):
    """A model with a tied head, a frozen weight and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(2200, 24)
        self.blocks = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        self.head = nn.Linear(24, 2200, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks[1].weight.requires_grad_(False)
        self.register_buffer("count", torch.arange(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


class Rows(Tied):
    """A model with embedding and head that are gathered by rows."""

    units = Units(max_bytes=120_000, rows=True)

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(0.5 * self.embedding.weight.detach())


def generated(model: nn.Module, count: int) -> list[int]:
    tokens = torch.randint(0, 64, (1, 3), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for _ in range(count):
            tokens = torch.cat([tokens, model(tokens[:, -16:])[:, -1].argmax(-1, keepdim=True)], 1)
    return tokens[0].tolist()


def one_step(opt: Any, model: nn.Module, number: int) -> None:
    x, y = batch(zcomm.rank(), number)
    opt.backward(nn.functional.cross_entropy(model(x).float().flatten(0, 1), y.reshape(-1)))
    opt.step()
    opt.zero_grad()


def read_nbytes(opt: Any) -> tuple[float, float]:
    return open_parts(opt).store.moved_nbytes, opt.stats()["swap_read_nbytes"]


def resident(model: nn.Module, weights: dict[str, torch.Tensor], dtype: torch.dtype) -> nn.Module:
    copy: nn.Module = type(model)() if isinstance(model, Tied) else small_gpt()
    copy.to(dtype).load_state_dict(weights)
    return copy.eval()


def generate_and_train(folder: str) -> None:
    comm = zcomm.init(timeout=60)
    cases: list[tuple[Any, Any]] = [(case, kind) for case in CASES for kind in (small_gpt, Tied)]
    cases += [({"stage": 3, "offload": tier, "units": Rows.units}, Rows) for tier in ("cpu", "nvme")]
    for case, kind in cases:
        model = kind()
        opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1, nvme_path=folder, **case)
        dtype = opt.precision.dtype
        one_step(opt, model, 0)
        for _ in range(2):
            want, count = resident(model, opt.full_state_dict(), dtype), 2 + 3 * comm.rank
            model.train(comm.rank == 0)
            loss = model(torch.arange(8).view(1, 8)).float().square().mean()
            flags = [p.requires_grad for p in model.parameters()]
            with opt.gathered() as same:
                assert same is model
                before = read_nbytes(opt)
                assert generated(model, count) == generated(want, count), case
                with torch.inference_mode(), opt.gathered():
                    assert generated(model, 2) == generated(want, 2), case
                assert [p.shape for p in model.parameters()] == [p.shape for p in want.parameters()]
                assert all(torch.equal(p, q) for p, q in zip(model.parameters(), want.parameters(), strict=True))
                assert read_nbytes(opt) == before, case
                assert not model(torch.arange(8).view(1, 8)).requires_grad
            assert model.training is (comm.rank == 0)
            assert flags == [p.requires_grad for p in model.parameters()]
            opt.backward(loss)
            opt.step()
            opt.zero_grad()
            again = want(torch.arange(8).view(1, 8)).float().square().mean()
            again.backward()
            for name, p in want.named_parameters() if dtype == torch.float32 and "compression" not in case else ():
                moved_to = p.detach() - 0.1 * (0 if p.grad is None else p.grad)
                assert torch.allclose(opt.full_state_dict()[name], moved_to, rtol=1e-5, atol=1e-7), (case, name)
        opt.close()


def test_generates_as_a_resident_model_without_communication(run_ranks: Run, tmp_path: Path) -> None:
    run_ranks(generate_and_train, 2, str(tmp_path))


CHANGED = r"blocks\.0\.weight was changed inside of opt\.gathered\(\) on "
EDITS: list[Callable[[nn.Parameter], object]] = [
    lambda p: p.add_(1),
    lambda p: setattr(p, "data", torch.zeros_like(p)),
    lambda p: p.data[:, 5].zero_(),
]


def edits_and_errors_of(case: dict[str, Any], folder: str) -> None:
    comm = zcomm.init(timeout=60)
    model = Tied()
    opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1, nvme_path=folder, **case)
    by_units = isinstance(open_parts(opt).store, UnitStore)
    one_step(opt, model, 0)
    weight, before = model.blocks[0].weight, opt.full_state_dict()

    def is_unchanged() -> bool:
        return all(torch.equal(a, b) for a, b in zip(opt.full_state_dict().values(), before.values(), strict=True))

    for edit in EDITS:
        with pytest.raises(RuntimeError, match=CHANGED), opt.gathered(), torch.no_grad():
            edit(weight)
        assert is_unchanged() is by_units, case
        if not by_units:
            weight.data.copy_(before["blocks.0.weight"])
        with opt.gathered(edits="forget"), torch.no_grad():
            edit(weight)
        assert is_unchanged(), case
    with pytest.raises(RuntimeError, match=CHANGED + "rank 1"), opt.gathered(), torch.no_grad():
        _ = comm.rank == 1 and weight.mul_(1)
    with opt.gathered(), GatheredParameters(weight, modifier_rank=1), torch.no_grad():
        weight.fill_(comm.rank)
    assert opt.full_state_dict()["blocks.0.weight"].eq(1).all(), case
    x, _ = batch(comm.rank, 1)
    loss = model(x).float().square().mean()
    saved = opt.state_dict()
    with opt.gathered(), opt.gathered():
        inside = [model(x).float().square().mean() for _ in range(1 + comm.rank)]
        assert not any(each.requires_grad for each in inside)
        calls = (
            ("backward", loss.backward), ("backward", lambda: opt.backward(loss)), ("step", opt.step),
            ("load_state_dict", lambda: opt.load_state_dict(saved)), ("load", lambda: opt.load(folder)),
            ("close", opt.close),
        )  # fmt: skip
        for name, call in calls:
            with pytest.raises(RuntimeError, match=rf"{name}.* inside of opt\.gathered\(\): call it after the block"):
                call()
    with pytest.raises(KeyError, match="within"), opt.gathered():
        raise KeyError("within")
    assert not open_parts(opt).store.is_whole(0), case
    opt.zero_grad()
    one_step(opt, model, 2)
    if by_units:
        handle = model.blocks[1].register_forward_hook(lambda *_: opt.gathered().__enter__())
        with pytest.raises(RuntimeError, match="inside of a forward or backward pass"):
            model(x)
        handle.remove()
        one_step(opt, model, 3)
    opt.close()


def frozen_weights_of(case: dict[str, Any], folder: str) -> None:
    """Check a weight that is whole on each rank in stages 0 to 2, and one that no optimizer has."""
    comm, model = zcomm.init(timeout=60), Tied()
    trained = [p for name, p in model.named_parameters() if name != "blocks.2.weight"]
    opt = zcomm.ZeroOptimizer(model, torch.optim.SGD(trained, lr=0.1), nvme_path=folder, **case)
    for name in ("blocks.1.weight", "blocks.2.weight"):
        weight, before = model.get_parameter(name), opt.full_state_dict()[name].clone()
        for edit in EDITS:
            with opt.gathered(edits="forget"), torch.no_grad():
                edit(weight)
            assert torch.equal(opt.full_state_dict()[name], before), (case, name)
        with (
            pytest.raises(RuntimeError, match=rf"{name} was changed inside of opt\.gathered\(\) on rank 1"),
            opt.gathered(),
            torch.no_grad(),
        ):
            _ = comm.rank == 1 and weight.mul_(1)
        for number, edits in enumerate(("refuse", "forget")):
            with opt.gathered(edits=edits), GatheredParameters(weight, modifier_rank=1), torch.no_grad():
                weight.fill_(comm.rank + number)
            assert opt.full_state_dict()[name].eq(1 + number).all(), (case, name, edits)
    with opt.gathered():
        assert not any(p.requires_grad for p in model.parameters())
    assert model.blocks[2].weight.requires_grad
    opt.close()


def edits_and_errors(folder: str) -> None:
    for case in CASES:
        edits_and_errors_of(case, folder)
        frozen_weights_of(case, folder)


def test_edits_and_training_inside_are_errors_of_all_ranks(run_ranks: Run, tmp_path: Path) -> None:
    run_ranks(edits_and_errors, 2, str(tmp_path))


def no_room(folder: str) -> None:
    comm = zcomm.init(timeout=60)
    model = Tied()
    opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1, stage=3, offload="nvme", nvme_path=folder)
    need = sum(p.numel() * 4 for p in model.parameters())
    room, words = (10**9, 1000)[comm.rank], rf"whole weights take {need:,} bytes on rank 1, which may use 1,000 \("
    for _ in range(2):
        with pytest.raises(MemoryError, match=words), whole_model.gathered(open_parts(opt), room, "refuse"):
            pass
        with opt.gathered(), whole_model.gathered(open_parts(opt), room, "refuse"):
            generated(model, 1)  # the outer block has the copies
    with (
        mock.patch.object(whole_model, "free_nbytes", lambda device: 4000),
        pytest.raises(MemoryError, match="use 2,000"),
    ):
        opt.gathered().__enter__()
    with pytest.raises(ValueError, match=r"edits='keep'"):
        opt.gathered(edits="keep").__enter__()
    one_step(opt, model, 0)
    opt.close()


def test_too_little_memory_is_an_error_of_all_ranks_that_names_bytes(run_ranks: Run, tmp_path: Path) -> None:
    run_ranks(no_room, 2, str(tmp_path))


def exports_of(case: dict[str, Any], folder: str) -> None:
    comm = zcomm.init(timeout=60)
    model = Tied()
    opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1, nvme_path=folder, **case)
    one_step(opt, model, 0)
    want, kept = opt.full_state_dict(), {}
    opt.export(kept.__setitem__)
    assert sorted(kept) == sorted(name for name in want if name != "head.weight"), case
    opt.export(kept.__setitem__, tied=True)
    assert kept.keys() == want.keys() and all(torch.equal(kept[name], want[name]) for name in want), case
    for tensor in kept.values():
        tensor.zero_()  # they are the program's
    sums: dict[str, float] = {}
    opt.export(lambda name, tensor: sums.update({name: float(tensor.mul_(2).float().sum())}), tied=True)
    assert sums["embedding.weight"] == sums["head.weight"], "a change does not reach the next name"
    mine: dict[str, torch.Tensor] = {}
    opt.export(mine.__setitem__, dtype=torch.bfloat16, root=1)
    assert bool(mine) is (comm.rank == 1)
    for name, tensor in mine.items():
        assert torch.equal(tensor, want[name].bfloat16() if want[name].is_floating_point() else want[name]), name
    with opt.gathered():
        opt.export(kept.__setitem__)
    assert all(torch.equal(kept[name], want[name]) for name in kept if name != "head.weight"), case

    def fails(name: str, tensor: torch.Tensor) -> None:
        if name == "blocks.1.weight" and comm.rank == 1:
            raise KeyError("the engine is gone")

    calls: list[str] = []
    with pytest.raises(KeyError if comm.rank else OSError, match="the engine is gone") as error:
        opt.export(lambda name, tensor: (calls.append(name), fails(name, tensor)))
    assert calls[-1] == "blocks.1.weight" and (
        comm.rank or "export() of blocks.1.weight failed on rank 1" in str(error.value)
    )
    with pytest.raises(RuntimeError, match=r"step\(\) inside of opt\.export\(\)"):
        opt.export(lambda name, tensor: opt.step())
    with pytest.raises(ValueError, match=r"export\(root=2\): ranks are 0 to 1"):
        opt.export(print, root=2)
    one_step(opt, model, 1)
    opt.close()


def exports(folder: str) -> None:
    for case in CASES:
        exports_of(case, folder)


def test_export_gives_each_whole_tensor_once_and_ends_by_an_error_on_all_ranks(run_ranks: Run, tmp_path: Path) -> None:
    run_ranks(exports, 2, str(tmp_path))
