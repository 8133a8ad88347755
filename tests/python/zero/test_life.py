"""Memory over a life: the kernel's count is the formula plus slots, steps add nothing, the end frees all of it."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from tiers import long
from zero_jobs import Case

Run = Callable[..., list[Any]]
MIB = 2**20


def settle() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory that malloc keeps free is not ours


def pss() -> int:
    """Return this process's memory, with its part of shared memory. Page cache is left out, because code that runs for
    the first time (1 MiB of torch and the core) is not data."""
    settle()
    with open("/proc/self/smaps_rollup") as rollup:
        return sum(int(line.split()[1]) * 1024 for line in rollup if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


def resident() -> int:
    settle()
    with open("/proc/self/status") as status:
        return sum(int(line.split()[1]) * 1024 for line in status if line.startswith(("RssAnon:", "RssShmem:")))


def held() -> tuple[int, int, int]:
    """Count descriptors, memfd mappings, threads."""
    with open("/proc/self/maps") as maps:
        mapped = sum("memfd:" in line for line in maps)
    return len(os.listdir("/proc/self/fd")), mapped, threading.active_count()


def grow(folder: str, case: Case, width: int) -> tuple[int, int, int, int]:
    """Return the growth of PSS by an optimizer, the formula plus slots in RAM, growth by 36 more steps and the last."""
    comm = zcomm.init(timeout=60)
    small = nn.Linear(8, 8)  # so that objects made on first use (imports, arenas of threads) exist
    zcomm.ZeroOptimizer(small, nvme_path=folder, **case.arguments()).close()
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(8))).to(
        torch.bfloat16 if case.precision == "bf16" else torch.float32
    )
    x = torch.randn(1, width, dtype=model[0].weight.dtype)
    model(x).sum().backward()  # so that torch's own buffers exist before the measurement
    model.zero_grad()
    comm.barrier()
    before = pss() - sum(p.nbytes for p in model.parameters())
    opt = zcomm.ZeroOptimizer(model, nvme_path=folder, **case.arguments())

    def step() -> None:
        model(x).sum().backward()
        opt.step()
        opt.zero_grad()

    step()
    step()
    comm.barrier()
    after = pss()
    comm.barrier()
    sizes = []
    for _ in range(3):
        for _ in range(12):
            step()
        comm.barrier()
        sizes.append(pss())
        comm.barrier()
    formula = zcomm.zero.memory_formula(8 * width * width, comm.world_size, case.stage, case.precision, case.offload)
    memory = opt.memory()
    wanted = sum(formula["device"].values()) + sum(formula["cpu"].values())
    wanted += memory["device"]["slots"] + memory["cpu"]["slots"]
    parts: Any = opt._live
    comms = [parts.comm, *([parts.store.gather.comm] if hasattr(parts.store, "gather") else [])]
    wanted += sum(each.memory()["slot_nbytes"] for each in comms)  # staging of private tensors
    opt.close()
    return after - before, wanted, max(sizes) - after, min(sizes[1:]) - sizes[0]


CASES = [Case(0), Case(1, "nvme"), Case(2, precision="bf16"), Case(3, "cpu"), Case(3, None, share_parameters=False)]
QUICK = [CASES[1], CASES[3]]  # test_memory_agrees_with_the_kernel runs the others


@pytest.mark.parametrize("case", [case if case in QUICK else long(case) for case in CASES], ids=str)
def test_the_kernel_counts_the_formula_and_slots(run_ranks: Run, tmp_path: Path, case: Case) -> None:
    case = Case(**{**vars(case), "bucket_mb": 4.0})
    results = run_ranks(grow, 2, str(tmp_path), case, 1536)
    grown, wanted, later, last = (sum(values) for values in zip(*results, strict=True))
    print(case, grown / MIB, wanted / MIB, later / MIB, last / MIB)
    assert abs(grown - wanted) < 0.02 * wanted, f"{grown / MIB:.1f} MiB, {wanted / MIB:.1f} planned"
    assert later < MIB and last < MIB, f"steps took {later / MIB:.1f} MiB more, {last / MIB:.1f} at the end"


_M_ARENA_MAX = -8  # malloc.h


def live(folder: str, case: dict[str, Any]) -> tuple[list[int], list[Any]]:
    """Run engines one after the other: trained, saved in the background, saved, destroyed."""
    ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 2)  # otherwise each saving thread may keep an arena: up to 8 for a core
    comm = zcomm.init(timeout=60)
    sizes, counts = [], []
    for number in range(20):
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(384, 384, bias=False) for _ in range(6)))  # 3.4 MiB
        config = {"train_batch_size": 2, "optimizer": {"type": "Adam", "params": {}}, "zero_optimization": case}
        engine = zcomm.initialize(model=net, config=config)[0]
        for _ in range(2):
            engine.backward(engine(torch.ones(1, 384)).square().mean())
            engine.step()
        if number % 4 == 0:
            engine.optimizer.save(f"{folder}/c", wait=False)
        engine.save_checkpoint(folder, tag="t")
        engine.destroy()
        del engine, net
        comm.barrier()
        sizes.append(resident())
        counts.append((*held(), tuple(sorted(comm.memory().items()))))
        comm.barrier()
    return sizes, counts


@pytest.mark.long
def test_twenty_engines_leave_nothing(run_ranks: Run, tmp_path: Path) -> None:
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    for case in ({"stage": 1}, {"stage": 3, "offload_optimizer": nvme, "offload_param": nvme}):
        for sizes, counts in run_ranks(live, 2, str(tmp_path), case):
            grown = min(sizes[15:]) - max(sizes[4:8])  # an allocator may return 8 MiB for a while
            assert grown < 2 * MIB, str([size // 1024 for size in sizes])  # each engine is 20 MiB and more
            assert len(set(counts[4:])) == 1, counts


def come_and_go(folder: str) -> tuple[list[int], list[Any]]:
    """Run jobs one after the other: joined, trained, left."""
    sizes, counts = [], []
    for number in range(20):
        os.environ["ZCOMM_INIT_METHOD"] = f"file://{folder}/store-{number}"
        zcomm.init(timeout=60)
        opt = zcomm.ZeroOptimizer(nn.Linear(512, 512), stage=3, share_parameters=False)
        opt.close()
        del opt
        zcomm.shutdown()
        sizes.append(resident())
        counts.append(held())
    return sizes, counts


@pytest.mark.slow
def test_twenty_jobs_leave_nothing(run_ranks: Run, tmp_path: Path) -> None:
    for sizes, counts in run_ranks(come_and_go, 2, str(tmp_path)):
        assert min(sizes[14:]) - min(sizes[2:8]) < MIB, [size // 1024 for size in sizes]
        assert len(set(counts[2:])) == 1 and counts[-1][1] == 0, counts


_AFTER_AN_ERROR = """
import sys, torch, zcomm
from torch import nn
torch.set_num_threads(1)
zcomm.init()
net = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))
opt = zcomm.ZeroOptimizer(net, "sgd", lr=0.1, stage=2)
def fails(grad):
    raise ValueError("in backward")
