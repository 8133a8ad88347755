"""Values that are set module by module under zero.Init: each rank keeps its shard, until ZeroOptimizer is built.

transformers' ``from_pretrained`` in stage 3 does this: ``GatheredParameters(module's, modifier_rank=0)`` around each.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from zcomm.zero import GatheredParameters

Run = Callable[..., list[Any]]
WIDTH, LAYERS = 1024, 24  # 4 MiB a layer, 96 MiB in all


class Net(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def load(model: nn.Module, rank: int, fill: Callable[[str, torch.Tensor], object]) -> None:
    """Load as transformers does."""
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if own:
            with GatheredParameters(list(own.values()), modifier_rank=0):
                if rank == 0:
                    with torch.no_grad():
                        for key, param in own.items():
                            fill(f"{name}.{key}", param)


def seeded(name: str, shape: torch.Size) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(name.encode()))) / 30


def fill_seeded(name: str, param: torch.Tensor) -> None:
    param.copy_(seeded(name, param.shape))


def train_loaded(folder: str) -> list[Any]:
    comm = zcomm.init(timeout=60)
    found = []
    for stage, offload, dtype in [(0, None, "fp32"), (2, None, "bf16"), (3, None, "fp32"), (3, "nvme", "bf16")]:
        torch.manual_seed(comm.rank)
        with zcomm.zero.Init():
            model = Net(37, 3)
        model.blocks[1].requires_grad_(False)  # frozen: below stage 3 it is in no store
        load(model, comm.rank, fill_seeded)
        assert all(p.is_meta == (comm.world_size > 1) for p in model.parameters() if p.dim() > 1)
        with GatheredParameters(list(model.parameters())):  # readable by all ranks
            assert all(torch.equal(p, seeded(n, p.shape)) for n, p in model.named_parameters() if p.dim() > 1)
            if comm.world_size > 1:
                next(model.parameters()).data.mul_(3)  # an edit that is dropped
        with GatheredParameters(model.blocks[2].weight, modifier_rank=comm.world_size - 1), torch.no_grad():
            model.blocks[2].weight += comm.rank
        if dtype == "bf16":
            model.to(torch.bfloat16)
        opt = zcomm.ZeroOptimizer(
            model,
            "sgd",
            lr=0.1,
            stage=stage,
            offload=offload,
            nvme_path=folder,
            precision=dtype,
            share_parameters=False,
        )
        whole = opt.full_state_dict()
        for name, value in whole.items():
            want = seeded(name, value.shape)
            if name == "blocks.2.weight":
                want = want + (comm.world_size - 1)
            if value.dim() > 1:
                assert torch.equal(value, want.to(value.dtype)), (stage, name)
        opt.backward(model(torch.ones(2, 37, dtype=opt.precision.dtype)).float().square().mean())
        opt.step()
        found.append(float(sum(value.double().sum() for value in opt.full_state_dict().values())))
        opt.close()
    zcomm.shutdown()
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_loaded_values_reach_every_stage(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    per_rank = run_ranks(train_loaded, world_size, str(tmp_path))
    assert all(found == per_rank[0] for found in per_rank)


def peak() -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.partition("VmHWM:")[2].split()[0]) * 1024


def measure() -> tuple[int, int]:
    comm = zcomm.init(timeout=60)
    with zcomm.zero.Init():
        model, first = Net(WIDTH, LAYERS), Net(WIDTH, 2)
    load(first, comm.rank, lambda name, param: param.fill_(0.5))  # one-time allocations
    Path("/proc/self/clear_refs").write_text("5")  # the peak is measured from this point
    before = peak()
    load(model, comm.rank, lambda name, param: param.fill_(0.5))
    grown = peak() - before
    opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1, stage=3, share_parameters=False)
    with GatheredParameters(model.blocks[7]):
        assert bool((model.blocks[7].weight == 0.5).all())
    opt.close()
    comm.barrier()
    zcomm.shutdown()
    return grown, sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize("world_size", [2])
def test_the_peak_is_a_part_of_the_model_and_a_few_layers(run_ranks: Run, world_size: int) -> None:
    layer = WIDTH * WIDTH * 4
    for grown, whole in run_ranks(measure, world_size):
        assert whole > LAYERS * layer
        assert grown < whole / world_size + 5 * layer, f"{grown / 2**20:.0f} MiB of {whole / 2**20:.0f}"


def load_whole_and_build_by_halves() -> str:
    comm = zcomm.init(timeout=60)
    with zcomm.zero.Init():
        model = Net(37, 2)
    load(model, comm.rank, fill_seeded)
    alone = comm.split(comm.rank)
    with pytest.raises(ValueError, match=r"by 2 ranks, .* but ZeroOptimizer's communicator has 1") as error:
        zcomm.ZeroOptimizer(model, "sgd", lr=0.1, stage=3, comm=alone)
    comm.barrier()
    zcomm.shutdown()
    return str(error.value)


def test_other_ranks_are_an_error(run_ranks: Run) -> None:
    run_ranks(load_whole_and_build_by_halves, 2)


def test_no_value_is_made_up_before_the_optimizer() -> None:
    """torch computes with uninitialized memory for a weight on the meta device."""
    with zcomm.zero.Init():
        model = Net(37, 2)
    assert model.to("cpu") is model and model.cpu().blocks[0].weight.is_meta, "ZeroOptimizer places it"
    beside = torch.zeros_like(model.blocks[0].weight, device=model.blocks[0].weight.device)  # as adapters are placed
    assert not beside.is_meta and beside.shape == model.blocks[0].weight.shape
    assert model.to("cpu", torch.bfloat16).blocks[0].weight.dtype == torch.bfloat16
    weight, x = model.float().blocks[0].weight, torch.ones(2, 37)
    computed: list[Callable[[], object]] = [lambda: model(x), lambda: x @ weight, lambda: x.clone().addmm_(x, weight)]
    for compute in computed:
        with pytest.raises(RuntimeError, match=r"shape \(37, 37\) of zcomm.zero.Init\(\) has no value here before"):
            compute()
    assert torch.ones(37 * 37).view_as(weight).shape == weight.shape
    with GatheredParameters(model):
        assert model(x).isfinite().all()


def test_tensors_of_a_state_dict_are_left_alone() -> None:
    """transformers 4 passes tensors of its state_dict(), which are not the parameters."""
    with zcomm.zero.Init():
        model = Net(37, 2)
    views = list(model.state_dict().values())
    with GatheredParameters(views, modifier_rank=0):
        assert all(param.is_meta for param in model.parameters() if param.dim() > 1), "no memory for the whole model"
    load(model, 0, fill_seeded)
    assert all(torch.equal(param, seeded(name, param.shape)) for name, param in model.named_parameters())
    lost = nn.Parameter(torch.empty(37, 37, device="meta"))
    with pytest.raises(ValueError, match=r"shape \(37, 37\) is on the meta device"), GatheredParameters([lost]):
        pass
