"""A torch optimizer passed to ZeroOptimizer or initialize(): one list of param groups, and it takes no step itself."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import zcomm

STAGES = [0, 1, 2, 3]


@pytest.fixture(autouse=True)
def job() -> Iterator[None]:
    """Leave the world of one; warnings of schedules are errors."""
    zcomm.init(timeout=60)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    zcomm.shutdown()


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 3))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [{"params": [p for p in params if p.ndim > 1]}, {"params": [p for p in params if p.ndim == 1], "lr": 0.05}]


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
    return model(x).square().mean()


def engine_of(opt: Any, model: nn.Module, **given: Any) -> tuple[Any, Any]:
    config = {"train_micro_batch_size_per_gpu": 8, "gradient_clipping": 0, **given.pop("config", {})}
    engine, zero, _, _ = zcomm.initialize(model=model, optimizer=opt, config=config, **given)
    return engine, zero


Change = Callable[[torch.optim.Optimizer, int], None]


def set_(key: str, of: Callable[[int], Any]) -> Change:
    def change(opt: torch.optim.Optimizer, step: int) -> None:
        opt.param_groups[step % 2][key] = of(step)

    return change


SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
CHANGES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], Change]] = {
    "lr": (torch.optim.AdamW, {"lr": 0.1}, set_("lr", lambda step: 0.1 / (step + 1))),
    "weight decay": (torch.optim.AdamW, {"lr": 0.1}, set_("weight_decay", lambda step: 0.1 * step)),
    "betas": (torch.optim.Adam, {"lr": 0.1}, set_("betas", lambda step: (0.5 + step / 20, 0.9))),
    "momentum": (torch.optim.SGD, SGD, set_("momentum", lambda step: 0.9 - step / 10)),
    "nesterov": (torch.optim.SGD, SGD, set_("nesterov", lambda step: step % 2 == 0)),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.1}, set_("alpha", lambda step: 0.9 - step / 10)),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", CHANGES)
def test_what_the_program_sets_on_its_optimizer_counts(name: str, stage: int) -> None:
    kind, options, change = CHANGES[name]
    plain = network()
    reference = kind(groups(plain), **options)
    model = network()
    opt = kind(groups(model), **options)
    zero = zcomm.ZeroOptimizer(model, opt, stage=stage)
    for step in range(6):
        for net, theirs, step_of in ((plain, reference, reference), (model, opt, zero)):
            change(theirs, step)
            loss_of(net, step).backward()
            step_of.step()
            step_of.zero_grad()
    weights = zero.full_state_dict()
    for key, value in plain.named_parameters():
        torch.testing.assert_close(weights[key], value.detach(), rtol=1e-4, atol=1e-5)
    zero.close()


def test_it_is_one_list_of_the_same_groups() -> None:
    model = network()
    opt = torch.optim.AdamW(groups(model), lr=0.1)
    every, each = opt.param_groups, list(opt.param_groups)
    zero = zcomm.ZeroOptimizer(model, opt)
    assert opt.param_groups is zero.param_groups is every
    assert all(now is before for now, before in zip(zero.param_groups, each, strict=True))
    zero.param_groups[0]["lr"] = 0.3
    assert opt.param_groups[0]["lr"] == 0.3
    assert zero.optimizer is opt
    zero.close()


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "step": lambda opt: lr_scheduler.StepLR(opt, 2, 0.5),
    "one cycle": lambda opt: lr_scheduler.OneCycleLR(opt, 0.2, total_steps=12),
    "in turn": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.LinearLR(opt, 0.1, total_iters=3), lr_scheduler.ExponentialLR(opt, 0.9)], [3]
    ),
    "of deepspeed": lambda opt: zcomm.schedulers.WarmupDecayLR(opt, 10, 0.0, 0.2, 4),
    "momenta of deepspeed": lambda opt: zcomm.schedulers.OneCycle(opt, 0.01, 0.2, cycle_first_step_size=3),
}


@pytest.mark.parametrize("when", ["before", "after", "in the engine"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_over_the_programs_optimizer(name: str, when: str) -> None:
    plain = network()
    reference = torch.optim.AdamW(groups(plain), lr=0.1)
    theirs = SCHEDULES[name](reference)
    model = network()
    opt = torch.optim.AdamW(groups(model), lr=0.1)
    ours = None if when == "after" else SCHEDULES[name](opt)
    engine, _ = engine_of(opt, model, lr_scheduler=ours if when == "in the engine" else None)
    ours = SCHEDULES[name](opt) if ours is None else ours
    for step in range(8):
        loss_of(plain, step).backward()
        reference.step()
        reference.zero_grad()
        theirs.step()
        engine.backward(loss_of(engine, step))
        engine.step()
        if when != "in the engine":
            ours.step()
        assert engine.get_lr() == [group["lr"] for group in reference.param_groups]
        assert ours.get_last_lr() == theirs.get_last_lr()
    assert len(set(map(tuple, [engine.get_lr(), [0.1, 0.05]]))) == 2, "it moves"
    for mine, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5)
    engine.destroy()


def test_steps_of_its_own_are_refused_by_name() -> None:
    model = network()
    opt = torch.optim.AdamW(groups(model), lr=0.1)
    engine, _ = engine_of(opt, model)
    engine.backward(loss_of(engine, 0))
    before = [p.detach().clone() for p in model.parameters()]
    for call in (opt.step, opt.state_dict, lambda: opt.load_state_dict({}), lambda: opt.add_param_group({})):
        with pytest.raises(RuntimeError, match=r"AdamW\.\w+\(\): .*ZeroOptimizer"):
            call()
    opt.zero_grad()  # as the engine's optimizer does, which drops the gradients
    with pytest.raises(RuntimeError, match="no backward pass has given gradients"):
        engine.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    engine.backward(loss_of(engine, 0))
    engine.step()
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    engine.destroy()
    loss_of(model, 1).backward()
    before = [p.detach().clone() for p in model.parameters()]
    opt.step()  # an ordinary optimizer again
    opt.zero_grad()
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert opt.state_dict()["state"] and all(p.grad is None for p in model.parameters())


def test_a_schedule_over_another_optimizer_of_the_same_groups() -> None:
    """For offload, Accelerate makes DeepSpeed's class of the program's groups, and passes on their schedule."""
    model = network()
    opt = torch.optim.AdamW(groups(model), lr=0.1)
    schedule = zcomm.schedulers.WarmupLR(opt, 0.0, 0.1, 4, "linear")
    engine, _ = engine_of(zcomm.optim.CPUAdam(opt.param_groups), model, lr_scheduler=schedule)
    seen = []
    for step in range(4):
        engine.backward(loss_of(engine, step))
        engine.step()
        seen.append(engine.get_lr()[0])
    assert seen == pytest.approx([0.0, 0.025, 0.05, 0.075])
    engine.destroy()
    other = torch.optim.AdamW(groups(network()), lr=0.1)
    with pytest.raises(ValueError, match="belongs to another optimizer"):
        engine_of(opt, model, lr_scheduler=lr_scheduler.StepLR(other, 2))


def test_hooks_of_its_steps_run() -> None:
    model = network()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[str] = []
    opt.register_step_pre_hook(lambda *_: seen.append("before"))
    zero = zcomm.ZeroOptimizer(model, opt)
    opt.register_step_post_hook(lambda *_: seen.append("after"))
    loss_of(model, 0).backward()
    zero.step()
    assert seen == ["before", "after"]
    zero.close()


def test_it_can_be_given_again_after_close() -> None:
    model = network()
    model[0].bias.requires_grad_(False)
    opt = torch.optim.AdamW(groups(model), lr=0.1)
    sizes = [len(group["params"]) for group in opt.param_groups]
    weights = []
    for _ in range(2):
        with torch.no_grad():
            for p, q in zip(model.parameters(), network().parameters(), strict=True):
                p.copy_(q)
        zero = zcomm.ZeroOptimizer(model, opt, stage=2)
        assert sum(len(group["params"]) for group in opt.param_groups) == 3
        for step in range(3):
            loss_of(model, step).backward()
            zero.step()
            zero.zero_grad()
        weights.append([p.detach().clone() for p in model.parameters()])
        zero.close()
        assert [len(group["params"]) for group in opt.param_groups] == sizes, "frozen ones are back"
    assert all(torch.equal(p, q) for p, q in zip(*weights, strict=True)), "counts of steps began anew"


def test_a_construction_that_fails_leaves_it_alone() -> None:
    model = network()
    opt = torch.optim.AdamW(groups(model), lr=0.1)
    before = copy.copy(opt.param_groups[0])
    with pytest.raises(ValueError, match="nvme_path"):
        zcomm.ZeroOptimizer(model, opt, offload="nvme")
    assert opt.param_groups[0] == before
    loss_of(model, 0).backward()
    opt.step()


@pytest.mark.parametrize("how", ["a group more", "a parameter more", "another list", "a parameter less"])
def test_groups_that_are_changed_are_named(how: str) -> None:
    model = network()
    opt = torch.optim.AdamW(groups(model), lr=0.1)
    zero = zcomm.ZeroOptimizer(model, opt)
    if how == "a group more":
        opt.param_groups.append({"params": [nn.Parameter(torch.ones(2))], "lr": 0.1})
    elif how == "a parameter more":
        opt.param_groups[1]["params"].append(nn.Parameter(torch.ones(2)))
    elif how == "a parameter less":
        opt.param_groups[1]["params"] = opt.param_groups[1]["params"][:1]
    else:
        opt.param_groups = [dict(group) for group in opt.param_groups]
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match=r"step\(\): .*param"):
        zero.step()
    zero.close()


def test_state_and_checkpoints_have_torchs_options_alone(tmp_path: Any) -> None:
    model = network()
    opt = torch.optim.AdamW(groups(model), lr=0.1)
    zero = zcomm.ZeroOptimizer(model, opt)
    loss_of(model, 0).backward()
    zero.step()
    state = zero.state_dict()
    assert not {"foreach", "fused"} & state["param_groups"][0].keys()
    zero.save(tmp_path / "c")
    opt.param_groups[0]["lr"] = 0.7
    zero.load(tmp_path / "c")
    assert opt.param_groups[0]["lr"] == 0.1 and opt.param_groups is zero.param_groups
    opt.param_groups[0]["lr"] = 0.7
    zero.load_state_dict(state)
    assert opt.param_groups[0]["lr"] == 0.1 and opt.param_groups is zero.param_groups
    zero.close()


def test_it_does_not_keep_the_zero_optimizer_alive() -> None:
    model = network()
    opt = torch.optim.AdamW(groups(model), lr=0.1)
    gc.disable()
    try:
        zcomm.ZeroOptimizer(model, opt)
        zcomm.ZeroOptimizer(model, opt).close()  # the first optimizer is freed, so its parameters are free
    finally:
        gc.enable()


def test_options_without_a_kernel_are_refused_when_they_are_set_later() -> None:
    model = network()
    opt = torch.optim.AdamW(groups(model), lr=0.1)
    zero = zcomm.ZeroOptimizer(model, opt)
    opt.param_groups[0]["amsgrad"] = True
    loss_of(model, 0).backward()
    with pytest.raises(NotImplementedError, match="amsgrad"):
        zero.step()
    zero.close()


def test_another_parameter_in_a_group_is_named(world_of_one: None) -> None:
    model = torch.nn.Linear(3, 3)
    opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1)
    opt.param_groups[0]["params"][0] = torch.nn.Parameter(torch.zeros(3, 3))
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="param group 0 has 2 parameters, and not the 2"):
        opt.step()
    opt.close()


def test_micro_steps_can_be_set_between_steps(world_of_one: None) -> None:
    model = torch.nn.Linear(3, 3)
    opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1)
    opt.grad_accum = 2
    before = model.weight.detach().clone()
    for number in range(2):
        model(torch.ones(1, 3)).sum().backward()
        if number == 0:
            opt.step()
            with pytest.raises(RuntimeError, match="micro-step 1 of 2"):
                opt.grad_accum = 1
    opt.step()
    torch.testing.assert_close(model.weight, before - 0.1)
    opt.zero_grad()
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(RuntimeError, match=r"after 2 backward passes with grad_accum=2: .*\(they act on every 2nd\)"):
        opt.step()
    with pytest.raises(ValueError, match="grad_accum=0"):
        opt.grad_accum = 0
    opt.close()
