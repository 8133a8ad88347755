"""ZeroOptimizer against torch, its memory against ZeRO's formula, and its errors."""

from __future__ import annotations

import errno
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import zcomm
from tiers import long, slow
from zero_jobs import Case, batch, compare_with_torch, loss_of, small_gpt

Run = Callable[..., list[Any]]


@pytest.mark.parametrize("world_size", [2, 3])
def test_equals_ddp_and_float64(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    for distances in run_ranks(compare_with_torch, world_size, str(tmp_path), Case(3, "nvme", 0.02)):
        assert distances["ddp"] < 1e-5
        assert distances["float64"] < 1e-4


# --- memory ---------------------------------------------------------------------------------------------------


def measure_memory(folder: str) -> list[tuple[Any, dict[str, Any]]]:
    """Return for each case: opt.memory(), the formula, padding, and the allocation count after each step."""
    comm = zcomm.init(timeout=60)
    torch.set_num_threads(1)
    measured = []
    for stage, offload, precision in product((0, 1, 2, 3), (None, "cpu", "nvme"), ("fp32", "bf16")):
        model = small_gpt()
        numel = sum(p.numel() for p in model.parameters())
        opt = zcomm.ZeroOptimizer(
            model, stage=stage, offload=offload, precision=precision, nvme_path=folder, bucket_mb=0.05
        )
        counts = []
        for number in range(5):
            loss_of(model, *batch(comm.rank, number)).backward()
            opt.step()
            opt.zero_grad()
            counts.append(opt.allocation_count())
        formula = zcomm.zero.memory_formula(numel, comm.world_size, stage, precision, offload)
        padding = opt._live.geometry.count - numel
        measured.append(((stage, offload, precision), opt.memory(), formula, padding, counts))
        opt.close()
    return measured


def measure_fractions(folder: str) -> list[tuple[Any, ...]]:
    comm = zcomm.init(timeout=60)
    measured = []
    for tier, fraction in product(("cpu", "nvme"), (0.0, 0.4, 1.0)):
        model, offload = small_gpt(), zcomm.Offload(optimizer=tier, fraction=fraction)
        opt = zcomm.ZeroOptimizer(model, stage=2, offload=offload, nvme_path=folder, bucket_mb=0.05)
        formula = zcomm.zero.memory_formula(opt._live.geometry.count, comm.world_size, 2, "fp32", offload)
        measured.append(
            (tier, fraction, opt.memory(), formula, max(c for _, _, c in spans(opt)) if tier == "nvme" else 1)
        )
        opt.close()
    return measured


def spans(opt: zcomm.ZeroOptimizer) -> list[tuple[int, int, int]]:
    return opt._live.state.kinds[0]._spans


def test_a_fraction_of_the_state_is_offloaded(run_ranks: Run, tmp_path: Path) -> None:
    for results in run_ranks(measure_fractions, 2, str(tmp_path)):
        for tier, fraction, memory, formula, span in results:
            for where in ("device", "cpu", "nvme"):  # within a span
                have, want = memory[where]["optimizer"], formula[where]["optimizer"]
                assert abs(have - want) <= 8 * span, f"{tier} {fraction}: {where}: {have}, not {want}"


@pytest.mark.parametrize("world_size", [2, long(3)])
def test_memory_is_the_formula(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    for measured in run_ranks(measure_memory, world_size, str(tmp_path)):
        for case, memory, formula, padding, counts in measured:
            for tier, purpose in product(("device", "cpu", "nvme"), ("parameters", "gradients", "optimizer")):
                have, want = memory[tier][purpose], formula[tier][purpose]
                assert want <= have + 16, f"{case}: {tier} {purpose}"
                assert have <= want + 10 * padding, f"{case}: {tier} {purpose}: {have} > {want} + padding"
            assert len(set(counts[1:])) == 1, f"{case}: the core allocated after step 2: {counts}"


def resident_memory(folder: str, stage: int, width: int) -> tuple[int, int]:
    """Return (growth of this process's PSS, opt.memory() in RAM) in bytes; small activations, large state."""
    import ctypes
    import gc

    comm = zcomm.init(timeout=60)
    torch.set_num_threads(1)

    def pss() -> int:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # memory that malloc keeps free is not ours
        with open("/proc/self/smaps_rollup") as rollup:
            return next(int(line.split()[1]) * 1024 for line in rollup if line.startswith("Pss:"))

    zcomm.ZeroOptimizer(torch.nn.Linear(8, 8), stage=stage).close()  # so that torch's imports on first use are complete
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(8)))
    x = torch.randn(1, width)
    model(x).sum().backward()  # so that torch's own buffers exist before the measurement
    model.zero_grad()
    comm.barrier()
    weights = sum(p.nbytes for p in model.parameters())
    before = pss() - weights
    opt = zcomm.ZeroOptimizer(model, stage=stage, bucket_mb=4)
    for _ in range(2):
        model(x).sum().backward()
        opt.step()
        opt.zero_grad()
    comm.barrier()
    after = pss()
    comm.barrier()
    memory = opt.memory()
    opt.close()
    return after - before, sum(memory["device"].values()) + sum(memory["cpu"].values())