net[4].weight.register_hook(fails)
try:
    net(torch.ones(4, 6)).square().mean().backward()
except ValueError:
    opt.close()
    torch.set_default_device("meta")
    print("caught")
"""


def test_a_program_ends_well_after_an_error_in_backward(tmp_path: Path) -> None:
    """autograd keeps nodes of the pass, with tensors in the core's memory, and frees them after Python has ended."""
    script = tmp_path / "ends.py"
    script.write_text(_AFTER_AN_ERROR)
    command = [sys.executable, "-m", "zcomm.cli.main", "run", "-n", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout.count("caught")) == (0, 2), done.stdout + done.stderr


def test_a_wrapper_that_is_freed_closes_nothing() -> None:
    """Lightning's wrapper of an optimizer has its class and attributes, and is freed earlier."""
    zcomm.init()
    model = nn.Linear(4, 1)
    opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.5)
    wrapper = object.__new__(type("Wrapper", (zcomm.ZeroOptimizer,), {}))
    wrapper.__dict__.update(opt.__dict__)
    del wrapper
    before = model.bias.item()
    model(torch.ones(1, 4)).sum().backward()
    opt.step()
    assert model.bias.item() == before - 0.5
    opt.close()
    zcomm.shutdown()


def test_a_wrapper_that_is_closed_closes_both() -> None:
    zcomm.init()
    model = nn.Linear(4, 1)
    opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.5, stage=3)
    wrapper = object.__new__(type("Wrapper", (zcomm.ZeroOptimizer,), {}))
    wrapper.__dict__.update(opt.__dict__)
    kept = model.weight.detach().clone()
    wrapper.close()
    for call in (opt.step, opt.state_dict, opt.memory):
        with pytest.raises(RuntimeError, match="closed by another object that shares its attributes"):
            call()
    assert torch.equal(model.weight, kept)
    opt.close()
    opt.close()
    zcomm.shutdown()
