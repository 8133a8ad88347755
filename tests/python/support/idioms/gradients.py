"""Gradients between backward and step: scaling, clipping, masks, noise, reading, setting."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from idioms.run import IdiomRun, Net, squared_error
from idioms.table import GRADIENTS, HALF, before_step, idiom


@idiom(precisions=HALF, places=GRADIENTS)
def plain_loop(run: IdiomRun) -> None:
    model, opt = run.sgd()
    for loss in run.losses(model, 5):
        opt.zero_grad()
        loss.backward()
        opt.step()


# ---- changed in place ----
@before_step(GRADIENTS, HALF)
def scaled_gradients(model: Net, step: int) -> None:
    """Unscale by hand."""
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.25)


@before_step()
def gradients_scaled_by_a_function(model: Net, step: int) -> None:
    for p in model.parameters():
        p.grad.apply_(lambda value: 0.25 * value)


@before_step(GRADIENTS, lr=0.01)
def gradients_changed_by_foreach(model: Net, step: int) -> None:
    grads = [p.grad for p in model.parameters()]
    torch._foreach_sign_(grads)
    grads[1].sign_()
    torch._foreach_mul_(grads, 0.1)
    torch._foreach_add_(grads, [torch.ones(grad.shape) for grad in grads])


@before_step(GRADIENTS)
def out_argument_of_gradients(model: Net, step: int) -> None:
    for p in model.parameters():
        torch.mul(p.grad, 0.5, out=p.grad)


@before_step(GRADIENTS)
def masked_gradients(model: Net, step: int) -> None:
    for at, p in enumerate(model.parameters()):
        mask = torch.rand(p.grad.shape, generator=torch.Generator().manual_seed(at)) < 0.5
        p.grad.mul_(mask) if at % 2 else p.grad.masked_fill_(mask, 0.25)


class Tokens(nn.Module):
    """A table, of which a batch reads a few rows, and sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 9)
        self.layers = nn.Sequential(nn.Linear(9, 33), nn.Tanh(), nn.Linear(33, 17), nn.Tanh(), nn.Linear(17, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.table((3 * x[:, 0]).long() % 11))


@before_step(GRADIENTS, kind=Tokens)
def rows_and_columns_of_gradients(model: Tokens, step: int) -> None:
    """Also as for the embeddings of tokens that stay."""
    table, weight, bias, other, *_ = model.parameters()
    table.grad[0] = 0
    table.grad[3:7].mul_(2)
    table.grad[[1, 9]] = 0.5
    weight.grad[:, 2] *= 3
    weight.grad.t()[4].add_(1)
    weight.grad.view(-1)[::5].zero_()
    bias.grad[bias.grad > 0.1] = 0.1
    for part in other.grad.chunk(4):
        part.neg_()


@before_step(GRADIENTS)
def noise_on_gradients(model: Net, step: int) -> None:
    """arXiv:1511.06807; the generators are seeded alike on all ranks."""
    for at, p in enumerate(model.parameters()):
        noise = torch.randn(p.grad.shape, generator=torch.Generator().manual_seed(at))
        p.grad.add_(noise, alpha=0.1)
        p.grad.addcmul_(noise, noise, value=0.1)
        p.grad.lerp_(noise, 0.1).nan_to_num_(0.0)


@before_step(GRADIENTS)
def centralised_gradients(model: Net, step: int) -> None:
    """arXiv:2004.01461: values that need the whole gradient."""
    for p in model.parameters():
        if p.grad is not None and p.dim() > 1:
            p.grad.sub_(p.grad.mean(dim=1, keepdim=True))


@before_step()
def weight_decay_on_the_gradient(model: Net, step: int) -> None:
    for p in model.parameters():
        p.grad.add_(p.data, alpha=0.5)


@idiom()
def gradients_averaged_again(run: IdiomRun) -> None:
    """Run a loop from before DistributedDataParallel, around gradients that are averaged already."""
    model, opt = run.sgd()

    def average(step: int) -> None:
        for p in model.parameters():
            if run.dist is not None:
                run.dist.all_reduce(p.grad.data)
                p.grad.data /= run.world_size
                run.dist.broadcast(p.grad, 0)
                run.dist.all_reduce(p.grad)
                p.grad.div_(run.world_size)

    run.train(model, opt, before=average)


# ---- clipping ----
@idiom(precisions=HALF, places=GRADIENTS)
def clip_by_norm(run: IdiomRun) -> None:
    model, opt = run.sgd()

    def clip(step: int) -> None:
        norm = clip_grad_norm_(model.parameters(), 0.2)
        assert norm > 0.2
        if run.precision != "fp16":  # there of the scaled gradients
            run.note("norm", norm)

    run.train(model, opt, before=clip)


@before_step(GRADIENTS)
def clip_by_other_norms(model: Net, step: int) -> object:
    norms = [
        clip_grad_norm_(model.parameters(), 0.2, foreach=foreach, error_if_nonfinite=True) for foreach in (True, False)
    ]
    return norms + [clip_grad_norm_(model.parameters(), 0.1, norm_type=kind) for kind in (1.0, 3.0, float("inf"))]


@before_step()
def clip_group_by_group(model: Net, step: int) -> object:
    """Another limit for the head, and for each parameter of the stem."""
    for p in model.stem.parameters():
        clip_grad_norm_(p, 0.05)
    rest = [*model.stem.parameters(), *model.blocks.parameters()]
    return clip_grad_norm_(model.head.parameters(), 0.05), clip_grad_norm_(rest, 0.1)


@idiom()
def clip_with_nonfinite_error(run: IdiomRun) -> None:
    """Leave out the second step, which has an infinite loss."""
    model, opt = run.sgd()
    for number in range(3):
        run.loss(model, number, scale=float("inf") if number == 1 else 1.0).backward()
        try:
            clip_grad_norm_(model.parameters(), 0.2, error_if_nonfinite=True)
        except RuntimeError as error:
            run.note("refused", number, "non-finite" in str(error))
        else:
            opt.step()
        opt.zero_grad()


@before_step(GRADIENTS)
def clip_by_value(model: Net, step: int) -> None:
    clip_grad_value_(model.parameters(), 0.02, foreach=[None, True, False][step])


@before_step()
def adaptive_clipping(model: Net, step: int) -> None:
    """arXiv:2102.06171, as timm's: by the ratio of a gradient's norm to its parameter's."""
    for p in model.parameters():
        limit = p.detach().norm().clamp(min=1e-3) * 0.01
        norm = p.grad.norm()
        if norm > limit:
            p.grad.mul_(limit / norm)


# ---- read ----
@before_step(GRADIENTS)
def norms_of_gradients(model: Net, step: int) -> object:
    """For the log, and for layer-wise clipping as LARS and older recipes have it."""
    norms = [p.grad.detach().data.norm(2) for p in model.parameters()]
    for p, norm in zip(model.parameters(), norms, strict=True):
        others = p.grad.norm(), torch.norm(p.grad, 2), torch.linalg.vector_norm(p.grad)
        assert all(torch.equal(norm, other) for other in others)
        if norm > 0.2:
            p.grad.mul_(0.2 / norm)
    return norms, torch.stack(norms).norm(2), sum(norm.item() ** 2 for norm in norms) ** 0.5


@before_step()
def statistics_of_gradients(model: Net, step: int) -> object:
    grads = [p.grad for p in model.parameters() if p.numel() > 1]
    counts = sum(torch.histc(grad.detach().float(), 8, -1.0, 1.0) for grad in grads)
    return counts, [(grad.abs().mean(), grad.max(), grad.std()) for grad in grads]


@before_step()
def copies_of_gradients(model: Net, step: int) -> object:
    """For a plot, or to compare steps."""
    grad = model.head.weight.grad
    array = torch.from_numpy(grad.detach().cpu().numpy().copy())
    return grad.detach().clone().cpu(), array, torch.cat([p.grad.flatten() for p in model.parameters()])


@idiom(places=GRADIENTS)
def finite_check(run: IdiomRun) -> None:
    """Leave out steps with gradients that are not finite, by the program."""
    model, opt = run.sgd()
    for number in range(3):
        run.loss(model, number, scale=float("nan") if number == 1 else 1.0).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        finite = all(bool(torch.isfinite(grad).all()) for grad in grads)
        nans, infinite = (any(bool(kind(grad).any()) for grad in grads) for kind in (torch.isnan, torch.isinf))
        run.note("finite", len(grads), finite, nans, infinite)
        if finite:
            opt.step()
        opt.zero_grad()


# ---- set by the program ----
@before_step(GRADIENTS)
def divided_gradients(model: Net, step: int) -> None:
    """In place by a tensor, and as a new tensor from the old one."""
    for p in model.parameters():
        p.grad /= torch.tensor(4.0)
        p.grad.data.div_(2.0)
        p.grad = p.grad * 4 + p.grad.clone().square()


@before_step()
def assigned_data_of_gradients(model: Net, step: int) -> None:
    for p in model.parameters():
        p.grad.data = p.grad.data.clamp(-0.05, 0.05)
        p.grad.data.mul_(0.5)
        p.grad.clamp_(-0.02, 0.02)


@before_step(GRADIENTS, steps=4, weight_decay=0.1)
def dropped_gradients(model: Net, step: int) -> None:
    """Leave parameters out of a step; a gradient of zeros is not the same."""
    if step in (1, 2):
        model.head.weight.grad = model.blocks[0].linear.bias.grad = None
    if step == 3:
        model.head.weight.grad.zero_()


@idiom(places=GRADIENTS)
def assigned_gradients(run: IdiomRun) -> None:
    """torch.autograd.grad, and p.grad set by the program; also of only one part."""
    model, opt = run.sgd()
    for number, loss in enumerate(run.losses(model)):
        parameters = list((model.head if number == 1 else model).parameters())
        for p, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.grad = 0.5 * grad
        opt.step()
        opt.zero_grad()


@idiom(places=GRADIENTS)
def gradients_assigned_after_backward(run: IdiomRun) -> None:
    model, opt = run.sgd()
    parameters = list(model.parameters())

    def assign(step: int) -> None:
        grads = torch.autograd.grad(run.loss(model, step + 10), parameters)
        for p, grad in list(zip(parameters, grads, strict=True))[::2]:
            p.grad = grad

    run.train(model, opt, before=assign)


@idiom(places=GRADIENTS)
def gradients_asked_for_between_backward_and_step(run: IdiomRun) -> None:
    model, opt = run.sgd()
    for number in range(3):
        run.loss(model, number).backward()
        torch.autograd.grad(run.loss(model, number + 20), list(model.parameters()))
        assert all(p.grad is not None for p in model.parameters())
        run.loss(model, number + 30).backward()
        opt.step()
        opt.zero_grad()


@idiom(places=GRADIENTS)
def gradients_in_buffers_of_the_program(run: IdiomRun) -> None:
    """Keep the same tensors in p.grad for ever, to which autograd adds."""
    model, opt = run.sgd()
    for p in model.parameters():
        p.grad = torch.zeros(p.shape)
    buffers = [p.grad for p in model.parameters()]
    for loss in run.losses(model):
        loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=False)
        assert all(p.grad is buffer for p, buffer in zip(model.parameters(), buffers, strict=True))
        assert not any(buffer.any() for buffer in buffers)


