"""The budget of processor time (support/budget.py): the runs that it measures, and the runs that it fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import budget

FAST = "not (slow or long)"
SUPPORT = Path(budget.__file__).parent


@pytest.mark.parametrize(
    ("markers", "args", "level"),
    [
        (FAST, ["tests/python"], "fast"),
        (FAST, ["tests/python/"], "fast"),
        ("slow and not long", ["tests/python"], "slow"),
        ("long", ["tests/python"], "long"),
        ("", ["tests/python"], None),
        (FAST, ["tests/python/comm"], None),
        (FAST, ["tests/python", "tests/python/comm"], None),
        (FAST, [], None),
    ],
)
def test_whole_runs_have_a_level(tmp_path: Path, markers: str, args: list[str], level: str | None) -> None:
    assert budget.level_of(markers, args, tmp_path) == level


def test_folders() -> None:
    assert budget.folder_of("tests/python/zero/units/test_rows.py::test_look[1-a/b]") == "zero/units"


def test_a_folder_and_the_sum_may_be_over_their_budgets_by_margins() -> None:
    spent = {"comm": 14.9, "zero": 15.1, "new": 0.1}
    folders = [
        "zero: 15.1 s, over its budget of 10 s by more than 50%",
        "new: tests/budget.toml has no line for it",
    ]
    assert budget.too_much(spent, {"comm": 10.0, "zero": 10.0, "gone": 5.0}) == folders
    assert budget.too_much({"comm": 14.9, "zero": 14.9}, {"comm": 10.0, "zero": 10.0}) == [
        "all: 29.8 s, over its budget of 20 s by more than 25%"
    ]
    assert budget.too_much(spent, {}) == [], "a level without a section is only measured"


def test_the_file_has_all_folders() -> None:
    root = SUPPORT.parents[2]
    folders = {os.path.dirname(file.relative_to(root)) for file in (root / "tests" / "python").rglob("test_*.py")}
    expected = {folder.removeprefix("tests/python/") for folder in folders} | {budget.COLLECTION}
    assert set(budget.read(root, "fast")) == expected


CONFTEST = f"""
import sys
sys.path.insert(0, {str(SUPPORT)!r})
import budget
budget.ranks.start_server = lambda: None
def pytest_configure(config):
    config.addinivalue_line("markers", "slow: more")
    config.addinivalue_line("markers", "long: most")
    budget.configure(config)
"""
SPENDS = """
import subprocess, sys, time, pytest
SPEND = "import time\\nwhile time.process_time() < 0.5: pass"
@pytest.mark.parametrize("number", range(4))
def test_spends(number):
    subprocess.run([sys.executable, "-c", SPEND], check=True)
"""


@pytest.mark.parametrize(("budget_s", "status"), [(1000, 0), (0.01, 1)])
def test_workers_add_up_and_children_count(tmp_path: Path, budget_s: float, status: int) -> None:
    folder = tmp_path / "tests" / "python" / "some"
    folder.mkdir(parents=True)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "tests" / "budget.toml").write_text(f"[fast]\ncollection = 1000\nsome = {budget_s}\n")
    (folder.parent / "conftest.py").write_text(CONFTEST)
    (folder / "test_spends.py").write_text(SPENDS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "2", "-m", FAST, "tests/python"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == status, run.stdout + run.stderr
    spent = next(line for line in run.stdout.splitlines() if line.startswith("some "))
    assert float(spent.split()[1]) > 0.5, run.stdout  # of 2 s, by a loop that may be faster than LOOP_S
    assert ("some: " in run.stdout) == bool(status), run.stdout
