"""Operations on a weight that is gathered in blocks of rows: F.linear, F.embedding, and Rows for others.

[Note: rows] A weight by rows remains a stand-in ([Note: stand-ins]). ``F.linear`` gathers a block W_j and computes its
outputs ``x W_j^T``. Its backward gathers the blocks again, and sums ``gy_j W_j`` in fp32 (fp64 for fp64). Blocks are
fixed (blocks.py). Outputs have the bits of the whole weight if the library of matrix products gives a column the same
bits between fewer columns. The same holds for the gradient of the weight, ``gy_j^T x`` ([Note: gradients by blocks]).
The gradient of the inputs has other last bits. ``F.embedding`` takes rows out of the blocks that ranks have indices in,
and gathers no others; its backward needs no weights.
Thread rule: on the thread that runs forward, or the node of backward.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from zcomm import _core
from zcomm.zero.rows.blocks import block_rows, row_blocks, used_ranges, used_rows
from zcomm.zero.rows.grads import RowGrads, RowWriter, no_autocast
from zcomm.zero.rows.weight import RowWeight

_plain: Any = torch._C.DisableTorchFunctionSubclass


class RowKeeper(Protocol):
    """The members of a stand-in's keeper that rows need. edits: changes of weights by the program so far."""

    edits: int

    def name(self, param: nn.Parameter) -> str: ...

    def placeholder(self, param: nn.Parameter) -> torch.Tensor:
        """Return a tensor of its shape, dtype and device, without its values."""

    def stamp(self, param: nn.Parameter) -> object:
        """Return a stamp that differs after each change of the value."""

    def check_open(self, param: nn.Parameter) -> int:
        """Return the parameter's number. Raises: RuntimeError if the keeper has released the values."""


class Weights(Protocol):
    """The members of RowWeights that a use needs."""

    grads: RowGrads

    def read(self, weight: RowWeight, ranges: Sequence[tuple[int, int]]) -> Iterator[torch.Tensor]: ...
    def used_by_ranks(self, weight: RowWeight, used: torch.Tensor) -> torch.Tensor: ...
    def in_forward(self) -> bool: ...
    def take(self, weight: RowWeight, number: int) -> torch.Tensor: ...


