"""On a device: constant memory, counted tiers, whole tensors, and errors that name the remedy."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import simulated
import zcomm
from device_jobs import Job
from test_corners import Net, loss_of
from tiers import slow
from zcomm import _core
from zcomm.memory import device_streams
from zcomm.zero.registry import open_parts
from zcomm.zero.units.store import UnitStore

Run = Callable[..., list[Any]]
_PinnedArena = _core.PinnedArena


def step(net: nn.Module, opt: Any, number: int) -> None:
    opt.backward(loss_of(net, zcomm.rank(), number))
    opt.step()
    opt.zero_grad()


def hold_and_set(job: Job, folder: str) -> list[Any]:
    """Read, set, open, gather and export whole tensors, save and load; return the values seen."""
    torch.manual_seed(1)
    net = Net("frozen")
    opt = job.build(net, folder)
    seen: list[Any] = []
    for number in range(2):
        step(net, opt, number)
    param = net.blocks[0].up.weight
    seen.append(zcomm.zero.full_param(param))
    zcomm.zero.set_full_param(param, seen[-1] * 0.5)
    step(net, opt, 2)
    with zcomm.zero.GatheredParameters(net, modifier_rank=0):
        seen.append(param.detach().clone())
        if zcomm.rank() == 0:
            with torch.no_grad():
                net.head.weight.mul_(2)
                net.embed.weight.add_(0.01)  # frozen
    step(net, opt, 3)
    with opt.gathered(), torch.no_grad():  # ranks run the model differently often
        seen += [loss_of(net, 0, 9) for _ in range(2 + zcomm.rank())]
        inside = {name: p.detach().clone() for name, p in net.named_parameters()}
    exported: dict[str, torch.Tensor] = {}
    opt.export(exported.__setitem__)
    assert all(torch.equal(exported[name], p.cpu()) for name, p in inside.items())
    if isinstance(open_parts(opt).store, UnitStore):
        with pytest.raises(RuntimeError, match=r"head\.weight was changed inside"), opt.gathered():
            net.head.weight.data[0] = 0.5  # not counted by torch
    opt.save(f"{folder}/{job.stage}-{simulated.playing()}")
    state = opt.state_dict()
    step(net, opt, 4)
    seen.append(zcomm.zero.full_optim_state(param, "exp_avg"))
    opt.load(f"{folder}/{job.stage}-{simulated.playing()}")
    step(net, opt, 4)
    opt.load_state_dict(state)
    step(net, opt, 5)
    opt.backward(loss_of(net, zcomm.rank(), 6))
    seen.append(zcomm.zero.full_grad(param))
    seen += [value for _, value in sorted(opt.full_state_dict().items())]
    opt.close()
    return seen


def both(job: Job, folder: str) -> list[tuple[Any, Any]]:
    zcomm.init(timeout=60)
    plain = hold_and_set(job, folder)
    simulated.play(0.0005, seed=zcomm.rank())
    return list(zip(plain, hold_and_set(job, folder), strict=True))


ON_DEVICE = [Job(0, None), Job(2, "mixed", clip=1.0), Job(3, None)]  # with optimizer state


@pytest.mark.parametrize(
    ("world_size", "job"),
    [
        (1, Job(2, "mixed", precision="bf16")), (1, Job(0, fraction=0.5, precision="fp16", behind=True)),
        (2, Job(3, None, precision="fp16")), (2, Job(1)), (2, Job(3, "nvme", precision="bf16")),
        slow(2, Job(2, precision="bf16")), slow(2, Job(2, behind=True)), slow(2, Job(3)),
    ],
    ids=str,
)  # fmt: skip
def test_whole_tensors_and_checkpoints(run_ranks: Run, tmp_path: Path, world_size: int, job: Job) -> None:
    for found in run_ranks(both, world_size, job, str(tmp_path)):
        for plain, there in found:
            assert torch.equal(plain, there)


@pytest.mark.parametrize("job", [Job(0), Job(2, behind=True), Job(3), Job(3, "nvme", prefetch=0), *ON_DEVICE], ids=str)
def test_nothing_is_allocated_after_the_second_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: Job) -> None:
    simulated.play()
    asked: list[str] = []
    empty = simulated.SimulatedLane.empty
    monkeypatch.setattr(
        simulated.SimulatedLane, "empty", lambda self, n, dtype, what: asked.append(what) or empty(self, n, dtype, what)
    )
    net = Net("plain")
    opt = job.build(net, str(tmp_path))
    for number in range(2):
        step(net, opt, number)
    assert ("optimizer state" in asked) == (job in ON_DEVICE)
    before = len(asked), opt.allocation_count(), threading.active_count()
    for number in range(6):
        step(net, opt, number)
    assert (len(asked), opt.allocation_count(), threading.active_count()) == before
    state = opt._parts.state
    opt.close()
    opt.close()
    assert opt._parts is None and not getattr(state.kinds[-1], "_states", None)
    with torch.no_grad():
        net.head.weight.add_(1)  # in stages 0 to 2 the model's own now


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_memory_is_counted_where_it_is(tmp_path: Path, stage: int, precision: str) -> None:
    """With one rank and one pass in a step: [Note: single pass]."""
    simulated.play()
    net = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))
    count, item = 6 * 64 * 64, 2 if precision == "bf16" else 4
    opt = zcomm.ZeroOptimizer(net, stage=stage, offload="cpu", precision=precision, bucket_mb=64 * 64 * item / 2**20)
    memory = opt.memory()
    slots = 3 * 64 * 64 * item
    places = 2 * 64 * 64 * item if stage == 3 else 0  # prefetch + 1
    assert memory["device"] == {
        "parameters": 0 if stage == 3 else count * item,
        "gradients": 0,
        "optimizer": 0,
        "slots": slots + places,
    }
    assert memory["cpu"] == {
        "parameters": count * item,
        "gradients": item * count,
        "optimizer": (8 if precision == "fp32" else 10) * count,
        "slots": 0,
    }
    opt.close()


def test_a_model_without_memory(tmp_path: Path) -> None:
    ends = []
    for there in (False, True):
        if there:
            simulated.play(0.0005)
        torch.manual_seed(3)
        with zcomm.zero.Init():
            net = nn.Sequential(*(nn.Linear(40, 40) for _ in range(4)))
        opt = zcomm.ZeroOptimizer(net, stage=3, offload="cpu", bucket_mb=0.01)
        net(torch.ones(2, 40)).square().mean().backward()
        opt.step()
        ends.append(opt.full_state_dict())
        opt.close()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_a_unit_inside_of_another_one_in_the_same_place(tmp_path: Path) -> None:
    class Outer(nn.Module):
        def __init__(self, inner: list[nn.Module]) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)
            self.hidden = inner  # a plain list: not its child

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.linear(x)) + self.hidden[0](x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            inner = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
            self.blocks = nn.ModuleList([inner, nn.Linear(16, 16), Outer([inner]), nn.Linear(16, 16)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    ends = []
    for there in (False, True):
        if there:
            simulated.play(0.0005)
        torch.manual_seed(3)
        net = Model()
        opt = zcomm.ZeroOptimizer(net, "sgd", lr=0.1, stage=3, offload="cpu", prefetch=1)
        for number in range(4):
            net(torch.randn(3, 16, generator=torch.Generator().manual_seed(number))).square().mean().backward()
            opt.step()
            opt.zero_grad()
        ends.append(opt.full_state_dict())
        opt.close()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


# --- errors -------------------------------------------------------------------------------------------------------


def fake(device: str) -> Any:
    return SimpleNamespace(device=torch.device(device), is_meta=device == "meta")


def test_mixed_devices_are_named() -> None:
    with pytest.raises(ValueError, match=r"a\.weight is on cpu, b\.weight on cuda:0; one optimizer has one device"):
        device_streams.for_params([("a.weight", fake("cpu")), ("b.weight", fake("cuda:0"))])
    with pytest.raises(ValueError, match="w is on cuda:1, but device='cuda:0'"):
        device_streams.for_params([("w", fake("cuda:1"))], "cuda:0")
    with pytest.raises(NotImplementedError, match="trains on the CPU and on CUDA devices"):
        device_streams.for_params([("w", fake("xpu:0"))])
    assert not device_streams.for_params([("w", fake("cpu")), ("v", fake("meta"))]).on_device


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_a_device_that_is_not_there() -> None:
    with pytest.raises((NotImplementedError, zcomm.CudaError), match="CUDA"):
        zcomm.ZeroOptimizer(nn.Linear(4, 4), device="cuda:0")


def no_memory(*_args: Any) -> torch.Tensor:
    raise torch.OutOfMemoryError("no more")


def test_out_of_memory_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated.play()
    monkeypatch.setattr(simulated.SimulatedLane, "_empty", no_memory)
    with pytest.raises(zcomm.CudaError, match=r"out of memory on .*: 256 bytes for parameters .*; use a higher stage"):
        zcomm.ZeroOptimizer(nn.Linear(4, 4, bias=False), stage=2, offload="cpu", bucket_mb=0.00001)


def test_a_device_that_is_lost(tmp_path: Path) -> None:
    simulated.play()
    net = Net("plain")
    opt = Job(2).build(net, str(tmp_path))
    step(net, opt, 0)
    simulated.lanes[-1].core.lose_after(3)
    with pytest.raises((zcomm.CudaError, RuntimeError), match="lost"):
        for number in range(3):
            step(net, opt, number)
    opt.close()


def test_what_a_device_is_needed_for() -> None:
    behind = zcomm.Offload("cpu", step_behind_forward=True)
    with pytest.raises(
        ValueError,
        match=r"step_behind_forward=True needs .*, or the model itself on a device in",
    ):
        zcomm.ZeroOptimizer(nn.Linear(4, 4), offload=behind)
    simulated.play()
    with pytest.raises(ValueError, match="is update='forward'; with update='backward' leave it out"):
        zcomm.Offload("cpu", "cpu", update="backward", step_behind_forward=True)
    with pytest.raises(ValueError, match="step_behind_forward=1 must be True or False"):
        zcomm.Offload("cpu", step_behind_forward=1)  # type: ignore[arg-type]


def test_after_an_exception_in_backward(tmp_path: Path) -> None:
    ends = []
    for there in (False, True):
        if there:
            simulated.play(0.0005)
        torch.manual_seed(0)
        net = Net("plain")
        opt = Job(2).build(net, str(tmp_path))
        step(net, opt, 0)
        loss = loss_of(net, 0, 1)
        handle = net.blocks[1].up.weight.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            opt.backward(loss)
        handle.remove()
        with pytest.raises(RuntimeError, match="ended with an error"):
            opt.step()
        opt.zero_grad()
        step(net, opt, 2)
        ends.append(opt.full_state_dict())
        opt.close()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@pytest.mark.parametrize("job", [Job(2), Job(3, precision="bf16"), Job(2, "nvme", fraction=0.5)], ids=str)
def test_only_what_crosses_to_the_device_is_page_locked(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Optimizer state never does: locking it would take a minute and most of a machine's memory for nothing."""
    made: list[tuple[bool, Any]] = []

    def arena(budget: int | None = None, page_lock: bool = True, keep_resident: bool = False) -> Any:
        made.append((page_lock, _PinnedArena(budget, page_lock, keep_resident)))
        return made[-1][1]

    monkeypatch.setattr(_core, "PinnedArena", arena)
    for on_device in (False, True):
        made.clear()
        simulated.stop()
        if on_device:
            simulated.play()
        zcomm.init()
        net = Net("plain")
        opt = job.build(net, str(tmp_path))
        used = {lock: sum(one.stats()["used_nbytes"] for at, one in made if at == lock) for lock in (False, True)}
        memory = opt.memory()["cpu"]
        state = memory["optimizer"] + opt.memory()["device"]["optimizer"]
        assert used[False] >= state > 0 and used[True] < state
        norm = _core.page_nbytes() if on_device else 0  # a sum of squares
        assert (used[True] > norm) == (on_device and job.stage == 3), "shards of the weights"
        assert used[True] >= norm
        step(net, opt, 0)
        count = sum(one.stats()["allocation_count"] for _, one in made)
        assert opt.allocation_count() == count + opt._parts.comm.memory()["allocation_count"]
        opt.close()
        del opt
        gc.collect()
        assert not any(one.stats()["used_nbytes"] for _, one in made), "all is given back"
