"""Devices that reach each other, in processes that number them differently (CUDA_VISIBLE_DEVICES)."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

import zcomm
from thread_world import thread_world
from zcomm import _core
from zcomm.backends import devices
from zcomm.bootstrap.join import Joined

A, B, C = (f"{number:032x}" for number in (10, 11, 12))


@pytest.mark.parametrize(
    ("seen", "own", "peers", "wanted"),
    [
        (([A, B], [A, B]), (0, 1), True, True),
        (([A, B], [A, B]), (0, 1), False, False),
        (([A, B], [A, B]), (0, 0), False, True),  # one device for both
        (([A], [B]), (0, 0), True, False),  # the same number of different devices; neither process sees the other's
        (([A, B], [B, A]), (0, 0), True, True),
        (([A, B], [B, A]), (0, 1), False, True),  # again one device
        (([A, B, C], [C]), (2, 0), False, True),
        (([A, B], [B]), (0, 0), True, (True, False)),
    ],
)
def test_devices_are_known_by_what_they_are(
    seen: tuple[list[str], ...],
    own: tuple[int, ...],
    peers: bool,
    wanted: bool | tuple[bool, bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = threading.local()
    asked: set[tuple[str, str]] = set()

    def access(index: int, other: int) -> bool:
        asked.add((seen[here.rank][index], seen[here.rank][other]))
        return peers

    monkeypatch.setattr(_core, "cuda_uuids", lambda: seen[here.rank])
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", access)

    def body(joined: Joined) -> bool:
        comm = zcomm.Communicator(joined)
        here.rank = comm.rank
        found = devices.reaches_all(comm, own[comm.rank])
        comm.close()
        return found

    found = thread_world(2, tmp_path, body)
    assert found == (list(wanted) if isinstance(wanted, tuple) else [wanted] * 2)
    uuids = [seen[rank][own[rank]] for rank in range(2)]
    assert asked <= {tuple(uuids), tuple(reversed(uuids))}
