"""Updates in backward of the buckets that allow it, and in the next forward of the others: the bits of step()."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zcomm
import zcomm.zero.assemble
from test_backward_step import AUTO, BACKWARD, BASE, Shared, build
from test_corners import Net as Corners
from test_gradient_tiers import loss_of
from test_mode_faults import BadSwap, Fault, small_spans
from tiers import long, slow
from zcomm.zero import StepUndoneError, full_grad, full_param
from zcomm.zero.cache.swap import Swap
from zero_jobs import Case, digest, share_small_buckets

Run = Callable[..., list[Any]]
Act = Callable[[Any, Any, int, Path], None]
STEPS, WATCHED = 6, 2
ATOMIC = replace(AUTO, atomic=True)


class More(Shared):
    """The block that is used twice is used once more where ``more``."""

    more = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = super().forward(tokens)
        if self.more:
            y: Any = checkpoint(self.blocks[1], self.embed(tokens), use_reentrant=True)
            x = x + self.head(y)
        return x


class Outside(Corners):
    """Blocks that use weights of other blocks. Of each, one bucket or more is launched before its last use."""

    def __init__(self) -> None:
        super().__init__("outside+reentrant")


class CountingSwap(Swap):
    """Counts the bytes of sums that are written, by bucket."""

    written: dict[str, int] = {}  # noqa: RUF012

    def write(self, key: str, ptr: int, nbytes: int) -> Any:
        if key.startswith("gradients."):
            CountingSwap.written[key] = CountingSwap.written.get(key, 0) + nbytes
        return super().write(key, ptr, nbytes)


def plainly(opt: Any, net: Any, number: int, folder: Path) -> None:
    opt.backward(loss_of(net, number))
    opt.step()
    opt.zero_grad()


def clears_late(opt: Any, net: Any, number: int, folder: Path) -> None:
    """Forget the gradients between forward and backward."""
    loss = loss_of(net, number)
    opt.zero_grad()
    opt.backward(loss)
    opt.step()


def keeps_zeros(opt: Any, net: Any, number: int, folder: Path) -> None:
    opt.backward(loss_of(net, number))
    opt.step()
    opt.zero_grad(set_to_none=False)


def looks(opt: Any, net: Any, number: int, folder: Path) -> None:
    plainly(opt, net, number, folder)
    opt.found.append(digest({name: full_param(param) for name, param in net.named_parameters()}))
    opt.found.append(digest({"state": zcomm.zero.full_optim_state(net.blocks[1].weight, "exp_avg")}))


def saves(opt: Any, net: Any, number: int, folder: Path) -> None:
    """Save with updates that wait; go on; load; go on again."""
    plainly(opt, net, number, folder)
    if number == STEPS - 2:
        opt.save(folder / "saved")
        plainly(opt, net, 50, folder)
        opt.load(folder / "saved")


def clips_once(opt: Any, net: Any, number: int, folder: Path) -> None:
    """Clip a step: it is updated in forward as a whole, and comes between two that are not."""
    opt.clip_norm = 0.1 if number == WATCHED + 1 else None
    plainly(opt, net, number, folder)


def evaluates(opt: Any, net: Any, number: int, folder: Path) -> None:
    plainly(opt, net, number, folder)
    with torch.no_grad():
        opt.found.append(float(loss_of(net, number)).hex())


def assigns(opt: Any, net: Any, number: int, folder: Path) -> None:
    """Step with gradients of the program itself, while updates of the step before wait."""
    plainly(opt, net, number, folder)
    if number == WATCHED + 1:
        for param in net.parameters():
            param.grad = torch.full(param.shape, 0.1) if param.requires_grad else None
        opt.step()
        opt.zero_grad()


def thrice(opt: Any, net: Any, number: int, folder: Path) -> None:
    """Use the shared block once more than in the steps that were watched."""
    net.more = number > WATCHED
    plainly(opt, net, number, folder)


def on_one_rank(opt: Any, net: Any, number: int, folder: Path) -> None:
    """Use a block twice on one rank alone."""
    net.shares = zcomm.rank() == zcomm.world_size() - 1
    plainly(opt, net, number, folder)


def overflows(opt: Any, net: Any, number: int, folder: Path) -> None:
    loss = loss_of(net, number)
    opt.backward(loss * float("inf") if number == WATCHED + 1 else loss)
    opt.step()
    opt.zero_grad()


def overflows_there(opt: Any, net: Any, number: int, folder: Path) -> None:
    """Make one gradient not finite: it is in a bucket that updates in forward."""

    def spoil(grad: torch.Tensor) -> torch.Tensor:
        return grad * float("nan")

    handle = net.blocks[1].bias.register_hook(spoil) if number == WATCHED + 1 else None
    plainly(opt, net, number, folder)
    if handle is not None:
        handle.remove()


def faulty(opt: Any, net: Any, number: int, folder: Path) -> None:
    """Fail in an update in backward, in one that waits, and in the write of a sum. The step is run again."""
    if opt._parts.updates.transaction.undoes and number == WATCHED + 2:
        stays, spans = opt._parts.reducer.accumulators.ring.stays, opt._parts.state.kinds[0]._swapped
        other, one = (next(b for b, _, _ in spans if (b in stays) == waits) for waits in (False, True))
        faults = [Fault("read", f"state.{other}."), Fault("read", f"state.{one}."), Fault("write", f"gradients.{one}")]
        for fault in faults:
            if zcomm.rank() == zcomm.world_size() - 1:
                BadSwap.arm(fault)
            opt.backward(loss_of(net, number))
            with pytest.raises(StepUndoneError, match=f"step {number + 1} was undone"):
                opt.step()
            assert BadSwap.fault is None, "it has come"
            assert opt.step_count == number and not opt._parts.updates.waits
            opt.zero_grad()
        opt.backward(loss_of(net, number))
        opt.zero_grad()  # takes it back
    plainly(opt, net, number, folder)


SCENES: dict[str, tuple[Act, type[nn.Module], Case, dict[str, Any]]] = {
    "plain": (plainly, Shared, AUTO, {}),
    "outside": (plainly, Outside, AUTO, {"prefetch": 3}),
    "prefetch": (plainly, Shared, AUTO, {"prefetch": 3}),
    "bf16, sgd": (plainly, Shared, AUTO, {"precision": "bf16", "optimizer": "sgd"}),
    "atomic": (plainly, Shared, ATOMIC, {}),
    "clears late": (clears_late, Shared, AUTO, {}),
    "keeps zeros": (keeps_zeros, Shared, AUTO, {}),
    "looks": (looks, Shared, AUTO, {}),
    "saves": (saves, Shared, AUTO, {}),
    "saves, atomic": (saves, Shared, ATOMIC, {}),
    "thrice": (thrice, More, AUTO, {}),
    "one rank": (on_one_rank, Shared, AUTO, {"units": zcomm.zero.Units(keep=("blocks.1",))}),
    "clips once": (clips_once, Shared, AUTO, {}),
    "evaluates": (evaluates, Shared, AUTO, {}),
    "assigns": (assigns, Shared, AUTO, {}),
    "overflows": (overflows, Shared, AUTO, {}),
    "fp16": (overflows, Shared, ATOMIC, {"precision": "fp16", "loss_scale": zcomm.zero.LossScale(initial_power=8)}),
    "skips": (overflows_there, Shared, ATOMIC, {"precision": "bf16", "skip_nonfinite": True}),
    "not finite": (overflows_there, Shared, AUTO, {}),
    "faulty": (faulty, Shared, ATOMIC, {}),
}


def train(case: Case, scene: str, folder: Path) -> tuple[dict[str, Any], Any, set[str]]:
    """Return what training has found; buckets that stay of all; keys of sums that were written once steps updated."""
    act, kind, _, options = SCENES[scene]
    net, opt = build(case, kind, str(folder), **options)  # type: ignore[arg-type]
    opt.found, norms, stays = [], [], None
    for number in range(STEPS):
        for group in opt.param_groups:
            group["lr"] = 0.01 / (1 + number)
        if number == WATCHED:
            CountingSwap.written = {}
        act(opt, net, number, folder)
        norms.append(float(opt.grad_norm).hex())
    arrays = {f"{n}.{k}": v.reshape(-1) for n, e in opt.state_dict()["state"].items() for k, v in e.items()}
    result = {"norms": norms, "bits": digest({**opt.full_state_dict(), **arrays}), "nonfinite": opt.nonfinite}
    result |= {"found": opt.found, "steps": [opt.step_count, opt.updates, opt.skipped_steps, opt.loss_scale]}
    result |= {"counters": [group.get("step") for group in opt.param_groups]}
    if case.update == "auto":
        assert opt._parts.updates.is_on
        stays = sorted(opt._parts.reducer.accumulators.ring.stays), len(opt._parts.geometry.buckets)
    opt.close()
    return result, stays, set(CountingSwap.written)


def train_all(scenes: list[str], folder: str) -> dict[str, Any]:
    zcomm.init(timeout=30)
    share_small_buckets()
    found = {}
    for scene in scenes:
        base = Path(folder) / scene
        base.mkdir(exist_ok=True)
        with pytest.MonkeyPatch.context() as patch:
            if scene == "faulty":
                small_spans(patch)
            else:
                patch.setattr(zcomm.zero.assemble, "Swap", CountingSwap)
            found[scene] = [train(case, scene, base) for case in (BASE, SCENES[scene][2])]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [long(1), 2])
def test_the_bits_of_updates_in_step(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    for found in run_ranks(train_all, world_size, list(SCENES), str(tmp_path)):
        for scene, ((wanted, _, _), (result, (stays, count), written)) in found.items():
            assert result == wanted, scene
            assert 0 < len(stays) <= count // 2, f"{scene}: {stays} of {count}"
            if scene not in ("faulty", "clips once", "assigns"):  # these have steps that update in forward as a whole
                assert written == {f"gradients.{bucket}" for bucket in stays}, scene


def raises(folder: str) -> None:
    """Look between backward and step(), step twice, and force updates in backward."""
    zcomm.init(timeout=30)
    share_small_buckets()
    net, opt = build(AUTO, Shared, folder)
    for number in range(4):
        plainly(opt, net, number, Path(folder))
    opt.backward(loss_of(net, 4))
    shared = net.blocks[1].weight
    looking: list[Callable[[], Any]] = [
        lambda: full_param(shared),
        lambda: full_grad(shared),
        lambda: shared.grad.norm(),  # type: ignore[union-attr]
        lambda: opt.save(f"{folder}/never"),
        lambda: loss_of(net, 5),
    ]
    for look in looking:
        with pytest.raises(RuntimeError, match=r"call step\(\) first"):
            look()
    opt.step()
    for look in (opt.step, lambda: full_grad(shared), lambda: loss_of(net, 5).backward()):
        with pytest.raises(RuntimeError, match="used the gradients up"):
            look()
    opt.close()
    net, opt = build(BACKWARD, Shared, folder)
    before = digest(opt.full_state_dict())
    opt.backward(loss_of(net, 0))
    with pytest.raises(RuntimeError, match=r"blocks\.1 .*nothing has been changed; give update='auto', or 'for"):
        opt.step()
    opt.zero_grad()
    assert digest(opt.full_state_dict()) == before
    opt.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_raises(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    run_ranks(raises, world_size, str(tmp_path))


class Turns(Shared):
    """Another block is used twice where ``other``."""

    other = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = super().forward(tokens)
        return x + super().forward(tokens) if self.other else x


def not_seen_before(folder: str) -> None:
    """Use all blocks again after their gradients, in no step that was watched."""
    zcomm.init(timeout=30)
    share_small_buckets()
    net, opt = build(AUTO, Turns, folder)
    for number in range(4):
        plainly(opt, net, number, Path(folder))
    net.other = True
    with pytest.raises(RuntimeError, match=r"uses unit .* again|in no step before"):
        opt.backward(loss_of(net, 4))
    zcomm.barrier()
    with pytest.raises(RuntimeError, match="load a checkpoint"):
        opt.step()
    opt.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_weight_that_comes_twice_later(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    run_ranks(not_seen_before, world_size, str(tmp_path))


def poisoned(folder: str, failing: int) -> None:
    """Fail without a transaction: in an update that waits, and in its sum. A load mends both."""
    comm, base = zcomm.init(timeout=30), Path(folder)
    with pytest.MonkeyPatch.context() as patch:
        small_spans(patch)
        net, opt = build(AUTO, Shared, folder)
        for number in range(4):
            plainly(opt, net, number, base)
        opt.save(base / "saved")
        for number in range(4, STEPS):
            plainly(opt, net, number, base)
        wanted, one = digest(opt.full_state_dict()), min(opt._parts.reducer.accumulators.ring.stays)
        for fault in (
            Fault("read", f"state.{one}."),
            Fault("write", f"state.{one}."),
            Fault("read", f"gradients.{one}"),
            Fault("write", f"gradients.{one}"),
        ):
            opt.load(base / "saved")
            if comm.rank == failing and fault.what == "write" and "gradients" in fault.key:
                BadSwap.arm(fault)
            with pytest.raises((OSError, RuntimeError)) as told:
                opt.backward(loss_of(net, 4))
                opt.step()
                opt.zero_grad()
                if comm.rank == failing:
                    BadSwap.arm(fault)
                plainly(opt, net, 5, base)
                opt.state_dict()
            assert BadSwap.fault is None, "it has come"
            words = str(told.value)
            assert "half way" in words or (fault.key in words and "zero_grad" not in words), words
            for call in (opt.step, opt.state_dict, lambda: opt.save(base / "never")):
                with pytest.raises(RuntimeError, match="load a checkpoint"):
                    call()
            opt.load(base / "saved")
            for number in range(4, STEPS):
                plainly(opt, net, number, base)
            assert digest(opt.full_state_dict()) == wanted, fault
        opt.close()
    zcomm.shutdown()


@pytest.mark.parametrize("world_size", [slow(1), 2])
def test_faults_poison(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    run_ranks(poisoned, world_size, str(tmp_path), world_size - 1)