class Rows:
    """The rows of one weight, [rows, width], with the weight's values at construction.

    uses: live uses of the weight.
    """

    def __init__(self, weights: Weights, weight: RowWeight, keeper: RowKeeper, uses: weakref.WeakSet[Rows]) -> None:
        self._weights, self._weight, self._keeper, self._uses = weights, weight, keeper, uses
        placeholder = keeper.placeholder(weight.param)
        self.shape, self.dtype, self.device = placeholder.shape, placeholder.dtype, placeholder.device
        self._stamp = keeper.stamp(weight.param)
        self._node: Callable[[], Any] = lambda: None
        uses.add(self)

    @property
    def name(self) -> str:
        return self._keeper.name(self._weight.param)

    def used_by(self, node: Any) -> None:
        """Keep the node of backward that computes the gradient of this use."""
        self._node = weakref.ref(node)  # weak, because the node refers to this object

    def blocks(self, step: int | None = None) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield begin, end, and the rows [begin, end), which the next rows overwrite. Collective.

        step: rows of each range; None: the blocks of row_blocks. Raises: RuntimeError if the weight has changed.
        """
        rows = self.shape[0]
        yield from self.ranges(
            [(at, min(at + step, rows)) for at in range(0, rows, step)]
            if step
            else list(row_blocks(rows, block_rows(self.shape)))
        )

    def used(self, indices: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield as ``blocks``: for each block with ``indices`` of any rank, the pages from its first to its last index.
        Collective. indices: flat."""
        rows = self.shape[0]
        used = self._weights.used_by_ranks(self._weight, used_rows(indices.long().cpu(), rows))
        page = _core.page_nbytes()
        step = page // math.gcd(page, self.shape[1] * self.dtype.itemsize)
        yield from self.ranges(list(used_ranges(used, rows, step)))

    def ranges(self, ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield as ``blocks`` the rows of each range. Collective. Raises: as ``blocks``."""
        if self._keeper.stamp(self._weight.param) != self._stamp:
            raise RuntimeError(
                f"{self.name} has been modified since the forward pass that used it, and backward needs its old values"
            )
        for (begin, end), block in zip(ranges, self._weights.read(self._weight, ranges), strict=True):
            yield begin, end, block

    def run(self, weight: nn.Parameter, func: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
        """Run F.linear or F.embedding with ``weight``, their second argument. None: the call needs the whole weight."""
        if (
            len(self.shape) != 2
            or torch.compiler.is_compiling()
            or torch._C._functorch.peek_interpreter_stack() is not None
        ):
            return None
        if func is F.linear:
            return _run_linear(self, weight, *args, **kwargs)
        return _run_embedding(self, weight, *args, **kwargs) if func is F.embedding else None

    def item(self, index: Any) -> torch.Tensor | None:
        """Return ``weight[index]`` of a weight with three dimensions, for a number or a tensor of numbers. None: the
        call needs the whole weight, because it is outside of a forward, or the weight may need a gradient."""
        several = isinstance(index, torch.Tensor) and index.dtype in (torch.int64, torch.int32) and index.dim() < 2
        if len(self.shape) != 3 or not (several or type(index) is int) or not self._weights.in_forward():
            return None
        with _plain():
            grad = torch.is_grad_enabled()
            if grad and self._weight.param.requires_grad:
                return None
        numbers, count = torch.as_tensor(index).reshape(-1).tolist(), self.shape[0]
        if not all(-count <= number < count for number in numbers):
            raise IndexError(f"{self.name}[...]: an index is out of range: the weight has {count} matrices")
        if not several or index.dim() == 0:
            found = self._weights.take(self._weight, numbers[0] % count)
            return found.to(self.device, copy=grad)  # backward cannot save tensors of inference
        found = torch.empty(len(numbers), *self.shape[1:], dtype=self.dtype, device=self.device)
        for each in sorted({number % count for number in numbers}):
            matrix = self._weights.take(self._weight, each)
            for place in (at for at, number in enumerate(numbers) if number % count == each):
                found[place] = matrix
        return found

    # --- the gradient, in backward ------------------------------------------------------------------------------

    def give(self, node: Any, make: Callable[[int, int], torch.Tensor], gathers: bool = False) -> torch.Tensor | None:
        """Defer the gradient to be computed block by block; return it whole if autograd needs it.

        node: of backward, with the weight as its second input. make: computes rows [begin, end) of the gradient in the
        weight's dtype. gathers: ``make`` is collective.
        """
        grads, index = self._weights.grads, self._weight.index
        if grads.takes(index, node):
            grads.add(index, make, gathers)
            return None
        if not grads.is_wanted(node):
            return None
        whole = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        with no_autocast():
            for begin, end in row_blocks(self.shape[0]):
                whole[begin:end] = make(begin, end)
        return whole

    def writer(self, node: Any) -> RowWriter | None:
        """Return a writer that takes the gradient's rows at once. None: use ``give``, because the pass runs other uses
        of the weight, or the whole gradient is needed."""
        grads, index = self._weights.grads, self._weight.index
        if not grads.takes(index, node) or any(other is not self and grads.runs(other._node()) for other in self._uses):
            return None
        return grads.writer(index)


def _run_linear(
    rows: Rows, weight: nn.Parameter, input: torch.Tensor, _: Any, bias: torch.Tensor | None = None
) -> torch.Tensor | None:
    fits = _is_ready(input) and (bias is None or _is_ready(bias))
    if not fits or input.dim() < 1 or input.shape[-1] != rows.shape[1]:
        return None
    with _plain():
        found: torch.Tensor = _Linear.apply(input, weight, bias, rows)  # type: ignore[no-untyped-call]
    return found


def _run_embedding(
    rows: Rows,
    weight: nn.Parameter,
    input: torch.Tensor,
    _: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor | None:
    count = rows.shape[0]
    padding = -1 if padding_idx is None else padding_idx % count if -count <= padding_idx < count else None
    if max_norm is not None or sparse or padding is None or input.dtype not in (torch.int64, torch.int32):
        return None
    if input.numel() and not 0 <= int(input.min()) <= int(input.max()) < count:
        raise IndexError(f"{rows.name}: F.embedding: an index is out of range: the weight has {count} rows")
    with _plain():
        options = (padding, scale_grad_by_freq, rows)
        found: torch.Tensor = _Embedding.apply(input, weight, *options)  # type: ignore[no-untyped-call]
    return found


def _is_ready(tensor: torch.Tensor) -> bool:
    """Return True if the tensor has values, because it is no stand-in."""
    return not hasattr(tensor, "_zcomm_keeper")


def _refuse_second(name: str) -> None:
    if torch.is_grad_enabled():  # a penalty computed from these gradients would have no gradient
        raise RuntimeError(
            f"{name} is gathered by rows, and has no second derivative (create_graph=True): leave out Units(rows=True)"
        )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: nn.Parameter, bias: torch.Tensor | None, rows: Rows) -> torch.Tensor:
        y: torch.Tensor | None = None
        for begin, end, block in rows.blocks():
            part = F.linear(x, block, None if bias is None else bias[begin:end])
            if y is None:
                y = part.new_empty((*x.shape[:-1], rows.shape[0]))
            y[..., begin:end] = part
        assert y is not None
        ctx.save_for_backward(x)
        rows.used_by(ctx)
        ctx.rows, ctx.bias_dtype = rows, None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows: Rows = ctx.rows
        _refuse_second(rows.name)
        (x,) = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        slope, inputs = grad.reshape(-1, rows.shape[0]), x.reshape(-1, rows.shape[1])
        grad_x = grad_weight = grad_bias = None
        with no_autocast():
            if needs_x:
                exact = torch.float64 if grad.dtype == torch.float64 else torch.float32
                total = torch.zeros(inputs.shape, dtype=exact, device=grad.device)
                for begin, end, block in rows.blocks():
                    total += slope[:, begin:end] @ block.to(grad.dtype)
                grad_x = total.to(x.dtype).view(x.shape)
            if needs_weight:
                inputs = inputs.to(grad.dtype)
                grad_weight = rows.give(ctx, lambda begin, end: (slope[:, begin:end].t() @ inputs).to(rows.dtype))
            if needs_bias:
                grad_bias = slope.sum(0).to(ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, indices: torch.Tensor, weight: nn.Parameter, padding: int, by_frequency: bool, rows: Rows
    ) -> torch.Tensor:
        flat = indices.reshape(-1)
        y = torch.empty(flat.numel(), rows.shape[1], dtype=rows.dtype, device=rows.device)
        for begin, end, block in rows.used(flat):
            (here,) = torch.where((flat >= begin) & (flat < end))
            y[here] = block[flat[here] - begin]
        ctx.save_for_backward(indices)
        rows.used_by(ctx)
        ctx.form, ctx.rows = (padding, by_frequency), rows
        return y.view(*indices.shape, rows.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _refuse_second(ctx.rows.name)
        (indices,) = ctx.saved_tensors
        flat, slope = indices.reshape(-1), grad.reshape(-1, grad.shape[-1])
        padding, by_frequency = ctx.form

        def make(begin: int, end: int) -> torch.Tensor:
            (here,) = torch.where((flat >= begin) & (flat < end))
            skipped = padding - begin if begin <= padding < end else -1
            found: torch.Tensor = torch.ops.aten.embedding_dense_backward(
                slope[here], flat[here] - begin, end - begin, skipped, by_frequency
            )
            return found

        return None, ctx.rows.give(ctx, make), None, None, None
