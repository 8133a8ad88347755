"""``memory=`` behind a kernel limit on all memory of the ranks together: a control group."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from control_groups import NoWall, wall
from test_memory_limit import keeps
from tiers import long

MIB = 2**20
_FILLS = "import sys; held = bytearray(int(sys.argv[1])); held[::4096] = held[::4096]; print('held all')"


def fills(nbytes: int, limit_nbytes: int) -> subprocess.CompletedProcess[str]:
    """Run a process that holds ``nbytes`` behind a wall."""
    with wall(limit_nbytes) as made:
        command = made.command(sys.executable, "-c", _FILLS, str(nbytes))
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.slow
@pytest.mark.timeout_s(600)
@pytest.mark.parametrize(("world_size", "limit_mib"), [long(1, 650), (2, 700)])
def test_the_ranks_train_behind_a_wall(tmp_path: Path, world_size: int, limit_mib: int) -> None:
    """70 million parameters need 1.1 GB. The wall counts memory of all ranks, with page cache."""
    try:
        with wall(world_size * limit_mib * MIB) as made:
            print(f"wall: {made.name}, {world_size * limit_mib} MiB for {world_size} ranks")
            process = keeps(tmp_path, f"{limit_mib}MiB", world_size, made.prefix)
            print(f"peak of the group: {(made.peak_nbytes or 0) / MIB:.0f} MiB")
        over = fills(2 * world_size * limit_mib * MIB, world_size * limit_mib * MIB)
    except NoWall as why:
        pytest.skip(f"no control group can be made here: {why}")
    assert process.returncode == 0, process.stdout + process.stderr
    assert "has held" not in process.stderr
    assert "held all" not in over.stdout, "the wall is none"
    within = fills(MIB, 100 * MIB)
    assert within.stdout == "held all\n", within.stderr
