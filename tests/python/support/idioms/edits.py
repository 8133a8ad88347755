"""Weights that the program changes itself, around the optimizer's steps."""

from __future__ import annotations

import copy
import io

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from idioms.run import WIDTH, IdiomRun
from idioms.table import HALF, Refusal, idiom


@idiom(precisions=HALF)
def decay_by_hand(run: IdiomRun) -> None:
    """Decoupled weight decay."""
    model, opt = run.sgd()
    for loss in run.losses(model):
        loss.backward()
        for p in model.parameters():
            p.data.mul_(1 - 0.1 * 2.0)
        opt.step()
        opt.zero_grad()


@idiom(precisions=HALF)
def clip_weights(run: IdiomRun) -> None:
    """Clip the critic of WGAN (arXiv:1701.07875)."""
    model, opt = run.sgd()
    for loss in run.losses(model):
        loss.backward()
        opt.step()
        opt.zero_grad()
        for p in model.parameters():
            p.data.clamp_(-0.1, 0.1)


@idiom()
def averaged_weights(run: IdiomRun) -> None:
    """Model averaging (local SGD) of weights that are the same on all ranks."""
    model, opt = run.sgd()
    for loss in run.losses(model):
        loss.backward()
        opt.step()
        opt.zero_grad()
        for p in model.parameters():
            if run.dist is not None:
                run.dist.all_reduce(p.data)
                p.data /= run.world_size
                run.dist.broadcast(p.data, 0)


@idiom()
def averaged_weights_in_the_background(run: IdiomRun) -> None:
    model, opt = run.sgd()
    for loss in run.losses(model):
        loss.backward()
        opt.step()
        opt.zero_grad()
        if run.dist is not None:
            for work in [run.dist.all_reduce(p.data, async_op=True) for p in model.parameters()]:
                work.wait()
            for p in model.parameters():
                p.data.div_(run.world_size)


@idiom()
def replaced_by_set(run: IdiomRun) -> None:
    model, opt = run.sgd()
    for loss in run.losses(model):
        loss.backward()
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            model.head.weight.set_(model.head.weight.detach() * 0.5)
        torch.utils.swap_tensors(model.stem.bias, nn.Parameter(torch.full((WIDTH,), 0.1)))


@idiom()
def clip_weights_in_no_grad(run: IdiomRun) -> None:
    model, opt = run.sgd()
    for loss in run.losses(model):
        loss.backward()
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.1, 0.1)


@idiom()
def max_norm_of_rows(run: IdiomRun) -> None:
    """Dropout's constraint on incoming weights."""
    model, opt = run.sgd()
    for loss in run.losses(model):
        loss.backward()
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            for block in model.blocks:
                norms = block.linear.weight.norm(dim=1, keepdim=True).clamp(min=0.3)
                block.linear.weight.mul_(0.3 / norms)


@idiom()
def renormalised_weights(run: IdiomRun) -> None:
    """nGPT's rows of unit norm, by copy."""
    model, opt = run.sgd()
    for loss in run.losses(model):
        loss.backward()
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            model.head.weight.copy_(F.normalize(model.head.weight, dim=-1))


@idiom(precisions=HALF)
def copied_weights(run: IdiomRun) -> None:
    """p.data.copy_ of values from elsewhere."""
    model, opt = run.sgd()
    other = run.net(seed=11)
    for number, loss in enumerate(run.losses(model, 4)):
        loss.backward()
        opt.step()
        opt.zero_grad()
        if number == 1:
            for p, q in zip(model.parameters(), other.parameters(), strict=True):
                p.data.copy_(q.data)


@idiom(precisions=HALF)
def assigned_data(run: IdiomRun) -> None:
    """p.data = t."""
    model, opt = run.sgd()
    other = run.net(seed=11)
    for number, loss in enumerate(run.losses(model, 4)):
        loss.backward()
        opt.step()
        opt.zero_grad()
        if number == 1:
            for p, q in zip(model.parameters(), other.parameters(), strict=True):
                p.data = q.data.to(p.dtype)


@idiom()
def initialised_again(run: IdiomRun) -> None:
    """Initialise a head again in training."""
    model, opt = run.sgd()
    for number, loss in enumerate(run.losses(model, 4)):
        loss.backward()
        opt.step()
        opt.zero_grad()
        if number == 1:
            torch.manual_seed(17)
            nn.init.xavier_uniform_(model.head.weight)
            nn.init.zeros_(model.head.bias)


