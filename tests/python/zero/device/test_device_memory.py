"""``memory=`` for a model on a (simulated) device: a limit on host memory, with all that crosses to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from simulated import on_device
from test_memory_limit import MIB, model, settings, train
from tiers import slow
from zcomm.zero import MemoryLimit, Offload, Units
from zcomm.zero.memory.limit import Guard
from zcomm.zero.memory.plan import Settings, plan_memory

Run = Callable[..., list[Any]]
ALL = Offload("nvme", "nvme")
LAYOUTS: list[dict[str, Any]] = [
    {"offload": ALL},
    {"offload": replace(ALL, gradients="nvme")},
    {"offload": ALL, "units": Units(max_bytes=MIB)},
    {"offload": replace(ALL, gradients="nvme", update="backward", atomic=True), "prefetch": 3},
    {"offload": replace(ALL, fraction=0.5), "units": Units(prefetch_bytes=2097152)},
    {"offload": Offload("cpu", "cpu")},
    {"offload": Offload("cpu", "cpu", update="forward"), "prefetch": 0},
    {"offload": Offload("nvme", "cpu")},
    {"offload": Offload("cpu"), "stage": 2},
    {"offload": Offload("nvme"), "stage": 1},
    {"offload": Offload("nvme", gradients="nvme"), "stage": 2},
    {"offload": Offload("cpu"), "stage": 0},
]
USED_UP: list[dict[str, Any]] = [  # in backward, by one rank
    {"offload": Offload("cpu", update="backward"), "stage": 2},
    {"offload": Offload("nvme", update="backward"), "stage": 0},
]


def wide() -> nn.Module:
    return nn.Sequential(nn.Embedding(5000, 64), nn.Linear(64, 64), nn.Linear(64, 5000, bias=False))


def as_laid_out(folder: str, share: bool) -> None:
    comm = zcomm.init(timeout=60)
    by_rows = {"offload": ALL, "units": Units(max_bytes=300_000, rows=True)}
    several = {"offload": Offload("cpu"), "stage": 2, "single_pass": False, "last_pass": True}
    used_up = USED_UP if comm.world_size == 1 else []
    for layout in (*LAYOUTS, by_rows, {**by_rows, "offload": Offload("cpu", "cpu")}, several, *used_up):
        net = wide() if "units" in layout and layout["units"].rows else model()
        here = {"world_size": comm.world_size, "shared": share, "on_device": True, "single_pass": True}
        wanted = replace(settings(), **{**here, **layout})
        planned = plan_memory(net, wanted).memory
        opt = zcomm.ZeroOptimizer(
            net, "adamw", stage=wanted.stage, offload=wanted.offload, nvme_path=folder, share_parameters=share,
            bucket_mb=wanted.bucket_mb, prefetch=wanted.prefetch, units=wanted.units,
            grad_accum=2 if wanted.last_pass else 1,
        )  # fmt: skip
        assert opt.memory() == planned, f"{layout}:\n{opt.memory()}\n{planned}"
        opt.close()


@pytest.mark.parametrize(("world_size", "share"), [(1, True), slow(2, True), slow(2, False)])
def test_what_is_laid_out_is_what_there_is(run_ranks: Run, tmp_path: Path, world_size: int, share: bool) -> None:
    run_ranks(on_device, world_size, 3, as_laid_out, str(tmp_path), share)


def limited(folder: str) -> None:
    """Train without a limit, with the least that works, and with one that keeps some weights in host memory."""
    free = train(folder, None)
    with pytest.raises(ValueError, match="units in use, buckets and windows") as told:
        train(folder, "1MiB")
    least = int(str(told.value).split("memory='")[2].split("MiB")[0]) + 20  # the process grows from run to run
    assert train(folder, f"{least}MiB") == train(folder, MemoryLimit(f"{least + 100}MiB", "16MiB")) == free


@pytest.mark.parametrize("world_size", [1, 2])
def test_no_bit_depends_on_the_limit(run_ranks: Run, world_size: int, tmp_path: Path) -> None:
    run_ranks(on_device, world_size, 3, limited, str(tmp_path))


def chosen_settings(folder: str) -> None:
    opt = zcomm.ZeroOptimizer(
        model(), "adamw", stage=3, offload="nvme", nvme_path=folder, memory=MemoryLimit("100GiB", 0)
    )
    assert opt.memory()["nvme"] == dict.fromkeys(opt.memory()["nvme"], 0), "all of it fits into host memory"
    assert opt.memory()["cpu"]["parameters"] > 0 == opt.memory()["device"]["parameters"]
    opt.close()
    for offload in (None, Offload("cpu", "cpu", fraction=0.5), Offload("nvme"), lambda name, param: "device"):
        where: Any = Offload(offload, "nvme") if callable(offload) else offload
        with pytest.raises(ValueError, match=r"limit on host memory.*needs all optimizer state offloaded"):
            zcomm.ZeroOptimizer(model(), "adamw", stage=3, offload=where, nvme_path=folder, memory="100GiB")


def test_what_is_left_is_spent_and_what_stays_on_the_device_is_refused(tmp_path: Path) -> None:
    zcomm.init()
    on_device(3, chosen_settings, str(tmp_path))


def test_the_guard_counts_no_memory_of_a_device(caplog: pytest.LogCaptureFixture) -> None:
    memory = plan_memory(model(), settings()).memory
    memory["device"]["parameters"], memory["cpu"]["gradients"] = 7 << 30, 5 * MIB
    Guard(MemoryLimit(1), 0, on_device=True).look(lambda: memory)
    assert "5.0 MiB gradients of the optimizer" in caplog.text and "GiB parameters" not in caplog.text


def test_gradients_in_autograd_are_not_in_host_memory() -> None:
    with torch.device("meta"):
        net = model()
    wanted: Settings = settings()
    held = [
        zcomm.zero.memory.limit.holders(plan_memory(net, each), each, 0)
        for each in (wanted, replace(wanted, on_device=True))
    ]
    assert "gradients that autograd holds" in held[0] and "gradients that autograd holds" not in held[1]
