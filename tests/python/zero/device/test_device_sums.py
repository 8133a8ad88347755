"""Sums of gradients on a (simulated) device, ``Offload(gradients="device")`` ([Note: sums on a device]).

The bits are those of the same program on the CPU. A step with the expected passes copies each sum to the host once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import simulated
import zcomm
from device_jobs import Job
from test_corners import Net, loss_of
from test_device_peers import ranks
from test_memory_limit import model, settings
from tiers import slow
from zcomm.memory import device_streams
from zcomm.zero import MemoryLimit, Offload
from zcomm.zero.gradients.device_sums import DeviceSumsTransport, Newest
from zcomm.zero.gradients.norm import Squares
from zcomm.zero.memory.plan import plan_memory
from zero_jobs import digest

Act = Callable[[Net, Any, int], Any]
STEPS = 3
THERE = Job(2, accum=2, gradients="device", precision="bf16")


def sums_of(opt: Any) -> DeviceSumsTransport:
    (found,) = (each for each in opt._live.reducer.accumulators.kinds if not each.on_device)
    assert isinstance(found, DeviceSumsTransport)
    return found


class Counts:
    """Bytes that the ``d2h`` stream copies, and shards that the host squares, by step. ahead: copies that are begun
    when the host squares the first shard of all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.steps = [0, 0], list[tuple[int, int]]()
        self.copies = self.ahead = 0
        copy, add = device_streams.CopyStream.copy, Squares.add

        def counted(this: Any, copies: Any, after: Any, *done: Any) -> None:
            copies = list(copies)
            if simulated.lanes and this is simulated.lanes[-1].d2h:
                self.now[0] += sum(to.nbytes for to, _ in copies)
                self.copies += 1
            copy(this, copies, after, *done)

        def squared(this: Any, *shard: Any) -> None:
            self.now[1] += 1
            self.ahead = self.ahead or self.copies
            add(this, *shard)

        monkeypatch.setattr(device_streams.CopyStream, "copy", counted)
        monkeypatch.setattr(Squares, "add", squared)

    def end_step(self) -> None:
        self.steps.append((self.now[0], self.now[1]))
        self.now = [0, 0]


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    return Counts(monkeypatch)


def nothing(net: Net, opt: Any, number: int) -> None: ...


def train(job: Job, folder: Path, act: Act, counts: Counts | None = None, passes: Sequence[int] = ()) -> list[Any]:
    """Train with ``act`` after each backward pass. passes: of each step, instead of ``job.accum``. Returns: results of
    ``act``, norms and all bits."""
    torch.manual_seed(0)
    net, number = Net(job.kind), 0
    opt = job.build(net, str(folder))
    seen: list[Any] = []
    for count in passes or [job.accum] * STEPS:
        for micro_step in range(count):
            opt.boundary = micro_step == count - 1 if passes else None
            opt.backward(loss_of(net, 0, number))
            seen.append(act(net, opt, number))
            opt.step()
            opt.zero_grad()
            number += 1
        seen.append(float(opt.grad_norm).hex())
        if counts is not None:
            opt.join()
            counts.end_step()
    if counts is not None:
        sums = sums_of(opt)
        counts.nbytes = 4 * sum(each.numel() for each in sums.sums.values())
        counts.buckets = len(sums.buckets)
    arrays = {f"{n}.{k}": v.reshape(-1) for n, e in opt.state_dict()["state"].items() for k, v in e.items()}
    seen += [opt.skipped_steps, digest({**opt.full_state_dict(), **arrays})]
    opt.close()
    return seen


def check_bits(job: Job, folder: Path, act: Act, counts: Counts, passes: Sequence[int] = ()) -> list[Any]:
    """Compare the device with the CPU. Returns: as ``train``."""
    simulated.stop()
    plain = train(job.plain, folder, act, None, passes)
    simulated.play(0.0003)
    counts.now, counts.ahead = [0, 0], 0
    assert train(job, folder, act, counts, passes) == plain
    return plain


JOBS = [
    replace(THERE, clip=0.5), replace(THERE, stage=0, accum=3, precision="fp16", behind=True),
    replace(THERE, stage=3, precision="fp32", offload="nvme", clip=0.5), replace(THERE, stage=1, precision="fp16"),
    replace(THERE, stage=3, accum=3), replace(THERE, stage=0, precision="fp32", fraction=0.5, clip=0.5),
    replace(THERE, accum=3, precision="fp32", behind=True), replace(THERE, stage=1, accum=1, optimizer="lamb"),
    replace(THERE, kind="unused", offload="mixed", clip=0.5), replace(THERE, overlap=False, kind="twice+reentrant"),
    replace(THERE, stage=3, kind="checkpoint", update="forward", precision="fp16"),
    replace(THERE, stage=3, offload=None, clip=0.5),
]  # fmt: skip


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_a_step_copies_each_sum_once(tmp_path: Path, counts: Counts, job: Job) -> None:
    """The host squares none of them, unless it reduces gradients that came a second time. New weights leave the device,
    too, if the state is there, and the weights are not."""
    check_bits(job, tmp_path, nothing, counts)
    squared = counts.buckets if "reentrant" in job.kind else 0
    weights = counts.nbytes // 2 if job.offload is None else 0
    assert counts.steps == [(counts.nbytes + weights, squared)] * STEPS


