"""Gradients of one pass in a world of one, on a (simulated) device: no fp32 sums ([Note: single pass]).

The bits are those of the same program on the CPU. The other tests of this folder train most of their jobs so, too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import simulated
from device_jobs import Job
from test_corners import Net, loss_of
from zcomm.memory import device_streams
from zcomm.zero.gradients.pinned import D2HTransport
from zcomm.zero.gradients.single_pass import SinglePassTransport
from zero_jobs import digest

Act = Callable[[Net, Any, int], Any]
STEPS = 4


def transport_of(opt: Any) -> Any:
    return next(each for each in opt._live.reducer.accumulators.kinds if not each.on_device)


def sums_of(opt: Any) -> set[torch.dtype]:
    return {each.dtype for each in transport_of(opt).sums.values()}


def element_count(opt: Any) -> int:
    return sum(bucket.shard_count for bucket in opt._live.geometry.buckets)


def train(job: Job, folder: Path, act: Act) -> tuple[list[Any], set[torch.dtype], Any]:
    """Train with ``act`` between backward and step. Returns: its results and all bits, dtypes of sums, memory."""
    torch.manual_seed(0)
    net = Net("plain")
    opt = job.build(net, str(folder))
    seen: list[Any] = []
    for number in range(STEPS):
        opt.backward(loss_of(net, 0, number))
        seen.append(act(net, opt, number))
        opt.step()
        seen.append(float(opt.grad_norm).hex())
        opt.zero_grad()
    dtypes, memory = sums_of(opt), opt.memory()["cpu"]
    memory["count"] = element_count(opt)
    arrays = {f"{n}.{k}": v.reshape(-1) for n, e in opt.state_dict()["state"].items() for k, v in e.items()}
    seen.append(digest({**opt.full_state_dict(), **arrays}))
    opt.close()
    return seen, dtypes, memory


def on_both(job: Job, folder: Path, act: Act) -> tuple[set[torch.dtype], Any]:
    """Compare the device with the CPU to the bit. Returns: dtypes of the device's sums, its memory on the host."""
    plain, _, _ = train(job.plain, folder, act)
    simulated.play(0.0005)
    found, dtypes, memory = train(job, folder, act)
    assert found == plain
    return dtypes, memory


def nothing(net: Net, opt: Any, number: int) -> None: ...


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("job", [Job(2), Job(3, "nvme", clip=0.5), Job(0, clip=0.5, behind=True)], ids=str)
def test_gradients_take_their_own_bytes(tmp_path: Path, job: Job, precision: str) -> None:
    job = Job(**{**vars(job), "precision": precision})
    dtypes, memory = on_both(job, tmp_path, nothing)
    kept = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]
    assert dtypes == {kept}
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


def test_several_passes_by_option_have_sums(tmp_path: Path) -> None:
    simulated.play()
    torch.manual_seed(0)
    opt = Job(2, accum=2, precision="bf16").build(Net("plain"), str(tmp_path))
    assert isinstance(transport_of(opt), D2HTransport)
    opt.close()


def test_a_pass_waits_for_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward ends while copies are in flight; the next pass does not overwrite a gradient that an update reads."""
    monkeypatch.setattr(device_streams, "PIECE_NBYTES", 512)
    in_flight = []

    def looks(net: Net, opt: Any, number: int) -> None:
        if simulated.playing():
            in_flight.append(sum(not event.done() for event in transport_of(opt)._landed.values()))

    plain, _, _ = train(Job(2, precision="bf16"), tmp_path, looks)
    simulated.play(0.003)
    assert train(Job(2, precision="bf16", behind=True), tmp_path, looks)[0] == plain
    assert max(in_flight) > 0


def test_a_failed_pass_leaves_nothing(tmp_path: Path) -> None:
    def fails_once(net: Net, opt: Any, number: int) -> None:
        if number == 1:
            opt.zero_grad()
            handle = net.embed.weight.register_hook(lambda grad: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                opt.backward(loss_of(net, 0, 40))
            handle.remove()
            opt.zero_grad()
            opt.backward(loss_of(net, 0, 41))

    dtypes, _ = on_both(Job(2, precision="bf16"), tmp_path, fails_once)
    assert dtypes == {torch.bfloat16}


def test_the_log_names_the_cause(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    simulated.play()
    with caplog.at_level("INFO", "zcomm"):
        train(Job(2, precision="bf16"), tmp_path, clips)
    (line,) = [each for each in caplog.messages if "fp32 from now on" in each]
    assert "changes of p.grad" in line and "clip_norm=" in line


def test_gradients_are_page_locked_once(tmp_path: Path) -> None:
    simulated.play()
    torch.manual_seed(0)
    net = Net("plain")
    opt = Job(2, precision="bf16").build(net, str(tmp_path))
    transport, lane = transport_of(opt), simulated.lanes[0]
    assert isinstance(transport, SinglePassTransport)
    locked = {each.data_ptr() for each in lane._locked}
    assert {each.data_ptr() for each in transport.sums.values() if each.numel()} <= locked
    transport.widen("a test")
    assert not {each.data_ptr() for each in transport.sums.values() if each.numel()} & {
        each.data_ptr() for each in lane._locked
    }
    opt.close()
