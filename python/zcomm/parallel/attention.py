"""Ulysses around one attention: any callable of query, key and value, or a function of Hugging Face's registry.

[Note: positions] Hugging Face's models make masks from one rank's part of the sequence. So no mask reaches the core
attention: it gets all tokens, and is causal by itself. Each call compares the positions and the padding of all parts.
All ranks raise the same error if the core attention would need a mask: packed samples, padding before tokens.
Thread rule: as heads.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zcomm.parallel.heads import Exchange, SequenceRanks, deal, shared_keys

_UNREAD = ("position_ids", "cache_position")  # arguments that no attention function reads, with packing apart
_PROBLEMS = (
    "",
    "query and key have different lengths: a cache or cross-attention cannot be divided; for generate() call "
    'model.set_attn_implementation("sdpa") first',
    "the attention mask is not causal with padding: the core attention cannot be told such a mask for all parts",
    "padding before or between tokens needs a mask: pad after the tokens, with labels of -100",
    "the attention mask has another form than [batch, tokens] and [batch, 1, tokens, tokens], such as a BlockMask",
)
_Rows = tuple[int, bool, list[int], list[int], list[int]]  # problem, packed; by row: first, last position, real tokens


class DividedAttention(nn.Module):
    """An attention of which each rank computes some heads, for queries, keys and values of parts of a sequence.

    attention: called with (query, key, value, ...) of all tokens and this rank's heads; returns the query's layout.
    heads, sequence: dimensions of the 4 that query, key and value have; the last one is a head's size.
    """

    def __init__(self, attention: Callable[..., Any], ranks: SequenceRanks, heads: int = 1, sequence: int = 2) -> None:
        super().__init__()
        self.attention = attention
        self.ranks = ranks
        self._order = (sequence, 3 - heads - sequence, heads, 3)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return this rank's part of the attention. Collective over the sequence's ranks, in backward, too."""
        return divided(self.attention, self.ranks, self._order, (query, key, value), args, kwargs)


