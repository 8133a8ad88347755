"""monitored_barrier: a barrier that names the ranks which did not come. It goes through the group's store.

Rank 0 waits for a key of each rank and answers each; a late rank joins rank 0's next barrier. The group itself is not
used, so it remains usable afterwards.
Source: torch's ProcessGroupGloo::monitoredBarrier (behaviour and words of the errors).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from zcomm import _core

_OK = "ok"


class MonitoredBarrierTimeout(TimeoutError, RuntimeError):
    """Some rank did not come. A RuntimeError, too, as from Gloo."""


class Monitor:
    """The monitored barriers of one group."""

    def __init__(self, store: dist.Store, meshes: Sequence[_core.Mesh], rank: int, size: int) -> None:
        self._store = dist.PrefixStore("monitored_barrier", store)
        self._meshes = meshes
        self._rank = rank
        self._size = size

    def barrier(self, timeout: timedelta, wait_all_ranks: bool) -> None:
        """Wait for all ranks. Raises: MonitoredBarrierTimeout naming ranks, on every rank that came."""
        limit_ms = int(timeout.total_seconds() * 1000)
        deadline = time.monotonic() + timeout.total_seconds()
        if self._rank == 0:
            self._lead(deadline, limit_ms, wait_all_ranks)
            return
        arrival = secrets.token_hex(8)  # distinguishes this arrival from one that timed out
        here, answer = f"here/{self._rank}", f"answer/{self._rank}/{arrival}"
        self._store.set(here, arrival)
        is_answered = self._wait_for(answer, deadline)
        result = self._store.get(answer).decode() if is_answered else f"no answer within {limit_ms} ms"
        self._store.delete_key(answer if is_answered else here)
        if result != _OK:
            raise MonitoredBarrierTimeout(
                f"Rank {self._rank} successfully reached monitoredBarrier, but received errors while waiting for "
                f"send/recv from rank 0: {result}. Please check rank 0 logs for faulty rank."
            )

    def _lead(self, deadline: float, limit_ms: int, wait_all_ranks: bool) -> None:
        missing: list[int] = []
        arrivals: dict[int, str] = {}
        if time.monotonic() >= deadline:
            raise MonitoredBarrierTimeout(f"[Rank 0]: Rank 0 timed out in monitoredBarrier after {limit_ms} ms")
        for rank in range(1, self._size):
            here = f"here/{rank}"
            if self._wait_for(here, deadline):
                arrivals[rank] = self._store.get(here).decode()
                self._store.delete_key(here)
            else:
                missing.append(rank)
                if not wait_all_ranks:
                    break
        result = _OK
        if missing:
            ranks = f"Rank {missing[0]}" if len(missing) == 1 else f"Ranks {', '.join(map(str, missing))}"
            result = f"[Rank 0]: {ranks} failed to pass monitoredBarrier in {limit_ms} ms"
        for rank, arrival in arrivals.items():
            self._store.set(f"answer/{rank}/{arrival}", result)
        if missing:
            raise MonitoredBarrierTimeout(result)

    def _wait_for(self, key: str, deadline: float) -> bool:
        pause = 0.0005
        while not self._store.check([key]):
            if time.monotonic() > deadline or any(mesh.lost() is not None for mesh in self._meshes):
                return bool(self._store.check([key]))
            time.sleep(pause)
            pause = min(pause * 2, 0.02)
        return True
