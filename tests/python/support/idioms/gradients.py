"""Gradients between backward and step: scaling, clipping, masks, noise, reading, setting."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from idioms.run import OUT, WIDTH, IdiomRun, squared_error
from idioms.table import HALF, idiom


@idiom(precisions=HALF)
def plain_loop(run: IdiomRun) -> None:
    model, opt = run.sgd()
    for loss in run.losses(model, 5):
        opt.zero_grad()
        loss.backward()
        opt.step()


@idiom(precisions=HALF)
def scale_gradients(run: IdiomRun) -> None:
    """Unscale by hand."""
    model, opt = run.sgd()
    for loss in run.losses(model):
        loss.backward()
        for p in model.parameters():
            if p.grad is not None:
                p.grad.mul_(0.25)
        opt.step()
        opt.zero_grad()


@idiom()
def scale_gradients_by_foreach(run: IdiomRun) -> None:
    model, opt = run.sgd()
    for loss in run.losses(model):
        loss.backward()
        torch._foreach_mul_([p.grad for p in model.parameters() if p.grad is not None], 0.25)
        opt.step()
        opt.zero_grad()


@idiom()
def scale_gradients_by_a_function(run: IdiomRun) -> None:
    model, opt = run.sgd()
    for loss in run.losses(model):
        loss.backward()
        for p in model.parameters():
            if p.grad is not None:
                p.grad.apply_(lambda value: 0.25 * value)
        opt.step()
        opt.zero_grad()


@idiom()
def divide_gradients_out_of_place(run: IdiomRun) -> None:
    model, opt = run.sgd()
    for loss in run.losses(model):
        loss.backward()
        for p in model.parameters():
            if p.grad is not None:
                p.grad = p.grad / 4
        opt.step()
        opt.zero_grad()


@idiom(precisions=HALF)
def clip_by_norm(run: IdiomRun) -> None:
    model, opt = run.sgd()
    for loss in run.losses(model):
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), 0.2)
        if run.precision != "fp16":  # there of the scaled gradients
            run.note("norm", norm)
        opt.step()
        opt.zero_grad()


@idiom()
def clip_by_infinity_norm(run: IdiomRun) -> None:
    model, opt = run.sgd()
    for loss in run.losses(model):
        loss.backward()
        run.note("norm", clip_grad_norm_(model.parameters(), 0.05, norm_type=float("inf")))
        opt.step()
        opt.zero_grad()


@idiom()
def clip_without_foreach(run: IdiomRun) -> None:
    model, opt = run.sgd()
    for loss in run.losses(model):
        loss.backward()
        run.note("norm", clip_grad_norm_(model.parameters(), 0.2, foreach=False))
        opt.step()
        opt.zero_grad()


@idiom()
def clip_group_by_group(run: IdiomRun) -> None:
    """Another limit for the head."""
    model, opt = run.sgd()
    for loss in run.losses(model):
        loss.backward()
        run.note("head", clip_grad_norm_(model.head.parameters(), 0.05))
        run.note("rest", clip_grad_norm_([*model.stem.parameters(), *model.blocks.parameters()], 0.1))
        opt.step()
        opt.zero_grad()


@idiom()
def clip_each_parameter(run: IdiomRun) -> None:
    model, opt = run.sgd()
    for loss in run.losses(model):
        loss.backward()
        for p in model.parameters():
            clip_grad_norm_(p, 0.05)
        opt.step()
        opt.zero_grad()


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


@idiom()
def clip_by_value(run: IdiomRun) -> None:
    model, opt = run.sgd()
    for loss in run.losses(model):
        loss.backward()
        clip_grad_value_(model.parameters(), 0.02)
        opt.step()
        opt.zero_grad()


@idiom()
def clamp_gradients(run: IdiomRun) -> None:
    model, opt = run.sgd()
    for loss in run.losses(model):
        loss.backward()
        for p in model.parameters():
            if p.grad is not None:
                p.grad.clamp_(-0.02, 0.02)
        opt.step()
        opt.zero_grad()


@idiom()
def norms_for_the_log(run: IdiomRun) -> None:
    model, opt = run.sgd()
    for loss in run.losses(model):
        loss.backward()
        for p in model.parameters():
            run.note("norm", p.grad.norm())
        opt.step()
        opt.zero_grad()


@idiom()
def total_norm_of_stacked_norms(run: IdiomRun) -> None:
    model, opt = run.sgd()
    for loss in run.losses(model):
        loss.backward()
        norms = [p.grad.detach().data.norm(2) for p in model.parameters() if p.grad is not None]
        run.note("total", torch.stack(norms).norm(2), sum(norm.item() ** 2 for norm in norms) ** 0.5)
        opt.step()
        opt.zero_grad()


@idiom()
def histogram_of_gradients(run: IdiomRun) -> None:
    model, opt = run.sgd()
    for loss in run.losses(model):
        loss.backward()
        counts = sum(torch.histc(p.grad.detach().float(), 8, -1.0, 1.0) for p in model.parameters())
        run.note("counts", counts)
        opt.step()
        opt.zero_grad()


@idiom()
def statistics_of_gradients(run: IdiomRun) -> None:
    model, opt = run.sgd()
    for loss in run.losses(model):
        loss.backward()
        for p in model.parameters():
            run.note("statistics", p.grad.abs().mean(), p.grad.max(), p.grad.std())
        opt.step()
        opt.zero_grad()


@idiom()
def masked_gradients(run: IdiomRun) -> None:
    """Rows of a weight that are not to be trained."""
    model, opt = run.sgd()
    mask = torch.ones(OUT, WIDTH)
    mask[1] = 0.0
    for loss in run.losses(model):
        loss.backward()
        if model.head.weight.grad is not None:
            model.head.weight.grad.mul_(mask)
        opt.step()
        opt.zero_grad()


@idiom()
def rows_of_gradients_zeroed(run: IdiomRun) -> None:
    """Zero rows by index, as for the embeddings of tokens that stay."""
    model, opt = run.sgd()
    for loss in run.losses(model):
        loss.backward()
        if model.head.weight.grad is not None:
            model.head.weight.grad[1] = 0.0
        opt.step()
        opt.zero_grad()


@idiom()
def noise_on_gradients(run: IdiomRun) -> None:
    """arXiv:1511.06807; the generator is seeded alike on all ranks."""
    model, opt = run.sgd()
    generator = torch.Generator().manual_seed(9)
    for loss in run.losses(model):
        loss.backward()
        for p in model.parameters():
            if p.grad is not None:
                p.grad.add_(torch.randn(p.shape, generator=generator), alpha=0.1)
        opt.step()
        opt.zero_grad()


@idiom()
def centralised_gradients(run: IdiomRun) -> None:
    """arXiv:2004.01461."""
    model, opt = run.sgd()
    for loss in run.losses(model):
        loss.backward()
        for p in model.parameters():
            if p.grad is not None and p.dim() > 1:
                p.grad.sub_(p.grad.mean(dim=1, keepdim=True))
        opt.step()
        opt.zero_grad()


@idiom()
def signs_of_gradients(run: IdiomRun) -> None:
    model, opt = run.sgd(lr=0.01)
    for loss in run.losses(model):
        loss.backward()
        for p in model.parameters():
            if p.grad is not None:
                p.grad.sign_()
        opt.step()
        opt.zero_grad()


@idiom()
def adaptive_clipping(run: IdiomRun) -> None:
    """arXiv:2102.06171, as timm's: by the ratio of a gradient's norm to its parameter's."""
    model, opt = run.sgd()
    for loss in run.losses(model):
        loss.backward()
        for p in model.parameters():
            if p.grad is None:
                continue
            limit = p.detach().norm().clamp(min=1e-3) * 0.01
            norm = p.grad.norm()
            if norm > limit:
                p.grad.mul_(limit / norm)
        opt.step()
        opt.zero_grad()


