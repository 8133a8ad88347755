"""ulysses, split_sequence and mean_over_sequence: a sequence divided over the ranks of the mesh axis "sequence".

Everything except attention works on one token at a time, so each rank keeps its part of the tokens. Around attention
two exchanges (heads.py) give each rank all tokens of some heads. Ranks along the axis read the same samples; their
gradients are added up by ZeroOptimizer and Engine.
"""

from __future__ import annotations

import inspect
import itertools
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from zcomm.parallel.attention import DividedAttention, RegisteredAttention
from zcomm.parallel.heads import SequenceRanks, cut, sequence_ranks

IGNORED = -100  # a label that counts no token
_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention", "attention")  # types of layers
_numbers = itertools.count()


def ulysses(of: Any, mesh: Any, *, heads: int = 1, sequence: int = 2) -> Any:
    """Let a model, or one attention, work on parts of sequences. Collective.

    of: a model of Hugging Face's transformers, which is changed and returned: its attention functions of the registry
    exchange heads. Or any callable of (query, key, value, ...): the returned module is called with parts instead.
    mesh: as ``sequence_ranks``. heads, sequence: their dimensions in query, key and value, of 4, if ``of`` is no model.
    Heads need not divide by the ranks. If there are fewer key heads than ranks, ranks have copies.
    Raises: ValueError for a model with layers that would see parts only, or an axis that the mesh lacks.
    """
    ranks = sequence_ranks(mesh)
    if not hasattr(of, "set_attn_implementation"):
        return DividedAttention(of, ranks, heads, sequence)
    check_layers(of)
    if ranks.size == 1:
        return of
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    core = of.config._attn_implementation
    if core != "eager" and core not in ALL_ATTENTION_FUNCTIONS:
        raise ValueError(f"ulysses: {core!r}, the attention of {type(of).__name__}, is not in the registry")
    function: Any = ALL_ATTENTION_FUNCTIONS.get(core)
    attention = RegisteredAttention(function, core, ranks)
    name = f"{core}_ulysses_{next(_numbers)}"
    ALL_ATTENTION_FUNCTIONS.register(name, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS[core])
    of.set_attn_implementation(name)
    if of.config._attn_implementation != name:
        raise ValueError(f"ulysses: {type(of).__name__} does not call its attention by the registry of transformers")
    check = _Check(of, attention)
    of.register_forward_pre_hook(check.begin, with_kwargs=True)
    of.register_forward_hook(check.end)
    return of