@idiom(places=GRADIENTS)
def part_of_an_accumulation_dropped(run: IdiomRun) -> None:
    model, opt = run.sgd()
    for number in range(3):
        run.loss(model, 2 * number).backward()
        model.blocks[1].linear.weight.grad = None
        model.stem.weight.grad.mul_(3.0)
        run.loss(model, 2 * number + 1).backward()
        opt.step()
        opt.zero_grad()


@idiom(places=GRADIENTS)
def gradient_surgery(run: IdiomRun) -> None:
    """PCGrad (arXiv:2001.06782) of two losses that are the same on all ranks, so that it commutes with averaging."""
    model, opt = run.sgd()
    parameters = list(model.parameters())
    for number in range(3):
        x, y = torch.ones(2, 5) * (number + 1), torch.tensor([[1.0, -1.0, 0.5], [0.0, 2.0, 1.0]])
        first, second = F.mse_loss(model(x), y), F.l1_loss(model(x), -y)
        grads = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in (first, second)]
        dot = sum((a * b).sum() for a, b in zip(*grads, strict=True))
        square = sum((b * b).sum() for b in grads[1])
        model.zero_grad()
        for p, a, b in zip(parameters, *grads, strict=True):
            p.grad = a - min(float(dot / square), 0.0) * b
        run.note("norm", clip_grad_norm_(parameters, 1e4))
        opt.step()
        opt.zero_grad()


@idiom()
def private_gradients(run: IdiomRun) -> None:
    """DP-SGD (arXiv:1607.00133): a clipped gradient of each sample, summed by the program."""
    model, opt = run.sgd()
    parameters = list(model.parameters())

    def of_samples(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        total = [torch.zeros(0)] * len(parameters)
        for row in range(len(x)):
            grads = torch.autograd.grad(squared_error(model, x[row : row + 1], y[row : row + 1]), parameters)
            factor = (1.0 / torch.stack([g.norm() for g in grads]).norm()).clamp(max=1.0)
            total = [t + g * factor if t.numel() else g * factor for t, g in zip(total, grads, strict=True)]
        return torch.cat([t.flatten() for t in total]) / len(x)

    for number in range(3):
        flat = run.average(of_samples, number)
        at = 0
        for p, size in zip(parameters, [p.numel() for p in parameters], strict=True):
            p.grad = flat[at : at + size].view(p.shape).clone()
            at += size
        opt.step()
        opt.zero_grad()
