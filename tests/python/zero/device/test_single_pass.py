"""Gradients that an update reads as they left a (simulated) device, in a world of one.

A step of one pass has no fp32 sums ([Note: single pass]). In other steps the update adds the last pass's gradients to
them ([Note: last pass]).
The bits are those of the same program on the CPU. The other tests of this folder train most of their jobs so, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import simulated
import zcomm
from device_jobs import Job
from test_corners import Net, loss_of
from zcomm.memory import device_streams
from zcomm.zero.gradients.last_pass import LastPassTransport
from zcomm.zero.gradients.pinned import D2HTransport
from zcomm.zero.optim_state.ram import ShardState
from zero_jobs import digest

Act = Callable[[Net, Any, int], Any]
Terms = list[tuple[torch.dtype, torch.dtype | None]]
KEPT = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
STEPS = 4


@pytest.fixture
def terms(monkeypatch: pytest.MonkeyPatch) -> Terms:
    """List the dtypes of both terms of each gradient that updates of a model on the device read on the host."""
    seen: Terms = []
    step = ShardState._step_tile

    def told(self: ShardState, shard: Any, *args: Any) -> None:
        if simulated.playing():
            seen.append((shard.grad.dtype, None if shard.addend is None else shard.addend.dtype))
        step(self, shard, *args)

    monkeypatch.setattr(ShardState, "_step_tile", told)
    return seen


def transport_of(opt: Any) -> Any:
    return next(each for each in opt._live.reducer.accumulators.kinds if not each.on_device)


def sums_of(opt: Any) -> set[torch.dtype]:
    """Return the dtypes of the memory that has sums."""
    transport = transport_of(opt)
    narrow = isinstance(transport, LastPassTransport) and not transport.sums
    return {each.dtype for each in (transport.slots.memory if narrow else transport.sums.values())}


def element_count(opt: Any) -> int:
    return sum(bucket.shard_count for bucket in opt._live.geometry.buckets)


def backwards(net: Net, opt: Any, passes: Sequence[int] | None) -> Iterator[int]:
    """Yield the number of each backward pass of a training, when it has ended. passes: of each step; None: as many as
    the option says."""
    number = 0
    for of_step in passes or [opt.grad_accum] * STEPS:
        for left in reversed(range(of_step)):
            opt.boundary = None if passes is None else not left
            opt.backward(loss_of(net, 0, number))
            yield number
            number += 1


def train(
    job: Job, folder: Path, act: Act, passes: Sequence[int] | None = None
) -> tuple[list[Any], set[torch.dtype], Any]:
    """Train with ``act`` between backward and step. Returns: its results and all bits, dtypes of sums, memory."""
    torch.manual_seed(0)
    net = Net("plain")
    opt = job.build(net, str(folder))
    seen: list[Any] = []
    for number in backwards(net, opt, passes):
        seen.append(act(net, opt, number))
        opt.step()
        seen.append(None if opt.grad_norm is None else float(opt.grad_norm).hex())
        opt.zero_grad()
    dtypes, memory = sums_of(opt), opt.memory()["cpu"]
    memory["count"], memory["transport"] = element_count(opt), type(transport_of(opt))
    arrays = {f"{n}.{k}": v.reshape(-1) for n, e in opt.state_dict()["state"].items() for k, v in e.items()}
    seen.append(digest({**opt.full_state_dict(), **arrays}))
    opt.close()
    return seen, dtypes, memory


def on_both(job: Job, folder: Path, act: Act, passes: Sequence[int] | None = None) -> tuple[set[torch.dtype], Any]:
    """Compare the device with the CPU to the bit. Returns: dtypes of the device's sums, its memory on the host."""
    simulated.stop()
    plain, _, _ = train(job.plain, folder, act, passes)
    simulated.play(0.0005)
    found, dtypes, memory = train(job, folder, act, passes)
    assert found == plain
    return dtypes, memory


