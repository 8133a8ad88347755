"""Styles of plans that torch does not have: fused weights, transposed layers, modules with parameters of their own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import zcomm
from tensor_jobs import whole
from torch_world import world
from zcomm.parallel.styles import REFUSED, STYLES, check_style, division_of_bare, is_transposed
from zcomm.zero.checkpoint.export import export

Run = Callable[..., list[Any]]
WIDTH, INNER, EXPERTS = 6, 8, 3
PLAN = {
    "fused.gate_up": "packed_colwise",
    "fused.down": "rowwise",
    "mix.c_attn": "packed_colwise:3",
    "mix.c_proj": "rowwise",
    "experts.gate_up": "packed_colwise",
    "experts.down": "rowwise",
    "experts": "moe_tp_experts",
    "turned.gate_up": "packed_rowwise",
    "turned.down": "colwise",
    "turned": "all_reduce",
    "mix.scale": "colwise",
    "mix": "local_params",
    "again": "moe_identity_expert",
}


class Conv1D(nn.Module):
    """A linear layer as transformers' for GPT-2: the weight is [inputs, outputs]."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf) / 3), nn.Parameter(torch.randn(nf) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).view(*x.shape[:-1], self.nf)


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(WIDTH, 2 * INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        out: torch.Tensor = self.down(gate.tanh() * up)
        return out


class Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = Conv1D(3 * INNER, WIDTH), Conv1D(WIDTH, INNER)
        self.scale = nn.Parameter(torch.rand(INNER))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.c_attn(x).chunk(3, -1)
        out: torch.Tensor = self.c_proj(query * key.tanh() * value * self.scale)
        return out


class Experts(nn.Module):
    """Experts with weights of one tensor. turned: [inputs, outputs]."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        gate_up, down = torch.randn(EXPERTS, 2 * INNER, WIDTH) / 3, torch.randn(EXPERTS, WIDTH, INNER) / 3
        self.turned = turned
        self.gate_up = nn.Parameter(gate_up.mT.contiguous() if turned else gate_up)
        self.down = nn.Parameter(down.mT.contiguous() if turned else down)

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        gate_up, down = (self.gate_up, self.down) if self.turned else (self.gate_up.mT, self.down.mT)
        gate, up = (x @ gate_up).chunk(2, -1)
        return ((gate.tanh() * up @ down) * weights.mT[:, :, None]).sum(0)


class Net(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.fused, self.mix, self.router = Fused(), Mix(), nn.Linear(WIDTH, EXPERTS)
        self.experts, self.turned, self.again = Experts(turned=False), Experts(turned=True), nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + checkpoint(self.mix, x, use_reentrant=False)
        x = x + self.fused(x)
        weights = self.router(x).softmax(-1)
        x = x + checkpoint(self.experts, x, weights, use_reentrant=False)
        shares = sum(self.again(x) for _ in range(_ranks(self)))
        return x + self.turned(x, weights=weights) + shares


def _ranks(model: nn.Module) -> int:
    """Return how often the sum of the ranks' parts of an identity has to be added here."""
    down: Any = model.experts.down  # type: ignore[union-attr]
    return down.device_mesh.size() if isinstance(down, DTensor) else 1


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(number)
    dtype = next(model.parameters()).dtype
    x, wanted = (torch.randn(5, WIDTH, generator=made).to(dtype) for _ in range(2))
    out: torch.Tensor = (model(x) - wanted).square().mean()
    return out


def exact() -> list[float]:
    with world() as (rank, size):
        zcomm.init(timeout=60)
        alone = Net(0).double()
        model = zcomm.parallel.tensor(Net(rank).double(), zcomm.ProcessMesh(tensor=size), PLAN)
        opts = [torch.optim.AdamW(m.parameters(), lr=0.01, foreach=False) for m in (model, alone)]
        worst = [0.0, 0.0, 0.0]
        for step in range(20):
            losses = [loss_of(each, step) for each in (model, alone)]
            for loss, opt in zip(losses, opts, strict=True):
                opt.zero_grad()
                loss.backward()
            worst[0] = max(worst[0], abs(losses[0].item() - losses[1].item()))
            for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
                assert mine.grad is not None and theirs.grad is not None
                worst[1] = max(worst[1], float((whole(mine.grad) - theirs.grad).abs().max()))
            for opt in opts:
                opt.step()
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            worst[2] = max(worst[2], float((whole(mine.detach()) - theirs.detach()).abs().max()))
        with pytest.raises(RuntimeError):
            model.experts(torch.ones(2, 1), torch.ones(2, EXPERTS))
        assert isinstance(model.experts.down, DTensor)  # after an error in forward, too
        opts[0].zero_grad()
        twin = copy.deepcopy(model)
        loss_of(twin, 20).backward()
        loss_of(model, 20).backward()
        for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert mine.grad is not None and other.grad is not None
            worst[1] = max(worst[1], float((whole(mine.grad) - whole(other.grad)).abs().max()))
            mine.grad = other.grad = None
        zcomm.shutdown()
        return worst


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_losses_gradients_and_weights_are_those_of_the_whole_model(run_ranks: Run, size: int) -> None:
    for found in run_ranks(exact, size):
        assert max(found) < 1e-9, found


def trained(folder: str, sizes: dict[str, int]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return losses and norms of 4 steps, and weights; 2 steps follow a checkpoint of other ranks, if there is one."""
    with world() as (rank, _):
        zcomm.init(timeout=60)
        mesh = zcomm.ProcessMesh(**sizes)
        model = Net(rank)
        if sizes["tensor"] > 1:
            zcomm.parallel.tensor(model, mesh, PLAN)
        opt = zcomm.ZeroOptimizer(model, "adamw", lr=0.01, mesh=mesh, stage=1, clip_norm=0.5)
        path, found = Path(folder), []
        if (path / "first").exists():
            opt.load(path / "first")
            begin = 2
        else:
            begin = 0
        for step in range(begin, 4):
            if step == 2 and begin == 0:
                opt.save(path / "first")
            loss = loss_of(model, step)
            loss.backward()
            opt.step()
            opt.zero_grad()
            found += [loss.item(), float(opt.grad_norm or 0)]
        weights = opt.full_state_dict()
        zcomm.zero.set_full_param(model.experts.gate_up, torch.zeros(EXPERTS, 2 * INNER, WIDTH))
        assert not bool(zcomm.zero.full_param(model.experts.gate_up).any())
        opt.close()
        zcomm.shutdown()
        return found[-4:], weights


def test_checkpoints_of_fused_weights_load_with_any_mesh(run_ranks: Run, tmp_path: Path) -> None:
    wanted, weights = run_ranks(trained, 2, str(tmp_path), {"tensor": 2})[0]
    for found, other in run_ranks(trained, 1, str(tmp_path), {"tensor": 1}):
        assert found == pytest.approx(wanted, rel=1e-5)
        for name, value in other.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)
    (file,) = export(tmp_path / "first", tmp_path / "model.safetensors")
    assert file.exists()


# --- refusals -------------------------------------------------------------------------------------------------


def refusals() -> dict[str, str]:
    found: dict[str, str] = {}
    with world():
        zcomm.init(timeout=60)
        mesh = zcomm.ProcessMesh(tensor=2)
        cases: dict[str, dict[str, str]] = {
            "no module style": {"experts.gate_up": "packed_colwise"},
            "whole parameters": {"experts.gate_up": "packed_colwise", "experts": "moe_tp_experts"},
            "no parameters": {**PLAN, "fused": "all_reduce"},
            "no such layer": {**PLAN, "mix": "colwise"},
            "transposed": {**PLAN, "mix.c_proj": "rowwise_split_input"},
            "rows of a layer": {**PLAN, "fused.down": "packed_rowwise"},
            "blocks": {**PLAN, "fused.gate_up": "packed_colwise:16"},
            "no blocks": {**PLAN, "fused.gate_up": "packed_colwise:x"},
            "latent": {**PLAN, "router": "mla_kv_a_proj"},
        }
        for case, plan in cases.items():
            try:
                zcomm.parallel.tensor(Net(0), mesh, plan)
                found[case] = "nothing"
            except (ValueError, NotImplementedError) as error:
                found[case] = f"{type(error).__name__}: {error}"
        zcomm.shutdown()
    return found


WORDS = {
    "no module style": "ValueError: plan: experts.gate_up is a parameter: give its module one of the styles",
    "whole parameters": "ValueError: plan: experts has the style 'moe_tp_experts', but down stays whole",
    "no parameters": "ValueError: plan: fused has the style 'all_reduce', but its children have parameters",
    "no such layer": "NotImplementedError: plan: the style 'colwise' is not available for mix (Mix)",
    "transposed": "NotImplementedError: plan: the style 'rowwise_split_input' is not available for mix.c_proj (Conv1D)",
    "rows of a layer": "NotImplementedError: plan: the style 'packed_rowwise' is not available for fused.down (Linear)",
    "blocks": "fused.gate_up.weight has size 16 in dimension 0, which the 2 ranks of the axis",
    "no blocks": "ValueError: plan: the style 'packed_colwise:x' of 'fused.gate_up' is no style with a number",
    "latent": "ValueError: plan: the style 'mla_kv_a_proj' of router needs model.config.qk_rope_head_dim",
}


def test_errors_name_the_value_on_all_ranks(run_ranks: Run) -> None:
    for found in run_ranks(refusals, 2):
        assert not {case: found[case] for case, words in WORDS.items() if words not in found[case]}


def test_each_word_is_served_or_refused_with_a_reason() -> None:
    for style in STYLES:
        check_style(style, "a", "a")
    for style, why in REFUSED.items():
        with pytest.raises(NotImplementedError) as error:
            check_style(style, "a", "a")
        assert why in str(error.value)
    assert is_transposed(Conv1D(4, 3)) and not is_transposed(nn.Linear(4, 3))
    found = [division_of_bare(torch.empty(shape), style) for shape, style in (((3,), "colwise"), ((3, 4), "rowwise"))]
    assert found == [(0, 1), (1, 1)]