@idiom()
def weight_decay_on_the_gradient(run: IdiomRun) -> None:
    model, opt = run.sgd()
    for loss in run.losses(model):
        loss.backward()
        for p in model.parameters():
            if p.grad is not None:
                p.grad.add_(p.data, alpha=0.5)
        opt.step()
        opt.zero_grad()


@idiom()
def gradient_set_to_none(run: IdiomRun) -> None:
    """Drop a parameter's gradient: the parameter is left out of this step."""
    model, opt = run.sgd(weight_decay=0.1)
    for number, loss in enumerate(run.losses(model, 4)):
        loss.backward()
        if number % 2:
            model.head.weight.grad = None
        opt.step()
        opt.zero_grad()


@idiom()
def gradient_zeroed_by_hand(run: IdiomRun) -> None:
    model, opt = run.sgd()
    for number, loss in enumerate(run.losses(model, 4)):
        loss.backward()
        if number % 2 and model.head.weight.grad is not None:
            model.head.weight.grad.zero_()
        opt.step()
        opt.zero_grad()


@idiom()
def gradient_data_assigned(run: IdiomRun) -> None:
    model, opt = run.sgd()
    for loss in run.losses(model):
        loss.backward()
        for p in model.parameters():
            p.grad.data = p.grad.data.clamp(-0.05, 0.05)
            p.grad.data.mul_(0.5)
        opt.step()
        opt.zero_grad()


