"""Training on a GPU: every stage, tier and way of stepping gives the same bits there, and torch's numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import zcomm
from device_jobs import NAMED, Job
from test_corners import KINDS, Net, tokens_of
from zero_jobs import digest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not zcomm._core.cuda_available(), reason="no CUDA device here"),
]
STEPS = 6

JOBS = [
    Job(0), Job(1, "nvme"), Job(2), Job(2, share_parameters=False), Job(2, "nvme", fraction=0.5),
    Job(3), Job(3, prefetch=0), Job(3, "nvme", prefetch=3), Job(3, share_parameters=False), Job(2, bucket_mb=25.0),
    Job(0, None), Job(2, None, bucket_mb=25.0), Job(2, fraction=0.5), Job(1, "mixed"), Job(3, None),
    Job(3, "mixed", mixed=True),
]  # fmt: skip


def test_a_resumed_run_draws_the_same_dropout(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.5)).cuda()
    opt = zcomm.ZeroOptimizer(net, "sgd", stage=2, offload="cpu")
    x = torch.ones(4, 64, device="cuda")
    net(x)
    opt.save(tmp_path / "c")
    drawn = [net(x).detach() for _ in range(3)]
    assert not torch.equal(drawn[0], drawn[1])
    opt.load(tmp_path / "c")
    assert all(torch.equal(net(x), before) for before in drawn)
    opt.close()


def loss_of(net: torch.nn.Module, number: int) -> torch.Tensor:
    tokens = tokens_of(0, number).cuda()
    return F.cross_entropy(net(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def chosen_of(job: Job, trained: list[Any]) -> Any:
    return NAMED[job.optimizer][0] if job.optimizer in NAMED else torch.optim.AdamW(trained, lr=1e-2)


def train(job: Job, folder: str, behind: bool = False, late: bool = False, edits: bool = False) -> dict[str, Any]:
    """late: the model is on the CPU until ZeroOptimizer takes it to the device. edits: after each other pass the
    program changes a gradient."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    net = Net(job.kind) if late else Net(job.kind).cuda()
    trained = [p for p in net.parameters() if p.requires_grad]
    opt = zcomm.ZeroOptimizer(
        net, chosen_of(job, trained), stage=job.stage, precision=job.precision, clip_norm=job.clip,
        offload=job.place(behind), nvme_path=folder, bucket_mb=job.bucket_mb,
        prefetch=job.prefetch, share_parameters=job.share_parameters, grad_accum=job.accum, device="cuda",
        **NAMED.get(job.optimizer, ("", {}))[1],
    )  # fmt: skip
    losses = []
    for number in range(STEPS * job.accum):
        loss = loss_of(net, number)
        opt.backward(loss)
        if edits and number % 2 == 0:
            net.embed.weight.grad.mul_(2)
        opt.step()
        opt.zero_grad()
        losses.append(loss.item().hex())
    result = {"losses": losses, "bits": digest(opt.full_state_dict())}
    opt.close()
    return result


@pytest.mark.timeout_s(300)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_the_same_bits(tmp_path: Path, precision: str, clip: float | None) -> None:
    jobs = [replace(job, precision=precision, clip=clip) for job in JOBS]
    reference = train(jobs[0], str(tmp_path))
    for job in jobs[1:] if clip is None else jobs[1::2]:
        assert train(job, str(tmp_path)) == reference, f"{job}"
    behind = [job for job in (*jobs[:3], *jobs[-5:]) if job.stage < 3]
    for job in behind:
        assert train(job, str(tmp_path), behind=True) == reference, f"{job} behind"
    assert train(Job(3, precision=precision, clip=clip), str(tmp_path), late=True) == reference
    zcomm.shutdown()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_bits_of_updates_in_step(tmp_path: Path, precision: str) -> None:
    drive = Job(3, "nvme", precision=precision, gradients="nvme")
    reference = train(drive.plain, str(tmp_path))
    jobs = [drive, *(replace(drive, update=update) for update in ("forward", "backward"))]
    jobs += [replace(job, atomic=True) for job in jobs]
    jobs += [replace(drive, gradients=None, update="forward", offload=tier) for tier in ("cpu", "nvme")]
    for job in jobs:
        assert train(job, str(tmp_path)) == reference, f"{job}"
    zcomm.shutdown()


@pytest.mark.parametrize("update", ["step", "forward", "backward"])
def test_weights_by_rows(tmp_path: Path, update: Any) -> None:
    """The bits of updates in step(), and numbers close to those of whole weights."""
    ends = []
    for rows, place in ((False, "step"), (True, "step"), (True, update)):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Embedding(2600, 32), torch.nn.Linear(32, 2600, bias=False)).cuda()
        offload = zcomm.Offload("nvme", "nvme", gradients="nvme", update=place)
        units = zcomm.zero.Units(max_bytes=1100 * 32 * 4, rows=True) if rows else None
        opt = zcomm.ZeroOptimizer(net, "adamw", lr=1e-2, stage=3, offload=offload, nvme_path=tmp_path, units=units)
        for number in range(STEPS):
            tokens = torch.randint(2600, (2, 32), generator=torch.Generator().manual_seed(number)).cuda()
            opt.backward(F.cross_entropy(net(tokens).flatten(0, 1), tokens.roll(1).flatten()))
            opt.step()
            opt.zero_grad()
        ends.append(opt.full_state_dict())
        opt.close()
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, rtol=2e-2, atol=2e-3)
        assert torch.equal(ends[2][name], ends[1][name])
    zcomm.shutdown()