FEW = [THERE, replace(THERE, clip=0.5), replace(THERE, behind=True), replace(THERE, stage=3, update="forward")]


@pytest.mark.parametrize("job", FEW, ids=str)
def test_a_step_of_fewer_or_more_passes(tmp_path: Path, counts: Counts, job: Job) -> None:
    """A sum comes when the host asks for it, or once more. The host squares the sums of a step that ends early, when it
    has begun to copy all of them. If the norm decides nothing, an update in step() squares them in its pass."""
    check_bits(job, tmp_path, nothing, counts, passes=(1, 3, 2))
    squared = 0 if job is THERE else counts.buckets
    assert counts.steps == [(counts.nbytes, squared), (2 * counts.nbytes, 0), (counts.nbytes, 0)]
    assert counts.ahead == squared


def reads(net: Net, opt: Any, number: int) -> list[str]:
    grads = [net.head.weight.grad, net.embed.weight.grad]
    found = [float(grad.float().sum()) for grad in grads] + [float(grads[0].norm())]
    return [value.hex() for value in (*found, float(torch.nn.utils.get_total_norm(grads)))]


def doubles_some(net: Net, opt: Any, number: int) -> None:
    if number in (0, 3):  # between the passes of a step, and behind the last one
        net.embed.weight.grad.mul_(2)
        net.head.weight.grad.clamp_(max=0.01)


def sets_some(net: Net, opt: Any, number: int) -> None:
    if number in (2, 5):
        net.head.weight.grad = torch.full_like(net.head.weight, 0.25)


def drops_some(net: Net, opt: Any, number: int) -> None:
    if number in (2, 5):
        net.blocks[0].up.weight.grad = None


def clips(net: Net, opt: Any, number: int) -> float:
    return float(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1))


def without_sync(net: Net, opt: Any, number: int) -> None:
    if number < 2:
        with opt.no_sync():
            opt.backward(loss_of(net, 0, 50 + number))


def forgets(net: Net, opt: Any, number: int) -> None:
    """Zero the sums that the last pass has made; the step then moves weights by momentum, or adds another pass."""
    if number in (3, 5):
        opt._live.reducer.zero(set_to_none=False)
    if number == 5:
        net.head.weight.grad.add_(0.5)
        opt.backward(loss_of(net, 0, 55))


def fails_once(net: Net, opt: Any, number: int) -> None:
    if number == 3:  # the last pass of a step, when some sums have left
        handle = net.embed.weight.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            opt.backward(loss_of(net, 0, 40))
        handle.remove()
        opt.zero_grad()
        for later in (41, 42):
            opt.backward(loss_of(net, 0, later))


def overflows(net: Net, opt: Any, number: int) -> None:
    if number == 1:
        net.head.weight.grad.mul_(float("inf"))


REGULAR, IRREGULAR = (replace(THERE, precision="fp32", clip=1.0), ()), (replace(THERE, behind=True), (3, 2, 1))
EVEN = replace(THERE, precision="fp32", clip=1.0), (2, 2, 2)
CASES = [
    (reads, *REGULAR), slow(reads, *IRREGULAR), (doubles_some, *REGULAR), slow(doubles_some, *IRREGULAR),
    (sets_some, *EVEN), slow(sets_some, *IRREGULAR), slow(drops_some, *EVEN), (drops_some, *IRREGULAR),
    slow(clips, THERE, ()), (clips, *IRREGULAR), slow(without_sync, *EVEN), (without_sync, *IRREGULAR),
    (forgets, *EVEN), slow(forgets, *IRREGULAR), (fails_once, *EVEN), slow(fails_once, *IRREGULAR),
    (overflows, replace(THERE, precision="fp16"), ()),
]  # fmt: skip


@pytest.mark.parametrize(("act", "job", "passes"), CASES)
def test_a_program_may_look_at_sums_and_change_them(
    tmp_path: Path, counts: Counts, act: Act, job: Job, passes: Sequence[int]
) -> None:
    seen = check_bits(job, tmp_path, act, counts, passes)
    assert seen[-2] == (act is overflows), "skipped steps"


