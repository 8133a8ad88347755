"""``deepspeed.moe.experts``: the experts of one rank."""

from __future__ import annotations

import copy

import torch
from torch import nn

from zcomm.parallel import experts as parallel


class Experts(nn.Module):
    """``num_local_experts`` copies of ``expert``, marked as parameters of the group ``expert_group_name``."""

    def __init__(self, expert: nn.Module, num_local_experts: int = 1, expert_group_name: str | None = None) -> None:
        super().__init__()
        copies = [copy.deepcopy(expert) for _ in range(num_local_experts)]
        self.deepspeed_experts = parallel.Experts(copies, group=expert_group_name)
        self.num_local_experts = num_local_experts

    def forward(self, inputs: torch.Tensor, counts: list[int] | None = None) -> torch.Tensor:
        """Give each expert its rows [R, D] of ``inputs``; without counts an equal part of dimension 1, as DeepSpeed."""
        if counts is not None:
            return parallel.run_experts(self.deepspeed_experts, inputs, counts)
        parts = zip(self.deepspeed_experts, inputs.chunk(self.num_local_experts, dim=1), strict=True)
        found = [expert(part) for expert, part in parts]
        return torch.cat([each[0] if isinstance(each, tuple) else each for each in found], dim=1)
