"""``model.state_dict()`` in every stage and tier: DDP's bits and shapes, as whole tensors or as DTensors."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

import zcomm
from tiers import slow
from zcomm.zero import assemble
from zcomm.zero.units.state_dict import Form, form_of

Run = Callable[..., list[Any]]
State = dict[str, torch.Tensor]

PLACES: list[tuple[int, Any, bool]] = [
    *((stage, offload, True) for stage in (0, 1, 2) for offload in (None, "cpu", "nvme")),
    *((3, offload, shared) for offload in (None, "cpu", "nvme") for shared in (True, False)),
    (3, ("cpu", "nvme"), True),
]


class Net(nn.Module):
    """A frozen, a tied and a scalar weight, buffers, and sizes that two ranks cannot divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 7)
        self.frozen = nn.Parameter(torch.linspace(0, 1, 7), requires_grad=False)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.down = nn.Linear(7, 5, bias=False)
        self.again = nn.Linear(7, 5)
        self.again.weight = self.down.weight
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x) * self.frozen
        for block in self.blocks:
            x = block(x).relu() * self.scale
        out: torch.Tensor = self.down(x) + self.again(x)
        return out


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))
    out: torch.Tensor = model(x.to(next(model.parameters()).dtype)).float().square().mean()
    return out


def as_ddp(comm: Any) -> State:
    """Return the state of a model trained as by DistributedDataParallel."""
    torch.manual_seed(2)
    model = Net()
    opt = zcomm.optim.CPUSGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(2):
        loss_of(model, comm.rank, step).backward()
        for param in model.parameters():
            if param.grad is not None:
                comm.all_reduce(param.grad, "avg")
        opt.step()
        opt.zero_grad()
    return copy.deepcopy(model.state_dict())


def trained(comm: Any, stage: int, offload: Any, shared: bool, folder: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(2 + comm.rank)  # rank 0's weights are broadcast
    model = Net()
    opt = zcomm.ZeroOptimizer(
        model,
        "sgd",
        lr=0.1,
        stage=stage,
        offload=zcomm.Offload(*offload) if isinstance(offload, tuple) else offload,
        nvme_path=f"{folder}/drive",
        share_parameters=shared,
    )
    for step in range(2):
        opt.backward(loss_of(model, comm.rank, step))
        opt.step()
        opt.zero_grad()
    return model, opt


def assert_same(found: State, wanted: State, case: object) -> None:
    assert list(found) == list(wanted), case
    for name, value in wanted.items():
        assert torch.equal(found[name], value) and found[name].dtype == value.dtype, (case, name)


def in_every_place(folder: str) -> None:
    comm = zcomm.init(timeout=60)
    wanted = as_ddp(comm)
    for case in PLACES:
        model, opt = trained(comm, *case, folder)
        for param, (name, plain) in zip(model.parameters(), Net().named_parameters(), strict=True):
            assert (param.shape, param.numel()) == (plain.shape, plain.numel()), (case, name)
        assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in Net().parameters())
        state = model.state_dict()
        assert_same(state, wanted, case)
        assert state["down.weight"] is not None and torch.equal(state["down.weight"], state["again.weight"])
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        assert_same(torch.load(file), wanted, case)
        assert_same(model.blocks.state_dict(), Net().blocks.state_dict() | {
            name.removeprefix("blocks."): value for name, value in wanted.items() if name.startswith("blocks.")
        }, case)  # fmt: skip
        other = {name: value * 2 for name, value in wanted.items()}
        model.load_state_dict(other)
        assert_same(model.state_dict(), other, case)
        assert torch.equal(zcomm.zero.full_param(model.up.weight), other["up.weight"]), "its master, too"
        with pytest.raises(RuntimeError, match=r"size mismatch for up.weight"):
            model.load_state_dict({**other, "up.weight": torch.zeros(2, 2)})
        comm.barrier()
        opt.close()
    zcomm.shutdown()


