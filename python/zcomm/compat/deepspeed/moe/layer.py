"""``deepspeed.moe.layer``: the layer of experts, by DeepSpeed's arguments and names of parameters."""

from __future__ import annotations

import torch
from torch import nn

from zcomm.compat.deepspeed.moe.experts import Experts
from zcomm.compat.deepspeed.moe.sharded_moe import MOELayer, TopKGate
from zcomm.compat.deepspeed.utils.logging import log_dist
from zcomm.parallel.experts import ExpertRanks


class MoE(nn.Module):
    """A layer of ``num_experts`` copies of ``expert``, which ``ep_size`` ranks divide once ``initialize`` has run.

    forward returns (output, l_aux, exp_counts). Tutel and tensor parallelism of experts are refused.
    Raises: ValueError; NotImplementedError.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        if enable_expert_tensor_parallelism:
            raise NotImplementedError("MoE(enable_expert_tensor_parallelism=True): an expert is whole on its rank")
        if noisy_gate_policy not in (None, "None", "Jitter", "RSample"):
            raise ValueError(f"noisy_gate_policy={noisy_gate_policy!r} is not one of None, 'Jitter', 'RSample'")
        self.ranks = ExpertRanks(num_experts, ep_size)
        self.use_residual, self.enable_expert_tensor_parallelism = use_residual, False
        self.ep_size, self.num_experts, self.num_local_experts = ep_size, num_experts, self.ranks.local
        self.expert_group_name = f"ep_size_{ep_size}"
        log_dist(f"MoE: {num_experts} experts, {ep_size} ranks divide them", [0])
        experts = Experts(expert, self.num_local_experts, self.expert_group_name)
        gate = TopKGate(
            hidden_size,
            num_experts,
            k,
            capacity_factor,
            eval_capacity_factor,
            min_capacity,
            noisy_gate_policy,
            drop_tokens,
            use_rts,
            None,
            top2_2nd_expert_sampling,
        )
        self.deepspeed_moe = MOELayer(
            gate, experts, self.expert_group_name, ep_size, self.num_local_experts, use_tutel, self.ranks
        )
        if use_residual:
            self.mlp = expert
            self.coefficient = nn.Linear(hidden_size, 2)

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Connect the layer with its ranks, if ``initialize`` has not; the first such call makes a mesh. Collective."""
        from zcomm.compat.deepspeed.utils import groups

        if use_data_before_expert_parallel_:
            raise NotImplementedError("use_data_before_expert_parallel_=True: adjacent ranks divide the experts")
        if self.ranks.mesh is None:
            self.ranks.connect(groups.mesh_of_experts(self.ep_size))

    def forward(
        self, hidden_states: torch.Tensor, used_token: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (output, l_aux, exp_counts). used_token: 0 for tokens without an expert, with top-1. Collective."""
        output = self.deepspeed_moe(hidden_states, used_token)
        if self.use_residual:
            plain = self.mlp(hidden_states)
            plain = plain[0] if isinstance(plain, tuple) else plain
            share = self.coefficient(hidden_states).softmax(-1)
            output = output * share[..., :1] + plain * share[..., 1:]
        l_aux, exp_counts = self.deepspeed_moe.l_aux, self.deepspeed_moe.exp_counts
        assert l_aux is not None and exp_counts is not None
        return output, l_aux, exp_counts
