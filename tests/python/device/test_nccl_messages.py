"""send and recv of backend nccl, over a stand-in for NCCL: ranks are threads, and their devices are simulated."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import simulated
import zcomm
import zcomm_testing
from backend_calls import any_source, message_mismatch, messages
from backend_values import raises
from thread_world import thread_world


@pytest.fixture(name="nccl")
def _nccl() -> Iterator[zcomm_testing.FakeNccl]:
    nccl = zcomm_testing.FakeNccl()
    before = nccl.complaints
    yield nccl
    gc.collect()
    assert nccl.complaints == before  # standard error has them


def in_world(
    world: int, nccl: zcomm_testing.FakeNccl, folder: Path, body: Callable[[zcomm.Communicator], Any], **times: Any
) -> list[Any]:
    def run(joined: Any) -> Any:
        device = simulated.device(joined.core.rank + 1, 0.0002)
        comm = zcomm.Communicator(simulated.over_nccl(nccl, joined, device, messages=True))
        try:
            return body(comm)
        finally:
            comm.close()

    return thread_world(world, folder, run, **times)


@pytest.mark.parametrize("check", [messages, any_source, message_mismatch])
def test_values_and_errors(
    check: Callable[[zcomm.Communicator], None], nccl: zcomm_testing.FakeNccl, tmp_path: Path
) -> None:
    in_world(3, nccl, tmp_path, check)


def test_parts_come_from_nccls_own_split(nccl: zcomm_testing.FakeNccl, tmp_path: Path) -> None:
    def body(comm: zcomm.Communicator) -> None:
        first = torch.ones(1000)
        comm.all_reduce(first)  # the split waits for it
        part = comm.split(7 if comm.rank != 1 else None, -comm.rank)
        if part is not None:
            assert part.rank == (3 - comm.rank if comm.rank else 2)
            got = torch.full((100,), float(comm.rank))
            part.all_reduce(got)
            assert got.eq(5).all()
            inner = part.split(0)
            assert inner is not None
            inner.all_reduce(got)
            assert got.eq(15).all()
            inner.close()
            part.close()
        assert first.eq(4).all()

    in_world(4, nccl, tmp_path, body)
    assert nccl.made == (4, 6)


def test_parts_have_messages_too(nccl: zcomm_testing.FakeNccl, tmp_path: Path) -> None:
    def body(comm: zcomm.Communicator) -> None:
        part = comm.split(comm.rank % 2)
        assert part is not None
        got = torch.zeros(30_000)
        sending = part.send(torch.full((30_000,), float(comm.rank)), 1 - part.rank, async_op=True)
        assert part.recv(got) == 1 - part.rank
        sending.wait()
        assert got.eq((comm.rank + 2) % 4).all()
        part.close()
        comm.barrier()

    in_world(4, nccl, tmp_path, body)


def test_a_communicator_of_an_optimizer_has_none(nccl: zcomm_testing.FakeNccl, tmp_path: Path) -> None:
    def run(joined: Any) -> None:
        comm = zcomm.Communicator(simulated.over_nccl(nccl, joined, simulated.device(1, 0.0)))
        raises(NotImplementedError, "without messages", lambda: comm.send(torch.ones(1), 1 - comm.rank))
        comm.close()

    thread_world(2, tmp_path, run)
