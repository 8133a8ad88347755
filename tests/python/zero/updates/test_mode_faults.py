"""Faults in each mode of sums and updates, in each phase of training, and at each place.

No half step counts, and no rank hangs. Either the step did not happen, as always with Offload(atomic=True): training
continues to the bits of an undisturbed run. Or all ranks, and later calls, raise an error that names the failed
operation. After a load of the last checkpoint, the bits equal that run's.
"""

from __future__ import annotations

import errno
import logging
from itertools import starmap
from pathlib import Path
from typing import Any

import pytest

import update_grid as grid
import zcomm
import zcomm.zero.cache.swap
from tiers import long, one_in, slow
from update_grid import STATE, SUMS, WEIGHTS, Fault, Row, Run

SCENES: list[Row] = [
    ("cpu, step", "forward", Fault("read", WEIGHTS, good=2), "again"),
    ("nvme, step", "forward", Fault("read", WEIGHTS, refused=True), "again"),
    ("nvme, step", "pass", Fault("write", SUMS, errno.ENOSPC, good=1), "again"),
    ("nvme, step", "pass", Fault("write", SUMS, refused=True), "again"),
    ("nvme, forward", "pass", Fault("write", SUMS, good=2), "again"),
    ("cpu, step", "step", Fault("read", STATE, good=3), "loaded"),
    ("cpu, step", "step", Fault("write", WEIGHTS, errno.ENOSPC, refused=True), "loaded"),
    ("nvme, step", "step", Fault("read", SUMS, good=1), "loaded"),
    ("nvme, step", "step", Fault("write", STATE, errno.ENOSPC), "loaded"),
    ("cpu, forward", "forward", Fault("read", STATE, good=2), "loaded"),
    ("nvme, forward", "forward", Fault("read", SUMS), "loaded"),
    ("nvme, forward", "forward", Fault("write", WEIGHTS, errno.ENOSPC, good=1), "loaded"),
    *(  # of units that have been updated, and are gathered again in backward
        ("nvme, forward", "forward", Fault("write", WEIGHTS, good=good), "loaded") for good in (3, 7)
    ),
    ("nvme, forward", "pass", Fault("read", STATE, good=100), "loaded"),  # of units that no forward used
    ("nvme, forward", "full_param", Fault("read", STATE, good=3), "loaded"),
    ("cpu, forward", "state", Fault("write", STATE), "loaded"),
    ("nvme, forward", "state_dict", Fault("read", SUMS, good=1), "loaded"),
    ("nvme, forward", "gathered", Fault("read", STATE), "loaded"),
    ("cpu, forward", "eval", Fault("read", STATE, good=4), "loaded"),
    ("nvme, forward", "save", Fault("write", WEIGHTS, errno.ENOSPC), "loaded"),
    ("nvme, forward", "join", Fault("read", SUMS, good=2), "loaded"),
    ("nvme, backward", "forward", Fault("read", WEIGHTS, good=2), "again"),
    ("nvme, backward", "backward", Fault("read", WEIGHTS, good=4), "loaded"),
    ("nvme, backward", "backward", Fault("read", WEIGHTS, good=4, refused=True), "loaded"),
    ("nvme, backward", "pass", Fault("read", STATE), "loaded"),
    ("nvme, backward", "pass", Fault("read", STATE, good=3, refused=True), "loaded"),
    ("nvme, backward", "pass", Fault("write", STATE, errno.ENOSPC, good=1), "loaded"),
    ("nvme, backward", "pass", Fault("write", WEIGHTS, errno.ENOSPC), "loaded"),
    ("nvme, backward", "pass", Fault("write", WEIGHTS, good=2, refused=True), "loaded"),
    ("nvme, backward", "end", Fault("write", WEIGHTS), "loaded"),  # the next pass waits for it
    ("nvme, backward", "step", Fault("read", STATE), "loaded"),
    ("nvme, backward", "full_param", Fault("read", WEIGHTS), "again"),
    ("nvme, step", "set_full_param", Fault("read", WEIGHTS), "loaded"),
    ("nvme, step", "state", Fault("read", STATE), "again"),
    ("nvme, backward", "gathered", Fault("read", WEIGHTS, good=1), "again"),
    ("nvme, backward", "save", Fault("read", WEIGHTS, good=1), "again"),
    ("nvme, backward", "eval", Fault("read", WEIGHTS, good=3), "again"),
    ("nvme, backward", "load", Fault("write", STATE), "loaded"),
    ("nvme, forward", "load", Fault("write", WEIGHTS, errno.ENOSPC), "loaded"),
]
OVER_TCP: list[Row] = [
    ("nvme, forward", "forward", Fault("read", STATE, good=1), "loaded"),
    ("nvme, backward", "backward", Fault("write", STATE, errno.ENOSPC, good=1), "loaded"),
    ("nvme, backward", "forward", Fault("read", WEIGHTS, good=2), "again"),
]
# An update that waits from the last watched step fails in the next backward pass, which updates.
LEFT: list[Row] = [
    ("nvme, backward, left", "left", Fault("read", STATE), "loaded"),
    ("nvme, backward, resident", "left, resident", Fault("read", STATE), "loaded"),
]
# Errors, exceptions and interrupts while backward updates, on this rank or on all.
TIED: list[Row] = [
    ("nvme, backward", "pass", Fault("read", STATE, good=3), "loaded"),
    ("nvme, backward", "pass", Fault("hook", error=ValueError, rank=None), "loaded"),
    ("nvme, backward", "pass", Fault("hook", error=KeyboardInterrupt, rank=None), "loaded"),
]
INTERRUPT, NO_ROOM = (Fault("tile", good=2, error=error) for error in (KeyboardInterrupt, MemoryError))
STAGES: list[Row] = [
    ("stage 3, auto", "pass", INTERRUPT, "loaded"),
    ("stage 2, nvme", "pass", Fault("read", STATE, good=3), "loaded"),
    ("stage 3, auto", "pass", Fault("read", STATE, good=3), "loaded"),
    ("stage 0", "pass", Fault("tile", good=1, error=MemoryError), "loaded"),
    ("bf16, step", "pass", Fault("read", STATE, good=3), "loaded"),
    ("bf16, forward", "pass", Fault("read", STATE, good=3), "loaded"),
    ("bf16, forward", "pass", INTERRUPT, "loaded"),
    ("bf16, forward", "pass", Fault("write", WEIGHTS, good=1), "loaded"),
    ("stage 2, nvme", "pass", INTERRUPT, "loaded"),
    ("stage 2", "pass", Fault("tile", good=1, error=KeyboardInterrupt), "loaded"),
]
BY_ROWS: list[Row] = [
    ("nvme, step", "forward", Fault("read", WEIGHTS, good=2), "again"),
    ("nvme, forward", "forward", Fault("read", STATE, good=40), "loaded"),
    ("nvme, forward", "forward", Fault("read", SUMS, good=1), "loaded"),
    ("nvme, forward", "forward", Fault("write", STATE, errno.ENOSPC, good=3), "loaded"),
    ("cpu, forward", "forward", Fault("write", WEIGHTS, errno.ENOSPC, refused=True), "loaded"),
    ("cpu, forward", "forward", Fault("read", WEIGHTS, good=1), "loaded"),
    ("nvme, forward", "full_param", Fault("read", STATE, good=3), "loaded"),
    ("nvme, forward", "eval", Fault("write", STATE, good=4), "loaded"),
    ("nvme, forward", "join", Fault("read", SUMS, good=2), "loaded"),
    ("nvme, backward", "forward", Fault("read", WEIGHTS, good=2), "again"),
    ("nvme, backward", "backward", Fault("read", WEIGHTS, good=4), "loaded"),
    ("nvme, backward", "pass", Fault("read", STATE, good=30), "loaded"),
    ("nvme, backward", "pass", Fault("write", WEIGHTS, errno.ENOSPC, good=1), "loaded"),
]
BEHIND: list[Row] = [  # of the last bucket of the embedding, which is updated behind the fourth block
    (mode, "forward", Fault(what, "state.3."), way)
    for mode, way in (("nvme, forward", "loaded"), ("atomic, forward", "undone"))
    for what in ("read", "write")
]
# Of the weights of blocks[2], on one rank; all ranks load at once. Then no bucket behind a forward waits for a rank.
USED_AGAIN: list[Row] = [("nvme, forward", "forward", Fault("write", "parameters.14.", rank=0), "reloaded")]
ATOMIC: list[Row] = [
    ("atomic, step", "step", Fault("read", STATE, good=2), "undone"),
    ("atomic, step", "step", Fault("write", STATE, errno.ENOSPC, good=1), "undone"),
    ("atomic, step", "step", Fault("write", STATE, good=12), "undone"),
    ("atomic, step", "step", Fault("write", WEIGHTS, errno.ENOSPC, refused=True), "undone"),
    ("atomic, step, one pass", "step", Fault("write", WEIGHTS, good=1), "undone"),
    ("atomic, step, one pass", "step", Fault("read", WEIGHTS, good=2), "undone"),
    ("atomic, forward", "forward", Fault("read", STATE, good=2), "undone"),
    ("atomic, forward", "forward", Fault("read", SUMS, good=1), "undone"),
    ("atomic, forward", "forward", Fault("write", STATE, errno.ENOSPC, good=3), "undone"),
    ("atomic, forward", "forward", Fault("write", WEIGHTS, good=1), "undone"),
    ("atomic, forward, sums in RAM", "forward", Fault("write", WEIGHTS, errno.ENOSPC, refused=True), "undone"),
    ("atomic, forward, sums in RAM", "forward", Fault("read", WEIGHTS, good=2), "undone"),
    ("atomic, backward", "pass", Fault("read", STATE, good=3), "undone"),
    ("atomic, backward", "pass", Fault("write", STATE, errno.ENOSPC, good=4), "undone"),
    ("atomic, backward", "pass", Fault("write", WEIGHTS, good=1), "undone"),
    ("atomic, backward, bf16", "pass", Fault("write", WEIGHTS, errno.ENOSPC, refused=True), "undone"),
    ("atomic, backward, bf16", "pass", Fault("write", STATE, good=1), "undone"),
]
ATOMIC_BY_ROWS: list[Row] = [
    ("atomic, forward", "forward", Fault("read", STATE, good=30), "undone"),
    ("atomic, forward", "forward", Fault("read", SUMS, good=1), "undone"),
    ("atomic, forward, sums in RAM", "forward", Fault("write", STATE, errno.ENOSPC, good=3), "undone"),
    ("atomic, backward", "pass", Fault("write", STATE, errno.ENOSPC, good=4), "undone"),
    ("atomic, backward, bf16", "pass", Fault("write", WEIGHTS, errno.ENOSPC, refused=True), "undone"),
]
Cell = tuple[str, int, list[Row]]  # place, ranks, rows of one job


