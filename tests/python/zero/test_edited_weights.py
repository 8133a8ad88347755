"""Weights that the program edits: looks, saves and collectives before a step, loaded masters, data that is replaced.

The table in support/idioms has edits in training, in every stage.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import simulated
import zcomm
from tiers import long
from zcomm.zero import full_param, set_full_param
from zcomm.zero.agree import broadcast

Run = Callable[..., list[Any]]


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(40, 70), nn.Tanh(), nn.Linear(70, 40, bias=False), nn.Tanh(), nn.Linear(40, 3))


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(8, 40, generator=generator).to(next(model.parameters()).dtype)
    return model(x).float().square().mean()


def double(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)


def vector(model: nn.Module) -> None:
    flat = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(flat.detach() * 0.9, model.parameters())


def new_data(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = param.detach() * 0.8


SETTINGS = [
    {"stage": 0},
    {"stage": 1},
    {"stage": 2, "share_parameters": False},
    {"stage": 3},
    {"stage": 2, "offload": "cpu", "bucket_mb": 0.005},
    {"stage": 3, "precision": "bf16"},
    {"stage": 1, "precision": "fp16"},
    {"stage": 0, "precision": "fp16"},
]


def look_after_an_edit() -> list[Any]:
    comm = zcomm.init(timeout=60)
    model = net()
    opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.0, stage=3)
    before = [param.detach().clone() for param in model.parameters()]
    double(model)
    found = [torch.equal(2 * old, new) for old, new in zip(before, opt.full_state_dict().values(), strict=True)]
    found += [torch.equal(2 * old, full_param(p)) for old, p in zip(before, model.parameters(), strict=True)]
    set_full_param(model[0].bias, torch.ones(70))  # publishes, so the other edits are kept
    found += [bool((model[0].bias == 1).all()), torch.equal(2 * before[0], model[0].weight)]
    with zcomm.zero.GatheredParameters(model[2].weight, modifier_rank=comm.world_size - 1):
        double(model[2])
    found += [torch.equal(4 * before[2], model[2].weight), torch.equal(2 * before[0], full_param(model[0].weight))]
    opt.close()
    found.append(torch.equal(2 * before[0], model[0].weight))
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_edits_are_seen_before_any_step(run_ranks: Run, world_size: int) -> None:
    for found in run_ranks(look_after_an_edit, world_size):
        assert all(found), found


def save_after_an_edit(folder: str) -> bool:
    zcomm.init(timeout=60)
    model = net()
    opt = zcomm.ZeroOptimizer(model, "adamw", lr=0.01, stage=2, precision="fp16")
    vector(model)
    wanted = [param.detach().clone() for param in model.parameters()]
    opt.save(folder)
    opt.close()
    again = net()
    opt = zcomm.ZeroOptimizer(again, "adamw", lr=0.01, stage=1, precision="fp16")
    opt.load(folder)
    same = all(torch.equal(want, param) for want, param in zip(wanted, again.parameters(), strict=True))
    opt.close()
    return same


def test_what_is_saved_is_what_the_model_has(run_ranks: Run, tmp_path: Any) -> None:
    assert run_ranks(save_after_an_edit, 2, str(tmp_path / "ck")) == [True, True]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_loaded_weights_are_the_master(world_of_one: None, precision: str) -> None:
    model = net()
    opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.0, stage=1, precision=precision)
    with torch.no_grad():
        model.load_state_dict({name: torch.full_like(value, 3.0) for name, value in model.state_dict().items()})
    opt.backward(loss_of(model, 0, 0))
    opt.step()
    assert all(bool((param == 3).all()) for param in model.parameters())
    tolerance = 0.0 if precision != "bf16" else 2**-7
    assert all(float((full_param(param) - 3).abs().max()) <= tolerance for param in model.parameters())
    opt.close()


def test_replaced_parameter_objects_train_on(world_of_one: None, caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1, stage=2)
    first = model[0].weight
    fresh = {name: torch.full_like(value, 0.01) for name, value in model.state_dict().items()}
    model.load_state_dict(fresh, assign=True)
    assert model[0].weight is not first
    assert all(bool((value == 0.01).all()) for value in opt.full_state_dict().values())
    assert model[0].weight is first
    assert "was replaced" in caplog.text
    before = first.detach().clone()
    loss_of(model, 0, 1).backward()
    opt.step()
    assert not torch.equal(before, first)
    opt.close()


def test_what_cannot_be_adopted_is_named(world_of_one: None) -> None:
    model = net()
    opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1, stage=1)
    model.double()
    with pytest.raises(RuntimeError, match=r"parameter 0.weight is torch.float64 now, .*torch.float32"):
        loss_of(model, 0, 0).backward()
        opt.step()
    model.float()
    opt.zero_grad()
    model[4].weight.data = torch.zeros(3, 7)
    with pytest.raises(RuntimeError, match=r"parameter 4.weight has shape \(3, 7\) now, .*\(3, 40\)"):
        opt.full_state_dict()
    opt.close()


@pytest.mark.parametrize("kind", ["CPUAdam", "CPULion", "CPUSGD", "CPUAdagrad"])
def test_a_graph_from_before_a_step_of_a_cpu_optimizer_raises(kind: str) -> None:
    model = net()
    opt = getattr(zcomm.optim, kind)(model.parameters(), lr=0.1)
    late = loss_of(model, 0, 1)
    loss_of(model, 0, 0).backward()
    opt.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.backward()


def reduce_by_hand() -> list[bool]:
    """Average models by a collective of the program on its parameters, which share memory."""
    comm = zcomm.init(timeout=60)
    model = net()
    opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.0, stage=2)
    before = copy.deepcopy([param.detach() for param in model.parameters()])
    for param in model.parameters():
        zcomm.all_reduce(param.data, op="sum")
    found = [torch.equal(comm.world_size * old, new) for old, new in zip(before, model.parameters(), strict=True)]
    loss_of(model, comm.rank, 0).backward()
    opt.step()
    found += [torch.equal(comm.world_size * old, new) for old, new in zip(before, model.parameters(), strict=True)]
    opt.close()
    return found


def test_collectives_of_the_program_on_its_parameters(run_ranks: Run) -> None:
    for found in run_ranks(reduce_by_hand, 2):
        assert all(found), found


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("offload", [None, "cpu"])
def test_loaded_weights_on_a_device_are_the_master(world_of_one: None, precision: str, offload: str | None) -> None:
    simulated.play()
    try:
        model = net()
        opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.0, stage=2, precision=precision, offload=offload)
        model.load_state_dict({name: torch.full_like(value, 3.0) for name, value in model.state_dict().items()})
        assert all(float((full_param(param) - 3).abs().max()) <= 2**-7 for param in model.parameters())
        opt.backward(loss_of(model, 0, 0))
        opt.step()
        assert all(bool((param == 3).all()) for param in model.parameters())
        new_data(model)
        opt.zero_grad()
        opt.backward(loss_of(model, 0, 1))
        opt.step()
        assert all(float((param.detach() - 2.4).abs().max()) < 0.02 for param in model.parameters())
        opt.close()
    finally:
        simulated.stop()


LOOKS: dict[str, Callable[[zcomm.ZeroOptimizer, nn.Module, str], Any]] = {
    "save": lambda opt, model, folder: opt.save(folder),
    "full_state_dict": lambda opt, model, folder: opt.full_state_dict(),
    "state_dict": lambda opt, model, folder: opt.state_dict(),
    "full_param": lambda opt, model, folder: [full_param(param) for param in model.parameters()],
    "memory": lambda opt, model, folder: (opt.memory(), opt.stats(), opt.allocation_count()),
}


def average_for_a_while(folder: str) -> list[str]:
    """Put averaged weights into the model by ``p.data = ...`` and remove them, as common EMA classes do."""
    comm = zcomm.init(timeout=60)
    wrong = []
    for number, setting in enumerate(SETTINGS):
        for look, act in LOOKS.items():
            model = net()
            opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1, **setting)
            for step in range(2):
                before = [param.detach().clone() for param in model.parameters()]
                backup = [param.data for param in model.parameters()]
                for param in model.parameters():
                    param.data = torch.full_like(param, 0.25)
                act(opt, model, f"{folder}/{number}-{look}-{step}")
                if look == "full_state_dict" and not all(
                    bool((v == 0.25).all()) for v in opt.full_state_dict().values()
                ):
                    wrong.append(f"{look}, {setting}: not the weights that the model has")
                if not all(bool((param == 0.25).all()) for param in model.parameters()):
                    wrong.append(f"{look}, {setting}: changed the program's tensors")
                for param, old in zip(model.parameters(), backup, strict=True):
                    param.data = old
                if not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)):
                    wrong.append(f"{look}, {setting}: the old weights are gone")
                opt.backward(loss_of(model, comm.rank, step))
                opt.step()
                opt.zero_grad()
                if all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)):
                    wrong.append(f"{look}, {setting}: trains no more")
            opt.close()
    return wrong


@pytest.mark.parametrize("world_size", [long(1), 2])
def test_averaged_weights_in_the_model_for_a_while(run_ranks: Run, world_size: int, tmp_path: Any) -> None:
    for wrong in run_ranks(average_for_a_while, world_size, str(tmp_path)):
        assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_data_of_another_layout_at_the_same_address_is_adopted(world_of_one: None, stage: int) -> None:
    torch.manual_seed(2)
    model = nn.Linear(6, 6)
    plain = copy.deepcopy(model)
    opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1, stage=stage)
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    for each in (model, plain):
        each.weight.data = each.weight.data.t()
        each.bias.data = torch._neg_view(each.bias.data)
    x = torch.randn(4, 6)
    for each, by in ((model, opt), (plain, other)):
        each(x).square().mean().backward()
        by.step()
    for name, value in opt.full_state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=0, atol=1e-6)
    model.weight.data = model.weight.data[:1]
    with pytest.raises(RuntimeError, match=r"parameter weight has shape \(1, 6\) now"):
        opt.full_state_dict()
    opt.close()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_another_dtype_after_steps_is_named(world_of_one: None, stage: int) -> None:
    model = net()
    opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1, stage=stage)
    loss_of(model, 0, 0).backward()
    opt.step()
    opt.zero_grad(set_to_none=False)
    model.double()
    with pytest.raises(RuntimeError, match=r"parameter 0.weight is torch.float64 now, .*torch.float32"):
        loss_of(model, 0, 1).backward()
        opt.step()
    opt.close()


def change_on_rank_0() -> list[str]:
    """Rank 0 puts negated views into a trained and a frozen weight; then ranks have buffers of other dtypes."""
    comm, wrong = zcomm.init(timeout=60), []
    for stage in (2, 3):
        model = net()
        model[0].weight.requires_grad_(False)
        opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1, stage=stage)
        weights = [model[0].weight, model[2].weight]
        before = [full_param(weight) for weight in weights]
        with zcomm.zero.GatheredParameters(weights, modifier_rank=0):
            if comm.rank == 0:
                for weight in weights:
                    weight.data = torch._neg_view(weight.data)
        after = [full_param(weight) for weight in weights]
        wrong += [
            f"stage {stage}: {a} became {b}" for a, b in zip(before, after, strict=True) if not torch.equal(-a, b)
        ]
        opt.close()
    value = (
        torch.complex(torch.ones(3), torch.ones(3)).conj() if comm.rank == 0 else torch.zeros(3, dtype=torch.complex64)
    )
    broadcast(comm, value, 0, "value")
    wrong += [] if value.tolist() == [1 - 1j] * 3 else [f"a conjugated view: {value}"]
    try:
        broadcast(comm, torch.ones(3, dtype=(torch.int16, torch.uint16)[comm.rank]), 0, "value")
    except zcomm.CollectiveMismatch as error:
        return wrong if "'value, torch.int16'" in str(error) else [*wrong, str(error)]
    return [*wrong, "int16 became uint16"]


def test_a_change_on_rank_0_is_its_values(run_ranks: Run) -> None:
    assert run_ranks(change_on_rank_0, 2) == [[], []]
