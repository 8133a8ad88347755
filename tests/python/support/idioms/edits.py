"""Weights that the program changes itself, around the optimizer's steps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from idioms.run import IN, OUT, WIDTH, IdiomRun, Net
from idioms.table import EDITS, HALF, SHARDED, WEIGHTS, Refusal, before_step, between_steps, idiom


@before_step(WEIGHTS, HALF)
def changed_between_backward_and_step(model: Net, step: int) -> None:
    """Decoupled weight decay by hand, and others."""
    for p in model.parameters():
        p.data.mul_(1 - 0.1 * 2.0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05)


@idiom(places=WEIGHTS)
def changed_between_forward_and_backward(run: IdiomRun) -> None:
    """Edit a weight that backward does not need."""
    model, opt = run.sgd()
    for loss in run.losses(model):
        with torch.no_grad():
            model.head.bias.mul_(0.5)
            model.head.bias.data.add_(0.25)
        loss.backward()
        opt.step()
        opt.zero_grad()


@between_steps(EDITS, HALF)
def scaled_data(model: Net, step: int) -> None:
    for p in model.parameters():
        p.data.mul_(0.9)


@between_steps(EDITS, HALF)
def changed_in_no_grad(model: Net, step: int) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.9)
            p += 0.01
            p.clamp_(-0.3, 0.3)


@between_steps(EDITS, HALF)
def clipped(model: Net, step: int) -> None:
    """Clip the critic of WGAN (arXiv:1701.07875)."""
    for p in model.parameters():
        p.data.clamp_(-0.1, 0.1)


@between_steps(SHARDED)
def added_to_detached(model: Net, step: int) -> None:
    for p in model.parameters():
        p.detach().add_(torch.full_like(p, 0.01), alpha=2)


@between_steps(WEIGHTS)
def changed_by_foreach(model: Net, step: int) -> None:
    params = list(model.parameters())
    with torch.no_grad():
        torch._foreach_mul_(params, 0.9)
        torch._foreach_add_(params, [torch.ones_like(p) for p in params], alpha=0.01)
        torch._foreach_lerp_([p.data for p in params], [torch.zeros(p.shape) for p in params], 0.1)
        ones, scalars = [torch.ones(p.shape) for p in params], torch.linspace(0.0, 0.01, len(params))
        torch._foreach_addcdiv_(params, ones, ones, scalars)


@between_steps(EDITS, HALF)
def assigned_data(model: Net, step: int) -> None:
    """p.data = t, and p.data.copy_ of values from elsewhere. One step trains on before the next such change."""
    for at, p in enumerate(model.parameters() if step != 2 else ()):
        if (at + step) % 2:
            p.data = p.data * 0.8
        else:
            p.data.copy_(torch.linspace(-0.4, 0.1 * step, p.numel()).view(p.shape))
    if step == 1:
        model.head.weight.data = torch.full((OUT, WIDTH), 0.1, dtype=model.head.weight.dtype)


@between_steps(EDITS, HALF)
def changed_by_index(model: Net, step: int) -> None:
    with torch.no_grad():
        model.head.weight[1, 2] = 0.75
        model.stem.weight[0] = 0.5
        model.blocks[1].linear.weight[2, 3:7] = torch.arange(4.0)
        model.blocks[2].linear.weight[::2] = -0.0
        model.stem.bias.zero_()
    model.norm.bias.data.fill_(0.0)
    model.blocks[2].linear.weight.data[:, step] *= 2
    model.blocks[0].linear.weight.data[1].zero_()
    model.blocks[1].linear.bias.data.view(4, 2)[1:3].fill_(0.3)
    model.head.weight.data.t()[0].add_(1.0)


@between_steps(SHARDED)
def changed_by_masks(model: Net, step: int) -> None:
    for p in model.parameters():
        p.data[p.data.abs() < 0.1] = 0.0
        p.data.masked_fill_(p.data > 0.3, 0.3)


@between_steps(EDITS, HALF)
def initialised_again(model: Net, step: int) -> None:
    torch.manual_seed(17 + step)
    if step != 2:
        nn.init.normal_(model.blocks[1].linear.weight, std=0.1)
        nn.init.zeros_(model.head.bias)


@between_steps(WEIGHTS)
def initialised_by_each_function(model: Net, step: int) -> None:
    torch.manual_seed(step)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    nn.init.trunc_normal_(model.head.weight, std=0.1)
    nn.init.orthogonal_(model.stem.weight)
    nn.init.kaiming_normal_(model.blocks[0].linear.weight)
    nn.init.constant_(model.shift, 1.5)
    nn.init.eye_(model.blocks[1].linear.weight)
    model.norm.weight.data.normal_(1.0, 0.1)
    model.blocks[2].linear.reset_parameters()


@between_steps(EDITS, HALF)
def loaded_weights(model: Net, step: int) -> None:
    """Before the first step and in training; one step trains on before the next such change."""
    generator = torch.Generator().manual_seed(step)
    state = {name: torch.randn(p.shape, generator=generator) / 4 for name, p in model.state_dict().items()}
    if step != 2:
        model.load_state_dict(state)


@idiom(places=SHARDED)
def loaded_weights_as_new_parameters(run: IdiomRun) -> None:
    """load_state_dict(assign=True) keeps sharded parameters. With torch the optimizer would train the old ones."""
    model, opt = run.sgd()
    before = list(model.parameters())

    def load(step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        state = {name: torch.randn(p.shape, generator=generator) / 4 for name, p in model.named_parameters()}
        model.load_state_dict(state, assign=run.setting is not None and run.setting.sharded)
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))

    load(3)
    run.train(model, opt, after=load)


@idiom(
    Refusal(
        "RuntimeError", "param group 0 has 13 parameters, and not the 13 that it had", ("*:[012]*", "*:3", "*:3-cpu")
    )
)
def weights_loaded_by_assignment(run: IdiomRun) -> None:
    """load_state_dict(assign=True) of parameters that the optimizer does not know: torch trains the old ones."""
    model, opt = run.sgd()
    model.load_state_dict(run.net(seed=11).state_dict(), assign=True)
    run.trained[0].optimizer.param_groups[0]["params"] = list(model.parameters())
    run.train(model, opt)


@between_steps(WEIGHTS)
def changed_state_dict(model: Net, step: int) -> None:
    state = model.state_dict()
    for at, name in enumerate(state):
        state[name].copy_(torch.full(state[name].shape, 0.05 + 0.01 * step + 0.02 * at))


@between_steps(EDITS, HALF)
def weights_as_a_vector(model: Net, step: int) -> object:
    vector = parameters_to_vector(model.parameters()).detach()
    vector_to_parameters(vector * 0.9, model.parameters())
    return vector


@between_steps(EDITS, HALF)
def other_dtypes_and_back(model: Net, step: int) -> None:
    dtype = model.head.weight.dtype
    model.half()
    assert all(p.dtype == torch.float16 for p in model.parameters())
    model.to(dtype)
    model.double()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.9)
    model.to(dtype)


@between_steps(SHARDED)
def decay_by_the_weight_itself(model: Net, step: int) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(p, alpha=0.01)
            p.data.add_(p.data, alpha=-0.01)


@between_steps(EDITS, HALF)
def renormalised(model: Net, step: int) -> None:
    """Dropout's constraint on incoming weights, and nGPT's rows of unit norm by copy."""
    with torch.no_grad():
        for block in model.blocks:
            norms = block.linear.weight.norm(dim=1, keepdim=True).clamp(min=0.3)
            block.linear.weight.mul_(0.3 / norms)
        model.head.weight.copy_(F.normalize(model.head.weight, dim=-1))
        model.stem.weight.data.div_(model.stem.weight.data.norm(dim=1, keepdim=True))
        for p in (*model.norm.parameters(), model.shift):
            p.div_(p.norm() + 1)


@between_steps(WEIGHTS)
def noise_on_weights(model: Net, step: int) -> None:
    """Langevin dynamics, with the same generator on all ranks."""
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.data.add_(torch.randn(p.shape, generator=generator), alpha=0.05)


@between_steps(WEIGHTS)
def replaced(model: Net, step: int) -> object:
    """Replace by set_ and swap_tensors, in turn."""
    if step % 2:
        torch.utils.swap_tensors(model.head.weight, nn.Parameter(torch.full((OUT, WIDTH), 0.01 * step)))
        torch.utils.swap_tensors(model.stem.bias, nn.Parameter(torch.full((WIDTH,), 0.1)))
    else:
        with torch.no_grad():
            for p in model.parameters():
                p.set_(p.detach() * 0.9)
    return model(torch.ones(2, IN)).detach()


@between_steps(SHARDED)
def out_argument_of_weights(model: Net, step: int) -> None:
    with torch.no_grad():
        torch.mul(model.stem.weight, 0.5, out=model.stem.weight)
        F.relu(model.blocks[0].linear.bias, inplace=True)
        torch.clamp_(model.head.weight, -0.2, 0.2)


@between_steps(SHARDED)
def other_tensors_of_the_memory(model: Net, step: int) -> object:
    w = model.blocks[1].linear.weight
    w.data.as_subclass(torch.Tensor)[0] = 0.2
    taken = torch.zeros(WIDTH, WIDTH).set_(w.data)
    return taken, w.detach().as_subclass(torch.Tensor), nn.Buffer(w.data) * 2


@idiom()
def averaged_weights(run: IdiomRun) -> None:
    """Model averaging (local SGD) of weights that are the same on all ranks; also in the background."""
    model, opt = run.sgd()

    def average(step: int) -> None:
        if run.dist is None:
            return
        for p in model.parameters():
            run.dist.all_reduce(p.data)
            p.data /= run.world_size
            run.dist.broadcast(p.data, 0)
        for work in [run.dist.all_reduce(p.data, async_op=True) for p in model.parameters()]:
            work.wait()
        for p in model.parameters():
            p.data.div_(run.world_size)

    run.train(model, opt, after=average)


@idiom()
def step_by_hand(run: IdiomRun) -> None:
    """`p -= lr * p.grad` and `p.data.add_`, alternating with the optimizer's step."""
    model, opt = run.sgd()
    for number, loss in enumerate(run.losses(model, 5)):
        loss.backward()
        for p in model.parameters():
            if number == 1:
                with torch.no_grad():
                    p -= 0.1 * p.grad
            elif number == 3:
                p.data.add_(p.grad.data, alpha=-0.1)
        if number % 2 == 0:
            opt.step()
        opt.zero_grad()


