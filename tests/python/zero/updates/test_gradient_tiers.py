"""Sums of gradients on a drive: the bits that they have in RAM, whatever a program does with its gradients. Errors."""

from __future__ import annotations

import ctypes
import errno
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
import zcomm.zero.assemble
import zcomm.zero.layout.tiles
import zcomm.zero.optim_state.nvme
from late_swap import Interrupted, LateSwap
from tiers import long, slow
from update_grid import SUMS, Fault, FaultySwap
from zcomm.zero import full_grad, full_param
from zcomm.zero.gradients.sum_ring import SumRing
from zero_jobs import Case, digest, share_small_buckets

Run = Callable[..., list[Any]]
WIDTH = 24
BASE = Case(3, "nvme", 0.004)
TIERS = [
    replace(BASE, gradients="nvme"),
    replace(BASE, gradients="nvme", update="forward"),
    replace(BASE, update="forward"),
]


class Net(nn.Module):
    """Blocks with a tied weight, a frozen one, one that is never used, and a sum that autograd expands."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        x = self.frozen(x) * self.scale
        return self.head(x) + self.blocks[0].bias.sum() * 0.1  # its gradient is expanded, and not plain


def loss_of(net: nn.Module, number: int) -> torch.Tensor:
    tokens = torch.randint(0, 16, (2, 8), generator=torch.Generator().manual_seed(10 * number + zcomm.rank()))
    return nn.functional.cross_entropy(net(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def plainly(opt: Any, net: nn.Module, number: int) -> None:
    opt.backward(loss_of(net, number))


def edits(opt: Any, net: nn.Module, number: int) -> None:
    """Gradients are scaled, measured, dropped, replaced and read."""
    opt.backward(loss_of(net, number))
    params = dict(net.named_parameters())
    params["blocks.1.weight"].grad.mul_(0.5)  # type: ignore[union-attr]
    params["blocks.2.weight"].grad.add_(0.01)  # type: ignore[union-attr]
    params["blocks.3.bias"].grad = None
    params["blocks.4.bias"].grad = torch.full((WIDTH,), 0.1 * (zcomm.rank() + 1))
    norm = nn.utils.clip_grad_norm_([p for p in net.parameters() if p.requires_grad], 0.05)
    whole = full_grad(params["blocks.5.weight"])
    assert whole is not None and float(norm) > 0
    opt.found.append(digest({"norm": norm.reshape(1), "whole": whole}))


def twice(opt: Any, net: nn.Module, number: int) -> None:
    opt.backward(loss_of(net, number))
    opt.backward(0.5 * loss_of(net, number + 100))


def locally(opt: Any, net: nn.Module, number: int) -> None:
    with opt.no_sync():
        opt.backward(loss_of(net, number))
        opt.backward(loss_of(net, number + 100))
    opt.backward(loss_of(net, number + 200))


def broken(opt: Any, net: nn.Module, number: int) -> None:
    """End a pass with an exception, and run it again."""

    def fail(grad: torch.Tensor) -> None:
        raise ValueError("in backward")

    handle = net.blocks[2].weight.register_hook(fail)
    with pytest.raises(ValueError, match="in backward"):
        opt.backward(loss_of(net, number))
    handle.remove()
    zcomm.barrier()
    opt.zero_grad()
    opt.backward(loss_of(net, number))


def nothing(opt: Any, net: nn.Module, number: int) -> None:
    """Every other step has no gradients."""
    if number % 2:
        opt.backward(loss_of(net, number))


def overflows(opt: Any, net: nn.Module, number: int) -> None:
    loss = loss_of(net, number)
    opt.backward(loss * float("inf") if number == 1 else loss)


def keeps(opt: Any, net: nn.Module, number: int) -> None:
    """zero_grad() makes zeros of them, and a step without another pass goes on by momentum."""
    opt.backward(loss_of(net, number))
    opt.step()
    opt.zero_grad(set_to_none=False)


Act = Callable[[Any, nn.Module, int], None]
SCENES: dict[str, tuple[Act, dict[str, Any]]] = {
    "plain": (plainly, {}),
    "clipped": (plainly, {"clip_norm": 0.1}),
    "edits": (edits, {}),
    "edits, clipped": (edits, {"clip_norm": 0.1}),
    "twice": (twice, {"clip_norm": 0.1}),
    "locally": (locally, {"clip_norm": 0.1}),
    "broken": (broken, {}),
    "nothing": (nothing, {"clip_norm": 0.1}),
    "keeps": (keeps, {"clip_norm": 0.1}),
    "overflow": (overflows, {"precision": "fp16", "loss_scale": zcomm.zero.LossScale(initial_power=8)}),
    "skips": (overflows, {"precision": "bf16", "skip_nonfinite": True, "clip_norm": 1.0}),
    "lamb": (plainly, {"optimizer": "lamb"}),
    "muon": (plainly, {"optimizer": "muon"}),
    "sgd": (plainly, {"optimizer": "sgd"}),
    "fp16 in fp32": (
        twice,
        {
            "precision": "fp16",
            "communication_dtype": "fp32",
            "loss_scale": zcomm.zero.LossScale(initial_power=8),
        },
    ),
    "bf16, travels": (edits, {"communication_dtype": "bf16"}),
}


def groups(net: nn.Module, optimizer: str) -> Any:
    if optimizer != "muon":
        return net
    trained = [p for p in net.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim == 2]},
        {"params": [p for p in trained if p.ndim != 2], "use_muon": False},
    ]


def train(case: Case, scene: str, folder: str, backend: str | None) -> dict[str, Any]:
    zcomm.init(backend, timeout=30) if backend else zcomm.init(timeout=30)
    torch.manual_seed(3)
    act, options = SCENES[scene]
    net, options = Net(), dict(options)
    kind = options.pop("optimizer", "adamw")
    arguments = {**case.arguments(), "lr": 1e-2, **options}
    if kind in ("lamb", "muon") and case.update == "forward":
        return train(replace(case, update="step"), scene, folder, backend)
    stage = 1 if kind == "muon" else case.stage  # param groups
    if kind == "muon":
        offload = arguments["offload"]
        tier = None if isinstance(offload, str) else offload.gradients
        arguments |= {"stage": stage, "offload": zcomm.Offload("nvme", gradients=tier)}
    opt: Any = zcomm.ZeroOptimizer(groups(net, kind), kind, nvme_path=folder, **arguments)
    opt.found = []
    norms = []
    for number in range(4):
        act(opt, net, number)
        opt.step()
        norms.append(None if opt.grad_norm is None else float(opt.grad_norm).hex())
        opt.zero_grad()
    arrays = {f"{n}.{k}": v.reshape(-1) for n, e in opt.state_dict()["state"].items() for k, v in e.items()}
    weights = dict(opt.full_state_dict()) if kind != "muon" else {n: p.detach() for n, p in net.named_parameters()}
    result = {"norms": norms, "bits": digest({**weights, **arrays}), "found": opt.found}
    result |= {"skipped": opt.skipped_steps, "nonfinite": opt.nonfinite}
    opt.close()
    return result


def train_all(scenes: list[str], folder: str, backend: str | None = None) -> dict[str, list[Any]]:
    share_small_buckets()
    return {scene: [train(case, scene, folder, backend) for case in (BASE, *TIERS)] for scene in scenes}


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "backend"), [long(1, None), (2, None), long(2, "tcp")])
def test_the_bits_of_sums_in_ram(run_ranks: Run, tmp_path: Path, world_size: int, backend: str | None) -> None:
    for found in run_ranks(train_all, world_size, list(SCENES), str(tmp_path), backend):
        for scene, (wanted, *results) in found.items():
            for case, result in zip(TIERS, results, strict=True):
                assert result == wanted, f"{scene}: {case}"
            assert (wanted["skipped"] > 0) == (scene in ("overflow", "skips")), scene


def test_options_are_checked() -> None:
    net = nn.Linear(4, 4)
    for offload, options, text in (
        ({"gradients": "disk"}, {}, "gradients='disk'"),
        ({"gradients": "nvme"}, {"stage": 0}, "needs nvme_path"),
        ({"gradients": "nvme"}, {"stage": 2}, "needs nvme_path"),
    ):
        with pytest.raises(ValueError, match=text):
            zcomm.ZeroOptimizer(net, offload=zcomm.Offload(**offload), **options)
    zcomm.shutdown()


# --- errors of the drive --------------------------------------------------------------------------------------------


def lost_and_run_again(fault: Fault, folder: str) -> None:
    """Lose a sum. step() raises on all ranks before anything has changed; backward runs again, with the same bits."""
    zcomm.init(timeout=30)
    ends = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zcomm.zero.assemble, "Swap", FaultySwap)
        for fails in (False, True):
            torch.manual_seed(3)
            net = Net()
            opt: Any = zcomm.ZeroOptimizer(net, nvme_path=folder, grad_accum=2, **TIERS[0].arguments())
            for number in range(3):
                for again in (True, False) if fails and number == 1 else (False,):
                    if again and fault.here():
                        FaultySwap.arm(fault)
                    for micro in range(2):
                        loss_of(net, 2 * number + micro).backward()
                        if again and micro == 1:
                            with pytest.raises(OSError, match=r"call zero_grad|rank") as told:
                                opt.step()
                            assert told.value.errno == errno.EIO
                        else:
                            opt.step()
                        opt.zero_grad()
            opt.save(Path(folder) / "saved")
            ends.append((opt.step_count, digest(opt.full_state_dict())))
            opt.close()
    assert ends[0] == ends[1]
    assert FaultySwap.fault is None


@pytest.mark.parametrize("what", ["read", "write", "write, refused"])
@pytest.mark.parametrize("world_size", [slow(1), 2])
def test_a_lost_sum_costs_a_backward_pass(run_ranks: Run, tmp_path: Path, world_size: int, what: str) -> None:
    fault = Fault(what.split(",")[0], SUMS, good=3, refused="refused" in what)
    run_ranks(lost_and_run_again, world_size, fault, str(tmp_path))


# --- memory that is in use, and updates that wait ---------------------------------------------------------------------


@pytest.mark.parametrize("case", [TIERS[0], TIERS[1]], ids=lambda case: case.update)
def test_nothing_is_used_before_it_is_read_or_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: Case
) -> None:
    """The drive reads and writes as late as it may."""
    wanted = train(case, "clipped", str(tmp_path), None), train(case, "twice", str(tmp_path), None)
    monkeypatch.setattr(zcomm.zero.layout.tiles, "TILE_COUNT", 192)
    monkeypatch.setattr(zcomm.zero.optim_state.nvme, "SPAN_TILES", 2)
    monkeypatch.setattr(zcomm.zero.optim_state.nvme, "WINDOWS", 4)
    zcomm.shutdown()
    monkeypatch.setattr(zcomm.zero.assemble, "Swap", LateSwap)
    assert (train(case, "clipped", str(tmp_path), None), train(case, "twice", str(tmp_path), None)) == wanted
    zcomm.shutdown()


def test_the_ring_is_all_that_is_in_memory(tmp_path: Path) -> None:
    kept = []
    for case in (replace(BASE, bucket_mb=0.01), replace(TIERS[0], bucket_mb=0.01)):
        opt = zcomm.ZeroOptimizer(Net(), nvme_path=tmp_path, **case.arguments())
        kept.append(opt.memory())
        opt.close()
    before, after = kept
    count = before["device"]["gradients"] // 4
    assert after["device"]["gradients"] == 0 and after["nvme"]["gradients"] == 4 * count > 0
    largest = max(bucket.shard_count for bucket in opt_buckets(replace(TIERS[0], bucket_mb=0.01), tmp_path))
    pages = -(-4 * largest // 4096) * 4096
    assert after["cpu"]["slots"] == before["cpu"]["slots"] + 3 * pages
    assert after["device"]["slots"] < before["device"]["slots"], "a rank that is alone has no slots of buckets"
    zcomm.shutdown()


def peak(folder: str, gradients: str | None, update: str) -> int:
    """Train blocks of 25 million parameters. Returns: the process's peak, bytes."""
    zcomm.init(timeout=60)
    ctypes.CDLL(None).mallopt(-3, 1 << 18)  # M_MMAP_THRESHOLD: freed memory returns to the system
    with zcomm.zero.Init():
        net = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(96)))
    case = Case(3, "nvme", 1.0, gradients=gradients, update=update)
    opt = zcomm.ZeroOptimizer(net, nvme_path=folder, **case.arguments())
    for _ in range(3):
        net(torch.ones(1, 512)).sum().backward()
        opt.step()
        opt.zero_grad()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    opt.close()  # gives the model its weights
    return 1024 * int(status["VmHWM"].split()[0])


