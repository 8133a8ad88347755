"""send and recv of device tensors: staged through host memory, in the order of streams. The host plays the device.

test_cuda_ipc.py and test_nccl.py use real devices.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import zcomm
from backend_calls import any_source, message_mismatch, messages, messages_on_device
from thread_world import thread_world
from zcomm.comm import p2p
from zcomm.comm.cuda_streams import Streams


class PlayedStreams(Streams):
    """Streams are names; a log records waits."""

    stream = "ours"
    log: list[tuple[str, str]]

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.log = []

    def current(self) -> Any:
        return self.stream

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self.stream = self.stream, stream
        yield
        self.stream = before

    def record(self) -> Any:
        return f"event of {self.stream}"

    def wait(self, event: Any) -> None:
        self.log.append((self.stream, event))

    def page_locked(self, like: torch.Tensor) -> torch.Tensor:
        memory = torch.empty(like.shape, dtype=like.dtype)
        return memory.fill_(float("nan")) if like.is_floating_point() else memory


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> PlayedStreams:
    """Every communicator treats its tensors as device tensors."""
    streams = PlayedStreams()
    monkeypatch.setattr(p2p, "streams_of", lambda device: streams)
    return streams


def in_world(world: int, folder: Path, body: Callable[[zcomm.Communicator], None]) -> None:
    def run(joined: Any) -> None:
        comm = zcomm.Communicator(joined)
        try:
            body(comm)
        finally:
            comm.close()

    thread_world(world, folder, run)


@pytest.mark.parametrize("check", [messages, messages_on_device, any_source, message_mismatch])
def test_values_and_errors(check: Callable[[zcomm.Communicator], None], tmp_path: Path, played: PlayedStreams) -> None:
    in_world(3, tmp_path, check)


def test_a_send_takes_what_is_there_and_a_receive_lands_when_it_is_waited_for(
    tmp_path: Path, played: PlayedStreams
) -> None:
    def body(comm: zcomm.Communicator) -> None:
        other, tensor = 1 - comm.rank, torch.full((50_000,), float(comm.rank))
        got = torch.zeros(50_000)
        receiving = comm.recv(got, other, async_op=True)
        sending = comm.send(tensor, other, async_op=True)
        assert sending is not None
        tensor.fill_(-1.0)  # it has been copied already
        sending.wait()
        while not receiving.done():
            pass
        assert got.eq(0.0).all()
        receiving.wait()
        assert receiving.source == other and got.eq(other).all()
        got.fill_(3.0)
        receiving.wait()
        assert got.eq(3.0).all(), "landed again"

    in_world(2, tmp_path, body)


def test_it_lands_on_the_stream_that_waits_after_that_of_the_call(tmp_path: Path, played: PlayedStreams) -> None:
    def body(comm: zcomm.Communicator) -> None:
        if comm.rank == 1:
            for value in range(3):
                comm.send(torch.full((9,), float(value)), 0)
            return
        got = torch.zeros(9)
        comm.recv(got, 1)
        assert got.eq(0.0).all() and played.log == [("ours", "event of ours")]
        work = comm.recv(got, 1, async_op=True)
        with played.on("another"):
            work.wait()
        assert got.eq(1.0).all() and played.log[1:] == [("another", "event of ours")]
        with played.on("the caller's"):
            work = comm.recv(got, 1, async_op=True)
        del work  # without a wait
        assert got.eq(2.0).all() and played.log[2:] == [("the caller's", "event of the caller's")]

    in_world(2, tmp_path, body)


def test_a_receive_that_fails_lands_nowhere(tmp_path: Path, played: PlayedStreams) -> None:
    def body(comm: zcomm.Communicator) -> None:
        if comm.rank == 1:
            with pytest.raises(zcomm.CollectiveMismatch):
                comm.send(torch.ones(50_000), 0)
            comm.barrier()
            return
        got = torch.zeros(49_999)
        work = comm.recv(got, 1, async_op=True)
        with pytest.raises(zcomm.CollectiveMismatch, match="49999"):
            work.wait()
        del work
        assert got.eq(0.0).all() and played.log == []
        comm.barrier()

    in_world(2, tmp_path, body)


def test_memory_of_the_host_is_locked_for_a_device_only() -> None:
    assert p2p.streams_of("cpu") is None
    streams = p2p.streams_of("cuda:1")
    assert streams is not None and streams.device == torch.device("cuda", 1)
