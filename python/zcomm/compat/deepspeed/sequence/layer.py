"""``deepspeed.sequence.layer``: attention between two exchanges of heads for tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zcomm.parallel.heads import Exchange, SequenceRanks, cut


class DistributedAttention(nn.Module):
    """``local_attention`` of all tokens and some heads, for queries, keys and values of parts of a sequence.

    sequence_process_group: of torch.distributed; ranks with the parts, in order. scatter_idx, gather_idx: dimensions of
    heads and tokens in [s, b, h, d] or [b, s, h, d]. sp_stream has no effect: exchanges end before attention begins.
    Heads need not divide by the ranks, and a part may be longer than another one.
    """

    def __init__(
        self,
        local_attention: Callable[..., Any],
        sequence_process_group: Any,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
    ) -> None:
        super().__init__()
        self.local_attn, self.spg = local_attention, sequence_process_group
        self.scatter_idx, self.gather_idx, self.sp_stream = scatter_idx, gather_idx, sp_stream

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch_dim_idx: int,
        rotary_pos_emb: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return this rank's tokens of the attention's output, which has heads in one dimension or in two. Collective.

        rotary_pos_emb: cosines and sines, [batch, tokens, 1, size] of all tokens. Raises: as zcomm.parallel.ulysses.
        """
        from zcomm.parallel.attention import divided

        def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **more: Any) -> Any:
            if rotary_pos_emb is not None:
                cos, sin = (each.permute(1, 0, 2, 3) for each in rotary_pos_emb)
                query, key = apply_rotary_pos_emb(query, cos, sin), apply_rotary_pos_emb(key, cos, sin)
            return self.local_attn(query, key, value, *rest, **more)

        order = (self.gather_idx, batch_dim_idx, self.scatter_idx, 3)
        out: torch.Tensor = divided(attention, SequenceRanks(self.spg), order, (query, key, value), args, kwargs)
        return out


def get_shard_size_list(total_size: int, mp_size: int, name: str | None = None) -> list[int]:
    """Return how many of the heads each rank has (``deepspeed.module_inject.tp_shard``)."""
    return [part.stop - part.start for part in cut(total_size, mp_size)]


_torchembed_available = False  # DeepSpeed's optional kernel


def _rotate_half(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def apply_rotary_pos_emb(t: torch.Tensor, freqs_cos: torch.Tensor, freqs_sin: torch.Tensor) -> torch.Tensor:
    """Return t of [tokens, ..., size] with the first elements rotated, as many as the cosines and sines have."""
    turned, rest = t[..., : freqs_cos.shape[-1]], t[..., freqs_cos.shape[-1] :]
    return torch.cat((turned * freqs_cos + _rotate_half(turned) * freqs_sin, rest), -1)


def single_all_to_all(
    input: torch.Tensor,
    scatter_idx: int,
    gather_idx: int,
    batch_dim_idx: int,
    group: Any,
    async_op: bool = False,
    handle: Any = None,
    type: Any = None,
) -> torch.Tensor:
    """Return all tokens of some heads, or, if ``scatter_idx`` < 2, some tokens of all heads. Collective; blocking.

    input: [s, b, h, d] or [b, s, h, d]; batch_dim_idx follows from the dimension of tokens. All tokens are cut into
    parts that differ by one at most. Differentiable.
    """
    ranks = SequenceRanks(group)
    to_heads = scatter_idx >= 2
    place = gather_idx if to_heads else scatter_idx
    order = (place, 1 - place, 2, 3)
    given = (input if input.dim() == 4 else input.unsqueeze(-1)).permute(order)
    told = ranks.gathered([given.shape[0], given.shape[2]])
    tokens, heads = (told[:, 0], told[:1, 1]) if to_heads else (told[:1, 0], told[:, 1])
    parts = cut(int(tokens[0]), ranks.size)
    lengths = tokens.tolist() if to_heads else [part.stop - part.start for part in parts]
    exchange = Exchange(ranks, tuple(lengths), (cut(int(heads.sum()), ranks.size),))
    (out,) = exchange.to_heads(given) if to_heads else exchange.to_tokens(given)
    out = out.permute([order.index(dim) for dim in range(4)])
    return out if input.dim() == 4 else out.squeeze(-1)


class _SeqAllToAll:
    """DeepSpeed's autograd function by its call."""

    @staticmethod
    def apply(
        group: dist.ProcessGroup, input: torch.Tensor, scatter_idx: int, gather_idx: int, batch_dim_idx: int, *rest: Any
    ) -> torch.Tensor:
        return single_all_to_all(input, scatter_idx, gather_idx, batch_dim_idx, group)