@idiom()
def reset_parameters(run: IdiomRun) -> None:
    model, opt = run.sgd()
    for number, loss in enumerate(run.losses(model, 4)):
        loss.backward()
        opt.step()
        opt.zero_grad()
        if number == 1:
            torch.manual_seed(17)
            model.head.reset_parameters()


@idiom(precisions=HALF)
def weights_loaded_in_training(run: IdiomRun) -> None:
    model, opt = run.sgd()
    other = run.net(seed=11).state_dict()
    for number, loss in enumerate(run.losses(model, 4)):
        loss.backward()
        opt.step()
        opt.zero_grad()
        if number == 1:
            model.load_state_dict(other)


@idiom(precisions=HALF)
def weights_loaded_at_once(run: IdiomRun) -> None:
    """Before the first step, after the optimizer was made."""
    model, opt = run.sgd()
    model.load_state_dict(run.net(seed=11).state_dict())
    for loss in run.losses(model):
        loss.backward()
        opt.step()
        opt.zero_grad()


@idiom(
    Refusal(
        "RuntimeError", "param group 0 has 12 parameters, and not the 12 that it had", ("*:[012]*", "*:3", "*:3-cpu")
    )
)
def weights_loaded_by_assignment(run: IdiomRun) -> None:
    """load_state_dict(assign=True) of parameters that the optimizer does not know: torch trains the old ones."""
    model, opt = run.sgd()
    model.load_state_dict(run.net(seed=11).state_dict(), assign=True)
    run.trained[0].optimizer.param_groups[0]["params"] = list(model.parameters())
    for loss in run.losses(model):
        loss.backward()
        opt.step()
        opt.zero_grad()


@idiom()
def best_weights_restored(run: IdiomRun) -> None:
    """Early stopping."""
    model, opt = run.sgd()
    best = copy.deepcopy(model.state_dict())
    for number, loss in enumerate(run.losses(model, 4)):
        if number == 2:
            best = copy.deepcopy(model.state_dict())
        loss.backward()
        opt.step()
        opt.zero_grad()
    model.load_state_dict(best)


@idiom()
def best_weights_restored_tensor_by_tensor(run: IdiomRun) -> None:
    model, opt = run.sgd()
    best: dict[str, torch.Tensor] = {}
    for number, loss in enumerate(run.losses(model, 4)):
        if number == 2:
            best = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
        loss.backward()
        opt.step()
        opt.zero_grad()
    with torch.no_grad():
        for name, value in model.state_dict().items():
            value.copy_(best[name])


@idiom()
def saved_and_loaded_by_torch(run: IdiomRun) -> None:
    model, opt = run.sgd()
    file = io.BytesIO()
    for number, loss in enumerate(run.losses(model, 4)):
        if number == 2:
            torch.save(model.state_dict(), file)
        loss.backward()
        opt.step()
        opt.zero_grad()
    file.seek(0)
    saved = torch.load(file)
    run.note("saved", *saved.values())
    model.load_state_dict(saved)


@idiom()
def weights_as_a_vector(run: IdiomRun) -> None:
    model, opt = run.sgd()
    for loss in run.losses(model):
        loss.backward()
        opt.step()
        opt.zero_grad()
        vector = parameters_to_vector(model.parameters())
        run.note("vector", vector)
        vector_to_parameters(vector * 0.9, model.parameters())


@idiom()
def half_and_back(run: IdiomRun) -> None:
    model, opt = run.sgd()
    for number, loss in enumerate(run.losses(model, 4)):
        loss.backward()
        opt.step()
        opt.zero_grad()
        if number == 1:
            model.half().float()


@idiom()
def step_by_hand(run: IdiomRun) -> None:
    """`p -= lr * p.grad`, alternating with the optimizer's step."""
    model, opt = run.sgd()
    for number, loss in enumerate(run.losses(model, 4)):
        loss.backward()
        if number % 2:
            with torch.no_grad():
                for p in model.parameters():
                    if p.grad is not None:
                        p -= 0.1 * p.grad
        else:
            opt.step()
        opt.zero_grad()


@idiom()
def step_by_hand_with_alpha(run: IdiomRun) -> None:
    model, opt = run.sgd()
    for number, loss in enumerate(run.losses(model, 4)):
        loss.backward()
        if number % 2:
            for p in model.parameters():
                if p.grad is not None:
                    p.data.add_(p.grad.data, alpha=-0.1)
        else:
            opt.step()
        opt.zero_grad()