def divided(
    attention: Callable[..., Any],
    ranks: SequenceRanks,
    order: tuple[int, ...],
    given: tuple[torch.Tensor, ...],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """Return this rank's tokens of ``attention``, which is called with all tokens of some heads. Collective.

    order: the dimensions of tokens, batch, heads and size in ``given``. The output may have heads and size in one.
    """
    if ranks.size == 1:
        return attention(*given, *args, **(kwargs or {}))
    back_order = [order.index(dim) for dim in range(4)]
    parts = [tensor.permute(order) for tensor in given]
    wholes, back = gathered_heads(ranks, _agreed(ranks, parts)[0], parts)
    out = attention(*(whole.permute(back_order) for whole in wholes), *args, **(kwargs or {}))
    flat = out.dim() == 3
    if flat:
        out = out.unflatten(2, (wholes[0].shape[2], -1))
    mine = back.to_tokens(out.permute(order))[0].permute(back_order)
    return mine.flatten(2) if flat else mine


def _agreed(
    ranks: SequenceRanks, parts: list[torch.Tensor], *more: int, problem: int = 0
) -> tuple[tuple[int, ...], list[list[int]]]:
    """Return the tokens of each rank's part, and ``more`` of all ranks. problem: of this rank, a place in _PROBLEMS.
    Collective. Raises: ValueError on all ranks."""
    (tokens, batch, heads, _), key = parts[0].shape, parts[1].shape
    problem = problem if key[0] == tokens else 1
    rows = ranks.gathered([problem, batch, heads, key[2], tokens, *more]).tolist()
    for rank, row in enumerate(rows):
        if row[0]:
            raise ValueError(f"ulysses: rank {rank} of the sequence: {_PROBLEMS[row[0]]}")
        if row[1:4] != rows[0][1:4]:
            first, other = (f"batch {each[1]}, {each[2]} query and {each[3]} key heads" for each in (rows[0], row))
            raise ValueError(f"ulysses: rank 0 of the sequence has {first}, but rank {rank} has {other}")
    return tuple(row[4] for row in rows), [row[5:] for row in rows]


def gathered_heads(
    ranks: SequenceRanks, lengths: tuple[int, ...], parts: list[torch.Tensor]
) -> tuple[list[torch.Tensor], Exchange]:
    """Return query, key and value of all tokens, and the exchange of the output. [tokens, batch, heads, size]."""
    queries, keys = deal(parts[0].shape[2], parts[1].shape[2], ranks.size)
    query, key, value = Exchange(ranks, lengths, (queries, keys, keys)).to_heads(*parts)
    group = parts[0].shape[2] // parts[1].shape[2]
    of = shared_keys(queries[ranks.rank], keys[ranks.rank], group)
    if of is not None:
        index = torch.tensor(of, device=key.device)
        key, value = key.index_select(2, index), value.index_select(2, index)
    return [query, key, value], Exchange(ranks, lengths, (queries,))


class RegisteredAttention:
    """A function of Hugging Face's attention registry around another one, ``core``, which gets all tokens.

    name: core's in the registry. disable_in_eval: a module in eval() gets whole sequences, and calls only ``core``.
    """

    def __init__(
        self, core: Callable[..., Any], name: str, ranks: SequenceRanks, disable_in_eval: bool = False
    ) -> None:
        if "eager" in name:
            raise ValueError(
                f'ulysses: attention {name!r} is causal by a mask of all tokens only; use "sdpa" or flash attention'
            )
        self.core, self.ranks, self.name = core, ranks, name
        self.disable_in_eval = disable_in_eval
        self.calls = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> RegisteredAttention:
        return self  # as in the registry

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Return ([batch, tokens, heads, size] of this rank's tokens, None). Collective, in backward, too.

        query, key, value: [batch, heads, tokens, size] of this rank's tokens and all heads. Raises: ValueError, on all
        ranks, for lengths and heads that differ, and masks that ``core`` cannot be told; NotImplementedError for
        arguments that belong to heads.
        """
        self.calls += 1
        if self.disable_in_eval and not module.training:
            found: tuple[torch.Tensor, None] = self.core(module, query, key, value, attention_mask, *args, **kwargs)
            return found
        self._refuse(kwargs)
        parts = [tensor.permute(2, 0, 1, 3) for tensor in (query, key, value)]
        causal = kwargs.get("is_causal")
        causal = bool(getattr(module, "is_causal", True) if causal is None else causal)
        positions = kwargs.pop("position_ids", None)
        problem, packed, *rows = _read(attention_mask, positions, query.shape[0], query.shape[2], causal)
        more = (packed, *(number for row in rows for number in row))
        lengths, told = _agreed(self.ranks, parts, *more, problem=problem)
        if self._is_packed(lengths, torch.tensor(told), causal):
            kwargs["position_ids"] = self._gathered(positions, lengths)
        self._check_window(module, sum(lengths), kwargs)
        wholes, back = gathered_heads(self.ranks, lengths, parts)
        query, key, value = (whole.permute(1, 2, 0, 3) for whole in wholes)
        group = query.shape[1] // key.shape[1]
        own = module if getattr(module, "num_key_value_groups", group) == group else _OtherGroups(module, group)
        out = self.core(own, query, key, value, None, *args, **kwargs)[0]
        return back.to_tokens(out.permute(1, 0, 2, 3))[0].permute(1, 0, 2, 3), None

    def _refuse(self, kwargs: dict[str, Any]) -> None:
        for name, given in kwargs.items():
            if isinstance(given, torch.Tensor) and given.dim() not in (0, 2) and name not in _UNREAD:  # 2: of the loss
                raise NotImplementedError(
                    f"ulysses: the model gives its attention {name}= of shape {tuple(given.shape)}, which belongs to "
                    "all heads or to a part of the tokens; it is not divided"
                )
        if kwargs.get("output_attentions"):
            raise NotImplementedError("ulysses: output_attentions=True: no rank has the weights of all heads")

    def _is_packed(self, lengths: tuple[int, ...], told: torch.Tensor, causal: bool) -> bool:
        """Return True if ``core`` needs the positions of packed samples. Raises: ValueError; see [Note: positions].

        told: [ranks, (packed, first, last, real tokens of each row)], the same on all ranks.
        """
        first, last, real = told[:, 1:].unflatten(1, (3, -1)).unbind(1)
        full = torch.tensor(lengths)[:, None] == real
        if not bool(full.all()) and (not causal or bool(((real[1:] > 0) & ~full[:-1]).any())):
            raise ValueError(f"ulysses: {_PROBLEMS[3 if causal else 2]}")
        follows = (first[1:] == last[:-1] + 1) | (real[1:] == 0) | (first[1:] < 0)
        packed = bool(told[:, 0].any())
        if not packed and bool(follows.all()):
            return False
        if "flash" in self.name and causal:
            return True
        rank, row = (0, 0) if packed else (~follows).nonzero()[0].tolist()
        where = "the positions of a part do not follow each other"
        if not packed:
            where = f"row {row} begins at position {first[rank + 1, row]} on rank {rank + 1} of the sequence"
            where += f" and ends at {last[rank, row]} on rank {rank}"
        raise ValueError(
            f"ulysses: {where}. Either position_ids are missing (zcomm.parallel.split_sequence adds them), or samples "
            f"are packed, which attention {self.name!r} cannot be told for all parts: use flash attention, or one "
            "sample per row"
        )

    def _gathered(self, positions: torch.Tensor | None, lengths: tuple[int, ...]) -> torch.Tensor:
        """Return the positions of all tokens: [batch, tokens]. Collective."""
        assert positions is not None
        padded = torch.nn.functional.pad(positions, (0, max(lengths) - positions.shape[1]))
        rows = self.ranks.gathered(padded).view(self.ranks.size, *padded.shape)
        return torch.cat([row[:, :tokens] for row, tokens in zip(rows, lengths, strict=True)], 1).to(positions.device)

    def _check_window(self, module: nn.Module, tokens: int, kwargs: dict[str, Any]) -> None:
        """Refuse a window that ``core`` has by a mask. Raises: NotImplementedError."""
        sizes = {"attention_chunk_size": getattr(getattr(module, "config", None), "attention_chunk_size", None)}
        if "flash" not in self.name:
            sizes["sliding_window"] = kwargs.get("sliding_window")
        for name, size in sizes.items():
            if size is not None and tokens > size:
                raise NotImplementedError(
                    f"ulysses: {name}={size} with {tokens} tokens: attention {self.name!r} has it by a mask, which "
                    "cannot be divided; use flash attention, or shorter sequences"
                )


class _OtherGroups:
    """A module as attention functions read it, with another number of query heads for each key head."""

    def __init__(self, module: nn.Module, groups: int) -> None:
        self._module, self.num_key_value_groups = module, groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _read(mask: Any, positions: torch.Tensor | None, batch: int, tokens: int, causal: bool) -> _Rows:
    """Return the rows of a part: see ``_Rows``. A position of -1: there are none, or no real token."""
    none = [-1] * batch
    real = torch.ones(batch, tokens, dtype=torch.bool)
    if mask is not None:
        if not isinstance(mask, torch.Tensor) or mask.dim() not in (2, 4) or mask.shape[-1] != tokens:
            return 4, False, none, none, none
        seen = (mask if mask.dtype == torch.bool else mask != 0 if mask.dim() == 2 else mask == 0).cpu()
        real = (seen if mask.dim() == 2 else seen[:, 0, -1]).expand(batch, -1)
        if mask.dim() == 4:
            by_rule = real[:, None, None, :].expand(-1, -1, tokens, -1)
            if seen.shape[-2] != tokens or not torch.equal(
                seen, (by_rule.tril() if causal else by_rule)[:, : seen.shape[1]].expand_as(seen)
            ):
                return 2, False, none, none, none
    counts = real.sum(1)
    if not torch.equal(real, torch.arange(tokens) < counts[:, None]):
        return 3, False, none, none, none
    if positions is None or positions.dim() != 2:
        return 0, False, none, none, counts.tolist()
    if positions.shape[1] != tokens:
        return 1, False, none, none, none
    given = positions.cpu().expand(batch, -1)
    packed = bool(((given.diff(dim=1) != 1) & real[:, 1:]).any())
    last = given.gather(1, (counts - 1).clamp(min=0)[:, None])[:, 0]
    empty = counts == 0
    return 0, packed, given[:, 0].masked_fill(empty, -1).tolist(), last.masked_fill(empty, -1).tolist(), counts.tolist()
