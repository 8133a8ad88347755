"""Updates in backward: the bits of updates in step(), programs that they cannot follow, and errors during them."""

from __future__ import annotations

import errno
import threading
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
from late_swap import LateSwap
from test_broken_step import FailedWork
from test_gradient_tiers import WIDTH, Net, edits, locally, loss_of, nothing, overflows, plainly, twice
from tiers import long, slow
from zcomm.zero import full_param
from zcomm.zero.cache.swap import Swap
from zcomm.zero.schedule.backward import InBackward
from zero_jobs import Case, digest, share_small_buckets

Run = Callable[..., list[Any]]
BASE = Case(3, "nvme", 0.004)
BACKWARD = replace(BASE, gradients="nvme", update="backward")
STEPS = 6


class Recomputed(Net):
    """The net with a checkpoint around each block. shares: one block is used twice."""

    reentrant = shares = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in (*self.blocks, *([self.blocks[1]] if self.shares else [])):
            y: Any = checkpoint(block, x, use_reentrant=self.reentrant)
            x = x + torch.tanh(y)
        return self.head(self.frozen(x) * self.scale)


class Reentrant(Recomputed):
    reentrant = True


class Shared(Recomputed):
    reentrant = shares = True


Act = Callable[[Any, nn.Module, int], None]
SCENES: dict[str, tuple[Act, type[Net], dict[str, Any]]] = {
    "plain": (plainly, Net, {}),
    "bf16": (plainly, Net, {"precision": "bf16"}),
    "sgd": (plainly, Net, {"optimizer": "sgd"}),
    "recomputed": (plainly, Recomputed, {}),
    "reentrant": (plainly, Reentrant, {}),
    "prefetch": (plainly, Reentrant, {"prefetch": 3}),
    "overflow": (overflows, Net, {}),
    "nothing": (nothing, Net, {}),
}


def build(case: Case, kind: type[Net], folder: str, **options: Any) -> tuple[Net, Any]:
    torch.manual_seed(3)
    net, options = kind(), dict(options)
    optimizer = options.pop("optimizer", "adamw")
    return net, zcomm.ZeroOptimizer(net, optimizer, nvme_path=folder, lr=1e-2, **{**case.arguments(), **options})


def train(case: Case, scene: str, folder: str) -> tuple[dict[str, Any], list[bool]]:
    zcomm.init(timeout=30)
    act, kind, options = SCENES[scene]
    net, opt = build(case, kind, folder, **options)
    opt.found, norms, updated = [], [], []
    for number in range(STEPS):
        for group in opt.param_groups:
            group["lr"] = 0.01 / (1 + number)
        act(opt, net, number)
        updated.append(opt._parts.updates.pending)
        opt.step()
        norms.append(None if opt.grad_norm is None else float(opt.grad_norm).hex())
        opt.zero_grad()
    arrays = {f"{n}.{k}": v.reshape(-1) for n, e in opt.state_dict()["state"].items() for k, v in e.items()}
    result = {"norms": norms, "bits": digest({**opt.full_state_dict(), **arrays}), "nonfinite": opt.nonfinite}
    result |= {"found": opt.found, "steps": opt.step_count}
    opt.close()
    return result, updated


def train_all(scenes: list[str], folder: str) -> dict[str, list[Any]]:
    share_small_buckets()
    return {scene: [train(case, scene, folder) for case in (BASE, BACKWARD)] for scene in scenes}


