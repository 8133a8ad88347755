"""`import zcomm` is cheap and has no side effects: no thread, no socket, no device, no build."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROBE = """
import json, os, sys

def native_threads():
    return sorted(os.listdir("/proc/self/task"))

def targets():
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[name] = os.readlink("/proc/self/fd/" + name)
        except OSError:
            pass
    return {t for t in found.values() if not t.startswith("/proc/")}

before = len(sys.modules)
import torch
of_torch = len(sys.modules) - before
import numpy
threads, files = native_threads(), targets()
environment = dict(os.environ)
before = len(sys.modules)
import zcomm
of_zcomm = len(sys.modules) - before
for name in zcomm.__all__:  # names load on first use: load them all
    getattr(zcomm, name)
of_all = len(sys.modules) - before
print(json.dumps({
    "of_torch": of_torch,
    "of_zcomm": of_zcomm,
    "of_all": of_all,
    "new_threads": len(native_threads()) - len(threads),
    "new_files": sorted(targets() - files),
    "changed_environment": sorted(set(environment.items()) ^ set(os.environ.items())),
    "cuda_initialized": torch.cuda.is_initialized(),
    "cuda_devices_open": [t for t in targets() if "nvidia" in t],
    "initialized": zcomm.is_initialized(),
    "c10d_initialized": torch.distributed.is_initialized(),
    "children": open("/proc/self/task/%d/children" % os.getpid()).read().split(),
}))
"""


@pytest.fixture(scope="module")
def probe() -> dict[str, object]:
    run = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=100, check=True)
    return json.loads(run.stdout)


def test_starts_no_thread_and_no_process(probe: dict[str, object]) -> None:
    assert probe["new_threads"] == 0
    assert probe["children"] == []


def test_opens_no_socket_file_or_device(probe: dict[str, object]) -> None:
    assert probe["new_files"] == []
    assert probe["cuda_devices_open"] == []
    assert probe["cuda_initialized"] is False


def test_changes_no_state_of_the_process(probe: dict[str, object]) -> None:
    assert probe["changed_environment"] == []
    assert probe["initialized"] is False
    assert probe["c10d_initialized"] is False


def test_loads_few_modules_beside_torch(probe: dict[str, int]) -> None:
    assert 0 < probe["of_zcomm"] < 0.05 * probe["of_torch"], probe
    assert probe["of_all"] < 0.5 * probe["of_torch"], probe


def test_public_names_are_there_and_typed() -> None:
    import zcomm

    names = """init shutdown rank world_size local_rank is_initialized all_reduce reduce_scatter all_gather broadcast
    barrier empty BucketLayout Communicator Work CollectiveMismatch PeerLost CudaError pinned_empty SwapFile
    ZeroOptimizer Offload initialize""".split()
    missing = [name for name in names if not hasattr(zcomm, name)]
    assert not missing
    assert issubclass(zcomm.CollectiveMismatch, RuntimeError)
    assert issubclass(zcomm.PeerLost, ConnectionError)
    assert issubclass(zcomm.CudaError, RuntimeError)


def test_version_is_the_installed_one() -> None:
    from importlib.metadata import version

    import zcomm

    assert zcomm.__version__ == version("zcomm")
