"""Updates in backward of gradients in their host slots, for weights that are whole on a (simulated) device.

``Offload("cpu", update="backward")`` in stages 0 to 2 ([Note: update from slots]). The bits are those of the same
program on the CPU with updates in step().
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import simulated
import zcomm
from device_jobs import Job
from test_corners import AGAIN, KINDS, Net, loss_of
from test_single_pass import Act, Terms, element_count, nothing, terms
from zcomm.zero import full_param, set_full_param
from zcomm.zero.gradients import pinned
from zcomm.zero.gradients.used_up import UsedUpTransport
from zcomm.zero.schedule.from_slots import FromSlots
from zero_jobs import digest

assert terms  # a fixture
SLOTS = Job(2, update="backward", precision="bf16")
STEPS = 4


@pytest.fixture(autouse=True)
def few_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "HOST_SLOTS_NBYTES", 1)  # so that there are three


def train(job: Job, folder: Path, act: Act) -> tuple[list[Any], Any]:
    """Train with ``act`` before each backward pass. Returns: norms and all bits, and the bytes on the host."""
    torch.manual_seed(0)
    net = Net("plain")
    opt = job.build(net, str(folder))
    seen: list[Any] = []
    for number in range(STEPS):
        act(net, opt, number)
        opt.backward(loss_of(net, 0, number))
        opt.step()
        seen.append(float(opt.grad_norm).hex())
        opt.zero_grad()
    memory = opt.memory()["cpu"]
    memory["count"], memory["slot"] = element_count(opt), max(b.count for b in opt._live.geometry.buckets)
    kinds = [each for each in opt._live.reducer.accumulators.kinds if not each.on_device]
    memory["transport"] = type(kinds[0]) if kinds else None
    arrays = {f"{n}.{k}": v.reshape(-1) for n, e in opt.state_dict()["state"].items() for k, v in e.items()}
    seen.append(digest({**opt.full_state_dict(), **arrays}))
    opt.close()
    return seen, memory


def on_both(job: Job, folder: Path, act: Act = nothing) -> Any:
    simulated.stop()
    plain, _ = train(job.plain, folder, act)
    simulated.play(0.0005)
    found, memory = train(job, folder, act)
    assert found == plain
    return memory


JOBS = [
    SLOTS, replace(SLOTS, stage=0, precision="fp32"), replace(SLOTS, offload="nvme"), replace(SLOTS, overlap=False),
    replace(SLOTS, optimizer="lion"), replace(SLOTS, optimizer="8bit", stage=1), replace(SLOTS, offload="mixed"),
    replace(SLOTS, optimizer="momentum", fraction=0.5), replace(SLOTS, optimizer="nadam", precision="fp32"),
]  # fmt: skip


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_the_bits_are_those_of_a_step(tmp_path: Path, job: Job) -> None:
    memory = on_both(job, tmp_path)
    assert memory["transport"] is UsedUpTransport and memory["gradients"] == 0


def test_host_memory_is_12_bytes_per_parameter(tmp_path: Path, terms: Terms) -> None:
    """Weight 2, remainder 2, moments 8, and three slots for gradients, whatever the size of the model."""
    simulated.play()
    _, memory = train(SLOTS, tmp_path, nothing)
    assert memory["parameters"] + memory["optimizer"] == 12 * memory["count"]
    assert memory["gradients"] == 0 and memory["slots"] == 3 * 2 * memory["slot"]
    assert set(terms) == {(torch.bfloat16, None)}


# --- programs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in (*AGAIN, "plain")])
def test_models_of_any_kind(tmp_path: Path, kind: str) -> None:
    on_both(replace(SLOTS, kind=kind), tmp_path)


def decays(net: Net, opt: Any, number: int) -> None:
    opt.param_groups[0]["lr"] = 1e-2 / (number + 1)
    opt.param_groups[0]["weight_decay"] = 0.1 * number


def edits(net: Net, opt: Any, number: int) -> None:
    with torch.no_grad():
        net.head.weight.clamp_(-0.1, 0.1)
        net.blocks[0].up.weight.data.mul_(0.5)
        if number == 2:
            net.embed.weight.data = torch.full_like(net.embed.weight, 0.25)


def evaluates(net: Net, opt: Any, number: int) -> float:
    """Evaluate before and after backward, which continues to use the old weights."""
    with torch.no_grad():
        return loss_of(net, 0, 100 + number).item()


def accesses(net: Net, opt: Any, number: int) -> list[float]:
    opt.join()
    opt.zero_grad(set_to_none=False)
    values = [full_param(net.head.weight), opt.full_state_dict()["embed.weight"]]
    set_full_param(net.blocks[1].up.weight, torch.full_like(net.blocks[1].up.weight, 0.125))
    return [value.sum().item() for value in values]


def clips_values(net: Net, opt: Any, number: int) -> None:
    """Change gradients by hooks, as long as they are not used up."""
    if number == 0:
        for param in net.parameters():
            param.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))


def asks_autograd(net: Net, opt: Any, number: int) -> float:
    return float(torch.autograd.grad(loss_of(net, 0, 7), net.head.weight)[0].norm())


@pytest.mark.parametrize("act", [decays, edits, evaluates, accesses, clips_values, asks_autograd])
def test_programs_around_steps(tmp_path: Path, act: Act) -> None:
    on_both(SLOTS, tmp_path, act)


def test_a_forward_before_the_step_uses_the_old_weights(tmp_path: Path) -> None:
    ends = []
    for there in (False, True):
        torch.manual_seed(0)
        net = Net("plain")
        if there:
            simulated.play(0.0005)
        opt = (SLOTS if there else SLOTS.plain).build(net, str(tmp_path))
        losses = []
        for number in range(STEPS):
            opt.backward(loss_of(net, 0, number))
            losses += [evaluates(net, opt, number), net.state_dict()["head.weight"].sum().item()]
            opt.step()
            opt.zero_grad()
            losses.append(evaluates(net, opt, number))
        ends.append((losses, digest(opt.full_state_dict())))
        opt.close()
    assert ends[0] == ends[1]


def test_checkpoints_hold_whole_steps(tmp_path: Path) -> None:
    simulated.play(0.0005)
    bits = []
    for stops in (False, True):
        torch.manual_seed(0)
        net = Net("plain")
        opt = SLOTS.build(net, str(tmp_path))
        for number in range(STEPS):
            step(net, opt, number)
            if stops and number == 1:
                opt.save(tmp_path / "saved")
                step(net, opt, 50)
                opt.close()
                net = Net("plain")
                opt = SLOTS.build(net, str(tmp_path))
                opt.load(tmp_path / "saved")
        bits.append(digest(opt.full_state_dict()))
        opt.close()
    assert bits[0] == bits[1]


def step(net: Net, opt: Any, number: int) -> None:
    opt.backward(loss_of(net, 0, number))
    opt.step()
    opt.zero_grad()


def test_a_gradient_that_is_not_finite_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    simulated.play()
    net = Net("plain")
    opt = SLOTS.build(net, str(tmp_path))
    handle = net.blocks[2].up.weight.register_hook(lambda grad: grad * float("inf"))
    step(net, opt, 0)
    handle.remove()
    assert "the gradient of blocks.2.up.weight is not finite" in caplog.text
    assert opt.grad_norm is not None and not math.isfinite(opt.grad_norm)
    opt.close()


def half_way(*calls: Callable[[], Any]) -> None:
    for call in calls:
        with pytest.raises(RuntimeError, match="half way"):
            call()


# --- calls that it does not support -----------------------------------------------------------------------------------

BETWEEN: dict[str, Callable[[Net, Any, Path], Any]] = {
    r"backward\(\): .* call step\(\) first": lambda net, opt, folder: opt.backward(loss_of(net, 0, 9)),
    r"zero_grad\(\): backward has updated": lambda net, opt, folder: opt.zero_grad(),
    r"p.grad: backward has updated": lambda net, opt, folder: net.head.weight.grad.norm(),
    r"p.grad: backward": lambda net, opt, folder: torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0),
    "backward has updated the weights": lambda net, opt, folder: opt.state_dict(),
    "has updated the weights already": lambda net, opt, folder: opt.full_state_dict(),
    "updated the weights already: call": lambda net, opt, folder: opt.save(folder / "saved"),
    "values of a parameter: backward has updated": lambda net, opt, folder: full_param(net.head.weight),
}


@pytest.mark.parametrize("error", BETWEEN)
def test_looks_before_the_step_raise_and_change_nothing(tmp_path: Path, error: str) -> None:
    simulated.play()
    bits = []
    for looks in (False, True):
        torch.manual_seed(0)
        net = Net("plain")
        opt = SLOTS.build(net, str(tmp_path))
        for number in range(2):
            opt.backward(loss_of(net, 0, number))
            if looks:
                with pytest.raises(RuntimeError, match=error):
                    BETWEEN[error](net, opt, tmp_path)
            opt.step()
            opt.zero_grad()
        bits.append(digest(opt.full_state_dict()))
        opt.close()
    assert bits[0] == bits[1]


def locally(net: Net, opt: Any) -> None:
    with opt.no_sync():
        loss_of(net, 0, 8).backward()


def assigns(net: Net, opt: Any) -> None:
    net.head.weight.grad = torch.ones_like(net.head.weight)


def freezes(net: Net, opt: Any) -> None:
    net.head.weight.requires_grad_(False)


def sets_clipping(net: Net, opt: Any) -> None:
    opt.clip_norm = 1.0


def keeps_micro_steps(net: Net, opt: Any) -> None:
    opt.boundary = False


BEFORE = {
    locally: "no_sync", assigns: "p.grad of head.weight is a tensor", freezes: "head.weight is frozen now",
    sets_clipping: "clip_norm=1.0", keeps_micro_steps: "boundary=False",
}  # fmt: skip


@pytest.mark.parametrize("act", BEFORE)
def test_a_pass_that_is_not_supported_changes_nothing(tmp_path: Path, act: Callable[[Net, Any], None]) -> None:
    simulated.play()
    net = Net("plain")
    opt = SLOTS.build(net, str(tmp_path))
    step(net, opt, 0)
    before = digest(opt.full_state_dict())
    act(net, opt)
    with pytest.raises(RuntimeError, match=BEFORE[act]):
        opt.backward(loss_of(net, 0, 1))
    if act in (locally, assigns):
        with pytest.raises(RuntimeError, match="nothing has been changed"):
            opt.step()
    opt.zero_grad()
    net.head.weight.requires_grad_(True)
    opt.clip_norm = opt.boundary = None
    assert digest(opt.full_state_dict()) == before
    step(net, opt, 1)
    opt.close()


def test_steps_without_new_gradients(tmp_path: Path) -> None:
    """One without a pass does nothing. Gradients that are used up are used by no second step and no second pass."""
    simulated.play()
    net = Net("plain")
    opt = SLOTS.build(net, str(tmp_path))
    opt.step()
    opt.backward(loss_of(net, 0, 0))
    opt.step()
    for act in (opt.step, lambda: opt.backward(loss_of(net, 0, 1)), lambda: net.head.weight.grad.norm()):
        with pytest.raises(RuntimeError, match="backward has used the gradients up; call zero_grad"):
            act()
        if act is not opt.step:
            assert opt.step_count == 1
    opt.zero_grad(set_to_none=False)
    with pytest.raises(RuntimeError, match=r"p.grad is zero, and no backward pass came: nothing has been changed"):
        opt.step()
    step(net, opt, 1)
    assert opt.step_count == 2
    opt.close()


def changes_rate(net: Net, opt: Any) -> None:
    opt.param_groups[0]["lr"] *= 0.5


def drops(net: Net, opt: Any) -> None:
    net.head.weight.grad = None


def edits_counted(net: Net, opt: Any) -> None:
    with torch.no_grad():
        net.head.weight.mul_(0.5)


def edits_data(net: Net, opt: Any) -> None:
    net.head.weight.data.mul_(0.5)


def edits_twice(net: Net, opt: Any) -> None:
    """Edit weights that were edited before backward, too."""
    net.blocks[4].up.weight.data.mul_(0.5)


def replaces(net: Net, opt: Any) -> None:
    net.head.weight.data = torch.zeros_like(net.head.weight)


AFTER = {
    changes_rate: "options were changed", drops: "p.grad was dropped", assigns: "p.grad was dropped or assigned",
    edits_counted: "edited on the device.*head.weight", edits_data: "edited on the device.*head.weight",
    edits_twice: r"edited on the device.*blocks\.4\.up\.weight", replaces: "p.data was replaced",
}  # fmt: skip


@pytest.mark.parametrize("act", AFTER)
def test_changes_before_the_step_raise_until_a_load(tmp_path: Path, act: Callable[[Net, Any], None]) -> None:
    simulated.play()
    bits = []
    for changed in (False, True):
        torch.manual_seed(0)
        net = Net("plain")
        opt = SLOTS.build(net, str(tmp_path))
        step(net, opt, 0)
        opt.save(tmp_path / str(changed))
        if changed:
            edits_twice(net, opt)
            opt.backward(loss_of(net, 0, 30))
            act(net, opt)
            with pytest.raises(RuntimeError, match=AFTER[act]):
                opt.step()
            half_way(opt.step, partial(opt.save, tmp_path / "other"), opt.full_state_dict)
            opt.load(tmp_path / str(changed))
            opt.param_groups[0]["lr"] = 1e-2
        step(net, opt, 1)
        bits.append(digest(opt.full_state_dict()))
        opt.close()
    assert bits[0] == bits[1]


@pytest.mark.parametrize("kind", AGAIN)
def test_a_second_gradient_of_a_weight_raises(tmp_path: Path, kind: str) -> None:
    simulated.play()
    net = Net(kind)
    opt = replace(SLOTS, kind=kind).build(net, str(tmp_path))
    with pytest.raises(RuntimeError, match=r"twice.*without the second gradient: give update='forward'"):
        opt.backward(loss_of(net, 0, 0))
    with pytest.raises(RuntimeError, match="half way"):
        opt.step()
    opt.close()


# --- faults -----------------------------------------------------------------------------------------------------------


class Stop(Exception): ...


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])
def test_backward_that_fails_poisons_until_a_load(tmp_path: Path, error: type[BaseException]) -> None:
    simulated.play()
    bits = []
    for fails in (False, True):
        torch.manual_seed(0)
        net = Net("plain")
        opt = SLOTS.build(net, str(tmp_path))
        step(net, opt, 0)
        opt.save(tmp_path / str(fails))
        if fails:

            def fail(grad: torch.Tensor) -> None:
                raise error

            handle = net.blocks[1].down.weight.register_hook(fail)
            with pytest.raises(error):
                opt.backward(loss_of(net, 0, 30))
            handle.remove()
            half_way(opt.zero_grad, opt.step, partial(opt.backward, loss_of(net, 0, 1)))
            opt.load(tmp_path / str(fails))
            opt.zero_grad()
        step(net, opt, 1)
        bits.append(digest(opt.full_state_dict()))
        opt.close()
    assert bits[0] == bits[1]


@pytest.mark.parametrize("good", [0, 3])
def test_an_update_that_fails_is_raised_by_step(tmp_path: Path, good: int, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated.play()
    net = Net("plain")
    opt = SLOTS.build(net, str(tmp_path))
    step(net, opt, 0)
    opt.save(tmp_path / "saved")
    before = digest(opt.full_state_dict())
    apply, calls = FromSlots.apply, []

    def fail(self: FromSlots, *args: Any) -> None:
        calls.append(1)
        if len(calls) > good:
            raise OSError(5, "the drive is gone")
        apply(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(FromSlots, "apply", fail)
        opt.backward(loss_of(net, 0, 1))
        with pytest.raises((OSError, RuntimeError), match="the drive is gone"):
            opt.step()
            opt.join()
    with pytest.raises(RuntimeError, match="half way"):
        opt.step()
    opt.load(tmp_path / "saved")
    assert digest(opt.full_state_dict()) == before
    opt.zero_grad()
    step(net, opt, 1)
    opt.close()
    assert type(net.head._parameters) is dict, "nothing is left in the model"


def test_close_before_the_step_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    simulated.play()
    net = Net("plain")
    opt = SLOTS.build(net, str(tmp_path))
    opt.backward(loss_of(net, 0, 0))
    opt.close()
    assert "backward has updated weights, and no step() has ended that" in caplog.text


# --- order ------------------------------------------------------------------------------------------------------------


class Held:
    """Holds the update of a bucket until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, index: int) -> None:
        self.open, self.reached, self.order = threading.Event(), threading.Event(), list[int]()
        update = FromSlots._update

        def late(this: FromSlots, bucket: Any) -> None:
            self.order.append(bucket.index)
            if bucket.index == index:
                self.reached.set()
                assert self.open.wait(30)
            update(this, bucket)

        monkeypatch.setattr(FromSlots, "_update", late)


