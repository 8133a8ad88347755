"""Optimizer state that stays on a (simulated) device: the bits of the CPU for all rules, memory, checkpoints.

LAMB has norms of whole parameters of which parts lie on devices and on the host. Muon has state in host memory only.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import simulated
import zcomm
from device_jobs import Job, pairs
from test_corners import Net, loss_of
from test_device_life import step
from test_device_peers import compare
from test_zero_device import same
from zcomm.zero.layout.tiles import TileForm, joined, split
from zcomm.zero.optim_state import device as device_state

Run = Callable[..., list[Any]]
DELAY_S = 0.0003

# A world of one with buckets that stay on the device.
ALONE: list[Job] = [
    Job(0, None), Job(1, None, precision="bf16", clip=0.5), Job(2, None, precision="fp16", accum=2),
    Job(2, None, clip=1.0, accum=3, overlap=False), Job(2, fraction=0.5, bucket_mb=0.002),
    Job(0, fraction=0.4, precision="bf16", clip=1.0, accum=2), Job(2, fraction=0.3, precision="fp16", clip=0.5),
    Job(1, "mixed", precision="bf16"), Job(2, None, optimizer="lion", precision="bf16"),
    Job(2, None, optimizer="8bit", precision="bf16"), Job(1, fraction=0.5, optimizer="8bit", precision="fp16"),
    Job(1, None, optimizer="small"), Job(2, fraction=0.5, optimizer="asgd", precision="bf16"),
    Job(2, fraction=0.5, behind=True), Job(2, "mixed", behind=True, accum=2, optimizer="nadam"), Job(3, fraction=0.5),
    Job(2, None, optimizer="sgd"), Job(1, None, optimizer="sgd", precision="bf16"), Job(2, None, optimizer="momentum"),
    Job(0, fraction=0.5, optimizer="nesterov", precision="fp16"), Job(2, None, optimizer="adagrad", clip=0.5),
]  # fmt: skip

# A world of two; gradients and weights go by host memory.
TOGETHER: list[Job] = [
    Job(0, None, clip=0.5), Job(1, None, precision="bf16", accum=2), Job(2, fraction=0.5, precision="fp16"),
    Job(2, "mixed", clip=1.0), Job(1, fraction=0.5, optimizer="lion", overlap=False),
    Job(2, None, optimizer="8bit", precision="fp16"), Job(2, None, optimizer="nadam", share_parameters=False),
    Job(2, fraction=0.5, behind=True), Job(3, None, precision="bf16"), Job(3, "mixed", optimizer="small", accum=2),
    Job(1, None, optimizer="nesterov", precision="bf16"), Job(3, None, optimizer="adagrad"),
]  # fmt: skip

LAMB_ALONE = [
    Job(0, None), Job(2, None, precision="bf16", clip=0.5, accum=2), Job(2, "cpu", precision="fp16"),
    Job(1, fraction=0.5), Job(2, "mixed", behind=True), Job(3, "mixed", precision="bf16"), Job(2, "nvme"),
    Job(2, None, precision="fp16"),
]  # fmt: skip
LAMB_TOGETHER = [
    Job(0, None), Job(0, "cpu", behind=True), Job(1, None), Job(2, fraction=0.5, precision="fp16"),
    Job(3, None, precision="bf16"), Job(3, "mixed", mixed=True, share_parameters=False), Job(2, "mixed", clip=1.0),
]  # fmt: skip
LAMB_PEERS = [Job(0, None, clip=0.5), Job(2, "mixed", precision="bf16"), Job(3, None, resident=True)]
MUON_ALONE = [
    Job(0, "cpu"), Job(2, "cpu", precision="bf16", clip=0.5, accum=2), Job(2, "nvme", fraction=0.5),
    Job(1, "nvme", precision="fp16"), Job(3, "nvme", precision="bf16"),
]  # fmt: skip
MUON_TOGETHER = [
    Job(0, "cpu"), Job(1, "nvme"), Job(2, "cpu", precision="fp16", clip=1.0), Job(3, "cpu", precision="bf16"),
    Job(3, "cpu", mixed=True, share_parameters=False), Job(3, "cpu", resident=True),
]  # fmt: skip


def by(optimizer: str, jobs: list[Job]) -> list[Job]:
    return [replace(job, optimizer=optimizer) for job in jobs]


RULES = {
    "any": (ALONE, TOGETHER),
    "lamb": (by("lamb", LAMB_ALONE), by("lamb", LAMB_TOGETHER)),
    "muon": (by("muon", MUON_ALONE), by("muon", MUON_TOGETHER)),
}


def small_pieces(jobs: list[Job], folder: str) -> list[Any]:
    device_state.PIECE_TILES = 1  # more pieces than slots
    return pairs(jobs, folder, DELAY_S, 3)


@pytest.mark.slow
@pytest.mark.timeout_s(300)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("rule", RULES)
def test_the_bits_of_the_cpu(run_ranks: Run, tmp_path: Path, rule: str, world_size: int) -> None:
    jobs = RULES[rule][world_size - 1]
    same(jobs, run_ranks(small_pieces, world_size, jobs, str(tmp_path), timeout_s=280))


@pytest.mark.slow
@pytest.mark.parametrize("job", by("lamb", LAMB_PEERS), ids=str)
def test_lamb_on_devices_that_reach_each_other(job: Job, tmp_path: Path) -> None:
    compare(job, tmp_path)


@pytest.mark.parametrize(
    ("offload", "message"),
    [
        (None, r"muon: optimizer state on a device \(weight\) is not available.*use offload='cpu' or 'nvme'"),
        (zcomm.Offload("cpu", fraction=0.5), r"on a device \(fraction=0\.5\) is not available"),
        (zcomm.Offload("cpu", step_behind_forward=True), "step_behind_forward=True is not available"),
    ],
)
def test_muon_on_a_device_is_refused(offload: Any, message: str) -> None:
    simulated.play(0.0, seed=0)
    with pytest.raises(NotImplementedError, match=message):
        zcomm.ZeroOptimizer(nn.Linear(4, 3, bias=False), "muon", offload=offload)


def test_a_save_in_the_background_is_of_its_moment(tmp_path: Path) -> None:
    ends = []
    for there in (False, True):
        if there:
            simulated.play(DELAY_S)
        torch.manual_seed(0)
        net = Net("plain")
        opt = Job(2, fraction=0.5, precision="fp16").build(net, str(tmp_path))
        step(net, opt, 0)
        saving = opt.save(tmp_path / f"{there}", wait=False)
        step(net, opt, 1)
        saving.wait()
        opt.load(tmp_path / f"{there}")
        ends.append({**opt.full_state_dict(), **opt.state_dict()["state"][0]})
        opt.close()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_gradients_that_are_not_finite_skip_the_step(tmp_path: Path) -> None:
    simulated.play()
    net = Net("plain")
    opt = zcomm.ZeroOptimizer(net, precision="bf16", skip_nonfinite=True, bucket_mb=0.004)
    step(net, opt, 0)
    before = opt.full_state_dict()
    loss = loss_of(net, 0, 1)
    handle = net.blocks[2].up.weight.register_hook(lambda grad: grad * float("inf"))
    opt.backward(loss)
    handle.remove()
    opt.step()
    opt.zero_grad()
    assert opt.skipped_steps == 1 and opt.nonfinite.parameter == "blocks.2.up.weight"
    assert all(torch.equal(before[name], value) for name, value in opt.full_state_dict().items())
    opt.close()


# --- memory -------------------------------------------------------------------------------------------------------

COUNT = 6 * 64 * 64  # of six buckets


def wide(offload: Any, precision: str = "fp32", stage: int = 2, accum: int = 1) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))
    size = 64 * 64 * (4 if precision == "fp32" else 2) / 2**20
    where = {"stage": stage, "offload": offload, "precision": precision, "bucket_mb": size, "grad_accum": accum}
    return net, zcomm.ZeroOptimizer(net, **where)


@pytest.mark.parametrize(("precision", "item", "state"), [("fp32", 4, 8), ("bf16", 2, 10), ("fp16", 2, 12)])
@pytest.mark.parametrize(("fraction", "kept"), [(0.0, 6), (0.5, 3), (5 / 6, 1), (0.9, 0), (1.0, 0)])
def test_memory_is_counted_where_it_is(fraction: float, kept: int, precision: str, item: int, state: int) -> None:
    """At most 1 - fraction of the state stays, by whole buckets."""
    simulated.play()
    _, opt = wide(zcomm.Offload("cpu", fraction=fraction), precision, accum=2)
    memory = opt.memory()
    slot, there, here = 64 * 64 * item, COUNT * kept // 6, COUNT * (6 - kept) // 6
    assert memory["device"] == {
        "parameters": COUNT * item,
        "gradients": 4 * there,
        "optimizer": state * there,
        "slots": 3 * slot,
    }
    assert memory["cpu"] == {
        "parameters": item * here,
        "gradients": 4 * here,
        "optimizer": state * here,
        "slots": (6 - kept) * slot,
    }
    opt.close()


def test_none_is_all_of_it_and_a_world_of_one_crosses_no_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated.play()
    carried: list[int] = []
    copy = zcomm.memory.device_streams.CopyStream.copy
    net, opt = wide(None)
    assert opt.memory()["cpu"]["optimizer"] == opt.memory()["cpu"]["parameters"] == 0

    def count(self: Any, copies: Any, *rest: Any) -> None:
        copies = list(copies)
        carried.extend(to.nbytes for to, _ in copies)
        copy(self, copies, *rest)

    monkeypatch.setattr(zcomm.memory.device_streams.CopyStream, "copy", count)
    for number in range(3):
        net(torch.full((2, 64), 1.0 + number)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    assert sum(carried) == 3 * 560, "sums of squares alone"
    opt.close()


@pytest.mark.parametrize("offload", [None, zcomm.Offload("cpu", fraction=0.5)], ids=["none", "cpu"])
def test_one_rank_has_no_shards(tmp_path: Path, offload: Any) -> None:
    """Stage 3 with weights that stay on the device: the bits, memory and checkpoints of stage 2, frozen weights too."""
    ends = []
    for stage in (2, 3):
        simulated.play(DELAY_S)
        torch.manual_seed(0)
        with zcomm.zero.Init() if stage == 3 else nullcontext():
            net = Net("frozen")
        opt = zcomm.ZeroOptimizer(net, lr=1e-2, stage=stage, offload=offload, device="cpu", bucket_mb=0.004)
        for number in range(3):
            step(net, opt, number)
        opt.save(tmp_path / f"{stage}")
        step(net, opt, 3)
        opt.load(tmp_path / f"{stage}")
        ends.append((opt.full_state_dict(), opt.memory()))
        opt.close()
        assert all(param.numel() > 0 for param in net.parameters())
    assert ends[0][1] == ends[1][1]
    assert all(torch.equal(ends[0][0][name], ends[1][0][name]) for name in ends[0][0])


def test_out_of_memory_names_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated.play()
    empty = simulated.SimulatedLane._empty

    def full(self: Any, count: int, dtype: torch.dtype) -> torch.Tensor:
        if dtype == torch.uint8:
            raise torch.OutOfMemoryError("no more")
        return empty(self, count, dtype)

    monkeypatch.setattr(simulated.SimulatedLane, "_empty", full)
    with pytest.raises(zcomm.CudaError, match=r"out of memory on .*: \d+ bytes for optimizer state .*zcomm.Offload"):
        zcomm.ZeroOptimizer(nn.Linear(8, 8))


# --- the parts that only a device's memory takes ------------------------------------------------------------------


def test_masters_are_split_by_torch_as_by_the_core() -> None:
    bits = torch.randint(-(2**31), 2**31 - 1, (1 << 14,), dtype=torch.int64).to(torch.int32)
    edges = [0, -(2**31), 0x7F800000, 0x7F7FFFFF, 0x3F808000, 0x3F818000, 0x3F807FFF, 0x7F8FFFFF, 0x7FC00001, 1]
    master = torch.cat((bits, torch.tensor(edges, dtype=torch.int32))).view(torch.float32)
    form, count = TileForm((), torch.bfloat16), master.numel()
    weight, state = torch.empty(count, dtype=torch.bfloat16), torch.empty(2 * count, dtype=torch.uint8)
    form.set_master(weight, state, master)
    high, low = split(master)
    assert torch.equal(high.view(torch.int16), weight.view(torch.int16))
    assert torch.equal(low, state.view(torch.int16))
    assert torch.equal(joined(weight, low).view(torch.int32), form.master(weight, state).view(torch.int32))


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_the_order_of_a_tile_of_fp16(state_dtype: torch.dtype) -> None:
    form, count = TileForm(("exp_avg", "exp_avg_sq"), torch.float16, state_dtype), 512
    state = torch.randint(256, (form.nbytes(count),), dtype=torch.uint8)
    core = form.reordered(state, count, True)
    assert torch.equal(form.reordered(core, count, False), state) and not torch.equal(core, state)
    assert torch.equal(core[: 4 * count].view(torch.int32), form.array(state, count, "master").view(torch.int32))
