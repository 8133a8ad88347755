"""Uses of ``p.grad``: layers that thaw, sums without sync, GradScaler, ranks that differ, refused calls.

The table in support/idioms has the other uses.
"""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from tiers import slow
from zcomm.zero import full_grad, set_full_grad

Run = Callable[..., list[Any]]
PLACES: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 2, "bucket_mb": 0.0005},
    {"stage": 3},
    {"stage": 3, "share_parameters": False, "bucket_mb": 0.0005},
    {"stage": 3, "offload": "nvme", "prefetch": 0},
]


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Embedding(11, 9), nn.Linear(9, 33), nn.Tanh(), nn.Linear(33, 17), nn.Tanh(), nn.Linear(17, 3)
    )


def loss_of(model: nn.Module, rank: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    tokens = torch.randint(0, 11, (6,), generator=generator)
    return model(tokens).float().square().sum()


class Program:
    """Backward passes of some ranks, and the mean of their gradients: this rank's, or with plain torch all ranks'."""

    def __init__(self, model: nn.Module, opt: Any, *ranks: int) -> None:
        self.model, self.opt, self.ranks = model, opt, ranks

    def backward(self, number: int, factor: float = 1.0) -> None:
        for rank in self.ranks:
            (loss_of(self.model, rank, number) * factor / len(self.ranks)).backward()


def end(it: Any) -> None:
    it.opt.step()
    it.opt.zero_grad()


# --- freezing -------------------------------------------------------------------------------------------------

RULES: list[tuple[str, type[torch.optim.Optimizer], dict[str, Any]]] = [
    ("adamw", torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    ("sgd", torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "dampening": 0.5}),
    ("nadam", torch.optim.NAdam, {"lr": 0.01}),
    ("adagrad", torch.optim.Adagrad, {"lr": 0.05, "lr_decay": 0.1}),
]


def gradual_unfreezing(it: Any, first: int, last: int) -> None:
    """Layers thaw one after the other; one is frozen again for a while. torch counts steps by parameter."""
    for number in range(first, last):
        for at, layer in enumerate((5, 3, 1, 0)):
            it.model[layer].requires_grad_(number >= 2 * at and not (layer == 5 and number in (3, 4)))
        it.backward(number)
        end(it)


def unfreeze(folder: str) -> list[str]:
    comm = zcomm.init(timeout=60)
    wrong = []
    for name, kind, options in RULES:
        plain = network()
        it = Program(plain, kind(plain.parameters(), **options), *range(comm.world_size))
        gradual_unfreezing(it, 0, 8)
        for place in PLACES:
            model = network()
            opt = zcomm.ZeroOptimizer(model, kind, nvme_path=folder, **options, **place)
            gradual_unfreezing(Program(model, opt, comm.rank), 0, 5)
            opt.save(f"{folder}/{name}")
            state = opt.state_dict()
            opt.close()
            for way in ("load", "load_state_dict"):
                model = network()
                opt = zcomm.ZeroOptimizer(model, kind, nvme_path=folder, **options, **place)
                opt.load(f"{folder}/{name}", optimizer=way == "load")
                if way == "load_state_dict":
                    opt.load_state_dict(state)
                gradual_unfreezing(Program(model, opt, comm.rank), 5, 8)
                got = opt.full_state_dict()
                opt.close()
                for key, value in plain.named_parameters():
                    if not torch.allclose(got[key], value.detach(), rtol=2e-4, atol=2e-6):
                        wrong.append(f"{name} {way} {place} {key}: {float((got[key] - value).abs().max()):.3g}")
    return wrong


@pytest.mark.slow
@pytest.mark.timeout_s(300)
@pytest.mark.parametrize("world_size", [slow(1), 2])
def test_layers_that_thaw_are_trained_as_in_torch(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    for wrong in run_ranks(unfreeze, world_size, str(tmp_path), timeout_s=280):
        assert not wrong


def test_a_parameter_frozen_at_construction_is_not_trained_in_silence() -> None:
    model = network()
    model[1].requires_grad_(False)
    opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1, stage=2)
    it = Program(model, opt, 0)
    it.backward(0)
    end(it)
    model[1].requires_grad_(True)
    opt.step()  # no gradient has reached it
    it.backward(1)
    with pytest.raises(RuntimeError, match=r"parameter 1\.weight requires a gradient now, but was frozen"):
        opt.step()
    opt.close()
    zcomm.shutdown()


# --- without sync ---------------------------------------------------------------------------------------------


def sums_of_many_passes(folder: str) -> list[tuple[str, float]]:
    """Return the relative error of 8 micro-steps' mean, of which 6 are local, against float64 sums of the same
    gradients."""
    comm = zcomm.init(timeout=60)
    found = []
    for place in PLACES:
        for precision in ("fp32", "bf16", "fp16"):
            model = network()
            opt = zcomm.ZeroOptimizer(
                model, "sgd", lr=0.1, grad_accum=8, nvme_path=folder, precision=precision, communication_dtype="fp32",
                loss_scale=8.0 if precision == "fp16" else None, **place,
            )  # fmt: skip
            exact = [torch.zeros(p.shape, dtype=torch.float64) for p in network().parameters()]

            def count(param: nn.Parameter, sum_: torch.Tensor, scale: float = opt.loss_scale) -> None:
                def add(grad: torch.Tensor) -> None:
                    sum_.add_(grad.double() / scale)

                param.register_hook(add)

            for param, sum_ in zip(model.parameters(), exact, strict=True):
                count(param, sum_)
            for number in range(8):
                opt.boundary = False
                if number in (3, 7):
                    opt.backward(loss_of(model, comm.rank, number))
                else:
                    with opt.no_sync():
                        opt.backward(loss_of(model, comm.rank, number))
            for param, sum_ in zip(model.parameters(), exact, strict=True):
                comm.all_reduce(sum_)
                wanted = sum_ / (8 * comm.world_size)
                error = float((full_grad(param).double() - wanted).norm() / wanted.norm())
                found.append((f"{precision} {place}", error))
            opt.close()
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_accumulated_gradients_are_exact(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    for found in run_ranks(sums_of_many_passes, world_size, str(tmp_path)):
        for place, error in found:
            assert error < 1e-6, place


def local_sums() -> None:
    comm = zcomm.init(timeout=60)
    for place in PLACES[1:4]:
        model, mine = network(), network()
        opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1, **place)
        it = Program(model, opt, comm.rank)
        with opt.no_sync():
            for number in range(2):
                it.backward(number)
                loss_of(mine, comm.rank, number).backward()
            for param, own in zip(model.parameters(), mine.parameters(), strict=True):
                torch.testing.assert_close(full_grad(param), own.grad)
                torch.testing.assert_close(param.grad.norm(), own.grad.norm())
                param.grad.clamp_(-0.1, 0.1)
                own.grad.clamp_(-0.1, 0.1)
        it.backward(2)
        loss_of(mine, comm.rank, 2).backward()
        for param, own in zip(model.parameters(), mine.parameters(), strict=True):
            mean = own.grad.clone()
            comm.all_reduce(mean, "avg")
            torch.testing.assert_close(full_grad(param), mean)
        opt.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_local_sum_can_be_read_and_changed(run_ranks: Run, world_size: int) -> None:
    run_ranks(local_sums, world_size)


# --- grad_accum -----------------------------------------------------------------------------------------------


def test_one_step_for_several_micro_steps_says_how_to_write_it() -> None:
    model = network()
    opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1, grad_accum=4, stage=2)
    it = Program(model, opt, 0)
    with pytest.raises(RuntimeError, match=r"step\(\) after 4 backward passes with grad_accum=4: either call step"):
        for number in range(4):
            it.backward(number)
            if number % 4 == 3:
                opt.step()
    opt.zero_grad()
    for number in range(8):
        with opt.no_sync() if number % 4 < 3 else torch.enable_grad():
            it.backward(number)
        end(it)
    assert opt.step_count == 2
    with opt.no_sync():
        it.backward(8)
    it.backward(9)
    with pytest.raises(RuntimeError, match="after 2 backward passes"):
        opt.step()
    opt.close()
    zcomm.shutdown()


