"""Runs tests of torch.testing._internal.distributed.distributed_test in this process, ranks as its forked children.

Writes one line of JSON per test to the descriptor from run.py. Variables select the tests: BACKEND, WORLD_SIZE,
INIT_METHOD, TEMP_DIR (as torch's module expects), TORCH_SUITE_TESTS (names, separated by commas; none: list them).

torch's module guards its tests by backend names. In those guards "zcomm" counts as "gloo", so that all tests of Gloo
run. It also counts as "mpi", to which CPU all_to_all is restricted. The tests are unchanged otherwise. Tests for "8 or
more ranks" that need only 3 are run with 3.
"""

from __future__ import annotations

import functools
import io
import json
import os
import sys
import time
import unittest


class Alias(str):
    """Reads as "zcomm"; compares as "gloo" and, for the tests of CPU all_to_all, also as "mpi"."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or other in ("gloo", "mpi")  # type: ignore[comparison-overlap]

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash("gloo")


def small_worlds_are_enough(function):  # type: ignore[no-untyped-def]
    @functools.wraps(function)
    def wrapper(*args, **kwargs):  # type: ignore[no-untyped-def]
        if int(os.environ["WORLD_SIZE"]) < 3:
            sys.exit(common.TEST_SKIPS["small_worldsize"].exit_code)
        return function(*args, **kwargs)

    return wrapper


import torch.testing._internal.common_distributed as common  # noqa: E402

if os.environ["BACKEND"] == "zcomm":
    import zcomm.torch_backend  # noqa: F401

common.DistTestCases.backend_feature["plugin"].add("zcomm")
common.skip_if_small_worldsize = small_worlds_are_enough

_environ = os.environ
_lookup = type(_environ).__getitem__
type(_environ).__getitem__ = lambda self, name: (  # type: ignore[method-assign]
    Alias(_lookup(self, name)) if name == "BACKEND" and _lookup(self, name) == "zcomm" else _lookup(self, name)
)
from torch.testing._internal.distributed import distributed_test as suite  # noqa: E402

type(_environ).__getitem__ = _lookup  # type: ignore[method-assign]


class Test(suite.TestDistBackend, suite.DistributedTest._DistTestBase):  # type: ignore[misc]
    def setUp(self) -> None:
        super().setUp()
        self._start_processes(common.torch.multiprocessing.get_context("fork").Process)


def names() -> list[str]:
    return [name for name in dir(Test) if name.startswith("test_")]


def run(name: str) -> dict[str, object]:
    text = io.StringIO()
    started = time.monotonic()
    result = unittest.TextTestRunner(stream=text, verbosity=0).run(Test(name))
    outcome, why = "passed", ""
    if result.skipped:
        outcome, why = "skipped", result.skipped[0][1]
    if result.failures or result.errors:
        outcome, why = "failed", (result.failures + result.errors)[0][1]
    return {"test": name, "outcome": outcome, "why": why, "seconds": round(time.monotonic() - started, 2)}


def main() -> None:
    out = os.fdopen(int(sys.argv[1]), "w")
    wanted = os.environ["TORCH_SUITE_TESTS"]
    if not wanted:
        out.write(json.dumps(names()) + "\n")
        return
    for name in wanted.split(","):
        out.write(json.dumps(run(name)) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
