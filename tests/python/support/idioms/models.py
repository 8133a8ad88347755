"""Several models, and modules that compute their weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from idioms.run import WIDTH, Block, IdiomRun, Net
from idioms.table import SHARDED, WEIGHTS, idiom


@idiom()
def adversarial(run: IdiomRun) -> None:
    """Train a GAN: two models, two optimizers, one step each."""

    class Two(nn.Module):
        def __init__(self, inside: int, outside: int) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Linear(inside, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, outside)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)

    maker, critic = run.net(lambda: Two(5, 3)), run.net(lambda: Two(3, 1), seed=6)
    of_maker = run.optimizer(maker, torch.optim.Adam(maker.parameters(), 0.02, (0.5, 0.9)))
    of_critic = run.optimizer(critic, torch.optim.Adam(critic.parameters(), 0.02, (0.5, 0.9)))

    def ones(score: torch.Tensor, one: float) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(score, torch.full_like(score, one))

    for number in range(3):
        of_critic.zero_grad()
        real = run.average(lambda x, y: ones(critic(y), 1.0) + ones(critic(maker(x).detach()), 0.0), number)
        real.backward()
        of_critic.step()
        of_maker.zero_grad()
        run.average(lambda x, y: ones(critic(maker(x)), 1.0), number).backward()
        of_maker.step()


@idiom()
def two_models_one_loss(run: IdiomRun) -> None:
    """Train a student and a projection, an optimizer each."""
    student, other = run.net(), run.net(seed=8)
    first = run.optimizer(student, torch.optim.SGD(student.parameters(), 0.1, 0.9))
    second = run.optimizer(other, torch.optim.AdamW(other.parameters(), 0.02))
    for number in range(3):
        run.average(lambda x, y: F.mse_loss(student(x) + other(x), y), number).backward()
        for opt in (first, second):
            opt.step()
            opt.zero_grad()


@idiom()
def distillation(run: IdiomRun) -> None:
    teacher = run.net(seed=8).requires_grad_(False).eval()
    model, opt = run.sgd()

    def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = teacher(x)
        return F.mse_loss(model(x), wanted)

    run.train(model, opt, of=loss_of)


def with_blocks(change: Callable[[nn.Linear], object]) -> Net:
    net = Net()
    for block in net.blocks:
        change(block.linear)
    return net


@idiom()
def weight_normalised(run: IdiomRun) -> None:
    """Use a parametrisation of each block's weight."""
    run.train(*run.sgd(lambda: with_blocks(parametrizations.weight_norm)))


@idiom()
def spectral_norm(run: IdiomRun) -> None:
    run.train(*run.sgd(lambda: with_blocks(parametrizations.spectral_norm)))


@idiom(places=SHARDED)
def parametrised_later(run: IdiomRun) -> None:
    """Register parametrisations after the optimizer was made, one of them for a while."""

    class Symmetric(nn.Module):
        def forward(self, w: torch.Tensor) -> torch.Tensor:
            return w.triu() + w.triu(1).T

    class Half(nn.Module):
        def forward(self, w: torch.Tensor) -> torch.Tensor:
            return w * 0.5

    model, opt = run.sgd()
    parametrize.register_parametrization(model.blocks[0].linear, "weight", Symmetric())
    run.train(model, opt, 1)
    parametrize.register_parametrization(model.blocks[1].linear, "weight", Half())
    run.train(model, opt, 2)
    parametrize.remove_parametrizations(model.blocks[1].linear, "weight")
    run.train(model, opt)
    run.note("weights", [model.blocks[number].linear.weight.detach() + 0 for number in (0, 1)])


@idiom()
def pruned(run: IdiomRun) -> None:
    """torch.nn.utils.prune before the optimizer is made."""
    run.train(*run.sgd(lambda: with_blocks(lambda linear: prune.l1_unstructured(linear, "weight", amount=0.5))))


@idiom(places=WEIGHTS)
def pruned_in_training(run: IdiomRun) -> None:
    model, opt = run.sgd()
    run.train(model, opt, 2)
    for block in model.blocks[:2]:
        prune.l1_unstructured(block.linear, "weight", amount=0.5)
    run.train(model, opt, 2)
    prune.remove(model.blocks[0].linear, "weight")
    run.train(model, opt, 2)
    run.note("weights", model.blocks[1].linear.weight_orig.detach() + 0, model.blocks[0].linear.weight.detach() + 0)


@idiom()
def masked_weights(run: IdiomRun) -> None:
    """Pruning by hand: the mask is applied after each step (the lottery ticket)."""
    model, opt = run.sgd()
    masks = [(p.detach().abs() > 0.15).to(p.dtype) for p in model.parameters()]

    def apply(step: int) -> None:
        for p, mask in zip(model.parameters(), masks, strict=True):
            p.data.mul_(mask)

    run.train(model, opt, after=apply)


@idiom()
def low_rank_adapters(run: IdiomRun) -> None:
    """LoRA on frozen weights, merged at the end for comparison."""

    class Adapted(Block):
        def __init__(self) -> None:
            super().__init__()
            self.linear.requires_grad_(False)
            self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tanh(self.linear(x) + self.up(self.down(x)))

    def make() -> nn.Module:
        net = Net()
        net.blocks = nn.ModuleList(Adapted() for _ in range(3))
        return net

    model, opt = run.sgd(make)
    run.train(model, opt)
    with torch.no_grad():
        block = model.blocks[1]
        run.note("merged", block.linear.weight + block.up.weight @ block.down.weight)


@idiom()
def layers_dropped_at_random(run: IdiomRun) -> None:
    """Stochastic depth, with the same draw on all ranks."""
    model, opt = run.sgd(momentum=0.0)

    def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = model.stem(x)
        for number, block in enumerate(model.blocks):
            if number != drops[-1]:
                x = block(x)
        return F.mse_loss(model.head(model.norm(x)), y)

    drops = []
    for number, drop in enumerate((0, 2, 1, 0)):
        drops.append(drop)
        run.loss(model, number, of=loss_of).backward()
        opt.step()
        opt.zero_grad()


@idiom()
def adagrad_and_others(run: IdiomRun) -> None:
    for make in (torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Adam, torch.optim.NAdam):
        model = run.net()
        run.train(model, run.optimizer(model, make(model.parameters(), lr=0.01)))