def apart(place: str, world_size: int, rows: list[Row]) -> list[Cell]:
    return [(place, world_size, [row]) for row in rows]


def atomic(moment: str) -> list[Row]:
    return [row for row in ATOMIC if row[0].startswith(f"atomic, {moment}")]


def two_steps(modes: dict[str, Any]) -> list[Row]:
    """Undo the first step, and a later one, by the update of a tile, also without a drive."""
    return [(mode, "two steps", NO_ROOM, "undone") for mode in modes]


GRID = [
    *one_in(4, 1, apart("host", 1, SCENES), long),
    *one_in(8, 3, apart("host", 2, SCENES)),
    *one_in(2, 0, apart("device", 2, SCENES[::3])),
    *apart("tcp", 2, OVER_TCP),
    *apart("host", 1, LEFT),
    *apart("host", 2, LEFT),
    long("tied", 1, TIED),
    ("tied", 2, TIED),
    *one_in(2, 1, apart("host", 1, STAGES)),
    *one_in(8, 0, apart("host", 2, STAGES[:8])),
    *starmap(long, apart("rows", 1, BY_ROWS)),
    *one_in(4, 1, apart("rows", 2, BY_ROWS)),
    long("few rows", 1, BEHIND),
    ("few rows", 2, BEHIND),
    ("used again", 2, USED_AGAIN),
    long("rows", 1, ATOMIC_BY_ROWS),
    ("rows", 2, ATOMIC_BY_ROWS),
    *(long("host", 1, atomic(moment)) for moment in ("step", "forward", "backward")),
    *one_in(3, 1, [("host", 2, atomic(moment)) for moment in ("step", "forward", "backward")]),
    *one_in(3, 2, [("device", 1, atomic(moment)) for moment in ("step", "forward", "backward")]),
    *(long("device", 2, atomic(moment)) for moment in ("step", "forward", "backward")),
    long("8-bit blocks", 1, two_steps(grid.IN_RAM)),
    ("8-bit blocks", 2, two_steps(grid.IN_RAM)),
    long("8-bit blocks", 1, two_steps(grid.RULES)),
    slow("8-bit blocks", 2, two_steps(grid.RULES)),
]