def nothing(net: Net, opt: Any, number: int) -> None: ...


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("job", [Job(2), Job(3, "nvme", clip=0.5), Job(0, clip=0.5, behind=True)], ids=str)
def test_gradients_take_their_own_bytes(tmp_path: Path, terms: Terms, job: Job, precision: str) -> None:
    job = Job(**{**vars(job), "precision": precision})
    dtypes, memory = on_both(job, tmp_path, nothing)
    kept = KEPT[precision]
    assert dtypes == {kept} and set(terms) == {(kept, None)}
    assert memory["gradients"] == kept.itemsize * memory["count"]
    if job.stage != 3:  # else slots of units
        assert memory["slots"] == 0


def test_host_memory_is_12_bytes_per_parameter(tmp_path: Path) -> None:
    """Gradient 2, remainder 2, moments 8; weights that are whole on the device have a copy of 2 bytes on the host."""
    simulated.play()
    _, _, memory = train(Job(2, precision="bf16"), tmp_path, nothing)
    count = memory["count"]
    assert memory["gradients"] + memory["optimizer"] == 12 * count
    assert memory["parameters"] == 2 * count


def second_pass(net: Net, opt: Any, number: int) -> None:
    if number > 0:
        opt.backward(loss_of(net, 0, number + 50))


def clips(net: Net, opt: Any, number: int) -> float:
    return float(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1))


def sets_some(net: Net, opt: Any, number: int) -> None:
    if number == 2:
        net.head.weight.grad = torch.full_like(net.head.weight, 0.25)
        net.blocks[0].up.weight.grad = None


def doubles_one(net: Net, opt: Any, number: int) -> None:
    if number == 1:
        net.embed.weight.grad.mul_(2)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("act", [second_pass, clips, sets_some, doubles_one])
@pytest.mark.parametrize("job", [Job(2), Job(1, behind=True)], ids=str)
def test_sums_are_fp32_from_the_first_change_on(tmp_path: Path, job: Job, act: Act, precision: str) -> None:
    dtypes, memory = on_both(Job(**{**vars(job), "precision": precision}), tmp_path, act)
    assert dtypes == {torch.float32} and memory["gradients"] == 4 * memory["count"]


def reads(net: Net, opt: Any, number: int) -> list[float]:
    """Read gradients in every way that changes none."""
    grads = [net.head.weight.grad, net.embed.weight.grad]
    found = [float(grad.float().sum()) for grad in grads] + [float(grad.norm(p)) for grad in grads for p in (1.0, 2.0)]
    return [value.hex() for value in (*found, float(torch.nn.utils.get_total_norm([*grads])))]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_reads_leave_gradients_as_they_are(tmp_path: Path, precision: str) -> None:
    dtypes, _ = on_both(Job(2, precision=precision), tmp_path, reads)
    assert torch.float32 not in dtypes


@pytest.mark.parametrize("optimizer", ["lamb", "nadam", "muon"])
def test_rules_that_need_fp32_have_sums(tmp_path: Path, optimizer: str) -> None:
    dtypes, _ = on_both(Job(2, precision="bf16", optimizer=optimizer), tmp_path, nothing)
    assert dtypes == {torch.float32}


# --- several passes -------------------------------------------------------------------------------------------------


SEVERAL = [
    Job(0, accum=2, precision="bf16"), Job(1, "nvme", accum=3, optimizer="8bit"), Job(2, accum=2, overlap=False),
    Job(2, accum=3, precision="bf16", optimizer="lion"), Job(3, accum=2, precision="bf16"), Job(3, "nvme", accum=3),
]  # fmt: skip


@pytest.mark.parametrize("job", SEVERAL, ids=str)
def test_the_update_adds_the_last_pass(tmp_path: Path, terms: Terms, job: Job) -> None:
    dtypes, memory = on_both(job, tmp_path, nothing)
    kept, count = KEPT[job.precision], memory["count"]
    assert dtypes == {torch.float32} and set(terms) == {(torch.float32, kept)}
    windows = memory["slots"] - kept.itemsize * count
    assert memory["gradients"] == 4 * count and (windows > 0 if job.offload == "nvme" else windows == 0)


def test_buckets_that_stay_on_the_device_have_sums_there(tmp_path: Path, terms: Terms) -> None:
    on_both(Job(2, "mixed", accum=2, precision="bf16"), tmp_path, nothing)
    assert set(terms) == {(torch.float32, torch.bfloat16)}


