"""``deepspeed.sequence.cross_entropy``: the loss of each token of a sequence, on all ranks that divide it."""

from __future__ import annotations

from typing import Any

import torch

from zcomm.parallel.heads import SequenceRanks


def vocab_sequence_parallel_cross_entropy(
    vocab_parallel_logits: torch.Tensor, target: torch.Tensor, sp_group: Any
) -> torch.Tensor:
    """Return the losses of all tokens, [tokens, batch], from a part's logits [part, batch, words]. Collective.

    target: [part, batch]. A gradient of the losses reaches the logits of this rank's tokens only.
    """
    flat = vocab_parallel_logits.flatten(0, 1)
    mine = torch.nn.functional.cross_entropy(flat, target.flatten(), reduction="none").view(target.shape)
    losses: torch.Tensor = _Gathered.apply(mine, SequenceRanks(sp_group))  # type: ignore[no-untyped-call]
    return losses


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor, ranks: SequenceRanks) -> torch.Tensor:
        lengths = ranks.gathered([len(mine)])[:, 0].tolist()
        ctx.begin, ctx.count = sum(lengths[: ranks.rank]), len(mine)
        counts = [length * mine.shape[1] for length in lengths]
        sent = mine.contiguous().view(-1).repeat(ranks.size)
        return ranks.all_to_all(sent, [mine.numel()] * ranks.size, counts).view(-1, mine.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad[ctx.begin : ctx.begin + ctx.count], None