def test_backward_waits_for_no_sum(tmp_path: Path, counts: Counts, monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm is known while sums are on their way; the next step does not overwrite one that still leaves."""
    monkeypatch.setattr(device_streams, "PIECE_NBYTES", 256)
    in_flight = []

    def looks(net: Net, opt: Any, number: int) -> None:
        if simulated.playing():
            sums = sums_of(opt)
            left = {sums._newest[bucket.index] for bucket in sums.buckets}
            assert left == {Newest.BOTH if number % 2 else Newest.DEVICE}
            in_flight.append(sum(not event.done() for event in sums._landed.values()))
            if number == 1:
                opt._live.reducer.zero()  # as a program that drops the step, with sums in flight
                for later in (60, 61):
                    opt.backward(loss_of(net, 0, later))
        elif number == 1:
            opt._live.reducer.zero()
            for later in (60, 61):
                opt.backward(loss_of(net, 0, later))

    job = replace(THERE, clip=0.5)
    plain = train(job.plain, tmp_path, looks, None, (2, 2))
    simulated.play(0.002)
    assert train(job, tmp_path, looks, counts, (2, 2)) == plain
    assert max(in_flight) > 0 and counts.steps[-1] == (counts.nbytes, 0)


@pytest.mark.parametrize(
    "layout",
    [
        {"offload": Offload("cpu")},
        {"offload": Offload("nvme"), "stage": 1},
        {"offload": Offload("nvme", "nvme", update="forward", atomic=True)},
    ],
)
def test_memory_is_as_planned(tmp_path: Path, layout: dict[str, Any]) -> None:
    """4 bytes per element on the device, and 4 in page-locked memory of the host instead of slots and sums."""
    simulated.play()
    layout = {"stage": 2 if layout["offload"].params is None else 3, **layout}
    layout["offload"] = replace(layout["offload"], gradients="device")
    wanted = replace(settings(), on_device=True, single_pass=True, **layout)
    net = model(layers=2, width=64)
    found = plan_memory(net, wanted)
    opt = zcomm.ZeroOptimizer(
        net, "adamw", nvme_path=str(tmp_path), bucket_mb=wanted.bucket_mb, prefetch=wanted.prefetch, **layout
    )
    assert opt.memory() == found.memory
    assert found.memory["device"]["gradients"] == found.memory["cpu"]["gradients"] == 4 * found.count
    assert wanted.stage == 3 or found.memory["cpu"]["slots"] == opt._live.state.window_nbytes
    locked = {each.data_ptr() for each in simulated.lanes[0]._locked}
    assert {each.data_ptr() for each in sums_of(opt).sums.values()} <= locked
    opt.close()


@pytest.mark.parametrize(
    ("memory", "options", "tier"),
    [
        (MemoryLimit("100GiB", 0, "1MiB"), {}, "device"),
        (MemoryLimit("100GiB", 0, "58MiB"), {}, None),  # activations leave the device some room, and too little
        ("100GiB", {}, None),  # their size is unknown
        (MemoryLimit("100GiB", 0), {}, None),  # the host has none; the device's are unknown
        (MemoryLimit("100GiB", 0, "1MiB"), {"grad_accum": 1}, None),  # gradients take less than sums
        (MemoryLimit("100GiB", 0, "1MiB"), {"offload": Offload("cpu", gradients="cpu")}, "cpu"),
    ],
)
def test_a_limit_places_sums_on_a_device_with_room(
    memory: Any, options: dict[str, Any], tier: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulated.SimulatedLane, "free_nbytes", lambda _: 60 << 20)
    simulated.play()
    opt = zcomm.ZeroOptimizer(
        model(2, 64), "adamw", memory=memory, **{"offload": Offload("cpu"), "grad_accum": 2, **options}
    )
    assert opt.offload.gradients == tier
    assert opt.memory()["device"]["gradients"] == (4 * opt._live.geometry.count if tier == "device" else 0)
    opt.close()


def test_other_places_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="gradients='gpu'; use None, 'device', 'cpu' or 'nvme'"):
        Offload("cpu", gradients="gpu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"gradients='device' needs a model on a device.* leave gradients= out"):
        zcomm.ZeroOptimizer(Net("plain"), "adamw", offload=Offload("cpu", gradients="device"))
    simulated.play()

    def body(comm: zcomm.Communicator) -> None:
        with pytest.raises(
            ValueError, match=r"gradients='device' needs one rank, but world_size=2: .* leave gradients="
        ):
            zcomm.ZeroOptimizer(Net("plain"), "adamw", offload=Offload("cpu", gradients="device"), comm=comm)

    ranks(2, tmp_path, body)
