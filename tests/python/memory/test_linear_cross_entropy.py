"""linear_cross_entropy: torch's numbers up to rounding, without whole logits; errors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import zcomm
from zcomm.planning import saved_nbytes, work_of

Tensor = torch.Tensor
WORDS, WIDTH = 37, 8
EPS = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2e-2}


def made(dtype: torch.dtype, bias: bool, *shape: int, seed: int = 0) -> tuple[list[Tensor], Tensor]:
    """Make inputs, weight and bias, and targets, one of them ignored."""
    draw = torch.Generator().manual_seed(seed)
    sizes = [(*shape, WIDTH), (WORDS, WIDTH), *([(WORDS,)] if bias else [])]
    leaves = [torch.randn(size, generator=draw).to(dtype).requires_grad_() for size in sizes]
    target = torch.randint(0, WORDS, shape, generator=draw)
    target.view(-1)[1:2] = -100
    return leaves, target


def ours(leaves: list[Tensor], target: Tensor, **options: Any) -> Tensor:
    x, weight, *bias = leaves
    return zcomm.linear_cross_entropy(x, weight, target, linear_bias=bias[0] if bias else None, **options)


def torchs(leaves: list[Tensor], target: Tensor, **options: Any) -> Tensor:
    x, weight, *bias = leaves
    logits = F.linear(x, weight, bias[0] if bias else None).flatten(0, -2)
    loss = F.cross_entropy(logits, target.flatten(), **options)
    return loss.view(target.shape) if loss.dim() else loss


@pytest.mark.parametrize("dtype", list(EPS))
@pytest.mark.parametrize("block_rows", [1, 10, 37, 5000])
def test_the_numbers_of_float64(dtype: torch.dtype, block_rows: int) -> None:
    for bias, smoothing, reduction in itertools.product((True, False), (0.0, 0.1, 1.0), ("mean", "sum", "none")):
        options = {"label_smoothing": smoothing, "reduction": reduction}
        leaves, target = made(dtype, bias, 3, 5)
        exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
        loss, wanted = ours(leaves, target, block_rows=block_rows, **options), torchs(exact, target, **options)
        assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        slope = torch.randn(wanted.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        grads = torch.autograd.grad(loss, leaves, slope.to(loss.dtype))
        found = [(loss, wanted), *zip(grads, torch.autograd.grad(wanted, exact, slope), strict=True)]
        for name, (a, b) in zip(("loss", "input", "weight", "bias"), found, strict=False):
            far = float((a.detach().double() - b.detach()).norm() / b.detach().norm())
            assert far < EPS[dtype], (name, bias, smoothing, reduction, far)
        assert [grad.dtype for grad in grads] == [dtype] * len(leaves)


def test_gradients_by_differences() -> None:
    leaves, target = made(torch.float64, True, 4)
    torch.autograd.gradcheck(lambda *given: ours(list(given), target, block_rows=10, label_smoothing=0.2), leaves)


def test_large_logits_and_masked_rows() -> None:
    leaves, target = made(torch.float32, True, 6)
    with torch.no_grad():
        leaves[0] *= 300
        leaves[2][:20] = -torch.inf  # the first blocks as a whole
    target = target.clamp(min=0) % 17 + 20
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    loss, wanted = ours(leaves, target, block_rows=7), torchs(exact, target)
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=0)
    grads = torch.autograd.grad(loss, leaves)
    for grad, exactly in zip(grads, torch.autograd.grad(wanted, exact), strict=True):
        torch.testing.assert_close(grad.double(), exactly, rtol=1e-5, atol=1e-5)


def test_what_nothing_counts() -> None:
    leaves, target = made(torch.float32, False, 3)
    none = torch.full_like(target, -100)
    assert ours(leaves, none).isnan() and torchs(leaves, none).isnan(), "as torch's"
    assert ours(leaves, none, reduction="sum") == 0
    one = torch.tensor([3, 4, 3])
    assert (ours(leaves, one, ignore_index=3, reduction="none") == 0).tolist() == [True, False, True]
    assert torch.equal(ours(leaves, none, reduction="none"), torch.zeros(3))
    x = leaves[0]
    with torch.no_grad():
        x[1] = torch.nan  # of the ignored token
    loss = ours(leaves, target)
    assert loss.isfinite() and torch.autograd.grad(loss, x)[0].isfinite().all()


def test_only_what_needs_a_gradient_gets_one() -> None:
    leaves, target = made(torch.float32, True, 5)
    for needed in itertools.product((True, False), repeat=3):
        given = [leaf.detach().clone().requires_grad_(need) for leaf, need in zip(leaves, needed, strict=True)]
        loss = ours(given, target)
        assert loss.requires_grad is any(needed)
        if any(needed):
            loss.backward()
        assert [leaf.grad is not None for leaf in given] == list(needed)
    with torch.no_grad():
        assert not ours(leaves, target).requires_grad


def test_autocast() -> None:
    leaves, target = made(torch.float32, True, 5)
    narrow = [leaf.detach().bfloat16().requires_grad_() for leaf in leaves]
    with torch.autocast("cpu", torch.bfloat16):
        loss = ours(leaves, target, block_rows=10)
    assert torch.equal(loss, ours(narrow, target, block_rows=10))
    grads = torch.autograd.grad(loss, leaves)
    assert [grad.dtype for grad in grads] == [torch.float32] * 3
    torch.testing.assert_close(grads[1], torchs_grad(leaves, target), rtol=0.1, atol=1e-2)


def torchs_grad(leaves: list[Tensor], target: Tensor) -> Tensor:
    return torch.autograd.grad(torchs(leaves, target), leaves[1])[0]


def test_it_is_no_part_of_compiled_code() -> None:
    (x, weight), target = made(torch.float32, False, 5)

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        return 2 * zcomm.linear_cross_entropy(torch.tanh(x), weight, target, block_rows=10)

    compiled = torch.compile(loss, backend="eager")
    for ours_now, plain in zip(
        torch.autograd.grad(compiled(x, weight), (x, weight)),
        torch.autograd.grad(loss(x, weight), (x, weight)),
        strict=True,
    ):
        assert torch.equal(ours_now, plain)


class Largest(TorchDispatchMode):
    """Count the elements of the largest tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.count = max([self.count, *(t.numel() for t in [made] if isinstance(t, Tensor))])
        return made