@idiom()
def sharpness_aware(run: IdiomRun) -> None:
    """SAM (arXiv:2010.01412): as its usual implementation, and with copies of the old weights, as Lightning's users."""
    model, opt = run.sgd()
    for number in range(4):
        run.loss(model, number).backward()
        old, steps = {}, {}
        with torch.no_grad():
            norm = torch.norm(torch.stack([p.grad.norm(2) for p in model.parameters()]), 2)
            for p in model.parameters():
                old[p], steps[p] = p.data.clone(), p.grad * (0.5 / (norm + 1e-12))
                if number % 2:
                    p.add_(p.grad, alpha=float(0.5 / (norm + 1e-12)))
                else:
                    p.add_(steps[p])
        opt.zero_grad()
        run.loss(model, number).backward()
        with torch.no_grad():
            for p in model.parameters():
                if number % 2:
                    p.data = old[p]
                else:
                    p.sub_(steps[p])
        opt.step()
        opt.zero_grad()


@idiom()
def lookahead(run: IdiomRun) -> None:
    """arXiv:1907.08610."""
    model, opt = run.sgd()
    slow = [p.detach().clone() for p in model.parameters()]

    def follow(step: int) -> None:
        if step % 2 == 0:
            return
        with torch.no_grad():
            for s, p in zip(slow, model.parameters(), strict=True):
                s.add_(p.detach() - s, alpha=0.5)
                p.copy_(s)

    run.train(model, opt, 4, after=follow)


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
