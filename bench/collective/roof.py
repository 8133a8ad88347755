"""The roof: speed of the machine at the same moment with as many bytes as the operation cannot avoid to move.

Memory: all ranks at once copy those bytes (half are read, half are written), with the C library's memcpy and with
non-temporal stores. The faster counts. A pass in place is timed, too, and is not a roof. It writes lines that it has
just read, which of all operations only an all_reduce on symmetric memory does. Device (CUDA tensors): the same copy on
each rank's device, all at once: 2N bytes of device memory per rank for an all_reduce. Sockets (backend tcp): all ranks
at once send and receive the bytes of a ring, over raw sockets (bench/cpp).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from collective.operations import Operation

if TYPE_CHECKING:
    import torch

Roofs = dict[str, Callable[[], object]]


def memory_roof(operation: Operation, nbytes: int, world: int, library: ctypes.CDLL | None) -> tuple[Roofs, Roofs]:
    """Return roofs, and other copies to time.

    All read n bytes and write n, n = half of the bytes that the operation must move;
    "streaming_copy" needs the library of bench/cpp.
    """
    import numpy

    source = numpy.zeros(max(1, int(nbytes * operation.memory_factor(world) / 2)), dtype=numpy.uint8)
    target = numpy.zeros_like(source)
    words = source[: source.size // 4 * 4].view(numpy.float32)
    roofs: Roofs = {"memcpy": lambda: numpy.copyto(target, source)}
    if library:
        to, start = target.ctypes.data, source.ctypes.data
        roofs["streaming_copy"] = lambda: library.zcomm_bench_streaming_copy(to, start, source.size)
    return roofs, {"in_place": lambda: numpy.negative(words, out=words)} if words.size else {}


def device_roof(operation: Operation, nbytes: int, world: int, device: torch.device) -> Roofs:
    import torch

    source = torch.zeros(max(1, int(nbytes * operation.memory_factor(world) / 2)), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return {"device_copy": lambda: target.copy_(source)}


def ring_nbytes(operation: Operation, nbytes: int, world: int) -> int:
    """Return the bytes that each rank sends, and receives, at least."""
    return int(nbytes * operation.bus_factor(world))


class SocketRoof:
    """Raw sockets between ring neighbours; see bench/cpp/socket_ring.hpp. Collective."""

    def __init__(self, library: ctypes.CDLL, sockets: int, rank: int, world: int, gather_ports: Any) -> None:
        self._library, self._world = library, world
        port = ctypes.c_int()
        self._ring = library.zcomm_bench_ring_listen(ctypes.byref(port))
        ports = gather_ports(port.value)
        array = (ctypes.c_int * world)(*ports)
        if not self._ring or library.zcomm_bench_ring_connect(self._ring, rank, world, sockets, array):
            raise OSError("the socket roof could not connect its sockets over loopback")

    def calls(self, nbytes: int) -> Roofs:
        def run(threads: int) -> None:
            if self._library.zcomm_bench_ring_run(self._ring, nbytes, threads):
                raise OSError("the socket roof lost a socket")

        return {"sockets_1_thread": lambda: run(1), "sockets_2_threads": lambda: run(2)}

    def close(self) -> None:
        if self._ring:
            self._library.zcomm_bench_ring_close(self._ring)
            self._ring = None
