"""Numbers of the model, measured in the ranks that use them (docs/internals/algorithms.md, section 7)."""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch

import zcomm
from collective import model, roof
from collective.measure import gather
from collective.operations import OPERATIONS
from harness.library import bench_library, bench_library_or_none
from harness.timing import interleaved

_FAR_NBYTES = 64 << 20
_NEAR_NBYTES = 128 << 10


def calibrate(arguments: argparse.Namespace, sockets: roof.SocketRoof | None) -> model.Machine:
    """Measure the numbers, the same on each rank. Collective; about a second."""
    world = zcomm.world_size()

    def seconds(nbytes: int) -> float:
        calls, _ = roof.memory_roof(OPERATIONS["all_reduce"], nbytes, world, bench_library_or_none())
        return min(t.median for t in interleaved(calls, 7, 1, 2, zcomm.barrier, gather).values())

    barrier = interleaved({"barrier": zcomm.barrier}, 7, 100, 20, zcomm.barrier, gather)["barrier"].percentiles[0]
    link_s, link_bps = 0.0, float("inf")
    if sockets:
        calls = sockets.calls(1), sockets.calls(_FAR_NBYTES)
        small, large = (min(t.median for t in interleaved(c, 7, 1, 2, zcomm.barrier, gather).values()) for c in calls)
        link_s, link_bps = small, _FAR_NBYTES / large
    return model.Machine(
        call_s=barrier,
        signal_s=_signal_s(),
        memory_bps=2 * _FAR_NBYTES / seconds(_FAR_NBYTES),
        cache_bps=2 * _NEAR_NBYTES / seconds(_NEAR_NBYTES),
        cache_nbytes=_cache_nbytes(),
        link_s=link_s,
        link_bps=link_bps,
    )


def predict(arguments: argparse.Namespace, machine: model.Machine, variant: str, nbytes: int) -> float | None:
    """Return the predicted seconds; None if the model does not apply (a peer)."""
    world = zcomm.world_size()
    if arguments.backend == "tcp":
        if OPERATIONS[arguments.op].ring_passes:
            ways = [model.ring(arguments.op, nbytes, world, machine), model.riding_along(nbytes, world, machine)]
            if OPERATIONS[arguments.op].reduces_for_all:
                ways.append(model.halving_doubling(arguments.op, nbytes, world, machine))
            return min(ways)
        return None
    return model.best_of_host(arguments.op, variant, nbytes, world, machine)


def _signal_s() -> float:
    """Measure half a round trip of one cache line between ranks 0 and 1.

    It goes through the futex if ranks outnumber cores.
    """
    library = bench_library()
    if isinstance(library, str) or zcomm.world_size() < 2:
        return 0.0
    try:
        line = zcomm.init().shared_empty(64, dtype=torch.int64)  # init: the communicator that there is
    except NotImplementedError:
        return 0.0  # ranks without shared memory
    samples = []
    for _ in range(7):
        zcomm.barrier()
        line[:] = 0
        zcomm.barrier()
        samples.append(library.zcomm_bench_round_trip_s(line.data_ptr(), zcomm.rank(), 200))
        zcomm.barrier()
    return max(of_rank[0] for of_rank in gather([statistics.median(samples)])) / 2


def _cache_nbytes() -> int:
    """Return the last-level cache of CPU 0; 32 MiB if the kernel does not report it."""
    sizes = [p.read_text().strip() for p in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    scale = {"K": 1 << 10, "M": 1 << 20}
    return max((int(s[:-1]) * scale[s[-1]] for s in sizes if s[-1:] in scale), default=32 << 20)