@pytest.mark.parametrize("stage", [slow(0), slow(2), 3])
def test_memory_agrees_with_the_kernel(run_ranks: Run, tmp_path: Path, stage: int) -> None:
    width = 1024  # 32 MiB of parameters
    results = run_ranks(resident_memory, 2, str(tmp_path), stage, width)
    grown, counted = (sum(values) for values in zip(*results, strict=True))
    assert abs(grown - counted) < 0.12 * counted, f"PSS grew by {grown / 2**20:.1f} MiB, counted {counted / 2**20:.1f}"


# --- errors ---------------------------------------------------------------------------------------------------


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"stage": 4}, "stage=4"),
        ({"offload": "disk"}, "offload='disk'"),
        ({"offload": "nvme"}, "nvme_path"),
        ({"precision": "fp8"}, "precision='fp8'"),
        ({"clip_norm": -1.0}, "clip_norm=-1.0"),
        ({"grad_accum": 0}, "grad_accum=0"),
        ({"bucket_mb": 0}, "bucket_mb=0"),
        ({"lr": -1.0}, "lr=-1.0"),
        ({"momentum": 0.9}, "has no argument 'momentum'"),
        ({"optimizer": "adan"}, "adan"),
        ({"betas": (0.9, 1.5)}, "betas=(0.9, 1.5)"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], part: str) -> None:
    with pytest.raises(ValueError, match=part.replace("(", r"\(").replace(")", r"\)")):
        zcomm.ZeroOptimizer(model(), **arguments)


def test_stage_3_needs_the_model() -> None:
    with pytest.raises(ValueError, match="stage=3 needs the model"):
        zcomm.ZeroOptimizer(list(model().parameters()), stage=3)


def test_unwritable_swap_directory() -> None:
    with pytest.raises(OSError, match="/proc/nowhere") as caught:
        zcomm.ZeroOptimizer(model(), stage=3, offload="nvme", nvme_path="/proc/nowhere")
    assert caught.value.errno in (errno.EACCES, errno.ENOENT, errno.EPERM, errno.EROFS)
    zcomm.shutdown()


def full_disk(folder: str) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * 2**20, 4 * 2**20))
    zcomm.init(timeout=30)
    zcomm.ZeroOptimizer(torch.nn.Linear(1024, 1024), stage=3, offload="nvme", nvme_path=folder)  # 6 MiB of state a rank


def test_full_disk_is_said_at_the_start(run_ranks: Run, tmp_path: Path) -> None:
    for result in run_ranks(full_disk, 2, str(tmp_path), check=False):
        assert result.error is not None and "OSError" in result.error.kinds
        assert result.error.errno == errno.ENOSPC, result.describe()
        assert str(tmp_path) in result.error.message and "bytes" in result.error.message


