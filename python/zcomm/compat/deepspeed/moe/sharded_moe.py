"""``deepspeed.moe.sharded_moe``: gates, and the layer that sends tokens to experts.

Gates return DeepSpeed's tuples: (l_aux, combine_weights, dispatch_mask, exp_counts), with [tokens, experts, capacity].
With ``sparse_routes``: (l_aux, capacity, num_experts, indices, locations, gates, exp_counts), with [k, tokens].
``MOELayer`` sends rows of tokens without padding, so that without ``drop_tokens`` no capacity is needed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zcomm.compat.deepspeed import comm as dist
from zcomm.compat.deepspeed.moe.experts import Experts
from zcomm.parallel import gates
from zcomm.parallel.exchange import through_experts
from zcomm.parallel.experts import ExpertRanks
from zcomm.parallel.gates import Routes

_JITTER = 1e-2


def top1gating(
    logits: torch.Tensor,
    capacity_factor: float,
    min_capacity: int,
    used_token: torch.Tensor | None = None,
    noisy_gate_policy: str | None = None,
    drop_tokens: bool = True,
    use_rts: bool = True,
    ep_group: Any = None,
    sparse_routes: bool = False,
    use_tutel: bool = False,
) -> tuple[Any, ...]:
    """Send each of [tokens, experts] logits to its most probable expert."""
    if len(logits) < min_capacity:
        raise AssertionError(f"{len(logits)} tokens are fewer than min_capacity={min_capacity}: set it to 0")
    routes = gates.top_1(
        logits,
        capacity_factor if drop_tokens else None,
        min_capacity,
        noisy=noisy_gate_policy == "RSample",
        at_random=use_rts,
        used=used_token,
    )
    return _told(routes, ep_group, sparse_routes, most=len(logits))


def top2gating(
    logits: torch.Tensor,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: Any = None,
    top2_2nd_expert_sampling: bool = True,
    sparse_routes: bool = False,
) -> tuple[Any, ...]:
    """Send each of [tokens, experts] logits to its most probable expert and a second one."""
    factor = capacity_factor if drop_tokens else None
    return _told(gates.top_2(logits, factor, min_capacity, top2_2nd_expert_sampling), ep_group, sparse_routes)


def topkgating(
    logits: torch.Tensor,
    k: int,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: Any = None,
    drop_policy: str = "probs",
    sparse_routes: bool = False,
) -> tuple[Any, ...]:
    """Send each of [tokens, experts] logits to its k most probable experts. Raises: ValueError for a drop_policy."""
    if drop_policy not in ("probs", "position"):
        raise ValueError(f"Invalid drop_policy: {drop_policy}")
    factor = capacity_factor if drop_tokens else None
    return _told(gates.top_k(logits, k, factor, min_capacity, drop_policy), ep_group, sparse_routes)


def _told(routes: Routes, ep_group: Any, sparse: bool, most: int | None = None) -> tuple[Any, ...]:
    """Return DeepSpeed's tuple. Without a capacity it is the most rows of an expert on any rank; then collective."""
    if routes.capacity is not None:
        capacity = torch.tensor(routes.capacity)
    else:
        capacity = routes.counts.max()
        if ep_group is not None and dist.get_world_size(group=ep_group) > 1:
            dist.all_reduce(capacity, op=dist.ReduceOp.MAX, group=ep_group)
        capacity = capacity if most is None else capacity.clamp(max=most)
    count, kept = len(routes.counts), routes.index >= 0
    if sparse:
        indices, places = (each.t().contiguous().to(torch.int32) for each in (routes.index, routes.place))
        return routes.aux, capacity, count, indices, places, routes.weights.t().contiguous(), routes.counts
    expert = gates.one_hot(routes.index, count).to(routes.weights)
    place = gates.one_hot(torch.where(kept, routes.place, -1), int(capacity)).to(routes.weights)
    combine = torch.einsum("sk,ske,skc->sec", routes.weights, expert, place)
    return routes.aux, combine, combine.bool(), routes.counts


