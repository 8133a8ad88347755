"""Ranks that die, or are late, in each hop of a step of hybrid shards: every survivor names the rank and its group.

The ranks are 0 to 3, in the shard groups {0, 1} and {2, 3}; rank 3 is at fault. Its hops: the sum in its shard group,
the sum across groups, the gather of new weights across groups, and the norm of all ranks.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import late
import zcomm
from tiers import slow
from zcomm.zero.gradients.across import AcrossGroups
from zcomm.zero.gradients.host import HostTransport
from zcomm.zero.gradients.norm import GradientNorm
from zcomm.zero.params.weights_across import WeightsAcross

Run = Callable[..., list[Any]]
HOPS: dict[str, tuple[type, str]] = {
    "shard": (HostTransport, "reduce"),
    "across": (AcrossGroups, "start"),
    "gather": (WeightsAcross, "start"),
    "norm": (GradientNorm, "end"),
}
GROUPS = ("its ranks 0, 1 are ranks 2, 3 of the job", "its ranks 0, 1 are ranks 1, 3 of the job")


def train(mesh: zcomm.ProcessMesh, hop: str, fault: Callable[[], None]) -> str:
    """Train until the error that rank 3's ``fault`` at the second step causes. Return its text."""
    layers = torch.nn.Sequential(*(torch.nn.Linear(40, 40) for _ in range(6)))
    opt = zcomm.ZeroOptimizer(layers, lr=1e-3, mesh=mesh, stage=3, hpz=True, bucket_mb=0.01)
    error = "no error"
    try:
        for step in range(3):
            if step == 1 and mesh.world.rank == 3:
                where, name = HOPS[hop]
                setattr(where, name, lambda *args, **kwargs: fault())
            layers(torch.ones(2, 40)).sum().backward()
            opt.step()
            opt.zero_grad()
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    begin = time.monotonic()
    opt.close()
    assert time.monotonic() - begin < 20
    return error


def die(hop: str) -> tuple[str, float]:
    zcomm.init(timeout=120)
    mesh = zcomm.ProcessMesh(replicate=2, shard=2)
    begin = time.monotonic()
    error = train(mesh, hop, lambda: os.kill(os.getpid(), signal.SIGKILL))
    return error, time.monotonic() - begin


def be_late(folder: str, hops: list[str]) -> list[str]:
    """Train with one fault after the other: an error of an optimizer leaves the job's communicator usable."""
    comm = late.init_with_deadline(6)
    found = []
    for hop in hops:
        before = threading.active_count()
        with comm.no_deadline():
            mesh = zcomm.ProcessMesh(replicate=2, shard=2)
            where, name = HOPS[hop]
            whole = getattr(where, name)

            def oversleep() -> None:
                late.wait_until_told(folder, hop, range(3))  # noqa: B023
                raise RuntimeError("was late")

            found.append(train(mesh, hop, oversleep))
            setattr(where, name, whole)
            late.tell(folder, hop)
        assert threading.active_count() == before
        late.meet(comm)
    return found


def is_named(text: str) -> bool:
    """Return True if an error names rank 3: in all ranks' communicator by its number, in a part by place and group."""
    if "[split" not in text:
        return re.search(r"rank 3\b", text) is not None
    at_fault = re.search(r"(rank 1 died|rank 1 left|s for rank 1\b)", text)
    return at_fault is not None and any(group in text for group in GROUPS)


@pytest.mark.parametrize("hop", ["across", slow("shard"), slow("gather"), slow("norm")])
def test_a_rank_killed_in_a_hop_is_named_with_its_group(hop: str, run_ranks: Run) -> None:
    *found, dead = run_ranks(die, 4, hop, check=False)
    assert dead.exitcode == -9
    for result in found:
        assert result.error is None, result.describe()
        text, seconds = result.value
        print(result.rank, seconds, text)
        assert is_named(text), text
        assert seconds < 60


@pytest.mark.slow
def test_a_late_rank_is_named_with_its_group(run_ranks: Run, tmp_path: Any) -> None:
    hops = list(HOPS)
    *found, _ = run_ranks(be_late, 4, str(tmp_path), hops)
    for rank, texts in enumerate(found):
        for hop, text in zip(hops, texts, strict=True):
            print(rank, hop, text)
    for rank, texts in enumerate(found):
        for hop, text in zip(hops, texts, strict=True):
            assert is_named(text), f"rank {rank} at {hop}: {text}"