def test_updates_run_during_backward_and_free_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated.play()
    net = Net("plain")
    opt = SLOTS.build(net, str(tmp_path))
    last = len(opt._parts.geometry.buckets) - 1
    held = Held(monkeypatch, last)
    ended = threading.Event()
    thread = threading.Thread(target=lambda: (opt.backward(loss_of(net, 0, 0)), ended.set()))
    thread.start()
    assert held.reached.wait(30) and not ended.wait(0.2), "backward waits for the slot of the last bucket"
    held.open.set()
    thread.join(30)
    assert ended.is_set()
    assert held.order[:3] == [last, last - 1, last - 2]
    opt.step()
    opt.close()


def test_after_step_the_next_forward_waits_for_its_own_weights_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned, "HOST_SLOTS_NBYTES", 1 << 30)  # backward waits for no update
    simulated.play()
    net = Net("plain")
    opt = SLOTS.build(net, str(tmp_path))
    last = len(opt._parts.geometry.buckets) - 1
    held = Held(monkeypatch, last)
    opt.backward(loss_of(net, 0, 0))
    assert held.reached.wait(30)
    before = net.embed.weight.detach().clone()
    opt.step()
    opt.zero_grad()
    seen = threading.Event()
    thread = threading.Thread(target=lambda: (net.embed(torch.arange(4)), seen.set()))
    thread.start()
    assert not seen.wait(0.2)
    held.open.set()
    thread.join(30)
    assert seen.is_set() and not torch.equal(net.embed.weight, before)
    opt.join()
    assert held.order == [last, last - 1, *range(last - 1)], "state of the second one was read ahead before step()"
    opt.close()


