"""Choices of the parameters that are trained, and ways to call backward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

from idioms.run import WIDTH, IdiomRun, Net, batch_of, squared_error
from idioms.table import GRADIENTS, WEIGHTS, Refusal, idiom


# ---- which parameters are trained ----
@idiom()
def alternate_freezing(run: IdiomRun) -> None:
    """Two halves in turn."""
    model, opt = run.sgd()
    for number in range(4):
        model.stem.requires_grad_(number % 2 == 0)
        model.head.requires_grad_(number % 2 == 1)
        run.loss(model, number).backward()
        opt.step()
        opt.zero_grad()


@idiom(Refusal("RuntimeError", "requires a gradient now, but was frozen when ZeroOptimizer was built"))
def gradual_unfreezing(run: IdiomRun) -> None:
    """ULMFiT (arXiv:1801.06146): frozen when the optimizer is made, trained later."""
    model = run.net()
    model.stem.requires_grad_(False)
    model.blocks.requires_grad_(False)
    opt = run.optimizer(model, torch.optim.SGD(model.parameters(), 0.1, 0.9))
    for number in range(4):
        if number == 1:
            model.blocks.requires_grad_(True)
        if number == 2:
            model.stem.requires_grad_(True)
        run.loss(model, number).backward()
        opt.step()
        opt.zero_grad()


@idiom(places=GRADIENTS)
def frozen_then_thawed(run: IdiomRun) -> None:
    """Freeze a part that was trained, then train it again; freeze others for good."""
    model, opt = run.sgd(weight_decay=0.1)
    for number in range(6):
        model.blocks[0].requires_grad_(number not in (2, 3))
        model.stem.requires_grad_(number < 4)
        run.loss(model, number).backward()
        opt.step()
        opt.zero_grad()


@idiom()
def frozen_from_the_beginning(run: IdiomRun) -> None:
    model = run.net()
    model.blocks[1].requires_grad_(False)
    opt = run.optimizer(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1, 0.9))
    run.train(model, opt)


@idiom()
def part_without_gradient(run: IdiomRun) -> None:
    """Train with a part that the loss does not reach in some steps, without momentum or decay."""
    model, opt = run.sgd(momentum=0.0)

    def skipping(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model.head(model.norm(model.blocks[0](model.stem(x)))), y)

    for number in range(4):
        run.loss(model, number, skipping if number % 2 else squared_error).backward()
        opt.step()
        opt.zero_grad()


@idiom()
def tied_weights(run: IdiomRun) -> None:
    class Tied(Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[2].linear.weight = self.blocks[0].linear.weight

    model, opt = run.sgd(Tied)
    run.train(model, opt)


@idiom()
def tied_later(run: IdiomRun) -> None:
    """After the optimizer was made: the weight that is left out has no gradient."""
    model, opt = run.sgd(momentum=0.0)
    left = model.blocks[2].linear.weight
    run.train(model, opt, 2)
    model.blocks[2].linear.weight = model.blocks[0].linear.weight
    run.train(model, opt, 2)
    model.blocks[2].linear.weight = left


# ---- how backward is called ----
@idiom(precisions=("fp32", "bf16"))
def accumulation_by_hand(run: IdiomRun) -> None:
    """Accumulate by the loop that every PyTorch user writes."""
    model, opt = run.sgd()
    for number, loss in enumerate(run.losses(model, 6)):
        (loss / 2).backward()
        if number % 2 == 1:
            opt.step()
            opt.zero_grad()


@idiom(precisions=("fp32", "bf16"))
def accumulation_without_sync(run: IdiomRun) -> None:
    model, opt = run.sgd()
    for number in range(6):
        if number % 2 == 0 and not run.plain:
            with opt.no_sync():
                (run.loss(model, number) / 2).backward()
        else:
            (run.loss(model, number) / 2).backward()
        if number % 2 == 1:
            opt.step()
            opt.zero_grad()


@idiom()
def accumulation_and_clipping(run: IdiomRun) -> None:
    model, opt = run.sgd()
    for number, loss in enumerate(run.losses(model, 6)):
        (loss / 2).backward()
        if number % 2 == 1:
            run.note("norm", clip_grad_norm_(model.parameters(), 0.2))
            opt.step()
            opt.zero_grad()


@idiom()
def accumulation_scaled_in_between(run: IdiomRun) -> None:
    """Halve the sum so far before the next backward adds to it."""
    model, opt = run.sgd()
    for number, loss in enumerate(run.losses(model, 6)):
        loss.backward()
        if number % 2 == 0:
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.mul_(0.5)
        else:
            opt.step()
            opt.zero_grad()


@idiom(precisions=("fp32", "bf16"))
def accumulation_of_the_optimizer(run: IdiomRun) -> None:
    """grad_accum, with step and zero_grad after each micro-step."""
    model = run.net()
    sgd = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    opt = run.optimizer(model, sgd, **({} if run.plain else {"grad_accum": 2}))
    for number, loss in enumerate(run.losses(model, 6)):
        (loss / 2 if run.plain else loss).backward()
        if not run.plain or number % 2:
            opt.step()
            opt.zero_grad()


@idiom(Refusal("RuntimeError", "grad_accum"))
def accumulation_twice(run: IdiomRun) -> None:
    """grad_accum=2 and a loop that accumulates by itself, too."""
    model = run.net()
    sgd = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    opt = run.optimizer(model, sgd, **({} if run.plain else {"grad_accum": 2}))
    for number, loss in enumerate(run.losses(model, 6)):
        loss.backward()
        if number % 2 == 1:
            opt.step()
            opt.zero_grad()


@idiom()
def two_losses(run: IdiomRun) -> None:
    model, opt = run.sgd()
    for number in range(3):
        first = run.loss(model, number)
        second = run.loss(model, 20 + number)
        first.backward(retain_graph=True)
        (0.5 * second).backward()
        opt.step()
        opt.zero_grad()


@idiom()
def retained_graph(run: IdiomRun) -> None:
    model, opt = run.sgd()
    for loss in run.losses(model):
        loss.backward(retain_graph=True)
        (0.5 * loss).backward()
        opt.step()
        opt.zero_grad()


@idiom()
def gradient_penalty(run: IdiomRun) -> None:
    """WGAN-GP (arXiv:1704.00028): create_graph with respect to the input."""
    model, opt = run.sgd()

    def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.mse_loss(out, y) + 0.2 * (slope.norm(dim=1) - 1).square().mean()

    run.train(model, opt, of=loss_of)


@idiom(places=WEIGHTS)
def penalty_on_the_gradient_of_weights(run: IdiomRun) -> None:
    """Gradient norm regularisation: create_graph with respect to the parameters. All ranks have the same batch."""
    model, opt = run.sgd(lr=0.02)
    parameters = list(model.parameters())
    for number in range(3):
        loss = squared_error(model, *batch_of(0, number))
        grads = torch.autograd.grad(loss, parameters, create_graph=True)
        (loss + 0.1 * sum(g.square().sum() for g in grads)).backward()
        opt.step()
        opt.zero_grad()


@idiom(places=GRADIENTS)
def stale_graph(run: IdiomRun) -> None:
    """Backward through a graph that is older than a step or an edit of the weights: torch raises."""
    model, opt = run.sgd()
    for number in range(2):
        old = run.loss(model, 0)
        if number == 0:
            run.loss(model, 1).backward()
            opt.step()
            opt.zero_grad()
        else:
            with torch.no_grad():
                model.blocks[1].linear.weight.mul_(0.5)
        try:
            old.backward()
        except RuntimeError as error:
            run.note("refused", "modified by an inplace operation" in str(error))
        else:
            run.note("refused", False)
        opt.zero_grad()
        run.loss(model, 2).backward()
        opt.step()
        opt.zero_grad()


@idiom()
def closure(run: IdiomRun) -> None:
    """Step with a closure that evaluates once, as LBFGS asks for."""
    model, opt = run.sgd()
    for number in range(3):

        def evaluate(number: int = number) -> torch.Tensor:
            opt.zero_grad()
            loss = run.loss(model, number)
            loss.backward()
            return loss

        run.note("loss", float(opt.step(evaluate)) if run.world_size == 1 else opt.step(evaluate) is not None)


@idiom()
def checkpointed_activations(run: IdiomRun) -> None:
    model, opt = run.sgd()

    def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = model.stem(x)
        for number, block in enumerate(model.blocks):
            x = checkpoint(block, x, use_reentrant=number == 1)
        return F.mse_loss(model.head(model.norm(x)), y)

    run.train(model, opt, of=loss_of)


@idiom()
def compiled_model(run: IdiomRun) -> None:
    model, opt = run.sgd()
    compiled = torch.compile(model, backend="eager")

    def loss_of(_: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(compiled(x), y)

    run.train(model, opt, of=loss_of)


@idiom()
def functional_call(run: IdiomRun) -> None:
    model, opt = run.sgd()

    def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(torch.func.functional_call(model, dict(model.named_parameters()), (x,)), y)

    run.train(model, opt, of=loss_of)


@idiom()
def functional_call_with_other_weights(run: IdiomRun) -> None:
    """Make a meta learner's inner step."""
    model, opt = run.sgd()

    def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        weights = {name: 0.9 * p for name, p in model.named_parameters()}
        return F.mse_loss(torch.func.functional_call(model, weights, (x,)), y)

    run.train(model, opt, of=loss_of)


