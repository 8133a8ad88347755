"""Bindings for connections between hosts: meshes over adopted sockets, communicators over links, ranks as threads."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

import pytest
import torch

from zcomm import _core

Pair = tuple[socket.socket, socket.socket]


class Wires:
    """Socket pairs between all ranks of a world of threads."""

    def __init__(self, world_size: int, links: int) -> None:
        self.world_size = world_size
        self.pairs: dict[tuple[int, int], list[Pair]] = {
            (a, b): [socket.socketpair() for _ in range(2 + links)] for a in range(world_size) for b in range(a)
        }

    def take(self, rank: int, peer: int) -> list[int]:
        if rank == peer:
            return [-1, -1]
        side = 0 if rank > peer else 1
        return [pair[side].detach() for pair in self.pairs[max(rank, peer), min(rank, peer)]]


def run_linked(world_size: int, body: Callable[[_core.Communicator], None]) -> None:
    wires = Wires(world_size, links=3)
    failures: list[BaseException] = []

    def rank_main(rank: int) -> None:
        try:
            numbers = [wires.take(rank, peer) for peer in range(world_size)]
            mesh = _core.Mesh.adopt(rank, world_size, [(each[0], each[1]) for each in numbers])
            with contextlib.closing(
                _core.Communicator.create_linked(mesh, [each[2:] for each in numbers], timeout_s=30.0)
            ) as comm:
                body(comm)
            mesh.leave()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for failure in failures:
        raise failure


def spans(tensor: torch.Tensor) -> list[tuple[int, int]]:
    return [(tensor.data_ptr(), tensor.numel())]


@pytest.mark.parametrize("count", [3, 1_000_000])
def test_linked(count: int) -> None:
    def body(comm: _core.Communicator) -> None:
        tensor = torch.full((count,), float(comm.rank + 1))
        comm.all_reduce(spans(tensor), _core.DType.float32, _core.ReduceOp.sum, "", False)
        assert torch.equal(tensor, torch.full((count,), 6.0))
        with pytest.raises(NotImplementedError, match="split"):
            comm.duplicate()

    run_linked(3, body)


def test_mismatch() -> None:
    def body(comm: _core.Communicator) -> None:
        tensor = torch.zeros(4 + comm.rank)
        with pytest.raises(_core.CollectiveMismatch, match=r"count=4.*count=5"):
            comm.all_reduce(spans(tensor), _core.DType.float32, _core.ReduceOp.sum, "", False)

    run_linked(2, body)


def test_bad_sockets() -> None:
    with pytest.raises(ValueError, match="sockets for 1 ranks"):
        _core.Mesh.adopt(0, 2, [(-1, -1)])
    mesh = _core.Mesh.adopt(0, 1, [(-1, -1)])
    with pytest.raises(ValueError, match="links to 2 ranks"):
        _core.Communicator.create_linked(mesh, [[], []])
    with pytest.raises(ValueError, match="the mesh has 1"):
        _core.Communicator.create_hierarchical(mesh, mesh, [0, 1], [[]])
    listener = _core.Listener()
    host_mesh = _core.Mesh.connect(0, 1, listener, [listener.address], "token", 10.0)
    comm = _core.Communicator.create_hierarchical(mesh, host_mesh, [0], [[]])
    comm.barrier("", False)
    comm.close()
