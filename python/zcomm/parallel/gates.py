"""Gates: which experts get a token, with which weights, and which routes are dropped. Pure arithmetic, on one rank.

Top-1, top-2 and top-k gates differ in the weights and in the routes that they drop. Top-1 weights are probabilities;
others are divided by the sum of a token's kept ones. Routes beyond the capacity of an expert are dropped: at random,
by position, or the least probable ones. Source: GShard (arXiv:2006.16668), Switch Transformer (arXiv:2101.03961).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Routes:
    """The routes of T tokens: [T, k] experts (-1: dropped), weights, and places among the rows of the expert.

    aux: loss that is small if tokens are spread evenly. counts: [n] routes of each expert, also dropped ones.
    capacity: rows that an expert has room for; None: for all.
    """

    index: torch.Tensor
    weights: torch.Tensor
    place: torch.Tensor
    aux: torch.Tensor
    counts: torch.Tensor
    capacity: int | None = None


def capacity_of(tokens: int, experts: int, factor: float, least: int = 0) -> int:
    """Return the rows of one expert for ``factor`` times an even share of the tokens."""
    return max(math.ceil(tokens / experts * factor), least)


def probabilities(logits: torch.Tensor) -> torch.Tensor:
    """Return the softmax of [T, n] logits, in fp32 or fp64."""
    return logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def balance(gates: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return the sum over experts of mean probability times share of tokens, times their number; 0 without tokens.

    gates: [T, n]. chosen: [T, n], 1 for a route.
    """
    tokens = max(gates.shape[0], 1)
    return (gates.sum(0) / tokens * (chosen.to(gates.dtype).sum(0) / tokens)).sum() * gates.shape[1]


def one_hot(index: torch.Tensor, count: int) -> torch.Tensor:
    """Return [..., count] int64, zeros for index -1."""
    return torch.nn.functional.one_hot(index + 1, count + 1)[..., 1:]


def first_come(index: torch.Tensor, count: int) -> torch.Tensor:
    """Return the place of each route among its expert's. Routes are in order of choice (columns), then of tokens."""
    mask = one_hot(index.t().reshape(-1), count)
    places = ((mask.cumsum(0) - 1) * mask).sum(1)
    return places.view(index.shape[1], -1).t()


def _kept(index: torch.Tensor, places: torch.Tensor, capacity: int | None) -> torch.Tensor:
    return index if capacity is None else torch.where(places < capacity, index, -1)


def shares(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return weights [T, k] divided by the sum of the kept weights."""
    values = values * (index >= 0)
    return values / values.sum(1, keepdim=True).clamp(min=torch.finfo(values.dtype).eps)


def top_k(logits: torch.Tensor, k: int, factor: float | None = None, least: int = 0, drop: str = "position") -> Routes:
    """Send each token to its k most probable experts.

    factor: capacity as a multiple of an even share; None: nothing is dropped. drop: routes beyond it, the last ones by
    "position" or the least probable ones ("probs").
    """
    gates = probabilities(logits)
    tokens, count = gates.shape
    values, index = gates.topk(k, dim=1)
    mask = one_hot(index, count).sum(1)
    capacity = None if factor is None else capacity_of(tokens, count, factor * k, least)
    kept = index
    if capacity is not None:
        score = (gates * mask).detach() if drop == "probs" else mask * torch.arange(tokens, 0, -1).to(mask)[:, None]
        best = score.topk(min(capacity, tokens), dim=0, sorted=False).indices
        stays = torch.zeros_like(mask).scatter_(0, best, 1) * mask
        kept = torch.where(stays.gather(1, index).bool(), index, -1)
        mask = stays
    place = (mask.cumsum(0) - 1).gather(1, index) * (kept >= 0)
    chosen = one_hot(index, count).sum(1)
    aux = balance(gates, chosen) / k
    return Routes(kept, shares(values, kept), place, aux, chosen.sum(0), capacity)


def top_1(
    logits: torch.Tensor,
    factor: float | None = None,
    least: int = 0,
    *,
    noisy: bool = False,
    at_random: bool = True,
    used: torch.Tensor | None = None,
) -> Routes:
    """Send each token to one expert. noisy: add Gumbel noise to the choice. at_random: the choice of dropped tokens.
    used: [T], 0 for tokens without a route."""
    gates = probabilities(logits)
    tokens, count = gates.shape
    index = (logits + gumbel(logits) if noisy else gates).argmax(1, keepdim=True)
    if used is not None:
        index = torch.where(used.reshape(-1, 1).bool(), index, -1)
    mask = one_hot(index[:, 0], count)
    capacity = None if factor is None else capacity_of(tokens, count, factor, least)
    score = mask * torch.rand(mask.shape, device=mask.device) if at_random else mask * 1.0
    stays, kept = mask, index
    if capacity is not None:
        if not at_random:
            score = mask * torch.arange(tokens, 0, -1).to(score)[:, None]
        best = score.topk(min(capacity, tokens), dim=0).indices
        stays = mask * torch.zeros_like(mask).scatter_(0, best, 1)
        kept = torch.where(stays.sum(1, keepdim=True).bool(), index, -1)
    place = ((stays.cumsum(0) - 1) * stays).sum(1, keepdim=True)
    weights = (gates * stays).sum(1, keepdim=True)
    return Routes(kept, weights, place, balance(gates, mask), mask.sum(0), capacity)


def top_2(logits: torch.Tensor, factor: float | None = None, least: int = 0, sampled: bool = True) -> Routes:
    """Send each token to its most probable expert and a second one. sampled: draw that one by Gumbel noise."""
    gates = probabilities(logits)
    tokens, count = gates.shape
    first = gates.argmax(1)
    noise = logits + gumbel(logits) if sampled else logits
    second = noise.masked_fill(one_hot(first, count).bool(), -math.inf).argmax(1)
    index = torch.stack((first, second), 1)
    capacity = None if factor is None else capacity_of(tokens, count, factor * 2, least)
    place = first_come(index, count)
    kept = _kept(index, place, capacity)
    weights = shares(gates.gather(1, index), kept)
    counts = one_hot(index, count).sum((0, 1))
    return Routes(kept, weights, place * (kept >= 0), balance(gates, one_hot(first, count)), counts, capacity)


def gumbel(like: torch.Tensor) -> torch.Tensor:
    """Return Gumbel noise of the shape and device of ``like``, in fp32 or fp64."""
    tiny = torch.finfo(torch.float32).tiny
    noise = torch.rand(like.shape, device=like.device).clamp(min=tiny)
    return -(-noise.log()).clamp(min=tiny).log()
