"""Calls of step and zero_grad in other orders than the usual one; groups, schedules and optimizer state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_
from torch.optim import lr_scheduler

from idioms.run import IdiomRun
from idioms.table import GRADIENTS, Refusal, idiom


# ---- step and zero_grad ----
@idiom(places=GRADIENTS)
def gradients_kept_at_zero(run: IdiomRun) -> None:
    """zero_grad(set_to_none=False), before and after the step; then step without a backward."""
    model, opt = run.sgd(weight_decay=0.1)
    for number, loss in enumerate(run.losses(model, 5)):
        if number < 3:
            opt.zero_grad(set_to_none=False)
        loss.backward()
        opt.step()
        if number > 1:
            opt.zero_grad(set_to_none=False)
            assert all(p.grad is not None for p in model.parameters())
    opt.step()


@idiom(places=GRADIENTS)
def zeroed_by_the_model(run: IdiomRun) -> None:
    model, opt = run.sgd(weight_decay=0.1)
    for loss in run.losses(model):
        model.zero_grad()
        loss.backward()
        opt.step()
    model.zero_grad()
    opt.step()  # nothing
    run.loss(model, 7).backward()
    model.zero_grad(set_to_none=False)
    opt.step()  # momentum goes on


@idiom()
def zeroed_by_hand(run: IdiomRun) -> None:
    """timm and fairseq: p.grad = None for all."""
    model, opt = run.sgd()
    for loss in run.losses(model):
        for p in model.parameters():
            p.grad = None
        loss.backward()
        opt.step()


@idiom()
def never_zeroed(run: IdiomRun) -> None:
    """Gradients add up over the steps."""
    model, opt = run.sgd()
    for loss in run.losses(model):
        loss.backward()
        opt.step()


@idiom()
def gradients_forgotten(run: IdiomRun) -> None:
    """zero_grad between a backward and the next, by the optimizer or the model."""
    model, opt = run.sgd()
    for number, zeroing in enumerate((opt, model, opt, model)):
        run.loss(model, 30 + number).backward()
        zeroing.zero_grad()
        run.loss(model, number).backward()
        opt.step()
        zeroing.zero_grad()


@idiom(places=GRADIENTS)
def step_twice(run: IdiomRun) -> None:
    """Step with the same gradients once more, then with others."""
    model, opt = run.sgd()
    for loss in run.losses(model):
        loss.backward()
        opt.step()
        opt.step()
        model.head.weight.grad.mul_(0.5)
        opt.step()
        opt.zero_grad()


@idiom()
def step_without_backward(run: IdiomRun) -> None:
    """Step without gradients: nothing changes, momentum included."""
    model, opt = run.sgd()
    opt.step()
    for loss in run.losses(model):
        loss.backward()
        opt.step()
        opt.zero_grad()
        opt.step()


@idiom()
def nan_loss_skipped(run: IdiomRun) -> None:
    model, opt = run.sgd()
    for number in range(4):
        loss = run.loss(model, number, scale=float("nan") if number == 1 else 1.0)
        if torch.isnan(loss):
            opt.zero_grad()
            continue
        loss.backward()
        opt.step()
        opt.zero_grad()


@idiom()
def nan_norm_skipped(run: IdiomRun) -> None:
    model, opt = run.sgd()
    for number in range(4):
        run.loss(model, number, scale=float("nan") if number == 1 else 1.0).backward()
        norm = clip_grad_norm_(model.parameters(), 0.5)
        if torch.isfinite(norm):
            opt.step()
        opt.zero_grad()


@idiom()
def optimizer_in_backward(run: IdiomRun) -> None:
    """Run an optimizer per parameter in a post-accumulate hook (torch's tutorial), in addition to the outer one."""
    model, opt = run.sgd(momentum=0.0)
    extra = {p: torch.zeros(()) for p in model.parameters()}

    def count(p: torch.Tensor) -> None:
        extra[p] += 1

    handles = [p.register_post_accumulate_grad_hook(count) for p in model.parameters()]
    run.train(model, opt)
    for handle in handles:
        handle.remove()
    if run.world_size == 1:
        run.note("calls", *extra.values())


# ---- groups, schedules, state ----
def scheduled(
    run: IdiomRun, make: Callable[[Any], Any], *of: Any, keys: tuple[str, ...] = ("lr",), adam: bool = False
) -> None:
    """Train under a schedule, and note options. of: arguments of its step."""
    model, opt = run.adamw() if adam else run.sgd()
    schedule = make(opt)

    def after(step: int) -> None:
        schedule.step(*of)
        run.note("options", [opt.param_groups[0][key] for key in keys])

    run.train(model, opt, 6, after=after)


@idiom()
def step_lr(run: IdiomRun) -> None:
    scheduled(run, lambda opt: lr_scheduler.StepLR(opt, 2, 0.1))


@idiom()
def lambda_lr(run: IdiomRun) -> None:
    scheduled(run, lambda opt: lr_scheduler.LambdaLR(opt, lambda step: 1.0 / (1 + step)))


@idiom()
def cosine_lr(run: IdiomRun) -> None:
    scheduled(run, lambda opt: lr_scheduler.CosineAnnealingLR(opt, 6))


@idiom()
def one_cycle_lr(run: IdiomRun) -> None:
    """Follow OneCycleLR, which moves the momentum as well."""
    scheduled(run, lambda opt: lr_scheduler.OneCycleLR(opt, 0.15, total_steps=8), keys=("lr", "momentum"))


@idiom()
def one_cycle_lr_of_adam(run: IdiomRun) -> None:
    """Follow OneCycleLR over Adam, which has its momentum in betas[0]."""
    scheduled(run, lambda opt: lr_scheduler.OneCycleLR(opt, 0.05, total_steps=8), keys=("lr", "betas"), adam=True)


@idiom()
def warm_restarts(run: IdiomRun) -> None:
    scheduled(run, lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 2))


