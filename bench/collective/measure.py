"""One row: buffers of one size, every variant checked and then timed in turn with the roof and the peers."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import psutil
import torch

import zcomm
from collective import check, roof
from collective.operations import OPERATIONS, TYPES, Call, Operation
from collective.peers import Peer
from harness.library import bench_library_or_none
from harness.timing import MIN_ROUNDS, PERCENTILES, Calls, Timing, interleaved

Gather = Callable[[list[float]], list[list[float]]]


def gather(values: list[float]) -> list[list[float]]:
    """Gather the lists of all ranks, by rank."""
    together = zcomm.all_gather(torch.tensor(values, dtype=torch.float64, device=zcomm.init().device))
    assert isinstance(together, torch.Tensor)
    return together.reshape(zcomm.world_size(), len(values)).tolist()


class Case:
    """One size: buffers of this rank and the calls on them, by variant. Peers work on the private buffers."""

    def __init__(self, arguments: argparse.Namespace, nbytes: int, peers: Mapping[str, Peer]) -> None:
        self.operation: Operation = OPERATIONS[arguments.op]
        self.redop: str = arguments.redop
        self.rank, self.world = zcomm.rank(), zcomm.world_size()
        self.dtype: torch.dtype = getattr(torch, TYPES[arguments.datatype])
        part = self.world if self.operation.parts else 1
        self.count = max(1, nbytes // self.dtype.itemsize // part) * part
        self.nbytes = self.count * self.dtype.itemsize
        self.buffers: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        if "symmetric" in arguments.variants:
            empty = partial(zcomm.empty, dtype=self.dtype)
            self.buffers["symmetric"] = self.operation.buffers(self.count, self.world, empty)
        zeros = partial(torch.zeros, dtype=self.dtype, device=zcomm.init().device)
        private = self.operation.buffers(self.count, self.world, zeros)
        if "private" in arguments.variants:
            self.buffers["private"] = private
        self.calls: dict[str, Call] = {
            name: self.operation.zcomm(zcomm, self.redop, *buffers) for name, buffers in self.buffers.items()
        }
        for name, peer in peers.items():
            call = peer.call(self.operation, self.redop, *private)
            if works_everywhere(call):  # else it lacks this operation, dtype or reduction: a dash in the row
                assert call is not None
                self.buffers[name], self.calls[name] = private, call

    def wrong(self, name: str) -> int:
        """Return the number of elements, over all ranks, that are not the exact result."""
        inp, out = self.buffers[name]
        mine = check.wrong(self.operation, self.redop, inp, out, self.calls[name], self.rank, self.world)
        return int(sum(of_rank[0] for of_rank in gather([mine])))

    def worst_ulp(self) -> dict[str, float]:
        """Return the worst error of each variant over all ranks; empty but for sums by all_reduce in 2-byte dtypes."""
        if not self.operation.reduces_for_all or self.redop != "sum" or self.dtype.itemsize != 2:
            return {}
        worst = {}
        for name, (inp, _) in self.buffers.items():
            mine = check.worst_ulp(inp, self.calls[name], self.rank, self.world)
            worst[name] = max(of_rank[0] for of_rank in gather([mine]))
        return worst

    def clear(self) -> None:
        """Set zeros for the timed calls: a sum in place stays zero instead of growing until it overflows."""
        for pair in self.buffers.values():
            for tensor in pair:
                tensor.zero_()


def works_everywhere(call: Call | None) -> bool:
    try:
        if call is not None:
            call()
        good = call is not None
    except (RuntimeError, ValueError, NotImplementedError, AttributeError):
        good = False
    return min(of_rank[0] for of_rank in gather([float(good)])) > 0


def memory_needed(arguments: argparse.Namespace, nbytes: int) -> float:
    """Return the bytes that all ranks of this host need for one size, roof and peers' own copies included."""
    operation, world = OPERATIONS[arguments.op], zcomm.world_size()
    copies = len({*arguments.variants, "private"}) + (1 if arguments.peers else 0)
    return world * nbytes * (copies * operation.footprint(world) + operation.memory_factor(world))


