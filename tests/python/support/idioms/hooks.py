"""Hooks on parameters, activations, modules and the optimizer."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from idioms.run import IdiomRun, Net, batch_of, squared_error
from idioms.table import GRADIENTS, HALF, idiom


def halve(p: torch.Tensor) -> None:
    if p.grad is not None:
        p.grad.mul_(0.5)


def clamp(p: torch.Tensor) -> None:
    p.grad.clamp_(-0.05, 0.05)


@idiom(precisions=HALF)
def hook_on_parameters(run: IdiomRun) -> None:
    model, opt = run.sgd()
    for p in model.parameters():
        p.register_hook(lambda grad: grad * 0.25)
    run.train(model, opt)


@idiom()
def hook_between_forward_and_backward(run: IdiomRun) -> None:
    model, opt = run.sgd()
    for loss in run.losses(model):
        handle = model.blocks[1].linear.weight.register_hook(lambda grad: grad * 0.25)
        loss.backward()
        handle.remove()
        opt.step()
        opt.zero_grad()


@idiom()
def hook_after_accumulation(run: IdiomRun) -> None:
    model, opt = run.sgd()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(halve)
    run.train(model, opt)


@idiom()
def hook_before_construction(run: IdiomRun) -> None:
    """Use a post-accumulate hook that was there before the optimizer."""
    model = run.net()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(halve)
    run.train(model, run.optimizer(model, torch.optim.SGD(model.parameters(), 0.1, 0.9)))


@idiom(places=GRADIENTS)
def hook_on_the_gradient_of_this_rank(run: IdiomRun) -> None:
    """Clamp it before it is averaged, as under DistributedDataParallel."""
    model, opt = run.sgd()
    params = list(model.parameters())
    for p in params:
        p.register_post_accumulate_grad_hook(clamp)
    for number in range(3):
        means = [torch.zeros(p.shape) for p in params]
        for rank in range(run.world_size) if run.plain else [run.rank]:
            squared_error(model, *batch_of(rank, number)).backward()
            for mean, p in zip(means, params, strict=True):
                if run.plain:
                    mean += p.grad / run.world_size
                    p.grad = mean if rank == run.world_size - 1 else None
        opt.step()
        opt.zero_grad()


@idiom()
def hook_on_the_node_that_accumulates(run: IdiomRun) -> None:
    """Find each parameter's node as DDP does, and scale its input."""
    model, opt = run.sgd()
    nodes = [p.expand_as(p).grad_fn.next_functions[0][0] for p in model.parameters()]
    for node in nodes:
        node.register_prehook(lambda grads: tuple(grad * 0.25 for grad in grads))
    run.train(model, opt)


@idiom()
def hook_on_several_gradients(run: IdiomRun) -> None:
    """Count the passes that have reached all parameters."""
    model, opt = run.sgd()
    passes = []
    torch.autograd.graph.register_multi_grad_hook(
        list(model.parameters()), lambda grads: passes.append(all(grad is not None for grad in grads))
    )

    def count(step: int) -> None:
        assert len(passes) == step + 1

    run.train(model, opt, before=count)


@idiom()
def hook_on_activations(run: IdiomRun) -> None:
    model, opt = run.sgd()

    def loss_of(model: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = model.stem(x)
        hidden.register_hook(lambda grad: 3 * grad)
        for block in model.blocks:
            hidden = block(hidden)
        return F.mse_loss(model.head(model.norm(hidden)), y)

    run.train(model, opt, of=loss_of)


@idiom()
def hooks_on_modules(run: IdiomRun) -> None:
    model, opt = run.sgd()
    model.blocks[1].register_forward_hook(lambda module, args, out: out * 1.5)
    model.blocks[2].register_full_backward_hook(lambda module, grads, outs: tuple(g * 0.5 for g in grads))
    model.head.register_forward_pre_hook(lambda module, args: (args[0] * 2.0,))
    run.train(model, opt)


@idiom()
def hooks_of_the_optimizer(run: IdiomRun) -> None:
    model, opt = run.sgd()
    calls: list[str] = []
    opt.register_step_pre_hook(lambda *_: calls.append("before"))
    opt.register_step_post_hook(lambda *_: calls.append("after"))
    run.train(model, opt)
    run.note("calls", calls.count("before"), calls.count("after"))