# --- refused --------------------------------------------------------------------------------------------------


def test_what_a_stand_in_cannot_do_says_what_to_use(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1, stage=2)
    it = Program(model, opt, 0)
    it.backward(0)
    grad = model[1].weight.grad
    assert "gradient of 1.weight, shape (33, 9)" in repr(grad) and grad.dtype == torch.float32 and not grad.is_sparse
    assert torch.zeros_like(grad).shape == grad.shape and not caplog.records
    calls: list[Any] = [lambda: pickle.dumps(grad), lambda: grad.view(torch.int32)]
    calls.append(lambda: grad.map2_(grad, grad, lambda x, y, z: x))
    for refused in (grad.data_ptr, grad.untyped_storage, *calls):
        with pytest.raises(RuntimeError, match="full_grad"):
            refused()
    with caplog.at_level(logging.WARNING, "zcomm"):
        whole = grad.clone()
        assert type(whole) is torch.Tensor and torch.equal(whole, full_grad(model[1].weight))
        assert torch.equal(torch.from_numpy(grad.numpy()), whole) and torch.equal(copy.deepcopy(grad), whole)
        assert float(grad[2, 3]) == float(whole[2, 3]) and grad.tolist() == whole.tolist()
    assert ["zcomm.zero.full_grad(p)" in record.message for record in caplog.records] == [True], "once"
    set_full_grad(model[1].weight, torch.ones(33, 9))
    assert torch.equal(grad.full_tensor(), torch.ones(33, 9))
    model[3].weight.grad = model[1].weight.grad[:17, :].expand(17, 9).repeat(1, 4)[:, :33]
    opt.step()
    opt.zero_grad()
    with pytest.raises(RuntimeError, match=r"gradient of 1.weight has been forgotten by zero_grad"):
        grad.mul_(2)
    it.backward(1)
    kept = model[1].weight.grad
    with pytest.raises(RuntimeError, match="has been forgotten"):
        model[1].weight.grad = grad
        opt.step()
    model[1].weight.grad = kept
    told: list[str] = []

    def edits_another(_: torch.Tensor) -> None:
        with pytest.raises(RuntimeError, match=r"is being reduced: use it after backward") as error:
            kept.mul_(2)
        told.append(str(error.value))

    handle = model[3].weight.register_hook(edits_another)
    it.backward(2)
    handle.remove()
    assert told
    opt.step()
    opt.close()
    with pytest.raises(RuntimeError, match="closed"):
        kept.norm()
    zcomm.shutdown()


