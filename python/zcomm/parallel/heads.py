"""The exchange of Ulysses: each rank has a part of the sequence and all heads, then all of the sequence and some heads.

One uneven all_to_all moves the heads of several tensors (query, key and value), and its transpose moves them back. A
message to a rank is [tokens, batch, width]: the width holds that rank's heads of each tensor. So the received parts,
one after the other, are the whole sequence. Both directions are differentiable, and each is the gradient of the other.
If there are fewer key heads than ranks, several ranks receive the same head, and its gradient is their sum by rank.
Thread rule: as the ranks' communicator. All ranks call the same exchanges in the same order, in backward, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from zcomm.comm.communicator import Communicator
from zcomm.comm.mesh import ProcessMesh

_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # newer torch: deprecated


class SequenceRanks:
    """The ranks that divide a sequence, as a Communicator or as a group of torch.distributed."""

    def __init__(self, of: Communicator | dist.ProcessGroup) -> None:
        self._comm = of if isinstance(of, Communicator) else None
        self._group: Any = None if self._comm is not None else of
        self.rank = of.rank if isinstance(of, Communicator) else dist.get_rank(of)
        self.size = of.world_size if isinstance(of, Communicator) else dist.get_world_size(of)

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceRanks:
        return self  # a copy of a model uses the same ranks

    def all_to_all(self, inp: torch.Tensor, in_counts: Sequence[int], out_counts: Sequence[int]) -> torch.Tensor:
        """Send a flat tensor's parts to the ranks by rank; return the parts that came, flat."""
        out = torch.empty(sum(out_counts), dtype=inp.dtype, device=inp.device)
        if self._comm is not None:
            self._comm.all_to_all(out, inp, in_splits=in_counts, out_splits=out_counts, name="ulysses")
        else:
            dist.all_to_all_single(out, inp, list(out_counts), list(in_counts), group=self._group)
        return out

    def gathered(self, values: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Return the integers of all ranks, equally many on each: [ranks, values] in host memory."""
        mine = torch.as_tensor(values, dtype=torch.int64, device=self._comm.device if self._comm else "cpu").flatten()
        every = torch.empty(self.size * mine.numel(), dtype=torch.int64, device=mine.device)
        if self._comm is not None:
            self._comm.all_gather(mine, out=every, name="ulysses: lengths")
        else:
            _all_gather(every, mine, group=self._group)
        return every.view(self.size, -1).cpu()

    def place(self, tensor: torch.Tensor) -> torch.device:
        """Return the device of messages for ``tensor``."""
        return tensor.device if self._comm is None else self._comm.device


_AXES = ("sequence", "sp", "cp", "sequence_parallel")


def sequence_ranks(mesh: Any) -> SequenceRanks:
    """Return the ranks along the axis "sequence", on a communicator of their own. Collective when it is new.

    mesh: a ProcessMesh, torch's DeviceMesh with an axis "sequence", "sp", "cp" or "sequence_parallel", a Communicator
    or a group of torch.distributed. Raises: ValueError for a mesh without such an axis.
    """
    if isinstance(mesh, SequenceRanks):
        return mesh
    if isinstance(mesh, ProcessMesh):
        return SequenceRanks(mesh.comm("sequence", use="attention"))
    if isinstance(mesh, (Communicator, dist.ProcessGroup)):
        return SequenceRanks(mesh)
    names = getattr(mesh, "mesh_dim_names", None) or ()
    for name in _AXES:
        if name in names:
            return SequenceRanks(mesh.get_group(name))
    raise ValueError(f"mesh={mesh!r} has no axis {' or '.join(map(repr, _AXES))}")


def cut(count: int, parts: int) -> list[slice]:
    """Cut ``count`` items into parts that differ by one item at most; the last ones are shorter."""
    ends = [0]
    for part in range(parts):
        ends.append(ends[-1] + count // parts + (part < count % parts))
    return [slice(begin, end) for begin, end in itertools.pairwise(ends)]


def deal(queries: int, keys: int, ranks: int) -> tuple[list[slice], list[slice]]:
    """Return the query heads and the key heads of each rank.

    A rank has the key heads that its query heads use: whole groups of grouped-query attention, if there are enough.
    Raises: ValueError for fewer query heads than ranks, or groups of different sizes.
    """
    if queries < ranks:
        raise ValueError(
            f"ulysses: {queries} attention heads cannot be divided among {ranks} ranks; use sequence={queries} at most"
        )
    if queries % keys:
        raise ValueError(f"ulysses: {queries} query heads are not a multiple of {keys} key heads")
    group = queries // keys
    if keys >= ranks:
        own = cut(keys, ranks)
        return [slice(each.start * group, each.stop * group) for each in own], own
    mine = cut(queries, ranks)
    return mine, [slice(each.start // group, (each.stop - 1) // group + 1) for each in mine]


def shared_keys(queries: slice, keys: slice, group: int) -> list[int] | None:
    """Return the local key head of each local query head; None: equal groups, in order, as the attention expects."""
    of = [head // group - keys.start for head in range(queries.start, queries.stop)]
    each, rest = divmod(len(of), keys.stop - keys.start)
    return None if not rest and of == [head // each for head in range(len(of))] else of


@dataclass(frozen=True)
class Exchange:
    """One exchange. lengths: tokens of each rank. heads: for each tensor the heads of each rank."""

    ranks: SequenceRanks
    lengths: tuple[int, ...]
    heads: tuple[Sequence[slice], ...]

    def to_heads(self, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return this rank's heads of the whole sequence: [tokens, batch, heads, size] of all tokens or of all heads.

        Differentiable. Collective. The tensors have one dtype. Raises: as all_to_all.
        """
        found: tuple[torch.Tensor, ...] = _ToHeads.apply(self, *parts)  # type: ignore[no-untyped-call]
        return found

    def to_tokens(self, *wholes: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return all heads of this rank's tokens; the inverse of ``to_heads`` and as it otherwise."""
        found: tuple[torch.Tensor, ...] = _ToTokens.apply(self, *wholes)  # type: ignore[no-untyped-call]
        return found

    def _widths(self, tensors: Sequence[torch.Tensor]) -> list[list[int]]:
        """Return the elements of a token for each rank, by tensor."""
        sizes = [tensor.shape[-1] for tensor in tensors]
        return [
            [(heads[rank].stop - heads[rank].start) * size for heads, size in zip(self.heads, sizes, strict=True)]
            for rank in range(self.ranks.size)
        ]

    def _scatter_heads(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        batch, mine, widths = parts[0].shape[1], self.lengths[self.ranks.rank], self._widths(parts)
        sent = [mine * batch * sum(width) for width in widths]
        message = torch.empty(sum(sent), dtype=parts[0].dtype, device=self.ranks.place(parts[0]))
        for rank, block in enumerate(message.split(sent)):
            views = _views(block, mine, batch, widths[rank], parts)
            for part, heads, view in zip(parts, self.heads, views, strict=True):
                view.copy_(part[:, :, heads[rank]])
        own = widths[self.ranks.rank]
        came = self.ranks.all_to_all(message, sent, [tokens * batch * sum(own) for tokens in self.lengths])
        return tuple(
            view.to(part.device)
            for view, part in zip(_views(came, sum(self.lengths), batch, own, parts), parts, strict=True)
        )

    def _scatter_tokens(self, wholes: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        batch, tokens, widths = wholes[0].shape[1], sum(self.lengths), self._widths(wholes)
        own, mine = widths[self.ranks.rank], self.lengths[self.ranks.rank]
        message = wholes[0]
        if len(wholes) > 1 or not message.is_contiguous() or message.device != self.ranks.place(message):
            count = tokens * batch * sum(own)
            message = torch.empty(count, dtype=message.dtype, device=self.ranks.place(message))
            for whole, view in zip(wholes, _views(message, tokens, batch, own, wholes), strict=True):
                view.copy_(whole)
        counts = [mine * batch * sum(width) for width in widths]
        sent = [length * batch * sum(own) for length in self.lengths]
        blocks = self.ranks.all_to_all(message.view(-1), sent, counts).split(counts)
        found = []
        for index, (whole, heads) in enumerate(zip(wholes, self.heads, strict=True)):
            shape = (mine, batch, max(each.stop for each in heads), whole.shape[-1])
            once = sum(each.stop - each.start for each in heads) == shape[2]
            out = (torch.empty if once else torch.zeros)(shape, dtype=whole.dtype, device=whole.device)
            for rank, block in enumerate(blocks):
                view = _views(block, mine, batch, widths[rank], wholes)[index]
                if once:
                    out[:, :, heads[rank]].copy_(view)
                else:  # several ranks have a head, and a gradient of it
                    out[:, :, heads[rank]] += view.to(whole.device)
            found.append(out)
        return tuple(found)


def _views(
    block: torch.Tensor, tokens: int, batch: int, widths: Sequence[int], like: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the tensors in a message, each [tokens, batch, heads, size]."""
    parts = block.view(tokens, batch, -1).split(list(widths), -1)
    return [part.unflatten(-1, (-1, each.shape[-1])) for part, each in zip(parts, like, strict=True)]


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.exchange = exchange
        return exchange._scatter_heads(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, *ctx.exchange._scatter_tokens(grads))


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, *wholes: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.exchange = exchange
        return exchange._scatter_tokens(wholes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, *ctx.exchange._scatter_heads(grads))