@pytest.mark.parametrize("world_size", [1, 2])
def test_it_equals_ddp_in_every_stage_and_tier(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    run_ranks(in_every_place, world_size, str(tmp_path))


# --- too large for whole tensors ------------------------------------------------------------------------------------


def test_the_rule() -> None:
    gib = 2**30
    for nbytes, world_size, hosts, form in [
        (4 * gib, 2, [(16 * gib, 2)] * 2, Form.WHOLE),
        (4 * gib + 2, 2, [(16 * gib, 2)] * 2, Form.DTENSOR),
        (8 * gib, 2, [(16 * gib, 2)] * 2, Form.DTENSOR),
        (8 * gib + 2, 2, [(16 * gib, 2)] * 2, Form.ERROR),
        (8 * gib + 2, 4, [(16 * gib, 2)] * 4, Form.DTENSOR),  # two hosts
        (7 * gib, 2, [(16 * gib, 1), (8 * gib, 1)], Form.DTENSOR),  # the smaller host decides
        (14 * gib, 1, [(16 * gib, 1)], Form.WHOLE),
        (15 * gib, 1, [(16 * gib, 1)], Form.ERROR),
    ]:
        assert form_of(nbytes, world_size, hosts) is form, (nbytes / gib, world_size)


def as_dtensors(folder: str, dtensors: bool) -> None:
    comm = zcomm.init(timeout=60)
    wanted = as_ddp(comm)
    if dtensors:
        assemble.form_of = lambda *_: Form.DTENSOR
    model, opt = trained(comm, 3, None, False, folder)
    if dtensors:
        with pytest.raises(RuntimeError, match=r"up.weight: state_dict\(\) .* DTensors need torch.distributed"):
            model.state_dict()
    store = torch.distributed.FileStore(f"{folder}/store", comm.world_size)
    torch.distributed.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.world_size)
    state = model.state_dict()
    params = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert all(isinstance(value, DTensor) == (dtensors and name in params) for name, value in state.items())
    assert all(value.shape == wanted[name].shape for name, value in state.items())
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}
    assert_same(whole, wanted, dtensors)
    if dtensors:
        kept = sum(value.to_local().nbytes for value in state.values() if isinstance(value, DTensor))
        assert kept < 0.75 * sum(value.nbytes for value in whole.values())
    dcp.save({"model": state}, checkpoint_id=f"{folder}/dcp")
    model.load_state_dict({name: torch.zeros_like(value) for name, value in wanted.items()})
    assert not any(bool(p.any()) for p in model.parameters())
    new = {"model": model.state_dict()}
    dcp.load(new, checkpoint_id=f"{folder}/dcp")
    model.load_state_dict(new["model"])
    loaded = opt.full_state_dict()
    assert_same(loaded, wanted, dtensors)
    opt.backward(loss_of(model, comm.rank, 2))  # masters are the loaded ones
    opt.step()
    torch.save(opt.full_state_dict(), f"{folder}/after-{comm.world_size}-{comm.rank}.pt")
    torch.distributed.destroy_process_group()
    opt.close()
    zcomm.shutdown()


def load_at_another_size(folder: str) -> None:
    """Load into a model of another world size, and stage, by torch.distributed.checkpoint."""
    comm = zcomm.init(timeout=60)
    store = torch.distributed.FileStore(f"{folder}/store-of-3", comm.world_size)
    torch.distributed.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.world_size)
    wanted = torch.load(f"{folder}/wanted.pt")
    for stage, shared in ((2, True), (3, False)):
        model = Net()
        opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1, stage=stage, share_parameters=shared)
        new = {"model": model.state_dict()}
        dcp.load(new, checkpoint_id=f"{folder}/dcp")
        model.load_state_dict(new["model"])
        assert_same(opt.full_state_dict(), wanted, stage)
        assert torch.equal(zcomm.zero.full_param(model.up.weight), wanted["up.weight"]), "the master"
        opt.close()
    torch.distributed.destroy_process_group()
    zcomm.shutdown()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("dtensors", [False, True])