@pytest.mark.parametrize("update", [slow("step"), slow("forward")])
def test_the_process_is_smaller_by_the_sums(run_ranks: Run, tmp_path: Path, update: str) -> None:
    sums = 4 * 96 * 512 * 512
    (before,) = run_ranks(peak, 1, str(tmp_path), None, "step")
    (after,) = run_ranks(peak, 1, str(tmp_path), "nvme", update)
    assert before - after > 0.8 * sums


def opt_buckets(case: Case, folder: Path) -> list[Any]:
    opt = zcomm.ZeroOptimizer(Net(), nvme_path=folder, **case.arguments())
    buckets = list(opt._live.geometry.buckets)
    opt.close()
    return buckets


def steps(opt: Any, net: nn.Module, numbers: range) -> None:
    for number in numbers:
        loss_of(net, number).backward()
        opt.step()
        opt.zero_grad()


def build(case: Case, folder: str, **options: Any) -> tuple[Net, Any]:
    torch.manual_seed(3)
    net = Net()
    arguments = {**case.arguments(), **options}
    return net, zcomm.ZeroOptimizer(net, nvme_path=folder, lr=1e-2, clip_norm=0.1, **arguments)


def whole(opt: Any) -> str:
    return digest(opt.full_state_dict())


def looked_at(case: Case, folder: str) -> list[Any]:
    """Run all calls that are allowed between a step and the next forward, and return the values that they see."""
    zcomm.init(timeout=30)
    net, opt = build(case, folder)
    params, seen = dict(net.named_parameters()), []
    steps(opt, net, range(2))
    seen.append(digest({"one": full_param(params["blocks.2.weight"]), "other": full_param(params["embed.weight"])}))
    steps(opt, net, range(2, 3))
    opt.save(Path(folder) / "one")
    opt.save(Path(folder) / "two", wait=False).wait()
    steps(opt, net, range(3, 4))
    seen.append(digest({n: e.clone() for n, e in net.state_dict().items()}))  # gathers it by units
    steps(opt, net, range(4, 5))
    seen.append(digest({f"{n}.{k}": v.reshape(-1) for n, e in opt.state_dict()["state"].items() for k, v in e.items()}))
    steps(opt, net, range(5, 6))
    with zcomm.zero.GatheredParameters(params["blocks.1.weight"], modifier_rank=0), torch.no_grad():
        params["blocks.1.weight"].mul_(0.5)
    steps(opt, net, range(6, 7))
    params["blocks.3.weight"].data.mul_(0.5)
    steps(opt, net, range(7, 8))
    with torch.no_grad():
        seen.append(loss_of(net, 7).item().hex())
    loss_of(net, 8).backward()
    opt.step()
    opt.step()  # the same gradients once more
    opt.zero_grad()
    loss_of(net, 9).backward()
    opt.step()
    loss_of(net, 10).backward()  # adds to the gradients of before
    opt.step()
    grad = full_grad(params["blocks.4.weight"])
    assert grad is not None
    seen.append(digest({"grad": grad}))
    params["blocks.4.weight"].grad.zero_()  # type: ignore[union-attr]  # of the step that waits
    opt.zero_grad()
    net.blocks[0](torch.ones(1, WIDTH)).sum().backward()  # a forward that uses one unit of all
    opt.step()
    opt.zero_grad()
    seen.append(whole(opt))
    opt.load(Path(folder) / "two")
    seen.append(whole(opt))
    steps(opt, net, range(3, 5))
    opt.load(Path(folder) / "one")
    steps(opt, net, range(3, 5))
    seen.append(whole(opt))
    steps(opt, net, range(5, 6))
    opt.close()
    if zcomm.world_size() == 1:
        seen.append(digest({name: param.detach() for name, param in net.named_parameters()}))
    return seen