# --- behaviour ------------------------------------------------------------------------------------------------


def test_unused_parameters_count_as_zero() -> None:
    net = torch.nn.ModuleDict({"used": torch.nn.Linear(4, 4), "unused": torch.nn.Linear(4, 4)})
    before = net["unused"].weight.detach().clone()
    opt = zcomm.ZeroOptimizer(net, stage=2, lr=0.1, weight_decay=0.0)
    net["used"](torch.ones(1, 4)).sum().backward()
    opt.step()
    assert torch.equal(net["unused"].weight, before)
    assert not torch.equal(net["used"].weight, before)
    opt.close()
    zcomm.shutdown()


def test_weights_stay_after_close() -> None:
    net = model()
    opt = zcomm.ZeroOptimizer(net, stage=1)
    net(torch.ones(1, 8)).sum().backward()
    opt.step()
    weights = opt.full_state_dict()
    opt.close()
    opt.close()
    zcomm.shutdown()
    for name, value in net.named_parameters():
        assert torch.equal(value, weights[name])
    with pytest.raises(RuntimeError, match="closed"):
        opt.step()


def train_by(net: torch.nn.Module, opt: Any, scheduler: Any) -> list[list[float]]:
    """Return the rates of three steps."""
    rates = []
    for _ in range(3):
        net(torch.ones(1, 8)).sum().backward()
        rates.append([group["lr"] for group in opt.param_groups])
        opt.step()
        opt.zero_grad()
        scheduler.step()
    return rates


def clip_nothing_finite(folder: str, bad: float) -> list[dict[str, torch.Tensor]]:
    comm = zcomm.init(timeout=60)
    ends = []
    for stage, share in ((0, True), (1, True), (2, True), (3, True), (3, False)):
        torch.manual_seed(0)
        net = model()
        name = "adamw" if stage == 2 else "sgd"
        opt = zcomm.ZeroOptimizer(net, name, stage=stage, lr=0.5, clip_norm=1.0, share_parameters=share)
        loss = net(torch.ones(1, 8)).sum()
        if comm.rank == 1:
            loss = loss + net[0].bias[1] * bad
        loss.backward()
        opt.step()
        ends.append(opt.full_state_dict())
        opt.close()
    return ends


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_clipping_by_a_norm_that_is_not_finite_makes_all_of_it_nan(run_ranks: Run, tmp_path: Path, bad: float) -> None:
    """The factor is NaN, as in torch's clip_grad_norm_; an unclipped step would be noticed much later."""
    for ends in run_ranks(clip_nothing_finite, 2, str(tmp_path), bad):
        assert [all(value.isnan().all() for value in weights.values()) for weights in ends] == [True] * 5


def test_lr_scheduler_and_groups() -> None:
    net, other, rates = model(), model(), [lambda step: 0.5**step, lambda step: 0.5**step]
    other.load_state_dict(net.state_dict())

    def groups(of: torch.nn.Module) -> list[dict[str, Any]]:
        weights, biases = ([p for p in of.parameters() if (p.ndim < 2) is small] for small in (False, True))
        return [{"params": weights, "lr": 0.5}, {"params": biases, "lr": 0.05, "weight_decay": 0.3}]

    opt, plain = zcomm.ZeroOptimizer(net, torch.optim.AdamW(groups(net)), stage=1), torch.optim.AdamW(groups(other))
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, rates)
    steps = [train_by(net, opt, scheduler), train_by(other, plain, torch.optim.lr_scheduler.LambdaLR(plain, rates))]
    assert steps[0] == steps[1] == [[0.5, 0.05], [0.25, 0.025], [0.125, 0.0125]]
    for ours, theirs in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    opt.close()
    zcomm.shutdown()


@pytest.mark.parametrize("fraction", [-0.1, 1.5, float("nan")])
def test_fractions_outside_of_0_to_1_are_named(fraction: float) -> None:
    with pytest.raises(ValueError, match=f"fraction={fraction}"):
        zcomm.Offload("nvme", fraction=fraction)