def test_torch_distributed_checkpoint(run_ranks: Run, tmp_path: Path, dtensors: bool) -> None:
    run_ranks(as_dtensors, 2, str(tmp_path), dtensors)
    plain = Net()  # without processes, and without zcomm
    state = {"model": plain.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    torch.save(state["model"], tmp_path / "wanted.pt")
    run_ranks(load_at_another_size, 3, str(tmp_path))


def train_and_save(folder: str, stage: int, shared: bool) -> None:
    model, opt = joined(folder, stage, shared, seed=1)
    for step in (0, 1):
        step_alike(model, opt, step)
    before = opt.state_dict()
    weights, state = get_state_dict(model, opt)
    for number, entry in before["state"].items():
        for key, value in entry.items():
            assert torch.equal(value, opt.state_dict()["state"][number][key]), "looking takes no step"
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/both")
    step_alike(model, opt, 2)
    torch.save(opt.full_state_dict(), f"{folder}/after.pt")
    end(opt)


def load_and_train(folder: str, stage: int, shared: bool) -> None:
    model, opt = joined(folder, stage, shared, seed=8)
    weights, state = get_state_dict(model, opt)
    new = {"model": weights, "optimizer": state}
    dcp.load(new, checkpoint_id=f"{folder}/both")
    set_state_dict(model, opt, model_state_dict=new["model"], optim_state_dict=new["optimizer"])
    step_alike(model, opt, 2)
    wanted = torch.load(f"{folder}/after.pt")
    for name, value in opt.full_state_dict().items():
        assert torch.allclose(value, wanted[name], atol=1e-6), name
    end(opt)


def joined(folder: str, stage: int, shared: bool, seed: int) -> tuple[nn.Module, Any]:
    comm = zcomm.init(timeout=60)
    store = torch.distributed.FileStore(f"{folder}/store-{comm.world_size}", comm.world_size)
    torch.distributed.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.world_size)
    torch.manual_seed(seed)
    model = Net()
    return model, zcomm.ZeroOptimizer(model, "adamw", lr=0.1, stage=stage, share_parameters=shared)


def step_alike(model: nn.Module, opt: Any, step: int) -> None:
    """Take a step with the same numbers at every world size."""
    opt.backward(loss_of(model, 0, step))
    opt.step()
    opt.zero_grad()


def end(opt: Any) -> None:
    torch.distributed.destroy_process_group()
    opt.close()
    zcomm.shutdown()


@pytest.mark.parametrize(("stage", "shared"), [slow(2, True), (3, False)])
def test_torch_distributed_checkpoint_of_the_optimizer(
    run_ranks: Run, tmp_path: Path, stage: int, shared: bool
) -> None:
    """For an optimizer without state torch first takes a step with zeros, but not after real steps."""
    run_ranks(train_and_save, 2, str(tmp_path), stage, shared)
    run_ranks(load_and_train, 3, str(tmp_path), 5 - stage, not shared)


# --- calls by only one rank -----------------------------------------------------------------------------------------


def on_rank_0_alone(folder: str) -> str:
    comm = zcomm.init(timeout=8)
    model, opt = trained(comm, 3, None, False, folder)
    try:
        if comm.rank == 0:
            model.state_dict()
        else:
            loss_of(model, comm.rank, 3)
    except (zcomm.CollectiveMismatch, zcomm.PeerLost) as error:
        return str(error)
    finally:
        opt.close()
        zcomm.shutdown()
    return "no error"


def test_one_rank_alone_is_found_out(run_ranks: Run, tmp_path: Path) -> None:
    """The other rank continues with its next forward, which gathers the same units in the same order."""
    for said in run_ranks(on_rank_0_alone, 2, str(tmp_path)):
        assert "state_dict() of unit" in said and "run on all ranks" in said, said


def on_rank_0_alone_at_the_end(folder: str) -> str:
    comm = zcomm.init(timeout=60)
    model, opt = trained(comm, 3, None, False, folder)
    if comm.rank == 1:
        zcomm.shutdown()
        return ""
    with pytest.raises(zcomm.PeerLost) as lost:
        torch.save(model.state_dict(), f"{folder}/model.pt")
    assert lost.value.rank == 1
    zcomm.shutdown()
    del opt
    return str(lost.value)


def test_one_rank_alone_at_the_end_is_told_what_to_do(run_ranks: Run, tmp_path: Path) -> None:
    """The last line of many programs: ``if rank == 0: torch.save(model.state_dict(), path)``."""
    said, _ = run_ranks(on_rank_0_alone_at_the_end, 2, str(tmp_path))
    assert "rank 1 left" in said and "state_dict() of unit" in said and "run on all ranks" in said, said
