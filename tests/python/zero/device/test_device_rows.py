"""Weights by rows (``Units(rows=True)``) of a model on a (simulated) device with late streams.

The oracle is the same training on the CPU with updates in step(), to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import simulated
import test_row_grads
import test_row_interrupts
import test_rows
import zcomm
import zcomm.zero.layout.sections
import zcomm.zero.layout.tiles
import zcomm.zero.optim_state.nvme
from test_matrix_rows import FACTORS, IN_BACKWARD, STEPS, Net, can_update, sample, train
from tiers import long, slow
from zcomm.zero import Offload, Units

Run = Callable[..., list[Any]]
Row = dict[str, Any]


def rows_of(world_size: int, part: int) -> list[Row]:
    """Return rows of the matrix of the CPU, and of updates in step(): the even or the odd ones."""
    chosen = [row for row in (*sample(), *IN_BACKWARD) if row[0] == world_size]
    named = [dict(zip(FACTORS, row, strict=True)) for row in chosen]
    named += [{**row, "update": "step"} for row in named[::3]]
    return named[part::2]


def train_there(rows: list[Row], folder: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    comm = zcomm.init(timeout=60)
    zcomm.zero.layout.sections.PAGE_NBYTES = 512
    zcomm.zero.layout.tiles.TILE_COUNT = 192
    zcomm.zero.optim_state.nvme.SPAN_TILES, zcomm.zero.optim_state.nvme.WINDOWS = 2, 4
    found = []
    for number, row in enumerate(rows):
        params = row["params"] or "cpu"
        update = "backward" if can_update(row) else "step" if row["update"] == "step" else "forward"
        plain = train(row, folder, Offload("nvme", params, update="step"), 25.0)
        simulated.play(0.0003, 10 * number + comm.rank)
        offload = Offload("nvme", params, gradients=row["gradients"], update=update, atomic=row["atomic"])
        found.append((plain, train(row, folder, offload, row["bucket_mb"])))
        simulated.stop()
    return found


@pytest.mark.timeout_s(300)
@pytest.mark.parametrize("part", [slow(0), long(1)])
@pytest.mark.parametrize("world_size", [long(1), 2])
def test_the_bits_of_the_cpu(run_ranks: Run, tmp_path: Path, world_size: int, part: int) -> None:
    rows = rows_of(world_size, part)
    per_rank = run_ranks(train_there, world_size, rows, str(tmp_path), timeout_s=280)
    for rank, found in enumerate(per_rank):
        for row, (wanted, result) in zip(rows, found, strict=True):
            updated = result.pop("updated")
            assert wanted.pop("updated") == 0 and result == wanted, f"rank {rank}: {row}"
            assert updated == (STEPS - 2 if can_update(row) else 0), f"{row}: {updated} updates in backward"


@pytest.mark.parametrize("job", [test_rows.look, slow(test_row_grads.no_sync), test_row_grads.own_parts])
def test_looks_and_edits(run_ranks: Run, tmp_path: Path, job: Callable[[str], Any]) -> None:
    run_ranks(simulated.on_device, 2, 5, job, str(tmp_path))


@pytest.mark.parametrize(("kind", "update"), [("linear", "step"), ("linear", "forward"), slow("embedding", "step")])
def test_close_does_not_wait_for_rows_of_a_rank_that_does_not_come(
    run_ranks: Run, tmp_path: Path, kind: str, update: str
) -> None:
    run_ranks(simulated.on_device, 2, 5, test_row_interrupts.left_alone, str(tmp_path), kind, update)


def stay() -> None:
    net, offload = Net(False, "", "module"), Offload("cpu", lambda name, _: "cpu" if "block" in name else "device")
    with pytest.raises(ValueError, match=r"rows=True \(.*embed.*needs weights in host memory or on a drive"):
        zcomm.ZeroOptimizer(net, stage=3, offload=offload, units=Units(max_bytes=1088 * 64, rows=True))


def test_weights_that_stay_on_the_device_are_refused() -> None:
    zcomm.init()
    simulated.on_device(1, stay)