@pytest.mark.parametrize("words", [400, 4000])
def test_logits_are_never_whole(words: int) -> None:
    x, weight = torch.randn(64, 4, requires_grad=True), torch.randn(words, 4, requires_grad=True)
    target = torch.randint(0, words, (64,))
    with Largest() as seen:
        zcomm.linear_cross_entropy(x, weight, target, block_rows=100).backward()
    assert seen.count == max(64 * 100, words * 4), "a block of logits, or the weight's gradient"
    with Largest() as seen:
        F.cross_entropy(x @ weight.t(), target).backward()
    assert seen.count >= 64 * words, "torch has all"


class Head(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(WORDS, WIDTH))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return zcomm.linear_cross_entropy(x, self.weight, target)


def test_it_can_be_traced() -> None:
    with torch.device("meta"):
        head, x, target = Head(), torch.zeros(5, WIDTH), torch.zeros(5, dtype=torch.int64)
        assert saved_nbytes(head, x, target) < 5 * WORDS * 4
        assert work_of(head, x, target).flops == 2 * 2 * 5 * WORDS * WIDTH + 2 * 5 * WORDS * WIDTH


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda x, w, t: (x, w[:, :7], t), ValueError, "linear_weight [37, 7] must be [..., width] and [vocabulary"),
        (lambda x, w, t: (x, w[0], t), ValueError, "linear_weight [8] must be"),
        (lambda x, w, t: (x, w, t.float()), TypeError, "target is torch.float32; it must be int64"),
        (lambda x, w, t: (x, w, t[:2]), ValueError, "target [2] must have the shape [5] of input"),
        (lambda x, w, t: (x.double(), w, t), TypeError, "linear_weight is torch.float32, and input is torch.float64"),
        (lambda x, w, t: (x, w, t + 40), IndexError, "is out of bounds: linear_weight has 37 rows"),
        (lambda x, w, t: (x, w, t - 90), IndexError, "out of bounds"),
    ],
)
def test_wrong_tensors(call: Callable[..., Any], kind: type[Exception], message: str) -> None:
    (x, weight), target = made(torch.float32, False, 5)
    with pytest.raises(kind) as caught:
        zcomm.linear_cross_entropy(*call(x, weight, target.clamp(min=0)))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reduction": "max"}, "reduction='max'; use 'mean', 'sum', 'none'"),
        ({"label_smoothing": 1.5}, "label_smoothing=1.5 must be in [0, 1]"),
        ({"block_rows": 0}, "block_rows=0 must be a whole number, at least 1"),
        ({"linear_bias": torch.zeros(3)}, "linear_bias [3] must be [37]"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    (x, weight), target = made(torch.float32, False, 5)
    with pytest.raises(ValueError) as caught:
        zcomm.linear_cross_entropy(x, weight, target, **options)
    assert message in str(caught.value)


def test_a_second_derivative_is_an_error() -> None:
    leaves, target = made(torch.float32, False, 5)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(ours(leaves, target), leaves[0], create_graph=True)