@pytest.mark.parametrize("world_size", [long(1), 2])
def test_the_bits_of_updates_in_step(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    for found in run_ranks(train_all, world_size, list(SCENES), str(tmp_path)):
        for scene, ((wanted, _), (result, updated)) in found.items():
            assert result == wanted, scene
            assert not any(updated[:2]), "they are watched"
            assert any(updated), scene


# --- calls between backward and step() --------------------------------------------------------------------------------


def stepped(opt: Any, net: nn.Module, numbers: range) -> None:
    for number in numbers:
        loss_of(net, number).backward()
        opt.step()
        opt.zero_grad()


def set_rate(opt: Any) -> None:
    opt.param_groups[0]["lr"] = 0.5


def set_grad(net: Net) -> None:
    net.scale.grad = None


def gathered(net: Net) -> None:
    with zcomm.zero.GatheredParameters(net.blocks[1].weight, modifier_rank=0), torch.no_grad():
        net.blocks[1].weight.mul_(0.5)


def part(net: Net) -> None:
    net.blocks[0](torch.ones(1, WIDTH))


# Calls between backward and step(), and whether they poison; otherwise step() has the same result as without the call.
MEANWHILE: dict[str, tuple[Callable[[Any, Net, str], Any], bool]] = {
    "forward": (lambda opt, net, folder: loss_of(net, 1), False),
    "part": (lambda opt, net, folder: part(net), False),
    "zero_grad": (lambda opt, net, folder: opt.zero_grad(), False),
    "save": (lambda opt, net, folder: opt.save(f"{folder}/never"), False),
    "save, no wait": (lambda opt, net, folder: opt.save(f"{folder}/never", wait=False), False),
    "load": (lambda opt, net, folder: opt.load(f"{folder}/saved"), False),
    "load_state_dict": (lambda opt, net, folder: opt.load_state_dict({}), False),
    "state_dict": (lambda opt, net, folder: opt.state_dict(), False),
    "full_state_dict": (lambda opt, net, folder: opt.full_state_dict(), False),
    "model.state_dict": (lambda opt, net, folder: {k: v.clone() for k, v in net.state_dict().items()}, False),
    "full_param": (lambda opt, net, folder: full_param(net.scale), False),
    "full_grad": (lambda opt, net, folder: zcomm.zero.full_grad(net.scale), False),
    "norm": (lambda opt, net, folder: net.scale.grad.norm(), False),  # type: ignore[union-attr]
    "scaled": (lambda opt, net, folder: net.scale.grad.mul_(0.5), False),  # type: ignore[union-attr]
    "edit": (lambda opt, net, folder: net.blocks[3].weight.data.mul_(0.5), False),
    "gathered": (lambda opt, net, folder: gathered(net), False),
    "rate": (lambda opt, net, folder: set_rate(opt), True),
    "grad": (lambda opt, net, folder: set_grad(net), True),
    "clip": (lambda opt, net, folder: setattr(opt, "clip_norm", 1.0), True),
}


def meanwhile(names: list[str], folder: str) -> None:
    share_small_buckets()
    comm = zcomm.init(timeout=30)
    net, opt = build(BACKWARD, Net, folder)
    stepped(opt, net, range(3))
    opt.save(f"{folder}/saved")
    stepped(opt, net, range(3, 5))
    wanted = digest(opt.full_state_dict())
    for name in names:
        act, poisons = MEANWHILE[name]
        opt.load(f"{folder}/saved")
        stepped(opt, net, range(3, 4))
        loss_of(net, 4).backward()
        assert opt._parts.updates.pending
        if not poisons:
            with pytest.raises(RuntimeError, match=r"call step\(\) first"):
                act(opt, net, folder)
                pytest.fail(f"{name} does not raise")
            comm.barrier()
            opt.step()
            opt.zero_grad()
            assert digest(opt.full_state_dict()) == wanted, name
            continue
        act(opt, net, folder)
        with pytest.raises(RuntimeError, match="after backward"):
            opt.step()
        opt.clip_norm = None
        with pytest.raises(RuntimeError, match="load a checkpoint"):
            opt.step()
        with pytest.raises(RuntimeError, match="load a checkpoint"):
            opt.save(f"{folder}/never")
        opt.load(f"{folder}/saved")
        stepped(opt, net, range(3, 5))
        assert digest(opt.full_state_dict()) == wanted, name
    opt.close()


@pytest.mark.parametrize("world_size", [slow(1), 2])
def test_what_comes_between_backward_and_step(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    run_ranks(meanwhile, world_size, list(MEANWHILE), str(tmp_path))


def twice_later(folder: str) -> None:
    """Run, after the watched steps, programs that updates in backward cannot follow: they raise before any change."""
    share_small_buckets()
    zcomm.init(timeout=30)
    net, opt = build(BACKWARD, Net, folder)
    stepped(opt, net, range(3))
    one, other = loss_of(net, 3), loss_of(net, 4)
    one.backward()
    with pytest.raises(RuntimeError, match=r"call step\(\) first"):
        other.backward()
    opt.step()
    with pytest.raises(RuntimeError, match="used the gradients up"):
        opt.step()
    with pytest.raises(RuntimeError, match="used the gradients up"):
        loss_of(net, 5).backward()
    opt.zero_grad()
    stepped(opt, net, range(5, 6))
    opt.close()


def refused(folder: str) -> None:
    """In the steps that are watched the same raises before anything has changed."""
    share_small_buckets()
    zcomm.init(timeout=30)
    for act, kind, text in (
        (twice, Net, "several backward passes|accumulated"),
        (locally, Net, "no_sync"),
        (edits, Net, "p.grad"),
        (
            plainly,
            Shared,
            r"(reached|uses unit) blocks\.1.* (twice|again).*: nothing has been changed; give update='forward'",
        ),
    ):
        net, opt = build(BACKWARD, kind, folder)
        opt.found = []
        before = digest(opt.full_state_dict())
        with pytest.raises(RuntimeError, match=text):
            act(opt, net, 0)
            opt.step()
        opt.zero_grad()
        assert digest(opt.full_state_dict()) == before
        opt.close()


@pytest.mark.parametrize("job", [twice_later, refused])
@pytest.mark.parametrize("world_size", [slow(1), 2])
def test_what_updates_in_backward_cannot_follow(
    run_ranks: Run, tmp_path: Path, world_size: int, job: Callable[[str], None]
) -> None:
    run_ranks(job, world_size, str(tmp_path))


def test_options_are_checked(tmp_path: Path) -> None:
    offload = zcomm.Offload("nvme", "nvme", gradients="nvme", update="backward")
    for offload_, options, text in (
        (offload, {"clip_norm": 1.0}, "clip_norm=1.0"),
        (offload, {"grad_accum": 2}, "grad_accum=2"),
        (offload, {"precision": "fp16"}, "fp16"),
        (offload, {"precision": "bf16", "skip_nonfinite": True}, "skip_nonfinite"),
        (replace(offload, gradients=None), {}, "gradients='nvme'"),
        (replace(offload, params=None), {"share_parameters": True, "stage": 2}, "by units"),
    ):
        with pytest.raises(ValueError, match=text):
            zcomm.ZeroOptimizer(nn.Linear(4, 4), nvme_path=tmp_path, offload=offload_, **{"stage": 3, **options})
    zcomm.shutdown()


# --- errors -----------------------------------------------------------------------------------------------------------


class FaultySwap(Swap):
    """A read or write of optimizer state fails, once, after ``good`` others. The operation is "read", "write" or ""."""

    what = ""
    good = 0

    def _fails(self, key: str, what: str) -> bool:
        if not key.startswith("state.") or what != FaultySwap.what:
            return False
        FaultySwap.good -= 1
        if FaultySwap.good >= 0:
            return False
        FaultySwap.what = ""
        return True

    def read(self, key: str, ptr: int, nbytes: int) -> Any:
        return FailedWork() if self._fails(key, "read") else super().read(key, ptr, nbytes)


def fails(folder: str, failing: int) -> None:
    """Poison by an I/O error, an exception and an interrupt during updates. A load clears it; the bits are right."""
    share_small_buckets()
    comm = zcomm.init(timeout=30)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zcomm.zero.assemble, "Swap", FaultySwap)
        patch.setattr("zcomm.zero.optim_state.nvme.WINDOWS", 2)
        net, opt = build(BACKWARD, Net, folder)
        stepped(opt, net, range(4))
        opt.save(f"{folder}/saved")
        stepped(opt, net, range(4, 6))
        wanted = digest(opt.full_state_dict())
        for kind in (OSError, ValueError, KeyboardInterrupt):
            opt.load(f"{folder}/saved")
            if kind is OSError:
                if comm.rank == failing:
                    FaultySwap.what, FaultySwap.good = "read", 3
                loss_of(net, 4).backward()
                with pytest.raises(OSError) as told:
                    opt.step()
                assert told.value.errno == errno.EIO and not FaultySwap.what
            else:

                def fail(grad: torch.Tensor, kind: type[BaseException] = kind) -> None:
                    raise kind("in backward")

                handle = net.blocks[0].weight.register_hook(fail)
                with pytest.raises(kind, match="in backward"):
                    loss_of(net, 4).backward()
                handle.remove()
                comm.barrier()
            for act in (opt.step, opt.zero_grad, lambda: opt.save(f"{folder}/never"), opt.state_dict):
                with pytest.raises(RuntimeError, match="load a checkpoint"):
                    act()
            with pytest.raises(RuntimeError):
                loss_of(net, 4)
            opt.load(f"{folder}/saved")
            stepped(opt, net, range(4, 6))
            assert digest(opt.full_state_dict()) == wanted, kind
        opt.close()


@pytest.mark.parametrize("world_size", [slow(1), 2])
def test_errors_amid_updates_poison(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    run_ranks(fails, world_size, str(tmp_path), world_size - 1)


def test_backward_goes_on_beside_updates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zcomm.zero.gradients.sum_ring.RING", 100)  # it bounds the updates that wait
    net, opt = build(BACKWARD, Net, str(tmp_path))
    stepped(opt, net, range(2))
    go, waited = threading.Event(), []
    update = InBackward._update_now

    def late(self: InBackward, *arguments: Any) -> None:
        waited.append(go.wait(20))
        update(self, *arguments)

    monkeypatch.setattr(InBackward, "_update_now", late)
    loss_of(net, 2).backward()
    go.set()
    opt.step()
    assert len(waited) == len(opt._parts.geometry.buckets) and all(waited), "backward waited for an update"
    opt.close()
    zcomm.shutdown()


def test_shards_are_used_once_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of updates in step(), with reads and writes that happen when they are waited for."""
    bits = []
    for case, swap in ((BASE, Swap), (BACKWARD, LateSwap)):
        monkeypatch.setattr(zcomm.zero.assemble, "Swap", swap)
        net, opt = build(case, Net, str(tmp_path))
        stepped(opt, net, range(STEPS))
        bits.append(digest(opt.full_state_dict()))
        opt.close()
    assert bits[0] == bits[1]
    zcomm.shutdown()


@pytest.mark.parametrize("changed", [False, True])
def test_a_shard_that_is_expected(tmp_path: Path, changed: bool) -> None:
    """A write between ``expect`` and ``load`` counts, as do other uses of the window."""
    _, opt = build(BASE, Net, str(tmp_path))
    source, buckets = opt._parts.store.source, opt._parts.geometry.buckets
    wanted = source.load(buckets[1]).clone()
    for other in (2, 4):  # 4 has the window of 1
        source.expect(buckets[1], buckets[other])
        if changed:
            wanted = wanted + 1.0
            source.keep(buckets[1], wanted)
        source.load(buckets[other])
        assert torch.equal(source.load(buckets[1]), wanted)
    opt.close()
    zcomm.shutdown()
