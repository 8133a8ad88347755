"""Weights that the program reads: averages, copies, penalties, logs, calls of functions."""

from __future__ import annotations

import copy
import io
import pickle
import threading

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from idioms.run import IN, WIDTH, IdiomRun, Net, squared_error
from idioms.table import HALF, SHARDED, WEIGHTS, between_steps, idiom

FORWARD_LEVELS = threading.Lock()  # torch counts levels of forward differentiation for a process; ranks may be threads


# ---- averages ----
@idiom(precisions=HALF, places=WEIGHTS)
def moving_average(run: IdiomRun) -> None:
    """EMA by hand, and of the state dict as timm's ModelEma."""
    model, opt = run.sgd()
    by_param = [p.detach().float().clone() for p in model.parameters()]
    by_name = run.net()

    def follow(step: int) -> None:
        for mean, p in zip(by_param, model.parameters(), strict=True):
            mean.mul_(0.5).add_(p.detach().float(), alpha=0.5)
        with torch.no_grad():
            for mean, value in zip(by_name.state_dict().values(), model.state_dict().values(), strict=True):
                mean.copy_(0.5 * mean + 0.5 * value)

    run.train(model, opt, after=follow)
    run.note("ema", by_param, by_name.state_dict())


@between_steps(WEIGHTS, HALF)
def average_put_in_for_evaluation(model: Net, step: int) -> object:
    """Evaluate with other weights, and put the own ones back (diffusers' EMAModel: store, copy_to, restore)."""
    kept = [p.detach().cpu().clone() for p in model.parameters()]
    for p in model.parameters():
        p.data.copy_(p.data * 0.5)
    with torch.no_grad():
        seen = model(torch.ones(2, IN))
    for p, old in zip(model.parameters(), kept, strict=True):
        p.data.copy_(old)
    return seen


@idiom(places=WEIGHTS)
def average_loaded_for_evaluation(run: IdiomRun) -> None:
    """Load the state of an averaged copy, and at the end the best state (early stopping)."""
    model, opt = run.sgd()
    ema, best = copy.deepcopy(model), {name: value.clone() for name, value in model.state_dict().items()}

    def evaluate(step: int) -> None:
        for a, p in zip(ema.parameters(), model.parameters(), strict=True):
            a.data = 0.9 * a.data + 0.1 * p.data
        kept = copy.deepcopy(model.state_dict())
        model.load_state_dict(ema.state_dict())
        with torch.no_grad():
            run.loss(model, 50 + step)
        model.load_state_dict(kept)

    run.train(model, opt, after=evaluate)
    model.load_state_dict(best)
    run.train(model, opt)


