"""Promises of each mode of sums and updates, for a model on a (simulated) device with late streams.

There are faults of the drive, kill -9, Ctrl-C, and unusual programs. The scenes and their expected results are the
CPU's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import test_atomic
import test_atomic_programs
import test_mode_faults
import test_mode_kills
import test_mode_programs
from simulated import on_device
from tiers import long, one_in, slow

Run = Callable[..., list[Any]]
SEED = 7


@pytest.mark.parametrize("scene", one_in(2, 0, test_mode_faults.SCENES[::3]), ids=str)
def test_faults_of_the_drive(run_ranks: Run, tmp_path: Path, scene: tuple[Any, ...]) -> None:
    run_ranks(on_device, 2, SEED, test_mode_faults.met, *scene, str(tmp_path), 1)


@pytest.mark.parametrize("world_size", [1, long(2)])
@pytest.mark.parametrize("place", [slow("step"), slow("forward"), "backward"])
def test_a_fault_undoes_the_step(run_ranks: Run, tmp_path: Path, place: str, world_size: int) -> None:
    scenes = [scene for scene in test_atomic.SCENES if scene[0].startswith(place)]
    job = (test_atomic.all_undone, scenes, str(tmp_path), world_size - 1)
    run_ranks(on_device, world_size, SEED, *job)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [long(1), 2])
@pytest.mark.parametrize("mode", [long("step"), long("forward"), "backward, bf16"])
def test_what_programs_do_with_atomic(run_ranks: Run, tmp_path: Path, mode: str, world_size: int) -> None:
    job = (test_atomic_programs.play, [mode], list(test_atomic_programs.ANY), str(tmp_path), world_size - 1)
    run_ranks(on_device, world_size, SEED, *job)


@pytest.mark.long  # test_mode_programs.py has them on the CPU
@pytest.mark.parametrize("world_size", [1, 2])
def test_programs_have_the_bits_of_updates_in_step(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    for found in run_ranks(on_device, world_size, SEED, test_mode_programs.train_all, str(tmp_path)):
        test_mode_programs.check(found)


@pytest.mark.parametrize("world_size", [long(1), slow(2)])
def test_surprises_have_names(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    run_ranks(on_device, world_size, SEED, test_mode_programs.surprised, str(tmp_path))


@pytest.mark.parametrize("mode", one_in(3, 2, ["nvme, step", "nvme, forward", "nvme, backward"]))
def test_an_interrupt_leaves_no_half_step(tmp_path: Path, mode: str) -> None:
    on_device(SEED, test_mode_kills.interrupt, mode, str(tmp_path), 30)


@pytest.mark.long  # test_mode_kills.py has them on the CPU
@pytest.mark.leaves_swap
@pytest.mark.timeout_s(300)
def test_kill_9_in_each_mode(start_ranks_in: Any, run_ranks: Run, tmp_path: Path) -> None:
    start = partial(_started, start_ranks_in)
    test_mode_kills.test_kill_9_in_each_mode(start, run_ranks, tmp_path, 2)


def _started(start_ranks_in: Any, function: Any, world_size: int, *args: Any) -> Any:
    return start_ranks_in(on_device, world_size, SEED, function, *args)