DECIDED = [
    Job(2, accum=2, precision="fp16"), Job(1, accum=2, clip=0.5), Job(0, accum=3, precision="bf16", behind=True),
    Job(2, accum=2, optimizer="nadam"), Job(2, accum=2, precision="bf16", optimizer="lamb"),
    Job(3, "mixed", accum=2, mixed=True, precision="bf16"),
]  # fmt: skip


@pytest.mark.parametrize("job", DECIDED, ids=str)
def test_backward_adds_all_passes_if_the_norm_comes_first_or_the_rule_reads_one_term(
    tmp_path: Path, terms: Terms, job: Job
) -> None:
    _, memory = on_both(job, tmp_path, nothing)
    assert memory["transport"] is D2HTransport and set(terms) == {(torch.float32, None)}


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, LastPassTransport), ({"clip_norm": 1.0}, D2HTransport), ({"optimizer": "lamb"}, D2HTransport),
        ({"offload": zcomm.Offload("cpu", update="forward")}, D2HTransport),
        ({"offload": zcomm.Offload("cpu", "cpu"), "stage": 3}, LastPassTransport),
        ({"offload": "nvme", "stage": 3}, D2HTransport),
    ],
)  # fmt: skip
def test_the_plan_of_a_limit_has_room_for_the_last_pass(tmp_path: Path, options: dict[str, Any], kind: type) -> None:
    simulated.play()
    given = {"stage": 2, "offload": "cpu", "grad_accum": 2, "nvme_path": str(tmp_path), "optimizer": "adamw", **options}
    opt = zcomm.ZeroOptimizer(Net("plain"), memory="100GiB", **given)
    assert type(transport_of(opt)) is kind
    opt.close()


def drops_some(net: Net, opt: Any, number: int) -> None:
    if number == 2:
        net.embed.weight.grad = None
    if number == 3:
        net.head.weight.grad = None


@pytest.mark.parametrize("act", [clips, sets_some, doubles_one, drops_some, reads])
def test_readers_and_changes_get_complete_sums(tmp_path: Path, act: Act) -> None:
    for job in (Job(2, accum=2, precision="bf16"), Job(1, accum=3)):
        dtypes, _ = on_both(job, tmp_path, act)
        assert dtypes == {torch.float32}


def test_the_number_of_passes_may_change_in_a_pass(tmp_path: Path) -> None:
    def changes(net: Net, opt: Any, number: int) -> None:
        if number in (2, 4):
            opt.grad_accum = {2: 1, 4: 3}[number]

    on_both(Job(2, accum=2, precision="bf16"), tmp_path, changes)


@pytest.mark.parametrize(
    ("job", "adds"),
    [
        (Job(2, precision="bf16"), True), (Job(2, accum=2, precision="bf16"), True),
        (Job(2, optimizer="nadam"), False), (Job(1, clip=0.5, precision="bf16"), False),
    ],
    ids=str,
)  # fmt: skip
def test_a_step_may_have_any_number_of_passes(tmp_path: Path, terms: Terms, job: Job, adds: bool) -> None:
    on_both(job, tmp_path, nothing, passes=(1, 2, 3, 2, 1, 4))
    assert ((torch.float32, KEPT[job.precision]) in terms) == adds