_known: dict[Any, grid.Wanted] = {}  # references of the tests so far


def name_of(value: Any) -> str:
    return ", ".join(value[0][:2]) if isinstance(value, list) else str(value)


@pytest.mark.parametrize(("place", "world_size", "rows"), GRID, ids=name_of)
def test_a_fault(run_ranks: Run, tmp_path: Path, place: str, world_size: int, rows: list[Row]) -> None:
    for found in grid.run_at(place, world_size, run_ranks, grid.meet, rows, place, str(tmp_path), _known):
        _known.update(found)


# --- a drive that stalls ----------------------------------------------------------------------------------------------


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def stalled(mode: str, fault: Fault, folder: str) -> None:
    """Let one operation of the last rank's drive take more than two deadlines."""
    zcomm.init(timeout=fault.stall_s / 2.25)
    base, log = Path(folder), Lines()
    logging.getLogger("zcomm").addHandler(log)
    with grid.small_spans() as patch:
        patch.setattr(zcomm.zero.cache.swap, "STALL_WARN_S", 0.5)
        wanted = grid.reference(mode, "host", base, [5])
        train = grid.Training(mode, base / "drive")
        train.run(2)
        if fault.here():
            grid.FaultySwap.arm(fault)
        train.run(5)
        assert grid.FaultySwap.fault is None and train.bits() == wanted[5][0]
        told = [line for line in log.lines if "the drive stalls" in line]
        assert bool(told) == fault.here()
        assert all(f"{fault.operation} of key '{fault.key}" in line and " bytes) in " in line for line in told)
        assert all(str(base / "drive") in line for line in told)
        train.opt.close()
    logging.getLogger("zcomm").removeHandler(log)
    zcomm.shutdown()


@pytest.mark.parametrize(
    ("mode", "fault"),
    [
        ("nvme, backward", Fault("read", STATE, good=2, stall_s=9.0)),
        slow("cpu, step", Fault("read", WEIGHTS, good=1, stall_s=9.0)),
        slow("nvme, step", Fault("write", SUMS, stall_s=9.0)),
        slow("nvme, forward", Fault("read", STATE, good=2, stall_s=9.0)),
        slow("nvme, step", Fault("write", STATE, good=2, stall_s=30.0)),
        slow("nvme, forward", Fault("write", WEIGHTS, stall_s=30.0)),
        slow("nvme, forward", Fault("read", SUMS, stall_s=30.0)),
        slow("nvme, backward", Fault("write", WEIGHTS, stall_s=30.0)),
        slow("nvme, backward", Fault("write", STATE, good=1, stall_s=30.0)),
    ],
)
def test_a_stalled_drive_is_a_wait(run_ranks: Run, tmp_path: Path, mode: str, fault: Fault) -> None:
    run_ranks(stalled, 2, mode, fault, str(tmp_path))
