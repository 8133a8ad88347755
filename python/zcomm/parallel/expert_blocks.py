"""Hugging Face's blocks with experts, divided among ranks (DeepSpeed's AutoEP).

A block's router and shared experts stay as they are. Its module of experts, with weights [experts, ...], keeps this
rank's part of them, and its forward sends tokens to all ranks and back. Names of parameters do not change. A rank's own
experts run by transformers' code, by a loop or grouped matrix products (``experts_implementation``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from zcomm.parallel.exchange import through_experts
from zcomm.parallel.experts import AXIS, DividedState, ExpertRanks
from zcomm.zero.agree import broadcast
from zcomm.zero.layout.cut import ExpertPart
from zcomm.zero.materialize import deferred
from zcomm.zero.tensors.gathered import GatheredParameters

if TYPE_CHECKING:
    from zcomm.comm.mesh import ProcessMesh


class Block(NamedTuple):
    """A kind of block: classes of its experts, and its names for router, experts and experts of a token."""

    classes: tuple[str, ...]
    router: str = "gate"
    experts: str = "experts"
    top_k: str = "num_experts_per_tok"


PRESETS = {
    "mixtral": Block(("MixtralExperts",)),
    "qwen3_moe": Block(("Qwen3MoeExperts", "Qwen2MoeExperts")),
    "qwen3_5_moe": Block(("Qwen3_5MoeExperts",)),
    "deepseek_v2": Block(("DeepseekV2Experts",)),
    "deepseek_v3": Block(("DeepseekV3Experts", "DeepseekV3NaiveMoe")),
}


class RoutedExperts(DividedState):
    """A module of experts with this rank's part of the weights; ``divide_experts`` derives from it and the class."""

    ranks: ExpertRanks

    def mark_experts(self) -> None:
        for key, param in self.named_parameters():
            if not param.dim() or param.shape[0] != self.ranks.local:
                raise NotImplementedError(
                    f"{key} of {type(self).__name__} has shape {tuple(param.shape)}, not "
                    f"{self.ranks.local} experts in one tensor"
                )
        super().mark_experts()

    @property
    def part(self) -> ExpertPart:
        return ExpertPart(self.ranks.rank, self.ranks.size, self.ranks.comm)

    def _join(self, ranks: ExpertRanks, found: dict[str, Any], prefix: str, whole: bool) -> None:
        for name in (f"{prefix}{key}" for key, _ in self.named_parameters() if whole):
            found[name] = self.part.joined(found[name], f"state_dict() {name}")

    def _take(self, ranks: ExpertRanks, state: dict[str, Any], prefix: str, errors: list[str]) -> None:
        for key, param in self.named_parameters():
            value, cut = state.get(f"{prefix}{key}"), self.part.cut(param.shape)
            if isinstance(value, torch.Tensor) and value.shape == cut.shape:
                state[f"{prefix}{key}"] = cut.part_of(value)
            elif state.pop(f"{prefix}{key}", None) is not None:
                errors.append(f"size mismatch for {prefix}{key}: expected all experts, {tuple(cut.shape)}")

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> Any:
        """Return the weighted results of all ranks' experts, [T, D], as the class does. Collective."""

        def run(rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
            if not len(rows):  # every parameter gets a gradient, of zeros
                return rows + sum(param.flatten()[:0].sum() for param in self.parameters())
            expert = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).to(rows.device)
            weights = top_k_weights.new_ones(len(rows), 1)
            found: torch.Tensor = super(RoutedExperts, self).forward(rows, expert.unsqueeze(1), weights)
            return found

        ranks = self.ranks
        return through_experts(hidden_states, top_k_index, top_k_weights, ranks.local, run, ranks.comm)


def divide_experts(model: nn.Module, mesh: ProcessMesh, preset: str | None = None) -> int:
    """Divide the experts of Hugging Face's blocks among the ranks along the mesh's axis "expert". Collective.

    All ranks have the whole model; rank 0's experts are used. preset: a kind of block; None: any. A block that is
    divided already is skipped. Returns: the number of divided blocks. Memory: each rank keeps its part only.
    Experts of ``zero.Init`` get memory: a whole tensor at a time, and this rank's part until ZeroOptimizer takes it.
    Raises: ValueError for an unknown preset, a model without such blocks, or experts that do not divide.
    NotImplementedError for experts that are not in one tensor.
    """
    if preset is not None and preset not in PRESETS:
        raise ValueError(f"preset_model={preset!r} is not one of {', '.join(PRESETS)}")
    blocks = list(PRESETS.values()) if preset is None else [PRESETS[preset]]
    classes = {name for block in blocks for name in block.classes}
    found = [(n, m) for n, m in model.named_modules() if type(m).__name__ in classes]
    if not found:
        raise ValueError(
            f"expert_parallel: {type(model).__name__} has no module of {', '.join(sorted(classes))}: name another "
            "preset_model, or use zcomm.parallel.MoE"
        )
    todo = [(name, module) for name, module in found if not isinstance(module, RoutedExperts)]
    for name, module in todo:
        _check(name, module, mesh.size(AXIS))
    for name, module in todo:
        ranks = ExpertRanks(int(module.num_experts), mesh.size(AXIS))
        ranks.connect(mesh)
        for key, param in module.named_parameters():
            if not param.is_meta:
                broadcast(mesh.world, param.data, 0, f"first value of {name}.{key}")
            with GatheredParameters([param]):  # of zero.Init: with rank 0's values
                part = param.data[ranks.own.start : ranks.own.stop].clone()
            deferred.materialize(param, part)
        module.ranks, module.num_experts, module.group = ranks, ranks.local, f"ep_size_{ranks.size}"
        module.__class__ = type(type(module).__name__, (RoutedExperts, type(module)), {})
        module.mark_experts()
    return len(todo)


def _check(name: str, module: nn.Module, size: int) -> None:
    count = getattr(module, "num_experts", None)
    if not isinstance(count, int) or count % size:
        raise ValueError(f"{name}: {count} experts do not divide among {size} ranks of the axis 'expert'")
    for key, param in module.named_parameters():
        if not param.dim() or param.shape[0] != count:
            raise NotImplementedError(
                f"{name}.{key} has shape {tuple(param.shape)}, not {count} experts in one tensor: install transformers "
                ">= 5.0"
            )