def check_layers(model: Any) -> None:
    """Raise ValueError for layers with a state along the sequence, which would restart on each rank."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    types = [*(getattr(config, "layer_types", None) or ()), *(getattr(config, "layers_block_type", None) or ())]
    if others := sorted({kind for kind in types if kind not in _ATTENTION}):
        raise ValueError(
            f"ulysses: {type(model).__name__} has layers of type {', '.join(others)}, which would see a part of the "
            "sequence only"
        )


class _Check:
    """Checks of a model's forward: its positions are given, and its attention is divided."""

    def __init__(self, model: nn.Module, attention: RegisteredAttention) -> None:
        taken = inspect.signature(model.forward).parameters.values()
        self._takes = any(each.name == "position_ids" or each.kind == each.VAR_KEYWORD for each in taken)
        self._attention, self._name = attention, type(model).__name__

    def begin(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._calls = self._attention.calls
        if not self._takes:
            raise ValueError(f"ulysses: {self._name} takes no position_ids: it cannot know which part a rank has")
        if kwargs.get("position_ids") is None:
            raise ValueError(
                f"ulysses: {self._name} was called without position_ids=: pass a part that "
                "zcomm.parallel.split_sequence returned"
            )

    def end(self, model: nn.Module, args: Any, output: Any) -> None:
        if self._attention.calls == self._calls:
            raise ValueError(f"ulysses: {self._name} did not call its attention by the registry of transformers")


def split_sequence(batch: Mapping[str, Any], mesh: Any) -> dict[str, Any]:
    """Return this rank's part of a batch that all ranks of the sequence have. Collective.

    batch: tensors of [batch, tokens, ...], of which dimension 1 is divided; parts differ by one token at most, and the
    last ones are shorter. Values without such a dimension, other than tensors, are passed on.
    ``position_ids`` [batch, tokens] are added if they are missing. ``labels`` become labels of the next tokens
    (Hugging Face's ``shift_labels``, with -100 at the end), under both names. ``num_items_in_batch`` is added: the
    number of labels other than -100 in all parts. So the ``loss`` of a model of transformers is this part's sum of
    losses divided by all tokens. The sum of these over the sequence's ranks is the mean.
    Raises: ValueError, also on all ranks if their batches differ or have fewer tokens than ranks.
    """
    ranks = sequence_ranks(mesh)
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    first = next((tensors[name] for name in ("input_ids", "inputs_embeds", *tensors) if name in tensors), None)
    if first is None or first.dim() < 2:
        raise ValueError("split_sequence: the batch has no tensor of [batch, tokens, ...]")
    tokens = first.shape[1]
    if ranks.size > 1:
        sample = zlib.crc32(first.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        rows = ranks.gathered([tokens, sample]).tolist()
        for rank, row in enumerate(rows):
            if row != rows[0]:
                raise ValueError(
                    f"split_sequence: rank {rank} of the sequence has another batch than rank 0 ({row[0]} and "
                    f"{rows[0][0]} tokens): ranks along the sequence read the same samples"
                )
    if tokens < ranks.size:
        raise ValueError(f"split_sequence: {tokens} tokens cannot be divided among {ranks.size} ranks")
    whole: dict[str, Any] = dict(batch)
    if whole.get("position_ids") is None:
        whole["position_ids"] = torch.arange(tokens, device=first.device).expand(first.shape[0], -1)
    if whole.get("labels") is not None:
        shifted = torch.nn.functional.pad(whole["labels"][:, 1:], (0, 1), value=IGNORED)
        whole["labels"] = whole["shift_labels"] = shifted
        whole["num_items_in_batch"] = max(1, int((shifted != IGNORED).sum()))
    part = cut(tokens, ranks.size)[ranks.rank]
    return {name: part_of(name, value, part, tokens) for name, value in whole.items()}


def part_of(name: str, value: Any, part: slice, tokens: int) -> Any:
    """Return a part of a tensor of a batch with so many tokens; other values as they are. Raises: ValueError."""
    if not isinstance(value, torch.Tensor):
        return value
    dim = value.dim() - 1 if name == "position_ids" else 1
    if value.dim() < 2 or value.shape[dim] != tokens or (name == "attention_mask" and value.dim() != 2):
        raise ValueError(
            f"split_sequence: {name} of shape {tuple(value.shape)} has no dimension of {tokens} tokens to divide; take "
            "it out of the batch"
        )
    return value.narrow(dim, part.start, part.stop - part.start).contiguous()


def mean_over_sequence(total: torch.Tensor, count: torch.Tensor | float, mesh: Any) -> torch.Tensor:
    """Return the sum of all ranks' ``total`` divided by the sum of their ``count``, equal on all ranks. Collective.

    total: this part's sum of losses, a scalar. count: its tokens. The gradient belongs to this rank's part,
    because zcomm adds up gradients along the sequence. Without tokens it is 0.
    """
    mean: torch.Tensor = _Mean.apply(total, count, sequence_ranks(mesh))  # type: ignore[no-untyped-call]
    return mean


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: torch.Tensor, count: torch.Tensor | float, ranks: SequenceRanks) -> torch.Tensor:
        sums = torch.stack([total.detach().double().cpu(), torch.as_tensor(count).double().cpu()])
        if ranks.size > 1:
            sums = ranks.gathered(sums.view(torch.int64)).view(torch.float64).sum(0)
        ctx.count = max(1.0, float(sums[1]))
        mean: torch.Tensor = sums[0] / ctx.count
        return mean.to(total)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad / ctx.count, None, None