@idiom()
def warmup_then_decay(run: IdiomRun) -> None:
    def make(opt: Any) -> Any:
        warmup, decay = lr_scheduler.LinearLR(opt, 0.1, total_iters=2), lr_scheduler.ExponentialLR(opt, 0.5)
        return lr_scheduler.SequentialLR(opt, [warmup, decay], [2])

    scheduled(run, make)


@idiom()
def reduced_on_plateau(run: IdiomRun) -> None:
    scheduled(run, lambda opt: lr_scheduler.ReduceLROnPlateau(opt, patience=1), 1.0)


@idiom()
def schedule_of_the_inner_optimizer(run: IdiomRun) -> None:
    """Step a schedule that was made for the torch optimizer that ZeroOptimizer then took over."""
    model = run.net()
    inner = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    schedule = lr_scheduler.StepLR(inner, 1, 0.1)
    opt = run.optimizer(model, inner)

    def after(step: int) -> None:
        schedule.step()
        run.note("lr", opt.param_groups[0]["lr"])

    run.train(model, opt, 4, after=after)


@idiom()
def options_set_in_training(run: IdiomRun) -> None:
    model, opt = run.sgd()
    for number, loss in enumerate(run.losses(model, 4)):
        for group in opt.param_groups:
            group["lr"] = 0.1 / (1 + number)
            group["weight_decay"] = 0.1 * number
            group["momentum"] = 0.9 - 0.2 * number
        loss.backward()
        opt.step()
        opt.zero_grad()


@idiom()
def options_by_layer(run: IdiomRun) -> None:
    """Layer-wise decay of the rate, and no weight decay on vectors."""
    model = run.net()
    groups = [
        {"params": [p], "lr": 0.1 * 0.8**number, "weight_decay": 0.1 if p.dim() > 1 else 0.0}
        for number, p in enumerate(model.parameters())
    ]
    run.train(model, run.optimizer(model, torch.optim.SGD(groups, 0.1, 0.9)))


@idiom(Refusal("NotImplementedError", r"add_param_group\(\) after construction: give all groups"))
def parameter_given_later(run: IdiomRun) -> None:
    """add_param_group."""
    model = run.net()
    opt = run.optimizer(model, torch.optim.SGD(list(model.stem.parameters()) + list(model.head.parameters()), 0.1))
    run.train(model, opt, 2)
    opt.add_param_group({"params": list(model.blocks.parameters()), "lr": 0.05})
    run.train(model, opt, 2)


@idiom(Refusal("RuntimeError", r"zcomm\.zero\.full_optim_state\("))
def state_inspected(run: IdiomRun) -> None:
    """optimizer.state[p]."""
    model, opt = run.adamw()
    run.train(model, opt)
    run.note("moment", opt.state[model.head.weight]["exp_avg"])


@idiom(Refusal("RuntimeError", r"zcomm\.zero\.set_full_optim_state\("))
def state_cleared(run: IdiomRun) -> None:
    """Do a warm restart that forgets the momentum: optimizer.state.clear()."""
    model, opt = run.sgd()
    run.train(model, opt, 2)
    opt.state.clear()
    run.train(model, opt, 2)


@idiom(Refusal("RuntimeError", r"zcomm\.zero\.set_full_optim_state\("))
def momentum_edited(run: IdiomRun) -> None:
    model, opt = run.sgd()
    run.train(model, opt, 2)
    for p in model.parameters():
        opt.state[p]["momentum_buffer"].zero_()
    run.train(model, opt, 2)


@idiom()
def state_dict_of_the_optimizer(run: IdiomRun) -> None:
    """Rollback of weights and optimizer state together."""
    model, opt = run.adamw()
    run.train(model, opt, 2)
    state, weights = copy.deepcopy(opt.state_dict()), [p.detach().clone() for p in model.parameters()]
    run.train(model, opt, 2)
    with torch.no_grad():
        for p, value in zip(model.parameters(), weights, strict=True):
            p.copy_(value)
    opt.load_state_dict(state)
    run.loss(model, 7).backward()
    opt.step()
