"""Exchange of tokens with experts on other ranks, and back: one uneven all_to_all in each direction.

Each rank has the same number of experts, and expert e is on rank e // local. A row of tokens travels once for each of
its routes. The number of rows for each expert travels first, in an equal all_to_all of integers. Backward sends the
gradients of results to the experts, and the gradients of tokens back.
A rank without tokens, or without rows for its experts, enters the same calls with zero rows, so that no rank waits.
[Note: memory of rows] New memory costs more than the exchange: the system clears each page. So rows arrive in memory
that is used again as soon as no tensor has it. Memory: as much as was in use at the same time, until the sizes change.
Thread rule: the thread of forward and backward; all ranks of the communicator call in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

import torch

if TYPE_CHECKING:
    from zcomm.comm.communicator import Communicator

Run = Callable[[torch.Tensor, list[int]], torch.Tensor]  # rows [R, D] by expert, rows of each expert -> [R, any]


def through_experts(
    x: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    local: int,
    run: Run,
    comm: Communicator | None = None,
) -> torch.Tensor:
    """Return for each token the sum of its experts' results, times their weights. Collective over ``comm``.

    x: [T, D]. index: [T, k] experts, numbered over all ranks; -1: no route. weights: [T, k]. local: experts of each
    rank. run: the experts of this rank. comm: of the ranks with different experts; None: this rank has all.
    Shapes: [T, width of a result], in the results' dtype; sums are in fp32, or in fp64 for such weights or results.
    Raises: PeerLost, TimeoutError, CollectiveMismatch.
    """
    ranks = 1 if comm is None else comm.world_size
    flat = index.reshape(-1)
    counts = torch.bincount(flat + 1, minlength=ranks * local + 1)
    order = flat.argsort(stable=True)[int(counts[0]) :]  # routes by expert
    token = order.div(max(index.shape[1], 1), rounding_mode="floor")
    if comm is None or ranks == 1:
        results = run(x.index_select(0, token), counts[1:].tolist())
    else:
        results = _on_ranks(x, token, counts[1:].view(ranks, local), run, comm)
    scale = weights.reshape(-1).index_select(0, order).unsqueeze(1)
    terms = results.to(torch.promote_types(torch.promote_types(results.dtype, weights.dtype), torch.float32)) * scale
    total = torch.zeros(x.shape[0], results.shape[1], dtype=terms.dtype, device=x.device)
    return total.index_add_(0, token, terms).to(results.dtype)


def to_experts(
    x: torch.Tensor, token: torch.Tensor, sent: torch.Tensor, comm: Communicator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Send rows to their experts' ranks; return the rows that arrive, by rank and expert, and their numbers.

    x: [T, D]. token: [R] the number of each row in x, by expert. sent: [ranks, local] rows for each expert.
    Shapes: -> [arriving rows, D], [ranks, local]. Collective.
    """
    got = torch.empty(sent.numel(), dtype=torch.int64, device=comm.device)
    counts = comm.all_to_all(got, sent.to(comm.device).reshape(-1), async_op=True, name="rows for experts")
    rows: torch.Tensor = _Rows.apply(x, token, None, comm)  # type: ignore[no-untyped-call]
    assert counts is not None
    counts.wait()
    got = got.view(sent.shape).cpu()
    arrived: torch.Tensor = _Exchange.apply(rows, comm, sent.sum(1).tolist(), got.sum(1).tolist(), "tokens to experts")  # type: ignore[no-untyped-call]
    return arrived, got


def _on_ranks(x: torch.Tensor, token: torch.Tensor, sent: torch.Tensor, run: Run, comm: Communicator) -> torch.Tensor:
    """Run the experts of all ranks. Arguments: as ``to_experts``."""
    rows, got = to_experts(x, token, sent, comm)
    if sent.shape[1] > 1:  # rows are by rank, then by expert
        expert = torch.arange(sent.shape[1]).repeat(sent.shape[0]).repeat_interleave(got.reshape(-1))
        order = expert.argsort(stable=True).to(rows.device)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(back), device=rows.device)
        rows = _Rows.apply(rows, order, back, comm)  # type: ignore[no-untyped-call]
    results = run(rows, got.sum(0).tolist())
    if sent.shape[1] > 1:
        results = _Rows.apply(results, back, order, comm)  # type: ignore[no-untyped-call]
    leaves, arrives = got.sum(1).tolist(), sent.sum(1).tolist()
    returned: torch.Tensor = _Exchange.apply(results, comm, leaves, arrives, "results of experts")  # type: ignore[no-untyped-call]
    return returned


_storage_users = getattr(torch._C, "_storage_Use_Count", None)
_SMALL_NBYTES = 1 << 20  # the allocator keeps smaller pieces


class _Memory:
    """Memory of the rows that one communicator brings ([Note: memory of rows])."""

    _known: ClassVar[WeakKeyDictionary[Communicator, _Memory]] = WeakKeyDictionary()

    def __init__(self) -> None:
        self._held: list[torch.UntypedStorage] = []

    @classmethod
    def of(cls, comm: Communicator) -> _Memory:
        """Return the memory of ``comm``, which ends with it."""
        return cls._known.setdefault(comm, cls())

    def take(self, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return [rows, width], not cleared."""
        nbytes = rows * width * dtype.itemsize
        if nbytes < _SMALL_NBYTES or device.type != "cpu" or _storage_users is None:
            return torch.empty(rows, width, dtype=dtype, device=device)
        free = [held for held in self._held if _storage_users(held._cdata) == 1]
        fit = [held for held in free if nbytes <= held.nbytes() <= 2 * nbytes]
        if not fit:
            unused = {id(held) for held in free}
            self._held = [held for held in self._held if id(held) not in unused]
            step = 1 << (nbytes.bit_length() - 3)
            fit = [torch.empty(-(-nbytes // step) * step, dtype=torch.uint8).untyped_storage()]
            self._held += fit
        # No view of a tensor: an expert may change its rows in place.
        return torch.empty(0, dtype=dtype).set_(fit[0], 0, (rows, width), (width, 1))


class _Rows(torch.autograd.Function):
    """Rows of a tensor by their numbers. inverse: the numbers that put the rows back; None: rows repeat."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor | None, comm: Communicator
    ) -> torch.Tensor:
        ctx.rows = len(x), index, inverse, comm
        out = _Memory.of(comm).take(len(index), x.shape[1], x.dtype, x.device)
        return torch.index_select(x, 0, index, out=out)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,), (count, index, inverse, comm) = gradients, ctx.rows
        if inverse is not None:
            return _Rows.apply(gradient, inverse, index, comm), None, None, None  # type: ignore[no-untyped-call]
        return gradient.new_zeros(count, gradient.shape[1]).index_add(0, index, gradient), None, None, None


class _Exchange(torch.autograd.Function):
    """An uneven all_to_all of rows, and its gradient, the exchange in the other direction."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, comm: Communicator, leaves: Sequence[int], arrives: Sequence[int], name: str
    ) -> torch.Tensor:
        ctx.exchange = comm, arrives, leaves, f"{name}, gradients"
        width = rows.shape[1]
        mine = rows.contiguous().to(comm.device)
        out = _Memory.of(comm).take(sum(arrives), width, rows.dtype, mine.device)
        comm.all_to_all(
            out.view(-1),
            mine.view(-1),
            out_splits=[count * width for count in arrives],
            in_splits=[count * width for count in leaves],
            name=name,
        )
        return out.to(rows.device)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        comm, leaves, arrives, name = ctx.exchange
        return _Exchange.apply(gradient, comm, leaves, arrives, name), None, None, None, None  # type: ignore[no-untyped-call]