def differ(kind: str) -> None:
    comm = zcomm.init(timeout=60)
    model = network()
    opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1, stage=2)
    if kind == "frozen" and comm.rank == 1:
        model[3].weight.requires_grad_(False)
    Program(model, opt, comm.rank).backward(0)
    if kind == "dropped" and comm.rank == 1:
        model[3].weight.grad = None
    if kind == "assigned" and comm.rank == 1:
        model[3].weight.grad = torch.ones(17, 33)
    words = {"dropped": "None", "frozen": "None", "assigned": "set by the program"}[kind]
    with pytest.raises(RuntimeError, match=rf"3\.weight is the optimizer's on rank 0, {words} on rank 1"):
        opt.step()
    opt.close()


@pytest.mark.parametrize("kind", ["dropped", "assigned", "frozen"])
def test_ranks_that_differ_are_told(run_ranks: Run, kind: str) -> None:
    run_ranks(differ, 2, kind)


def nothing_on_one_rank() -> None:
    """Step with gradients on only some of the ranks: the weights remain equal."""
    comm = zcomm.init(timeout=60)
    model = network()
    opt = zcomm.ZeroOptimizer(model, "sgd", lr=1.0, stage=2)
    before = [param.detach().clone() for param in model.parameters()]
    opt.step()
    assert opt.step_count == 0
    for number in range(4):
        if number % 2 == comm.rank:
            for param in model.parameters():
                param.grad = torch.full(param.shape, 2.0)
        opt.step()
        opt.zero_grad()
    assert opt.step_count == 4
    for param, old in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(param, old - 4.0)
    opt.close()


def test_a_rank_without_gradients_counts_as_zero(run_ranks: Run) -> None:
    run_ranks(nothing_on_one_rank, 2)


def scaled_by_torch() -> None:
    """torch.amp.GradScaler around ZeroOptimizer; one rank's overflow is all ranks'."""
    comm = zcomm.init(timeout=60)
    model, plain = network(), network()
    opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1, stage=2)
    torch_opt = torch.optim.SGD(plain.parameters(), lr=0.1)
    ours, theirs = (torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=100) for _ in range(2))
    it, reference = Program(model, opt, comm.rank), Program(plain, torch_opt, *range(comm.world_size))
    for number in range(4):
        bad = float("inf") if number == 2 and comm.rank == comm.world_size - 1 else 1.0
        it.backward(number, float(ours.scale(torch.ones(()))) * bad)
        reference.backward(number, float(theirs.scale(torch.ones(()))) * (float("inf") if number == 2 else 1.0))
        for scaler, optimizer, net in ((ours, opt, model), (theirs, torch_opt, plain)):
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert ours.get_scale() == theirs.get_scale() == 32.0
    for got, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)
    opt.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradscaler(run_ranks: Run, world_size: int) -> None:
    run_ranks(scaled_by_torch, world_size)


def assigned_in_16_bits(precision: str) -> None:
    """Use an assigned gradient as it is, whatever loss scale and grad_accum are."""
    comm = zcomm.init(timeout=60)
    for place in PLACES[:3]:
        model = network()
        opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.5, precision=precision, grad_accum=2, **place)
        before = {key: value.float() for key, value in opt.full_state_dict().items()}
        for _ in range(2):
            for param in model.parameters():
                param.grad = torch.full_like(param, comm.rank + 1.0)
            opt.step()
        after = opt.full_state_dict()
        mean = sum(range(1, comm.world_size + 1)) / comm.world_size
        for key, value in before.items():
            torch.testing.assert_close(after[key].float(), value - 0.5 * mean, rtol=1e-2, atol=1e-2)
        opt.close()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_assigned_gradients_are_used_as_they_are(run_ranks: Run, precision: str) -> None:
    run_ranks(assigned_in_16_bits, 2, precision)