def fits(arguments: argparse.Namespace, nbytes: int) -> bool:
    device = zcomm.init().device
    mine = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    available = min(of_rank[0] for of_rank in gather([float(mine)]))
    return memory_needed(arguments, nbytes) < 0.9 * available


def measure(
    arguments: argparse.Namespace, nbytes: int, peers: Mapping[str, Peer], sockets: roof.SocketRoof | None
) -> dict[str, Any]:
    """Measure one row, the same on each rank."""
    case = Case(arguments, nbytes, peers)
    wrong = {name: case.wrong(name) if arguments.check else None for name in case.calls}
    ulp = case.worst_ulp() if arguments.check else {}
    case.clear()
    if sockets:
        roofs: Calls = sockets.calls(roof.ring_nbytes(case.operation, case.nbytes, case.world))
        beside: Calls = {}
    elif zcomm.init().device.type == "cuda":
        roofs, beside = roof.device_roof(case.operation, case.nbytes, case.world, zcomm.init().device), {}
    else:
        roofs, beside = roof.memory_roof(case.operation, case.nbytes, case.world, bench_library_or_none())
    settle = torch.cuda.synchronize if zcomm.init().device.type == "cuda" else None
    # Rounds come before calls in a round: their median passes over the machine's noise. Small messages are timed in
    # batches (of 1 MiB at most), since a single call is near the clock's own cost. All calls use the same buffers, so
    # that small sizes are in the caches, as gradients are right after backward.
    rounds = max(MIN_ROUNDS, min(arguments.iters, 21))
    inner = max(-(-arguments.iters // rounds), min(50, (1 << 20) // case.nbytes))
    timings = interleaved(
        {**case.calls, **roofs, **beside}, rounds, inner, arguments.warmup_iters, zcomm.barrier, gather, settle
    )
    row = _row(arguments, case, timings, list(roofs), wrong)
    if ulp:
        row["worst_ulp"] = ulp
    return {**row, "roof": "sockets" if sockets else "memory", "rounds": rounds, "calls_per_round": inner}


def _row(
    arguments: argparse.Namespace,
    case: Case,
    timings: Mapping[str, Timing],
    roofs: list[str],
    wrong: Mapping[str, int | None],
) -> dict[str, Any]:
    """Return the row of the results file: the size and the operation, and by variant (and peer and roof) the figures.

    time_us: medians of the slowest rank; percentiles_us: the same calls. algbw_gbps: nbytes / time; busbw_gbps: that
    times ``Operation.bus_factor``. wrong: elements that are not exact, over all ranks. share_of_roof: time of the
    fastest roof / time. factor_over_peer: time of the peer / time.
    """
    seconds = {name: timing.median for name, timing in timings.items()}
    best = min(seconds[name] for name in roofs)
    bus = case.operation.bus_factor(case.world)
    return {
        "kind": "row",
        "op": case.operation.name,
        "world_size": case.world,
        "backend": arguments.backend,
        "nbytes": case.nbytes,
        "count": case.count,
        "type": arguments.datatype,
        "redop": case.redop if case.operation.reduces else "none",
        "time_us": {name: 1e6 * value for name, value in seconds.items()},
        "percentiles_us": {
            name: {f"p{p}": 1e6 * v for p, v in zip(PERCENTILES, timing.percentiles, strict=True)}
            for name, timing in timings.items()
        },
        "algbw_gbps": {name: case.nbytes / seconds[name] / 1e9 for name in case.calls},
        "busbw_gbps": {name: case.nbytes / seconds[name] / 1e9 * bus for name in case.calls},
        "wrong": dict(wrong),
        "roof_us": 1e6 * best,
        "share_of_roof": {name: best / seconds[name] for name in case.calls},
        "factor_over_peer": {
            peer: {name: seconds[peer] / seconds[name] for name in arguments.variants}
            for peer in arguments.peers
            if peer in seconds
        },
    }
