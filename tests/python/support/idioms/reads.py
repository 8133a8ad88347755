"""Weights that the program reads: averages, copies, penalties, logs."""

from __future__ import annotations

import copy

import torch
from torch import nn

from idioms.run import WIDTH, IdiomRun, Net, squared_error
from idioms.table import HALF, idiom


@idiom(precisions=HALF)
def moving_average(run: IdiomRun) -> None:
    """EMA by hand."""
    model, opt = run.sgd()
    ema = [p.detach().float().clone() for p in model.parameters()]
    for loss in run.losses(model):
        loss.backward()
        opt.step()
        opt.zero_grad()
        for mean, p in zip(ema, model.parameters(), strict=True):
            mean.mul_(0.5).add_(p.detach().float(), alpha=0.5)
    run.note("ema", *ema)


@idiom()
def moving_average_of_state_dict(run: IdiomRun) -> None:
    """timm's ModelEma."""
    model, opt = run.sgd()
    ema = run.net()
    for loss in run.losses(model):
        loss.backward()
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            for mean, value in zip(ema.state_dict().values(), model.state_dict().values(), strict=True):
                mean.copy_(0.5 * mean + 0.5 * value)
    run.note("ema", *ema.state_dict().values())


@idiom()
def moving_average_swapped_in(run: IdiomRun) -> None:
    """Evaluate with the averaged weights, and back (diffusers' EMAModel: store, copy_to, restore)."""
    model, opt = run.sgd()
    ema = [p.detach().clone() for p in model.parameters()]
    for number, loss in enumerate(run.losses(model)):
        loss.backward()
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            for mean, p in zip(ema, model.parameters(), strict=True):
                mean.lerp_(p.detach(), 0.5)
            stored = [p.detach().cpu().clone() for p in model.parameters()]
            for mean, p in zip(ema, model.parameters(), strict=True):
                p.data.copy_(mean)
            run.loss(model, 50 + number)
            for value, p in zip(stored, model.parameters(), strict=True):
                p.data.copy_(value)


@idiom()
def averaged_model(run: IdiomRun) -> None:
    """torch.optim.swa_utils."""
    model, opt = run.sgd()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    for loss in run.losses(model):
        loss.backward()
        opt.step()
        opt.zero_grad()
        averaged.update_parameters(model)
    run.note("averaged", *averaged.module.state_dict().values())


@idiom()
def averaged_model_of_ema(run: IdiomRun) -> None:
    model, opt = run.sgd()
    ema = torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=ema)
    for loss in run.losses(model):
        loss.backward()
        opt.step()
        opt.zero_grad()
        averaged.update_parameters(model)
    run.note("averaged", *averaged.module.state_dict().values())


@idiom()
def averaged_model_with_statistics(run: IdiomRun) -> None:
    """SWA of a net with BatchNorm: update_bn."""
    model, opt = run.sgd(lambda: Net(lambda: nn.BatchNorm1d(WIDTH)))
    averaged = torch.optim.swa_utils.AveragedModel(model)
    for loss in run.losses(model):
        loss.backward()
        opt.step()
        opt.zero_grad()
        averaged.update_parameters(model)
    loader = [torch.randn(6, 5, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    torch.optim.swa_utils.update_bn(loader, averaged)
    run.note("statistics", averaged.module.norm.running_mean, averaged.module.norm.running_var)


@idiom()
def copy_for_evaluation(run: IdiomRun) -> None:
    model, opt = run.sgd()
    for loss in run.losses(model):
        loss.backward()
        opt.step()
        opt.zero_grad()
        twin = copy.deepcopy(model).eval()
        with torch.no_grad():
            run.note("evaluation", twin(torch.ones(2, 5)))


@idiom()
def copy_before_the_optimizer(run: IdiomRun) -> None:
    """Keep a target network (DQN, BYOL) that follows by a soft update."""
    model = run.net()
    target = copy.deepcopy(model).requires_grad_(False)
    opt = run.optimizer(model, torch.optim.SGD(model.parameters(), 0.1, 0.9))
    for loss in run.losses(model):
        loss.backward()
        opt.step()
        opt.zero_grad()
        for t, p in zip(target.parameters(), model.parameters(), strict=True):
            t.data.mul_(0.5).add_(p.data, alpha=0.5)
    run.note("target", *target.parameters())


@idiom()
def target_by_load_state_dict(run: IdiomRun) -> None:
    model, opt = run.sgd()
    target = run.net(seed=11)
    for number, loss in enumerate(run.losses(model, 4)):
        loss.backward()
        opt.step()
        opt.zero_grad()
        if number % 2:
            target.load_state_dict(model.state_dict())
    run.note("target", *target.state_dict().values())


@idiom()
def norm_penalty(run: IdiomRun) -> None:
    """L2 by the loss: the penalty reads the parameters themselves."""
    model, opt = run.sgd()

    def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return squared_error(model, x, y) + 0.5 * sum(p.pow(2.0).sum() for p in model.parameters())

    for loss in run.losses(model, of=loss_of):
        loss.backward()
        opt.step()
        opt.zero_grad()


@idiom()
def penalty_before_the_model_runs(run: IdiomRun) -> None:
    model, opt = run.sgd()

    def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        penalty = sum(p.abs().sum() for p in model.parameters() if p.dim() > 1)
        return 0.05 * penalty + squared_error(model, x, y)

    for loss in run.losses(model, of=loss_of):
        loss.backward()
        opt.step()
        opt.zero_grad()


@idiom()
def proximal_penalty(run: IdiomRun) -> None:
    """Distance from the first weights (EWC, FedProx)."""
    model, opt = run.sgd()
    anchor = [p.detach().clone() for p in model.parameters()]

    def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        far = sum((p - a).square().sum() for p, a in zip(model.parameters(), anchor, strict=True))
        return squared_error(model, x, y) + 2.0 * far

    for loss in run.losses(model, of=loss_of):
        loss.backward()
        opt.step()
        opt.zero_grad()


@idiom()
def norms_of_weights(run: IdiomRun) -> None:
    model, opt = run.sgd()
    for loss in run.losses(model):
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.note("norms", *(p.norm() for p in model.parameters()))
        run.note("counts", sum(p.numel() for p in model.parameters()))


@idiom()
def weights_printed(run: IdiomRun) -> None:
    model, opt = run.sgd()
    for loss in run.losses(model):
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.note("elements", model.head.weight[0, 0].item(), model.head.bias.tolist())


@idiom()
def weights_to_numpy(run: IdiomRun) -> None:
    model, opt = run.sgd()
    for loss in run.losses(model):
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.note("numpy", torch.from_numpy(model.head.weight.detach().numpy().copy()))