@idiom(places=WEIGHTS)
def averaged_model(run: IdiomRun) -> None:
    """torch.optim.swa_utils: SWA, EMA, and the statistics of a net with BatchNorm."""
    model, opt = run.sgd(lambda: Net(lambda: nn.BatchNorm1d(WIDTH)))
    swa, ema = AveragedModel(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))

    def update(step: int) -> None:
        swa.update_parameters(model)
        ema.update_parameters(model)

    run.train(model, opt, after=update)
    loader = [torch.randn(6, IN, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    for averaged in (swa, ema):
        update_bn(loader, averaged)
        with torch.no_grad():
            run.note("averaged", averaged.module.state_dict(), averaged(loader[0]))


# ---- copies ----
@between_steps(WEIGHTS)
def copies(model: Net, step: int) -> object:
    twin = copy.deepcopy(model).eval()
    assert all(type(p) is nn.Parameter and p.requires_grad for p in twin.parameters())
    twin(torch.ones(1, IN)).sum().backward()
    with torch.no_grad():
        seen = twin(torch.ones(2, IN))
        for p in twin.parameters():
            p.zero_()
        fresh = Net()
        fresh.load_state_dict(model.state_dict())
        return seen, fresh(torch.ones(2, IN))


@between_steps(SHARDED)
def pickles(model: Net, step: int) -> object:
    twin = pickle.loads(pickle.dumps(model))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    other = torch.load(file, weights_only=False)
    assert all(type(p) is nn.Parameter for p in twin.parameters())
    return twin(torch.ones(2, IN)).detach(), other(torch.ones(2, IN)).detach()


@between_steps(WEIGHTS)
def state_dicts(model: Net, step: int) -> object:
    """Copy the values, also a submodule's, and by torch.save."""
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert all(type(value) is torch.Tensor for value in saved.values())
    part = {name: value + 0 for name, value in model.blocks.state_dict().items()}
    return {name: value.clone() for name, value in model.state_dict().items()}, part, saved


@idiom()
def copy_before_the_optimizer(run: IdiomRun) -> None:
    """Keep a target network (DQN, BYOL) that follows by a soft update."""
    model = run.net()
    target = copy.deepcopy(model).requires_grad_(False)
    opt = run.optimizer(model, torch.optim.SGD(model.parameters(), 0.1, 0.9))

    def follow(step: int) -> None:
        for t, p in zip(target.parameters(), model.parameters(), strict=True):
            t.data.mul_(0.5).add_(p.data, alpha=0.5)

    run.train(model, opt, after=follow)
    run.note("target", *target.parameters())


# ---- penalties ----
@idiom(places=WEIGHTS)
def norm_penalty(run: IdiomRun) -> None:
    """L2 by the loss: the penalty reads the parameters themselves, after the model has run."""
    model, opt = run.sgd()

    def loss_of(model: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return squared_error(model, x, y) + 0.5 * sum(p.pow(2.0).sum() for p in model.parameters())

    run.train(model, opt, of=loss_of)


@idiom()
def penalty_before_the_model_runs(run: IdiomRun) -> None:
    model, opt = run.sgd()

    def loss_of(model: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        penalty = sum(p.abs().sum() for p in model.parameters() if p.dim() > 1)
        return 0.05 * penalty + squared_error(model, x, y)

    run.train(model, opt, of=loss_of)


@idiom(places=SHARDED)
def penalties_on_single_weights(run: IdiomRun) -> None:
    """L1, and orthogonality."""
    model, opt = run.sgd()

    def loss_of(model: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        error, w = squared_error(model, x, y), model.blocks[0].linear.weight
        apart = (w.t() @ w - torch.eye(WIDTH)).square().sum()
        return error + 0.05 * model.blocks[1].linear.weight.abs().sum() + 0.1 * apart

    run.train(model, opt, of=loss_of)


@idiom()
def proximal_penalty(run: IdiomRun) -> None:
    """Distance from the first weights (EWC, FedProx)."""
    model, opt = run.sgd()
    anchor = [p.detach().clone() for p in model.parameters()]

    def loss_of(model: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        far = sum((p - a).square().sum() for p, a in zip(model.parameters(), anchor, strict=True))
        return squared_error(model, x, y) + 2.0 * far

    run.train(model, opt, of=loss_of)


# ---- values ----
@between_steps(WEIGHTS)
def norms_of_weights(model: Net, step: int) -> object:
    with torch.no_grad():
        return (
            [p.norm() for p in model.parameters()],
            [p.norm().item() for p in model.parameters()],
            torch.stack(torch._foreach_norm([p.detach() for p in model.parameters()])),
            sum(p.sum() for p in model.parameters()),
            sum(p.numel() for p in model.parameters()),
        )


@between_steps(WEIGHTS)
def arithmetic(model: Net, step: int) -> object:
    w = model.blocks[0].linear.weight
    made = (w * 2 + 1).detach(), (3 - w).detach(), w.data @ w.data.T, w.mean(dim=0).detach()
    return made, w.tolist(), len(w), w[0, 0].item()


@between_steps(WEIGHTS)
def arrays_and_iteration(model: Net, step: int) -> object:
    rows = [row.detach() + 0 for row in model.head.weight]
    array = torch.from_numpy(model.stem.weight.detach().numpy().copy())
    return array, rows, [float(x) for x in model.head.bias.detach()]


@between_steps(SHARDED)
def tensors_like_weights(model: Net, step: int) -> object:
    p = model.blocks[0].linear.weight
    made = (torch.zeros_like(p), p.new_zeros(3), torch.ones_like(p.data), p.new_full((2,), 7.0))
    assert isinstance(p, nn.Parameter) and p.is_leaf and p.requires_grad and p.is_contiguous() and len(p) == WIDTH
    assert p.dtype == torch.float32 and str(p.device) == "cpu"
    return made, p.shape, p.stride(), p.numel(), [m.stride() for m in made], p.ndim


@between_steps(SHARDED)
def conversions_to_itself(model: Net, step: int) -> object:
    model.float()
    model.to("cpu")
    model.to(torch.float32)
    model.train().requires_grad_(True)
    return [p.float().sum().item() for p in model.parameters()]


@between_steps(SHARDED)
def function_transforms(model: Net, step: int) -> object:
    w = model.blocks[1].linear.weight.detach()
    params = {name: p.detach() * 0.5 for name, p in model.named_parameters()}

    def loss(params: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, params, (torch.ones(2, IN),)).square().sum()

    own = {name: p.detach() for name, p in model.named_parameters()}
    with FORWARD_LEVELS:
        along = torch.func.jvp(lambda v: (v * v).sum(), (w,), (torch.ones(WIDTH, WIDTH),))
    return loss(params), torch.func.grad(loss)(own), torch.vmap(lambda row: row * 2)(w), along


@between_steps(SHARDED)
def compiled_function(model: Net, step: int) -> object:
    act = torch.compile(lambda w: (w * 2).sum(), backend="aot_eager")
    return act(model.blocks[1].linear.weight.detach()), act(model.blocks[1].linear.weight).detach()