class TopKGate(nn.Module):
    """The router: a linear layer ``wg`` in fp32, and one of the gates. min_capacity is DeepSpeed's default here."""

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 8,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        ep_group: Any = None,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        self.wg = nn.Linear(model_dim, num_experts, bias=False)
        self.ep_group, self.k, self.min_capacity = ep_group, k, min_capacity
        self.capacity_factor, self.eval_capacity_factor = capacity_factor, eval_capacity_factor
        self.noisy_gate_policy, self.drop_tokens, self.use_rts = noisy_gate_policy, drop_tokens, use_rts
        self.top2_2nd_expert_sampling = top2_2nd_expert_sampling

    def _set_ep_group(self, ep_group: Any) -> None:
        self.ep_group = ep_group

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return [tokens, experts], in fp32 or fp64."""
        wide = torch.promote_types(tokens.dtype, torch.float32)
        tokens = tokens.to(wide)
        if self.noisy_gate_policy == "Jitter" and self.training:
            tokens = tokens * torch.empty_like(tokens).uniform_(1 - _JITTER, 1 + _JITTER)
        return nn.functional.linear(tokens, self.wg.weight.to(wide))

    def routes(self, tokens: torch.Tensor, used_token: torch.Tensor | None = None) -> Routes:
        """Return the routes of [tokens, model_dim]."""
        logits = self.logits(tokens)
        factor = (self.capacity_factor if self.training else self.eval_capacity_factor) if self.drop_tokens else None
        if self.k == 1:
            noisy = self.noisy_gate_policy == "RSample" and self.training
            return gates.top_1(logits, factor, self.min_capacity, noisy=noisy, at_random=self.use_rts, used=used_token)
        if self.k == 2:
            return gates.top_2(logits, factor, self.min_capacity, self.top2_2nd_expert_sampling)
        return gates.top_k(logits, self.k, factor, self.min_capacity, "probs")

    def forward(
        self,
        input: torch.Tensor,
        used_token: torch.Tensor | None = None,
        sparse_routes: bool = False,
        use_tutel: bool = False,
    ) -> tuple[Any, ...]:
        """Return the tuple of the gate for [tokens, model_dim]."""
        most = len(input) if self.k == 1 else None
        return _told(self.routes(input, used_token), self.ep_group, sparse_routes, most)


class MOELayer(nn.Module):
    """The gate, and the experts of all ranks. ``l_aux`` and ``exp_counts`` are of the last forward."""

    def __init__(
        self,
        gate: TopKGate,
        experts: nn.Module,
        ep_group_name: str,
        ep_size: int,
        num_local_experts: int,
        use_tutel: bool = False,
        ranks: ExpertRanks | None = None,
    ) -> None:
        super().__init__()
        self.gate, self.experts, self.ep_group = gate, experts, None
        self.ep_size, self.ep_group_name, self.num_local_experts = ep_size, ep_group_name, num_local_experts
        self.ranks = ranks or ExpertRanks(ep_size * num_local_experts, ep_size)
        if isinstance(experts, Experts):
            experts.deepspeed_experts.ranks = self.ranks
        self.l_aux: torch.Tensor | None = None
        self.exp_counts: torch.Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "l_aux": None}  # copies have no part of a graph

    def _set_ep_group(self, ep_group: Any) -> None:
        self.ep_group = ep_group
        self.gate._set_ep_group(ep_group)

    def forward(self, *input: torch.Tensor | None) -> torch.Tensor:
        """Return the experts' weighted results for [..., model_dim]. The second input: ``used_token``. Collective."""
        hidden, used = input[0], input[1] if len(input) > 1 else None
        assert hidden is not None
        tokens = hidden.reshape(-1, hidden.shape[-1])
        routes = self.gate.routes(tokens, used)
        self.l_aux, self.exp_counts = routes.aux, routes.counts.detach()
        ranks = self.ranks
        found = through_experts(tokens, routes.index, routes.weights, ranks.local, self.experts, ranks.comm)
        return found.reshape(hidden.shape)