def test_a_limit_on_host_memory(tmp_path: Path) -> None:
    net = Net("plain").cuda()
    with pytest.raises(ValueError, match="is too small for this model"):
        zcomm.ZeroOptimizer(net, "adamw", stage=3, offload="nvme", nvme_path=tmp_path, memory="1MiB")
    limit = zcomm.zero.MemoryLimit("64GiB", 0)
    opt = zcomm.ZeroOptimizer(net, "adamw", stage=3, offload="nvme", nvme_path=tmp_path, memory=limit)
    assert opt.memory()["nvme"]["parameters"] == 0 < opt.memory()["cpu"]["parameters"]
    opt.close()
    zcomm.shutdown()


@pytest.mark.timeout_s(300)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "plain"])
def test_models_off_the_straight_road(tmp_path: Path, kind: str) -> None:
    reference = train(Job(0, kind=kind, accum=2), str(tmp_path))
    for job in (Job(2, kind=kind, accum=2), Job(3, kind=kind, accum=2), Job(3, "nvme", kind=kind, accum=2, prefetch=2)):
        assert train(job, str(tmp_path)) == reference, f"{job}"
    zcomm.shutdown()


@pytest.mark.parametrize("optimizer", NAMED)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_state_on_the_device_has_the_bits_of_the_host(tmp_path: Path, optimizer: str, precision: str) -> None:
    on_host = train(Job(2, optimizer=optimizer, precision=precision, accum=2), str(tmp_path))
    for job in (Job(2, None, accum=2), Job(0, fraction=0.5, accum=2), Job(3, None, accum=2)):
        assert train(replace(job, optimizer=optimizer, precision=precision), str(tmp_path)) == on_host, f"{job}"
    zcomm.shutdown()


@pytest.mark.parametrize("optimizer", ["nadam", "asgd"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_torchs_optimizers_run_on_the_device(tmp_path: Path, optimizer: str, precision: str) -> None:
    """Their arithmetic is torch's there: close to that of the host."""
    ends = []
    for offload in ("cpu", None):
        torch.manual_seed(0)
        net = Net("plain").cuda()
        opt = Job(2, offload, optimizer=optimizer, precision=precision).build(net, str(tmp_path))
        for number in range(STEPS):
            opt.backward(loss_of(net, number))
            opt.step()
            opt.zero_grad()
        ends.append(opt.full_state_dict())
        opt.close()
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name].float(), value.float(), rtol=2e-2, atol=2e-3)
    zcomm.shutdown()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_state_on_the_device_is_saved_and_loaded(tmp_path: Path, precision: str) -> None:
    torch.manual_seed(0)
    net = Net("plain").cuda()
    opt = Job(2, fraction=0.5, precision=precision).build(net, str(tmp_path))
    ends: list[dict[str, torch.Tensor]] = []
    assert opt.memory()["device"]["optimizer"] > 0 and opt.memory()["cpu"]["optimizer"] > 0
    for number in (0, 1, 2, 1, 2, 1, 2):
        if number == 1 and not ends:
            saving = opt.save(tmp_path / "saved", wait=False)
            state = opt.state_dict()
        elif number == 1:
            opt.load(tmp_path / "saved")
            if len(ends) == 2:
                opt.load_state_dict(state)
        opt.backward(loss_of(net, number))
        opt.step()
        opt.zero_grad()
        if number == 2:
            saving.wait()
            ends.append(opt.full_state_dict())
    assert all(torch.equal(ends[0][name], end[name]) for end in ends[1:] for name in end)
    opt.close()
    zcomm.shutdown()


def test_torch_has_the_same_numbers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Net("plain").cuda()
    twin = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for number in range(STEPS):
        loss_of(net, number).backward()
        twin.step()
        twin.zero_grad()
    torch.manual_seed(0)
    ours = Net("plain").cuda()
    opt = Job(2, None).build(ours, str(tmp_path))
    for number in range(STEPS):
        opt.backward(loss_of(ours, number))
        opt.step()
        opt.zero_grad()
    for mine, theirs in zip(ours.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    opt.close()
    zcomm.shutdown()


def test_nothing_is_allocated_on_the_device_after_the_second_step(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Net("plain").cuda()
    opt = Job(3).build(net, str(tmp_path))
    counts = []
    for number in range(8):
        opt.backward(loss_of(net, number))
        opt.step()
        opt.zero_grad()
        counts.append((torch.cuda.memory_stats()["num_device_alloc"], opt.allocation_count()))
    assert len(set(counts[2:])) == 1
    opt.close()
    zcomm.shutdown()