# --- options ----------------------------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"clip": 1.0}, ValueError, "clip_norm=1.0"),
    ({"accum": 2}, ValueError, "grad_accum=2"),
    ({"precision": "fp16"}, ValueError, "fp16"),
    ({"gradients": "device"}, ValueError, "keeps no gradients, but gradients='device': leave gradients= out"),
    ({"gradients": "nvme"}, ValueError, "keeps no gradients, but gradients='nvme'"),
    ({"optimizer": "lamb"}, NotImplementedError, "lamb needs whole parameters"),
    ({"optimizer": "nadam"}, NotImplementedError, "takes gradients in fp32 only"),
]


@pytest.mark.parametrize(("options", "kind", "error"), REFUSED)
def test_options_are_checked(tmp_path: Path, options: dict[str, Any], kind: type[Exception], error: str) -> None:
    simulated.play()
    with pytest.raises(kind, match=error):
        replace(SLOTS, **options).build(Net("plain"), str(tmp_path))


def test_it_needs_the_model(tmp_path: Path) -> None:
    simulated.play()
    offload = zcomm.Offload("cpu", update="backward")
    with pytest.raises(ValueError, match="needs the model itself"):
        zcomm.ZeroOptimizer(list(Net("plain").parameters()), "adamw", stage=2, offload=offload)


def test_state_that_stays_on_the_device_needs_no_slots(tmp_path: Path) -> None:
    memory = on_both(replace(SLOTS, fraction=0.0), tmp_path)
    assert memory["slots"] == memory["optimizer"] == 0