@idiom()
def evaluation_between_backward_and_step(run: IdiomRun) -> None:
    model, opt = run.sgd()

    def evaluate(step: int) -> None:
        model.eval()
        with torch.no_grad():
            run.loss(model, 50 + step)
        model.train()

    run.train(model, opt, before=evaluate)


@idiom()
def evaluation_with_statistics(run: IdiomRun) -> None:
    """train() and eval() of a net with BatchNorm."""
    model, opt = run.sgd(lambda: Net(lambda: nn.BatchNorm1d(WIDTH)))

    def evaluate(step: int) -> None:
        model.eval()
        with torch.inference_mode():
            run.loss(model, 50 + step)
        model.train()

    run.train(model, opt, after=evaluate)
    run.note("statistics", model.norm.running_mean, model.norm.running_var)


@idiom()
def synchronous_statistics_off(run: IdiomRun) -> None:
    """BatchNorm in training, with each rank's own statistics as in DDP."""
    model, opt = run.sgd(lambda: Net(lambda: nn.BatchNorm1d(WIDTH)))
    run.train(model, opt)
    model.train()
    with torch.no_grad():
        run.loss(model, 60)


@idiom()
def exception_in_backward(run: IdiomRun) -> None:
    """Leave a failed batch out."""
    model, opt = run.sgd()

    def fail(grad: torch.Tensor) -> None:
        raise ArithmeticError("a bad batch")

    for number in range(4):
        if number == 1:
            handle = model.blocks[1].linear.weight.register_hook(fail)
        loss = run.loss(model, number)
        try:
            loss.backward()
        except ArithmeticError:
            handle.remove()
            opt.zero_grad()
            continue
        opt.step()
        opt.zero_grad()


@idiom()
def exception_in_forward(run: IdiomRun) -> None:
    model, opt = run.sgd()
    for number in range(4):
        opt.zero_grad()
        try:
            if number == 1:
                hook = model.blocks[1].register_forward_pre_hook(lambda module, args: 1 / 0)
            run.loss(model, number).backward()
        except ZeroDivisionError:
            hook.remove()
            continue
        opt.step()
