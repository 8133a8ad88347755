"""Unit-wise stage 3 on awkward models: tied and frozen weights, evaluation in between, more units than slots."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
from torch import nn

import zcomm
from zcomm import _core
from zcomm.zero.layout.unit_policy import choose_units
from zcomm.zero.sharded.param import ShardedParameter
from zcomm.zero.units.slot import Slot


class Tied(nn.Module):
    """Embedding tied to the head, a bias shared by two blocks, a frozen scale, a block used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))
        self.blocks[3].bias = self.blocks[1].bias
        self.scale = nn.Parameter(torch.full((16,), 0.5), requires_grad=False)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for index in (0, 1, 2, 3, 4, 2):
            h = h + torch.tanh(self.blocks[index](h)) * self.scale
        return self.norm(h) @ self.embed.weight.t()


def train(
    stage: int, offload: str | None, folder: Path | list[Path], prefetch: int = 1
) -> tuple[list[str], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = Tied()
    opt = zcomm.ZeroOptimizer(
        model, stage=stage, offload=offload, nvme_path=folder, lr=0.01, prefetch=prefetch, clip_norm=1.0
    )
    losses = []
    for step in range(8):
        x = torch.randint(0, 32, (4, 7), generator=torch.Generator().manual_seed(step))
        if step % 3 == 2:
            model.eval()
            with torch.no_grad():
                losses.append(model(x).sum().item().hex())
            model.train()
        loss = nn.functional.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item().hex())
    weights = opt.full_state_dict()
    opt.close()
    zcomm.shutdown()
    return losses, weights


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_awkward_model_has_the_same_bits(tmp_path: Path, prefetch: int) -> None:
    losses, weights = train(0, None, tmp_path)
    swapped_losses, swapped_weights = train(3, "nvme", tmp_path, prefetch)
    assert swapped_losses == losses
    assert weights.keys() == swapped_weights.keys()
    for name, value in weights.items():
        assert torch.equal(value, swapped_weights[name]), name


def test_several_drives_have_the_same_bits(tmp_path: Path) -> None:
    drives = [tmp_path / name for name in "abc"]
    losses, weights = train(0, None, tmp_path)
    swapped_losses, swapped_weights = train(3, "nvme", drives)
    assert swapped_losses == losses
    for name, value in weights.items():
        assert torch.equal(value, swapped_weights[name]), name
    assert all(drive.is_dir() and not list(drive.iterdir()) for drive in drives)


def test_choice_of_units() -> None:
    model = Tied()
    wanted = [p for p in model.parameters() if p.requires_grad]
    units = choose_units(model, wanted)
    assert [unit.name for unit in units] == ["root", *(f"blocks.{i}" for i in range(5))]
    root = {id(p) for p in units[0].params}
    for shared in (model.embed.weight, model.blocks[1].bias, model.norm.weight):
        assert id(shared) in root, "what several units use belongs to the root"
    assert sorted(id(p) for unit in units for p in unit.params) == sorted(map(id, wanted))


def test_parameters_are_stand_ins_between_steps_and_whole_in_use(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    seen: list[type] = []
    model[2].register_forward_hook(lambda module, *_: seen.append(type(module.weight)))
    opt = zcomm.ZeroOptimizer(model, stage=3, offload="nvme", nvme_path=str(tmp_path))
    assert isinstance(model[2].weight, ShardedParameter) and model[2].weight.shape == (8, 8)
    model(torch.ones(1, 8)).sum().backward()
    opt.step()
    assert issubclass(seen[0], nn.Parameter) and not issubclass(seen[0], ShardedParameter)
    assert all(isinstance(p, ShardedParameter) for p in model.parameters()), "after a step all are sharded again"
    opt.close()
    zcomm.shutdown()


@pytest.mark.skipif(not _core.moves_mappings(), reason="Linux before 5.13")
def test_a_gathered_unit_costs_no_work_for_each_page(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))
    opt = zcomm.ZeroOptimizer(model, "sgd", stage=3, offload="nvme", nvme_path=str(tmp_path), prefetch=0)
    faults = []
    for _ in range(8):
        model(torch.ones(1, 512)).sum().backward()
        opt.step()
        opt.zero_grad()
        with torch.no_grad():  # gradients' pages depend on malloc's state
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            model(torch.ones(1, 512))
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    unit_pages = 512 * 512 * 4 // resource.getpagesize()
    assert min(faults) < 4 * unit_pages, "8 gathers would take so many each"
    opt.close()
    zcomm.shutdown()


@pytest.mark.parametrize("method", ["map", "unmap"])
@pytest.mark.parametrize("after", [False, True])
def test_interrupted_forward_runs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, after: bool
) -> None:
    plain, calls = getattr(Slot, method), 0

    def breaking(*given: object) -> None:
        nonlocal calls
        calls += 1
        if calls != 4 or after:
            plain(*given)
        if calls == 4:
            raise KeyboardInterrupt

    sums = []
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    opt = zcomm.ZeroOptimizer(model, stage=3, offload="nvme", nvme_path=str(tmp_path), prefetch=0)
    with torch.no_grad():
        sums.append(model(torch.ones(1, 8)).sum().item())
        opt.zero_grad()
        monkeypatch.setattr(Slot, method, breaking)
        with pytest.raises(KeyboardInterrupt):
            for _ in range(3):
                model(torch.ones(1, 8))
        for _ in range(2):
            sums.append(model(torch.ones(1, 8)).sum().item())
            opt.zero_grad()
    assert calls > 4 and sums == sums[:1] * 3
    opt.close()
    zcomm.shutdown()