@idiom()
def gradients_averaged_again(run: IdiomRun) -> None:
    """Run a loop from before DistributedDataParallel, around gradients that are averaged already."""
    model, opt = run.sgd()
    for loss in run.losses(model):
        loss.backward()
        for p in model.parameters():
            if run.dist is not None:
                run.dist.all_reduce(p.grad.data)
                p.grad.data /= run.world_size
                run.dist.broadcast(p.grad, 0)
        opt.step()
        opt.zero_grad()


@idiom()
def assigned_gradients(run: IdiomRun) -> None:
    """torch.autograd.grad, and p.grad set by the program."""
    model, opt = run.sgd()
    for loss in run.losses(model):
        parameters = list(model.parameters())
        for p, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.grad = grad
        opt.step()
        opt.zero_grad()


@idiom()
def assigned_gradients_of_one_part(run: IdiomRun) -> None:
    model, opt = run.sgd()
    for loss in run.losses(model):
        parameters = list(model.head.parameters())
        for p, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.grad = 0.5 * grad
        opt.step()
        opt.zero_grad()


@idiom()
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
        for p, a, b in zip(parameters, *grads, strict=True):
            p.grad = a - min(float(dot / square), 0.0) * b
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


@idiom()
def gradient_read_as_a_tensor(run: IdiomRun) -> None:
    """Copy a gradient out for a plot."""
    model, opt = run.sgd()
    for loss in run.losses(model):
        loss.backward()
        run.note("head", model.head.weight.grad.detach().clone().cpu())
        opt.step()
        opt.zero_grad()


@idiom()
def gradient_to_numpy(run: IdiomRun) -> None:
    model, opt = run.sgd()
    for loss in run.losses(model):
        loss.backward()
        run.note("head", torch.from_numpy(model.head.weight.grad.detach().cpu().numpy().copy()))
        opt.step()
        opt.zero_grad()


@idiom()
def finite_check(run: IdiomRun) -> None:
    """Leave out steps with gradients that are not finite, by the program."""
    model, opt = run.sgd()
    for number in range(3):
        run.loss(model, number, scale=float("nan") if number == 1 else 1.0).backward()
        finite = all(bool(torch.isfinite(p.grad).all()) for p in model.parameters() if p.grad is not None)
        run.note("finite", finite)
        if finite:
            opt.step()
        opt.zero_grad()


@idiom()
def mean_of_gradients_by_hand(run: IdiomRun) -> None:
    """Average gradients that are the ranks' mean already: it changes nothing."""
    model, opt = run.sgd()
    for loss in run.losses(model):
        loss.backward()
        for p in model.parameters():
            if run.dist is not None and p.grad is not None:
                run.dist.all_reduce(p.grad)
                p.grad.div_(run.world_size)
        opt.step()
        opt.zero_grad()


@idiom()
def flat_gradients(run: IdiomRun) -> None:
    model, opt = run.sgd()
    for loss in run.losses(model):
        loss.backward()
        run.note("flat", torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        opt.step()
        opt.zero_grad()


@idiom()
def agreement_of_gradients(run: IdiomRun) -> None:
    """Compute the cosine of two steps' gradients."""
    model, opt = run.sgd()
    before: list[torch.Tensor] | None = None
    for loss in run.losses(model):
        loss.backward()
        grads = [p.grad.detach().clone() for p in model.parameters()]
        if before is not None:
            run.note("dot", sum((a * b).sum() for a, b in zip(before, grads, strict=True)))
        before = grads
        opt.step()
        opt.zero_grad()
