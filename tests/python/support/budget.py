"""Processor time of a whole run of the Python tests against tests/budget.toml, as a plugin of pytest.

A whole run is one of the Makefile's three, without -k and single files. Each process of pytest adds up the times of its
tests by folder, children included, and runs a loop between tests from time to time. The loop's mean time is the unit,
because both grow equally on a slow or a busy machine. The table at the end of a run is in seconds of a machine on which
the loop takes LOOP_S. The run fails if the sum exceeds the sum of the budgets by more than MARGIN, or a folder its own
by more than FOLDER_MARGIN. The few tests of a folder vary more than the sum does.

Processes of the fork server of ``ranks`` are its children, not ours: /proc counts their time in the server's line.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path

import pytest

import ranks

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest requires it on such a Python

LEVELS = {"not (slow or long)": "fast", "slow and not long": "slow", "long": "long"}  # by the expression of -m
MARGIN = 0.25
FOLDER_MARGIN = 0.5
LOOP_S = 0.01
LOOP_COUNT, LOOP_NBYTES = 100_000, 8 << 20
EVERY = 40  # tests between two loops
COLLECTION = "collection"
TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


def level_of(markers: str, args: list[str], root: Path) -> str | None:
    """Return the level that -m and the arguments name, or None if the run is not a whole one."""
    whole = [(root / arg).resolve() for arg in args] == [(root / "tests" / "python").resolve()]
    return LEVELS.get(markers) if whole else None


def folder_of(nodeid: str) -> str:
    """Return the folder of a test, as in the file of budgets."""
    return os.path.dirname(nodeid.partition("::")[0].removeprefix("tests/python/"))


def too_much(spent: Mapping[str, float], budget: Mapping[str, float]) -> list[str]:
    """Return a line for each folder that exceeds its budget, or has none, and for the sum. Without a budget: none."""
    limits = [(name, spent[name], budget[name], FOLDER_MARGIN) for name in sorted(spent) if name in budget]
    limits.append(("all", sum(spent.values()), sum(budget.values()), MARGIN))
    lines = [
        f"{name}: {seconds:.1f} s, over its budget of {limit:g} s by more than {margin:.0%}"
        for name, seconds, limit, margin in limits
        if budget and seconds > limit * (1 + margin)
    ]
    unknown = sorted(set(spent) - set(budget)) if budget else []
    return lines + [f"{folder}: tests/budget.toml has no line for it" for folder in unknown]


def table(spent: Mapping[str, float], budget: Mapping[str, float]) -> list[str]:
    """Return the lines of the report: the most costly folder first."""
    rows = [(name, spent[name], budget.get(name, 0.0)) for name in sorted(spent, key=lambda name: -spent[name])]
    rows.append(("all", sum(spent.values()), sum(budget.values())))
    return [f"{name:18} {seconds:8.1f} s of {limit:g}" for name, seconds, limit in rows]


def read(root: Path, level: str) -> dict[str, float]:
    """Return the budgets of a level by folder, in seconds; none if the level has no section, and is only measured."""
    return dict(tomllib.loads((root / "tests" / "budget.toml").read_text()).get(level, {}))


def loop() -> float:
    """Return the processor time of the loop, in seconds: bytecode, and pages of memory that the kernel clears."""
    begin, total, numbers = time.thread_time(), 0, list(range(256))
    for number in range(LOOP_COUNT):
        total += numbers[number & 255] ^ number
    bytearray(LOOP_NBYTES)
    return time.thread_time() - begin


def processor_time() -> float:
    """Return the processor time of this process, its ended children, and the fork server, in seconds."""
    own = [resource.getrusage(each) for each in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    total = sum(usage.ru_utime + usage.ru_stime for usage in own)
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if server is not None:
        with suppress(OSError):  # it was killed
            fields = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, fields[11:15])) * TICK_S
    return total


class Budget:
    """The sums of one process. A worker of xdist sends its sums to the first process, which has the table."""

    def __init__(self, config: pytest.Config, level: str) -> None:
        self._config, self._level = config, level
        self._folders: dict[str, float] = {}
        self._loops: list[float] = []
        self._tests = 0
        self._parts: list[tuple[dict[str, float], float]] = []  # of workers: sums, mean of the loops
        self._budget = read(config.rootpath, level)

    def pytest_collection_finish(self) -> None:
        self._loops += [loop() for _ in range(5)]
        ranks.start_server()
        self._add(COLLECTION, processor_time())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._tests += 1
        if self._tests % EVERY == 0:
            self._loops.append(loop())
        begin = processor_time()
        try:
            return (yield)
        finally:
            self._add(folder_of(item.nodeid), processor_time() - begin)

    def _add(self, folder: str, seconds: float) -> None:
        self._folders[folder] = self._folders.get(folder, 0.0) + seconds

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        output = getattr(node, "workeroutput", {})  # a worker that died has none
        if "budget" in output:
            self._parts.append(output["budget"])

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._loops:
            self._parts.append((self._folders, sum(self._loops) / len(self._loops)))
        output = getattr(self._config, "workeroutput", None)
        if output is not None:
            output["budget"] = self._parts[0] if self._parts else ({}, LOOP_S)
        elif session.exitstatus == pytest.ExitCode.OK and too_much(self._spent(), self._budget):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _spent(self) -> dict[str, float]:
        spent: dict[str, float] = {}
        for folders, loop_s in self._parts:
            for folder, seconds in folders.items():
                spent[folder] = spent.get(folder, 0.0) + seconds * LOOP_S / loop_s
        return spent

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        spent = self._spent()
        terminalreporter.section(f"processor time of the level {self._level!r}, tests/budget.toml")
        for line in table(spent, self._budget):
            terminalreporter.write_line(line)
        loops = " ".join(f"{1e3 * loop_s:.1f}" for _, loop_s in self._parts)
        terminalreporter.write_line(f"the loop took {loops} ms; the table is for {1e3 * LOOP_S:g} ms")
        for line in too_much(spent, self._budget):
            terminalreporter.write_line(line, red=True)


def configure(config: pytest.Config) -> None:
    """Add up the run if it is a whole one."""
    option = config.option
    others = [option.keyword, option.deselect, option.ignore, option.ignore_glob, option.collectonly]
    others.append(getattr(option, "lf", False))
    level = None if any(others) else level_of(option.markexpr, config.args, config.rootpath)
    if level is not None:
        config.pluginmanager.register(Budget(config, level), "zcomm-budget")
