"""DeepSpeed's layer of experts in initialize(): two ranks that divide the experts, and two ranks that both have all."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from tiers import slow

Run = Callable[..., list[Any]]
DIM, EXPERTS = 6, 4
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 5,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
    "gradient_clipping": 0.5,
}
LAYERS: list[dict[str, Any]] = [
    {"k": 1, "use_rts": False, "min_capacity": 0, "capacity_factor": 0.8, "use_residual": True},
    {"k": 2, "drop_tokens": False, "top2_2nd_expert_sampling": False},
    {"k": 3, "capacity_factor": 0.7, "min_capacity": 1},
    {"k": 1, "noisy_gate_policy": "RSample"},
]


def model_of(size: int, rank: int, layer: dict[str, Any]) -> nn.Module:
    """Return a model with all experts (size 1), or with ``rank``'s; equal experts have equal weights."""
    from zcomm.compat.deepspeed.moe.layer import MoE

    torch.manual_seed(3)
    expert = nn.Sequential(nn.Linear(DIM, 7), nn.Tanh(), nn.Linear(7, DIM))
    model = nn.ModuleList([nn.Linear(3, DIM), MoE(DIM, expert, EXPERTS, size, **layer), nn.Linear(DIM, 1)])
    for number, own in enumerate(model[1].deepspeed_moe.experts.deepspeed_experts):  # type: ignore[union-attr]
        torch.manual_seed(100 + number + rank * (EXPERTS // size) * (size > 1))
        for param in own.parameters():
            nn.init.normal_(param, std=0.4)
    return model


class Net(nn.Module):
    def __init__(self, parts: nn.Module) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, moe, last = self.parts.children()
        hidden = first(x)
        more, aux, _ = moe(hidden)
        result: torch.Tensor = (last(hidden + more) - x.sum(1, keepdim=True)).square().mean() + 0.05 * aux
        return result


def losses(size: int, layer: dict[str, Any], stage: int) -> tuple[list[float], list[float]]:
    import zcomm.compat.deepspeed as deepspeed
    from zcomm.compat.deepspeed.moe.utils import configure_moe_param_groups, has_moe_layers
    from zcomm.compat.deepspeed.utils import groups

    comm = zcomm.init(timeout=60)
    model = Net(model_of(size, comm.rank, layer))
    config = {**CONFIG, "zero_optimization": {"stage": stage}}
    params = configure_moe_param_groups(list(model.parameters()))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=params, config=config)
    assert has_moe_layers(model) == (True, EXPERTS)
    if size > 1:
        assert groups._get_expert_parallel_group_ranks("ep_size_2") == [0, 1]
        assert groups._get_expert_data_parallel_world_size("ep_size_2") == 1
        assert torch.distributed.get_world_size(groups._get_expert_parallel_group("ep_size_2")) == 2
        assert groups._get_data_parallel_world_size() == 2
    found, norms = [], []
    for step in range(8):
        torch.manual_seed(10 * step + comm.rank)
        loss = engine(torch.randn(5, 3))
        engine.backward(loss)
        engine.step()
        found.append(float(loss.detach()))
        norms.append(float(engine.get_global_grad_norm() or 0))
    engine.destroy()
    return found, norms


def beside_all_experts(layer: dict[str, Any], stage: int) -> None:
    divided, whole = losses(2, layer, stage), losses(1, layer, stage)
    assert divided[0] == pytest.approx(whole[0], abs=1e-5)
    assert divided[1] == pytest.approx(whole[1], rel=1e-4)


@pytest.mark.parametrize(
    ("layer", "stage"), [(LAYERS[0], 2), slow(LAYERS[1], 0), slow(LAYERS[2], 1), slow(LAYERS[3], 0)]
)
def test_ranks_that_divide_experts_train_as_ranks_that_have_all(
    layer: dict[str, Any], stage: int, run_ranks: Run
) -> None:
    run_ranks(beside_all_experts, 2, layer, stage)


def checkpoints(folder: str) -> None:
    comm = zcomm.init(timeout=60)
    states, config = [], {**CONFIG, "zero_optimization": {"stage": 2}}
    for number, size in enumerate((2, 1, 2)):
        engine, *_ = zcomm.initialize(model=Net(model_of(size, comm.rank, LAYERS[0])), config=config)
        if number:
            assert engine.load_checkpoint(folder, tag=f"of {number - 1}") == (f"{folder}/of {number - 1}", {"steps": 2})
            states.append(copy.deepcopy(engine.module.state_dict()))
        for step in range(2):
            torch.manual_seed(10 * step + comm.rank)
            engine.backward(engine(torch.randn(5, 3)))
            engine.step()
        states.append(copy.deepcopy(engine.module.state_dict()))
        engine.save_checkpoint(folder, tag=f"of {number}", client_state={"steps": 2})
        engine.destroy()
    for one, other in ((0, 1), (2, 3)):
        assert states[one].keys() == states[other].keys()
        assert all(torch.equal(states[one][name], value) for name, value in states[other].items())


def test_checkpoints_of_an_engine_load_with_another_ep_size(run_ranks: Run, tmp_path: Path) -> None:
    run_ranks(checkpoints, 2, str(tmp_path))


def wrong_layers() -> None:
    comm = zcomm.init(timeout=60)
    layer = LAYERS[1]
    two = model_of(2, comm.rank, layer)
    with pytest.raises(RuntimeError, match=r"call initialize\(\) first"):
        Net(two)(torch.ones(1, 3))
    with pytest.raises(ValueError, match="do not divide the 2 data ranks"):
        zcomm.initialize(model=model_of(4, 0, layer), config=CONFIG)
    with pytest.raises(NotImplementedError, match="divided among 2 and 4 ranks"):
        zcomm.initialize(model=nn.ModuleList([two, model_of(4, 0, layer)]), config=CONFIG)
    with pytest.raises(ValueError, match="give expert=2"):
        zcomm.initialize(model=copy.deepcopy(two), config=CONFIG, mesh=zcomm.ProcessMesh(shard=2))
    with pytest.raises(ValueError, match=r"has no module of .*MixtralExperts"):
        zcomm.initialize(
            model=nn.Linear(1, 1), config={**CONFIG, "expert_parallel": {"enabled": True, "autoep_size": 2}}
        )


def test_wrong_layers_of_experts(run_ranks: Run) -> None:
    run_ranks(wrong_layers, 2)


def test_gates_drop_routes_as_their_rules_say() -> None:
    from zcomm.compat.deepspeed.moe.sharded_moe import top1gating, top2gating, topkgating

    logits = torch.tensor([[3.0, 1.0], [2.0, 1.0], [4.0, 1.0], [1.0, 2.0]])
    _, combine, mask, counts = top1gating(logits, 1.0, 0, use_rts=False)
    assert counts.tolist() == [3, 1] and mask.nonzero().tolist() == [[0, 0, 0], [1, 0, 1], [3, 1, 0]]
    assert torch.allclose(combine.sum((1, 2)), logits.softmax(1).amax(1) * torch.tensor([1, 1, 0, 1]))
    kept = topkgating(logits, 1, 1.0, 0)[2]  # the least probable route is dropped
    assert kept.nonzero().tolist() == [[0, 0, 0], [2, 0, 1], [3, 1, 0]]
    _, capacity, count, indices, places, weights, counts = top2gating(logits, 1.0, 0, True, None, False, True)
    assert (int(capacity), count, counts.tolist()) == (4, 2, [4, 4])
    assert indices.tolist() == [[0, 0, 0, 1], [1, 1, 1, 0]] and places.tolist() == [[0, 1, 2, 0], [1, 2, 3, 3]]
    assert torch.allclose(weights.sum(0), torch.ones(4))
    assert top1gating(logits, 1.0, 0, used_token=torch.tensor([1, 0, 1, 0]))[3].tolist() == [2, 0]
    with pytest.raises(AssertionError, match="4 tokens are fewer than min_capacity=5"):
        top1gating(logits, 1.0, 5)