def looked_at_twice(folder: str) -> None:
    share_small_buckets()
    wanted = looked_at(BASE, f"{folder}/step")
    for case in TIERS:
        assert looked_at(case, f"{folder}/{case.update}{case.gradients}") == wanted, case


@pytest.mark.parametrize("world_size", [long(1), 2])
def test_what_comes_between_a_step_and_a_forward(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    run_ranks(looked_at_twice, world_size, str(tmp_path))


def test_a_step_moves_no_weight_and_a_skipped_one_nothing(tmp_path: Path) -> None:
    net, opt = build(TIERS[1], str(tmp_path), precision="bf16", skip_nonfinite=True)
    waits = opt._parts.updates
    steps(opt, net, range(2))
    buckets = {bucket.index for bucket in opt._parts.geometry.buckets}
    assert set(waits._left) == buckets
    with torch.no_grad():
        net.blocks[1](torch.ones(1, WIDTH).bfloat16())
    assert 0 < len(waits._left) < len(buckets), "one unit was gathered, with what was gathered ahead"
    loss_of(net, 2).backward()
    assert not waits._left
    opt.zero_grad()
    opt.backward(loss_of(net, 3) * float("inf"))
    moved = opt.stats()["swap_read_nbytes"]
    opt.step()
    assert opt.overflow and not waits._left and opt.stats()["swap_read_nbytes"] - moved < 4 * 65536
    opt.close()
    zcomm.shutdown()


def test_updates_that_cannot_wait_are_refused(tmp_path: Path) -> None:
    nvme, in_ram = (zcomm.Offload("nvme", tier, update="forward") for tier in ("nvme", None))
    limited = nn.Sequential(nn.Embedding(4, 4, max_norm=1.0))
    for model, optimizer, stage, offload, kind, text in (
        (nn.Linear(4, 4), "adamw", 2, in_ram, ValueError, "by units"),
        (nn.Linear(4, 4), "adamw", 3, in_ram, ValueError, "by units"),
        (nn.Linear(4, 4), "lamb", 3, nvme, NotImplementedError, "lamb"),
        (limited, "adamw", 3, nvme, ValueError, "max_norm"),
    ):
        with pytest.raises(kind, match=text):
            zcomm.ZeroOptimizer(model, optimizer, stage=stage, offload=offload, nvme_path=tmp_path)
    with pytest.raises(ValueError, match="update='later'"):
        zcomm.Offload(update="later")  # type: ignore[arg-type]
    zcomm.shutdown()


def test_step_reads_no_sum_of_which_backward_has_taken_the_squares(tmp_path: Path) -> None:
    torch.manual_seed(3)
    net, case = Net(), replace(TIERS[1], update="forward")
    opt = zcomm.ZeroOptimizer(net, nvme_path=tmp_path, lr=1e-2, **case.arguments())
    loss_of(net, 5).backward()
    steps(opt, net, range(2))  # two passes before the first
    read = []
    for number in range(3):
        loss_of(net, number).backward()
        before = opt.stats()["swap_read_nbytes"]
        opt.step()
        read.append(opt.stats()["swap_read_nbytes"] - before)
        opt.zero_grad()
    assert read == [0] * 3
    opt.close()
    zcomm.shutdown()


class Deep(nn.Module):
    """Blocks that are units of one bucket, of which those in ``rests`` are not used."""

    rests: tuple[int, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = x if number in self.rests else torch.tanh(block(x))
        return x


def test_updates_that_wait_have_windows_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Update together the buckets that a forward has not used, although their state maps to the same window."""
    monkeypatch.setattr(zcomm.zero.optim_state.nvme, "WINDOWS", 4)
    bits = []
    for case in (BASE, TIERS[1]):
        torch.manual_seed(3)
        net = Deep()
        opt: Any = zcomm.ZeroOptimizer(net, nvme_path=tmp_path, lr=1e-2, **case.arguments())
        assert len(opt._parts.geometry.buckets) == 10
        for net.rests in ((), (0, 4, 8), (1, 5), (), (2, 3, 6, 7), ()):
            net(torch.ones(2, WIDTH)).square().mean().backward()
            opt.step()
            opt.zero_grad()
        arrays = {f"{n}.{k}": v.reshape(-1) for n, e in opt.state_dict()["state"].items() for k, v in e.items()}
        bits.append(digest({**opt.full_state_dict(), **arrays}))
        opt.close()
    assert bits[0] == bits[1]
    zcomm.shutdown()


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("update", ["step", "forward"])
def test_an_interrupt_as_a_sum_leaves_makes_no_wrong_norm(
    tmp_path: Path, update: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupt a read of a gradient when its sum is complete and is about to be written."""

    def make() -> tuple[nn.Module, Any]:
        torch.manual_seed(3)
        net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
        offload = zcomm.Offload("nvme", "nvme", gradients="nvme", update=update)
        options = {"stage": 3, "offload": offload, "nvme_path": tmp_path, "bucket_mb": 0.02, "clip_norm": 0.05}
        return net, zcomm.ZeroOptimizer(net, lr=1e-2, **options)

    def run(net: nn.Module, opt: Any, begin: int, end: int) -> None:
        for number in range(begin, end):
            net(torch.full((2, 64), 1.0 + number)).square().mean().backward()
            opt.step()
            opt.zero_grad()

    def stop(self: SumRing, bucket: int) -> None:
        raise KeyboardInterrupt

    net, opt = make()
    run(net, opt, 0, 2)
    net(torch.full((2, 64), 3.0)).square().mean().backward()
    (transport,) = opt._parts.reducer.accumulators.kinds
    transport.finish(opt._parts.geometry.buckets[0])
    transport._works[transport.number[0]] = Reduced()  # as if it were still to be waited for
    with monkeypatch.context() as patch:
        patch.setattr(SumRing, "store", stop)
        with pytest.raises(KeyboardInterrupt):
            transport.wait(transport.number[0])  # as a look at a gradient does
    with pytest.raises(OSError, match="gradients of this step are lost"):
        opt.step()
    opt.zero_grad()
    run(net, opt, 2, 4)
    found = digest(opt.full_state_dict())
    opt.close()
    net, opt = make()
    run(net, opt, 0, 4)
    assert digest(opt.full_state_dict()) == found
    opt.close()


class Reduced:
    """A reduction that has ended."""

    def done(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> None:
        pass


@pytest.mark.parametrize("update", ["step", "forward"])
def test_an_interrupt_as_a_write_of_a_sum_begins(tmp_path: Path, update: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is forgotten though the write goes on; the same step then has the bits of an undisturbed run."""
    monkeypatch.setattr(zcomm.zero.assemble, "Swap", Interrupted)
    bits: list[str] = []
    for stops in (False, True):
        torch.manual_seed(3)
        net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
        offload = zcomm.Offload("nvme", "nvme", gradients="nvme", update=update)
        opt = zcomm.ZeroOptimizer(net, stage=3, offload=offload, nvme_path=tmp_path, bucket_mb=0.02)
        for number in range(4):
            Interrupted.at = "gradients." if stops and number == 2 else None
            if Interrupted.at:
                with pytest.raises(KeyboardInterrupt):
                    net(torch.full((2, 64), 9.0)).square().mean().backward()
                opt.zero_grad()
            net(torch.full((2, 64), 1.0 + number)).square().mean().backward()
            opt.step()
            opt.zero_grad()
        assert Interrupted.at is None
        bits.append(digest(opt.full_state_dict()))
        opt.close()
    zcomm.shutdown()
    assert bits[0] == bits[1]


class Residual(nn.Module):
    """Layers with gradients that come in another order than the parameters lie in."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 64)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.head = nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        out: torch.Tensor = self.head(x)
        return out


def edits_beside_a_late_rank(folder: str) -> list[str]:
    """Touch gradients while those of other buckets are still reduced: one rank is late at the end of backward."""
    comm, bits = zcomm.init(timeout=30), []
    for gradients in (None, "nvme"):
        torch.manual_seed(1)
        net = Residual()
        if comm.rank == 1:
            net.stem.weight.register_hook(lambda grad: time.sleep(0.1))
        offload = zcomm.Offload("nvme", "nvme", gradients=gradients, update="step")
        options = {"stage": 3, "offload": offload, "bucket_mb": 0.001, "nvme_path": folder}
        opt = zcomm.ZeroOptimizer(net, "sgd", lr=0.1, momentum=0.9, **options)
        for number in range(5):
            net.zero_grad()
            net(torch.full((4, 16), 1.0 + number + comm.rank)).square().mean().backward()
            if number > 2:
                for param in net.blocks.parameters():
                    param.grad.mul_(0.5)  # type: ignore[union-attr]
            opt.step()
        bits.append(digest(opt.full_state_dict()))
        opt.close()
    return bits


def test_gradients_are_touched_while_others_are_reduced(run_ranks: Run, tmp_path: Path) -> None:
    for wanted, found in run_ranks(edits_beside_a_late_rank, 2, str(tmp_path)):
        assert found == wanted
