"""Cross entropy of a linear layer's outputs, block by block of the vocabulary: the logits are never whole.

[Note: loss in blocks] Forward computes the logits of one block of the weight's rows at a time. Per token it keeps the
maximum so far, the sum of exponentials under it, and the target's logit. Backward recomputes each block's logits,
overwrites them with their gradient, and adds its part to the inputs' gradient. Logits have the dtype of the inputs, as
the layer's output would. Sums over the vocabulary are fp32 (fp64 for fp64 inputs). Blocks have a fixed number of rows,
and the bits depend only on it, not on stage or tier.
Memory: tokens x BLOCK_ROWS logits a few times, and the weight's gradient, or blocks of it if the weight is gathered by
rows. Arithmetic: 8 operations per weight and token, against 6 with whole logits. A weight by rows with other uses
takes 10, because its gradient then needs the logits once more.
Source: online softmax (Milakov and Gimelshein, arXiv:1805.02867); Cut Cross-Entropy (Wijmans et al., arXiv:2411.09009).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch

from zcomm.comm.dynamo import skip

BLOCK_ROWS = 2048
_REDUCTIONS = ("mean", "sum", "none")


def linear_cross_entropy(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    *,
    linear_bias: torch.Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    block_rows: int = BLOCK_ROWS,
) -> torch.Tensor:
    """Compute ``cross_entropy(linear(input, linear_weight, linear_bias), target)`` without whole logits.

    input: [..., width]. linear_weight: [vocabulary, width]. One that stage 3 has sharded is gathered for forward and
    backward, as for its module. target: int64 [...], class numbers. linear_bias: [vocabulary].
    reduction, ignore_index, label_smoothing: as of torch's cross_entropy. block_rows: rows of the weight at a time; the
    memory for logits follows it. A weight that is gathered by rows has so many rows in memory.

    Returns: a scalar, or losses of the shape of ``target`` with reduction "none"; fp32, in fp64 for fp64 inputs.
    Raises: ValueError, TypeError naming the argument; IndexError naming a target outside of the vocabulary;
    RuntimeError from a second derivative (``create_graph=True``).
    """
    _check(input, linear_weight, target, linear_bias, reduction, label_smoothing, block_rows)
    vocabulary, width = linear_weight.shape
    flat, classes = input.reshape(-1, width), target.reshape(-1)
    counted = classes != ignore_index
    _check_classes(classes, counted, vocabulary)
    rows = _rows_of(linear_weight)
    options = (counted, float(label_smoothing), block_rows, rows)
    with _in_use(linear_weight if rows is None else None) as note, _in_use(linear_bias) as note_bias:
        tensors = (flat, linear_weight, linear_bias, classes)
        losses: torch.Tensor = _Losses.apply(*tensors, *options)  # type: ignore[no-untyped-call]
        note(losses)
        note_bias(losses)
    if reduction == "none":
        return losses.view(target.shape)
    total = losses.sum()
    return total if reduction == "sum" else total / counted.sum()


linear_cross_entropy._torchdynamo_disable = True  # type: ignore[attr-defined]  # not part of a caller's graph
skip(linear_cross_entropy.__code__)


def _check(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    reduction: str,
    label_smoothing: float,
    block_rows: int,
) -> None:
    name = "linear_cross_entropy"
    if weight.dim() != 2 or input.dim() < 1 or input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{name}: input {list(input.shape)} and linear_weight {list(weight.shape)} must be [..., width] and "
            "[vocabulary, width]"
        )
    if target.dtype != torch.int64:
        raise TypeError(f"{name}: target is {target.dtype}; it must be int64, class numbers")
    if target.shape != input.shape[:-1]:
        raise ValueError(f"{name}: target {list(target.shape)} must have the shape {list(input.shape[:-1])} of input")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{name}: linear_bias {list(bias.shape)} must be [{weight.shape[0]}]")
    for other, tensor in (("linear_weight", weight), ("linear_bias", bias)):
        if tensor is not None and tensor.dtype != input.dtype and not _is_autocast(input.device.type):
            raise TypeError(f"{name}: {other} is {tensor.dtype}, and input is {input.dtype}: they must be the same")
    if reduction not in _REDUCTIONS:
        raise ValueError(f"{name}: reduction={reduction!r}; use {', '.join(map(repr, _REDUCTIONS))}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"{name}: label_smoothing={label_smoothing!r} must be in [0, 1]")
    if not isinstance(block_rows, int) or isinstance(block_rows, bool) or block_rows < 1:
        raise ValueError(f"{name}: block_rows={block_rows!r} must be a whole number, at least 1")


def _check_classes(classes: torch.Tensor, counted: torch.Tensor, vocabulary: int) -> None:
    wrong = ((classes < 0) | (classes >= vocabulary)) & counted
    if not classes.is_meta and bool(wrong.any()):
        raise IndexError(
            f"linear_cross_entropy: target {int(classes[wrong][0])} is out of bounds: linear_weight has {vocabulary} "
            "rows"
        )


def _is_autocast(kind: str) -> bool:
    return kind != "meta" and torch.is_autocast_enabled(kind)


def _without_autocast(kind: str) -> Any:
    return torch.autocast(kind, enabled=False) if kind != "meta" else nullcontext()


def _ignore(losses: torch.Tensor) -> None:
    """Note nothing: an ordinary weight needs no gather before backward."""


def _in_use(weight: torch.Tensor | None) -> Any:
    """Enter the use of a sharded weight (zero/sharded/param.py); yields the function to call with ``losses``."""
    use = getattr(weight, "_zcomm_in_use", None)
    return nullcontext(_ignore) if use is None else use()


def _rows_of(weight: torch.Tensor) -> Any:
    """Return the rows of a weight that is gathered in blocks of them (zero/rows/ops.py); else None."""
    rows = getattr(weight, "_zcomm_rows", None)
    return None if rows is None else rows()


class _Losses(torch.autograd.Function):
    """Losses of tokens [T] from inputs [T, width]; 0 for an ignored token."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        classes: torch.Tensor,
        counted: torch.Tensor,
        smoothing: float,
        block_rows: int,
        rows: Any,
    ) -> torch.Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if _is_autocast(kind) else x.dtype
        blocks = _Blocks(dtype, classes, block_rows, rows)
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        highest = torch.full(classes.shape, -torch.inf, dtype=exact, device=x.device)
        total, of_target, every = (torch.zeros_like(highest) for _ in range(3))
        with _without_autocast(kind):
            for begin, logits, _ in blocks.logits(x, weight, bias, exact):
                column, is_here = blocks.targets(begin, logits.shape[1])
                of_target = torch.where(is_here, logits.gather(1, column[:, None])[:, 0], of_target)
                if smoothing:
                    every += logits.sum(1)
                above = torch.maximum(highest, logits.amax(1))
                above = above.masked_fill(above == -torch.inf, 0.0)  # rows that a bias has masked
                total = total * (highest - above).exp() + logits.sub_(above[:, None]).exp_().sum(1)
                highest = above
        logs = highest + total.log()
        bias = None if bias is None else bias.detach()  # a parameter may be a stand-in when backward comes
        if rows is not None:
            rows.used_by(ctx)
        ctx.save_for_backward(x, None if rows is not None else weight.detach(), bias, counted, logs)
        ctx.blocks, ctx.smoothing, ctx.form, ctx.rows = blocks, smoothing, (weight.shape, weight.dtype), rows
        losses = logs - (1 - smoothing) * of_target - (smoothing / weight.shape[0]) * every
        return losses.masked_fill_(~counted, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # else a penalty on these gradients would have no gradient
            raise RuntimeError(
                "linear_cross_entropy has no second derivative (create_graph=True): use F.linear and F.cross_entropy"
            )
        x, weight, bias, counted, logs = ctx.saved_tensors
        blocks, smoothing, (shape, dtype) = ctx.blocks, ctx.smoothing, ctx.form
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x = torch.zeros(x.shape, dtype=logs.dtype, device=x.device) if needs_x else None
        grad_bias = torch.empty_like(bias) if needs_bias else None
        scale = grad.to(logs.dtype).masked_fill(~counted, 0.0)

        def slope_of(begin: int, logits: torch.Tensor) -> torch.Tensor:
            """Compute the gradient of a block's logits in place."""
            column, is_here = blocks.targets(begin, logits.shape[1])
            slope = logits.sub_(logs[:, None]).exp_()
            if smoothing:
                slope -= smoothing / shape[0]
            slope.scatter_add_(1, column[:, None], is_here[:, None] * slope.new_full((), smoothing - 1))
            return slope.mul_(scale[:, None]).masked_fill_(~counted[:, None], 0.0)

        def make(begin: int, end: int) -> torch.Tensor:
            """Compute rows of the weight's gradient, from recomputed logits."""
            ((_, logits, _),) = blocks.logits(x, weight, bias, logs.dtype, only=(begin, end))
            made: torch.Tensor = (slope_of(begin, logits).to(blocks.dtype).t() @ x.to(blocks.dtype)).to(dtype)
            return made

        grad_weight = writer = None
        if needs_weight and ctx.rows is None:
            grad_weight = torch.empty(shape, dtype=dtype, device=x.device)
        elif needs_weight:
            writer = ctx.rows.writer(ctx)
            if writer is None:
                grad_weight = ctx.rows.give(ctx, make, gathers=True)
        if writer is None and not needs_x and not needs_bias and ctx.rows is not None:
            return None, grad_weight, None, None, None, None, None, None
        with _without_autocast(x.device.type):
            inputs = x.to(blocks.dtype)
            for begin, logits, block in blocks.logits(x, weight, bias, logs.dtype):
                slope = slope_of(begin, logits)
                if grad_bias is not None:
                    grad_bias[begin : begin + slope.shape[1]] = slope.sum(0)
                narrow, end = slope.to(blocks.dtype), begin + slope.shape[1]
                if grad_x is not None:
                    grad_x += narrow @ block.to(blocks.dtype)
                if writer is not None:
                    writer.put(begin, (narrow.t() @ inputs).to(dtype))
                elif grad_weight is not None and ctx.rows is None:
                    grad_weight[begin:end] = narrow.t() @ inputs
        return None if grad_x is None else grad_x.to(x.dtype), grad_weight, grad_bias, None, None, None, None, None


class _Blocks:
    """Blocks of ``count`` rows of a weight. dtype: of products. Each token's target lies in one block.

    rows: gathers them; None: the weight is whole.
    """

    def __init__(self, dtype: torch.dtype, classes: torch.Tensor, count: int, rows: Any) -> None:
        self.dtype, self._count, self._classes, self._rows = dtype, count, classes, rows

    def logits(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        exact: torch.dtype,
        only: tuple[int, int] | None = None,
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Yield the first row of each block, logits [T, rows] of dtype ``exact``, which the caller may change, and the
        block. only: of these rows, which are gathered."""
        x = x.to(self.dtype)
        for begin, end, block in self._cut(weight) if only is None else self._rows.ranges([only]):
            part = None if bias is None else bias[begin:end].to(self.dtype)
            yield begin, torch.nn.functional.linear(x, block.to(self.dtype), part).to(exact), block

    def _cut(self, weight: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor]]:
        if self._rows is not None:
            yield from self._rows.blocks(self._count)
            return
        for begin in range(0, weight.shape[0], self._count):
            end = min(begin + self._count, weight.shape[0])
            yield begin, end, weight[begin:end]

    def targets(self, begin: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return for each token the column of its target in the block, and whether the target is in the block."""
        column = self._classes - begin
        return column.clamp(0, count - 1), (column >= 0) & (column < count)
