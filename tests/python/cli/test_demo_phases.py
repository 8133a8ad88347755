"""Bounds of the demo's phases: the arithmetic, the drive's rates, and the live picture of tiers and phases."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console

from zcomm.demo.llama import LlamaConfig
from zcomm.demo.model import ByteLlama
from zcomm.demo.options import SIZES
from zcomm.demo.phases import Clock, DriveRates, bounds, measure_drive
from zcomm.demo.progress import BarProgress, Recent, StepRecord, tier_rows
from zcomm.demo.results import Summary, bound_rows, drive_lines, memory_rows, settled

RATES = DriveRates(read=2e9, written=1e9)


def phase(seconds: float, waited_s: float, read: float = 0.0, written: float = 0.0) -> dict[str, float]:
    return {"seconds": seconds, "waited_s": waited_s, "read_nbytes": read, "written_nbytes": written}


STEPS = [  # the first step learns the order of units, so it counts only if there is no other
    {"phases": {"forward": phase(9.0, 0.0), "backward": phase(9.0, 0.0), "step": phase(9.0, 0.0)}},
    {"phases": {"forward": phase(2.0, 1.0, read=3e9), "backward": phase(4.0, 0.5), "step": phase(1.0, 0.9, 1e9, 4e8)}},
]


def test_the_larger_of_compute_and_the_drive_bounds_a_phase() -> None:
    forward, backward, step = bounds([STEPS[1]["phases"]], 1, RATES)
    assert (forward.by, forward.least_s, forward.share) == ("drive", 1.5, 0.75)
    assert (backward.by, backward.least_s, backward.share) == ("compute", 3.5, 0.875)
    assert (step.by, round(step.least_s, 9)) == ("drive", 0.9)
    assert [each.by for each in bounds([STEPS[1]["phases"]], 1, None)] == ["compute"] * 3


def test_the_ranks_share_the_drive() -> None:
    alone, two = (bounds([STEPS[1]["phases"]], ranks, RATES)[0].least_s for ranks in (1, 2))
    assert two == 2 * alone


def test_rows_leave_out_the_first_steps_where_there_are_others() -> None:
    rows = bound_rows(settled(STEPS), 1, {"read": 2e9, "written": 1e9})
    assert rows[0] == ("forward", "2.000", "1.500", "drive 75%", "3.00", "0.00")
    assert rows[-1] == ("all", "7.000", "5.900", "84%", "4.00", "0.40")
    assert bound_rows(settled(STEPS[:1]), 1, None)[0][:4] == ("forward", "9.000", "9.000", "compute 100%")
    assert settled([*STEPS, STEPS[1], STEPS[0]], "backward") == [STEPS[0]["phases"]], "two steps are watched"
    assert settled(STEPS, "backward") == [STEPS[1]["phases"]]


def test_the_bytes_of_a_step_are_beside_the_plan() -> None:
    (line,) = drive_lines(settled(STEPS), {"read": 4_040_000_000, "written": 400_000_000})
    assert line == "drive, in a step: 4.00 GB read (planned 4.04 GB, -1.0%), 0.40 GB written (planned 0.40 GB, +0.0%)"
    (small,) = drive_lines(settled(STEPS), {"read": 5_000_000})
    assert "(planned 5.00 MB" in small
    assert drive_lines(settled(STEPS), None) == ["drive, in a step: 4.00 GB read, 0.40 GB written"]
    assert drive_lines(settled(STEPS[:1]), None) == []


def test_a_purpose_that_a_limit_has_put_on_other_tiers_is_a_row() -> None:
    memory = {
        "device": {"parameters": 0, "gradients": 0, "slots": 1 << 20},
        "cpu": {"parameters": 3 << 20, "slots": 1 << 20},
        "nvme": {"parameters": 1 << 20, "gradients": 8 << 20, "optimizer": 9 << 20},
    }
    formula = {"device": {"gradients": 8 << 20}, "cpu": {}, "nvme": {"parameters": 4 << 20, "optimizer": 9 << 20}}
    summary = Summary(2.0, 3.0, 1.0, 10, "text", 1, 1, memory, formula, {}, "")
    assert memory_rows(summary) == [
        ("device", "slots", "1.00", "0.00", "-"),
        ("cpu, nvme", "parameters", "3.00 + 1.00", "4.00", "+0.0%"),
        ("cpu", "slots", "1.00", "0.00", "-"),
        ("nvme", "gradients", "8.00", "8.00", "+0.0%"),
        ("nvme", "optimizer", "9.00", "9.00", "+0.0%"),
        ("all", "without slots", "21.00", "21.00", "+0.0%"),
    ]


def test_a_clock_adds_up_what_happens_in_a_phase() -> None:
    counters = {"comm_s": 1.0, "swap_s": 2.0, "swap_read_nbytes": 10.0, "swap_written_nbytes": 0.0}
    clock = Clock(lambda: dict(counters))
    for _ in range(2):
        with clock.phase("backward"):
            counters["comm_s"] += 0.25
            counters["swap_s"] += 0.5
            counters["swap_read_nbytes"] += 7
    found = clock.phases["backward"]
    assert (found.waited_s, found.read_nbytes, found.written_nbytes) == (1.5, 14, 0)
    assert found.seconds > 0 and found.compute_s == 0.0 and list(clock.phases) == ["backward"]


def test_the_drive_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    rates = measure_drive([str(tmp_path)], 1 << 20)
    assert rates.read > 0 and rates.written > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("width", [80, 120])
def test_the_picture_shows_tiers_and_phases(width: int) -> None:
    console = Console(width=width, force_terminal=True, file=io.StringIO())
    progress = BarProgress(10, Recent(1, RATES), limit_nbytes=4 << 30, console=console)
    record = StepRecord(1, 5.0, 1e-3, 1.0, 123456.0, 1.0, compute_s=0.5, comm_s=0.3, swap_s=0.2)
    clock = Clock(lambda: dict.fromkeys(("comm_s", "swap_s", "swap_read_nbytes", "swap_written_nbytes"), 0.0))
    with clock.phase("forward"):
        torch.ones(64, 64) @ torch.ones(64, 64)
    record.phases.update(clock.phases)
    progress.step(record)
    progress.tiers({"device": {"slots": 1 << 30}, "nvme": {"parameters": 6 << 30}}, 3 << 29)
    with console.capture() as shown:
        console.print(progress._picture())
    lines = re.sub(r"\x1b\[[0-9;]*[a-zA-Z]", "", shown.get()).splitlines()
    assert re.match(r"RAM +\S+ +peak 1\.50 GiB of 4\.00 GiB allowed, optimizer 1\.00 GiB", lines[0]), lines
    assert re.match(r"drive +\S+ +6\.00 GiB", lines[1]), lines
    assert [line.split()[0] for line in lines[2:5]] == ["forward", "backward", "step"]
    assert "bound by compute 100% of it" in lines[2]
    assert all(len(line) <= width for line in lines)


def test_a_gpu_is_a_row_of_its_own() -> None:
    memory = {"device": {"slots": 1 << 30}, "cpu": {"gradients": 2 << 30}, "nvme": {"optimizer": 6 << 30}}
    gpu, ram, drive = tier_rows(memory, 5 << 30, None, 3 << 30)
    assert (gpu.name, gpu.text) == ("GPU", "peak 3.00 GiB, optimizer 1.00 GiB")
    assert (ram.name, ram.text) == ("RAM", "peak 5.00 GiB, optimizer 2.00 GiB")
    assert (drive.name, drive.text) == ("drive", "6.00 GiB")
    assert [row.text for row in tier_rows(memory, 5 << 30, None)] == ["peak 5.00 GiB, optimizer 3.00 GiB", "6.00 GiB"]


def test_a_tier_that_holds_nothing_has_no_row() -> None:
    assert [row.name for row in tier_rows({"device": {}, "nvme": {"optimizer": 0}}, 5, None)] == ["RAM"]


@pytest.mark.parametrize(("size", "millions"), [("300m", 308), ("1b", 1060), ("3b", 2990)])
def test_the_large_sizes_are_deeper_not_wider(size: str, millions: int) -> None:
    shape = SIZES[size]
    with torch.device("meta"):
        model = ByteLlama(2, shape["heads"], shape["width"])
    config = model.config
    assert model.recompute and (config.hidden_size, config.vocab_size) == (SIZES["300m"]["width"], 256)
    whole = LlamaConfig(**{**vars(config), "num_hidden_layers": shape["layers"]})
    assert abs(whole.numel() / 1e6 - millions) < 0.02 * millions


def test_the_decoder_has_the_calls_of_the_gpt() -> None:
    torch.manual_seed(1)
    model = ByteLlama(layers=2, heads=8, width=64)
    inputs, targets = torch.randint(256, (2, 3, 16)).unbind(0)
    logits, loss = model(inputs), model(inputs, targets)
    assert logits.shape == (3, 16, 256)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()))
    loss.backward()
    assert all(param.grad is not None for param in model.parameters())