@idiom()
def sharpness_aware(run: IdiomRun) -> None:
    """SAM (arXiv:2010.01412), as its usual implementation."""
    model, opt = run.sgd()
    for number in range(3):
        run.loss(model, number).backward()
        steps = {}
        with torch.no_grad():
            norm = torch.norm(torch.stack([p.grad.norm(2) for p in model.parameters() if p.grad is not None]), 2)
            for p in model.parameters():
                if p.grad is not None:
                    steps[p] = p.grad * (0.5 / (norm + 1e-12))
                    p.add_(steps[p])
        opt.zero_grad()
        run.loss(model, number).backward()
        with torch.no_grad():
            for p, step in steps.items():
                p.sub_(step)
        opt.step()
        opt.zero_grad()


@idiom()
def sharpness_aware_by_copies(run: IdiomRun) -> None:
    """SAM that keeps the old weights, as Lightning and timm users write it."""
    model, opt = run.sgd()
    for number in range(3):
        run.loss(model, number).backward()
        old = {}
        with torch.no_grad():
            norm = torch.stack([p.grad.norm(2) for p in model.parameters() if p.grad is not None]).norm(2)
            for p in model.parameters():
                if p.grad is None:
                    continue
                old[p] = p.data.clone()
                p.add_(p.grad, alpha=float(0.5 / (norm + 1e-12)))
        opt.zero_grad()
        run.loss(model, number).backward()
        for p, value in old.items():
            p.data = value
        opt.step()
        opt.zero_grad()


@idiom()
def lookahead(run: IdiomRun) -> None:
    """arXiv:1907.08610."""
    model, opt = run.sgd()
    slow = [p.detach().clone() for p in model.parameters()]
    for number, loss in enumerate(run.losses(model, 4)):
        loss.backward()
        opt.step()
        opt.zero_grad()
        if number % 2:
            with torch.no_grad():
                for s, p in zip(slow, model.parameters(), strict=True):
                    s.add_(p.detach() - s, alpha=0.5)
                    p.copy_(s)


@idiom(precisions=HALF)
def reset_to_a_former_state(run: IdiomRun) -> None:
    """Rollback after a bad step."""
    model, opt = run.sgd()
    for number, loss in enumerate(run.losses(model, 4)):
        before = [p.detach().clone() for p in model.parameters()]
        loss.backward()
        opt.step()
        opt.zero_grad()
        if number == 2:
            with torch.no_grad():
                for p, value in zip(model.parameters(), before, strict=True):
                    p.copy_(value)


@idiom()
def broadcast_of_weights_by_hand(run: IdiomRun) -> None:
    model, opt = run.sgd()
    for loss in run.losses(model):
        loss.backward()
        opt.step()
        opt.zero_grad()
        if run.dist is not None:
            for p in model.parameters():
                run.dist.broadcast(p.data, 0)


@idiom()
def edit_between_forward_and_backward(run: IdiomRun) -> None:
    """Edit a weight that backward does not need."""
    model, opt = run.sgd()
    for loss in run.losses(model):
        with torch.no_grad():
            model.head.bias.mul_(0.5)
        loss.backward()
        opt.step()
        opt.zero_grad()


@idiom()
def edit_between_backward_and_step(run: IdiomRun) -> None:
    model, opt = run.sgd()
    for loss in run.losses(model):
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.05)
        opt.step()
        opt.zero_grad()


@idiom()
def edit_of_one_element(run: IdiomRun) -> None:
    model, opt = run.sgd()
    for loss in run.losses(model):
        loss.backward()
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            model.head.weight[1, 2] = 0.75


@idiom()
def foreach_edit(run: IdiomRun) -> None:
    model, opt = run.sgd()
    for loss in run.losses(model):
        loss.backward()
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            torch._foreach_mul_(list(model.parameters()), 0.8)


@idiom()
def exponential_noise_on_weights(run: IdiomRun) -> None:
    """Langevin dynamics, with the same generator on all ranks."""
    model, opt = run.sgd()
    generator = torch.Generator().manual_seed(3)
    for loss in run.losses(model):
        loss.backward()
        opt.step()
        opt.zero_grad()
        for p in model.parameters():
            p.data.add_(torch.randn(p.shape, generator=generator), alpha=0.05)