def test_a_reader_moves_the_next_addition_into_backward(
    tmp_path: Path, terms: Terms, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated.play()
    late, add = [], LastPassTransport._add_waiting

    def told(self: LastPassTransport, bucket: Any, why: str) -> None:
        late.append(bucket.index)
        add(self, bucket, why)

    monkeypatch.setattr(LastPassTransport, "_add_waiting", told)
    for read_in, expected in (({1}, [True, False, False, True, True]), (range(5), [False] * 5)):
        net = Net("plain")
        opt = Job(2, accum=2, precision="bf16").build(net, str(tmp_path))
        late.clear()
        found = []
        for number in range(10):
            opt.backward(loss_of(net, 0, number))
            terms.clear()
            if number // 2 in read_in and number % 2:
                clips(net, opt, number)
            opt.step()
            opt.zero_grad()
            if number % 2:
                assert len(set(terms)) == 1
                found.append(terms[0][1] is not None)
        assert found == expected
        assert sorted(late) == list(range(len(opt._live.geometry.buckets))), (
            "each once, in the first step with a reader"
        )
        opt.close()


@pytest.mark.parametrize("late", [False, True])
def test_an_interrupted_addition_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    """An interrupt may come before or after the last gradient has been added to the sum."""
    ends = []
    for there in (False, True):
        torch.manual_seed(0)
        net = Net("plain")
        if there:
            simulated.play()
        opt = Job(2, accum=2, precision="bf16").build(net, str(tmp_path))
        if there:
            _interrupt(net, opt, monkeypatch, late)
        for number in range(4):
            opt.backward(loss_of(net, 0, number))
            opt.step()
            opt.zero_grad()
        ends.append(digest(opt.full_state_dict()))
        opt.close()
    assert ends[0] == ends[1]


def _interrupt(net: Net, opt: Any, monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    """Run two passes, and interrupt a reader of their sums."""
    add = LastPassTransport.add

    def interrupted(self: LastPassTransport, bucket: Any, accumulate: bool) -> None:
        if late:
            add(self, bucket, accumulate)
        raise KeyboardInterrupt

    opt.backward(loss_of(net, 0, 20))
    opt.step()
    opt.zero_grad()
    opt.backward(loss_of(net, 0, 21))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(LastPassTransport, "add", interrupted)
        net.head.weight.grad.norm()
    with pytest.raises(RuntimeError, match="call zero_grad"):
        net.head.weight.grad.norm()
    with pytest.raises(RuntimeError, match="call zero_grad"):
        opt.step()
    opt.zero_grad()


# --- passes ---------------------------------------------------------------------------------------------------------


def test_a_pass_waits_for_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward ends while copies are in flight; the next pass does not overwrite a gradient that an update reads."""
    monkeypatch.setattr(device_streams, "PIECE_NBYTES", 512)
    in_flight = []

    def looks(net: Net, opt: Any, number: int) -> None:
        if simulated.playing():
            in_flight.append(sum(not event.done() for event in transport_of(opt)._copied))

    plain, _, _ = train(Job(2, precision="bf16"), tmp_path, looks)
    simulated.play(0.003)
    assert train(Job(2, precision="bf16", behind=True), tmp_path, looks)[0] == plain
    assert max(in_flight) > 0


@pytest.mark.parametrize(("accum", "kept"), [(1, torch.bfloat16), (2, torch.float32)])
def test_a_failed_pass_leaves_nothing(tmp_path: Path, accum: int, kept: torch.dtype) -> None:
    def fails_once(net: Net, opt: Any, number: int) -> None:
        if number == 1:
            opt.zero_grad()
            handle = net.embed.weight.register_hook(lambda grad: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                opt.backward(loss_of(net, 0, 40))
            handle.remove()
            opt.zero_grad()
            opt.backward(loss_of(net, 0, 41))

    dtypes, _ = on_both(Job(2, accum=accum, precision="bf16"), tmp_path, fails_once)
    assert dtypes == {kept}


def test_the_log_names_the_cause(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    simulated.play()
    with caplog.at_level("INFO", "zcomm"):
        train(Job(2, precision="bf16"), tmp_path, clips)
    (line,) = [each for each in caplog.messages if "fp32 from now on" in each]
    assert "changes of p.grad" in line and "clip_norm=" in line


def test_gradients_are_page_locked_once(tmp_path: Path) -> None:
    """The copies from the device land in locked memory; sums, which no copy uses, are not locked."""
    simulated.play()
    torch.manual_seed(0)
    net = Net("plain")
    opt = Job(2, precision="bf16").build(net, str(tmp_path))
    transport, lane = transport_of(opt), simulated.lanes[0]
    assert isinstance(transport, LastPassTransport)
    opt.backward(loss_of(net, 0, 0))
    clips(net, opt, 0)
    locked = {each.data_ptr() for each in lane._locked}
    assert {each.data_ptr() for each in transport.slots.memory if each.numel()} <= locked
    sums = {each.data_ptr() for each in transport.sums.values() if each.numel()}
    assert sums and not sums & locked
    opt.close()
