"""The alpha-beta model of docs/internals/algorithms.md: each algorithm's time, from a few measured numbers.

It explains a measurement (which term dominates) and warns of one that is far off; it does not replace it. N: bytes of
the larger buffer of a rank; P: ranks. Sources: Hockney 1994 (alpha + N beta); Thakur, Rabenseifner, Gropp 2005.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from collective.operations import OPERATIONS


@dataclass(frozen=True)
class Machine:
    """Numbers of a machine; docs/internals/algorithms.md, section 7 has how each is measured.

    call_s: a call that moves nothing (barrier, median). signal_s: from one rank's store until another rank has seen it.
    memory_bps, cache_bps: bytes per second, reads and writes together, of one rank while all of them copy. The buffers
    are far beyond the last-level cache (memory_bps), or within it (cache_bps). cache_nbytes: last-level cache.
    slot_nbytes: a staging slot.
    link_s, link_bps: start-up of one message between hosts, and bytes per second and direction of one rank.
    """

    call_s: float
    signal_s: float
    memory_bps: float
    cache_bps: float
    cache_nbytes: int
    slot_nbytes: int = 256 << 10
    link_s: float = 0.0
    link_bps: float = math.inf

    def bandwidth(self, footprint: float) -> float:
        """Return the bandwidth of a working set of `footprint` bytes (all ranks).

        It is the cache's, the memory's, or a mix of both by shares.
        """
        cached = min(1.0, self.cache_nbytes / max(1.0, footprint)) if footprint > self.cache_nbytes / 2 else 1.0
        if cached < 0.25:  # a stream much longer than the cache finds nothing of itself there
            cached = 0.0
        return 1.0 / (cached / self.cache_bps + (1.0 - cached) / self.memory_bps)


def symmetric(operation: str, nbytes: float, world: int, machine: Machine) -> float:
    """Predict owner computes, in place on symmetric memory: enter, one pass, done."""
    described = OPERATIONS[operation]
    bandwidth = machine.bandwidth(described.footprint(world) * nbytes * world)
    return machine.call_s + machine.signal_s + described.memory_factor(world) * nbytes / bandwidth


def private(operation: str, nbytes: float, world: int, machine: Machine) -> float:
    """Predict staged slots: the pass over memory, the slots' traffic in the cache, one exposed signal per step."""
    steps = math.ceil(nbytes / machine.slot_nbytes) + 2
    slots = OPERATIONS[operation].slot_factor(world) * nbytes / machine.cache_bps
    return symmetric(operation, nbytes, world, machine) + slots + steps * machine.signal_s


def one_shot(operation: str, nbytes: float, world: int, machine: Machine) -> float:
    """Predict small messages: each rank writes its own line(s) and reads all; enter is the only synchronisation."""
    parts = world if OPERATIONS[operation].reduces_for_all else 1
    return machine.call_s + (1 + parts) * nbytes / machine.cache_bps


def ring(operation: str, nbytes: float, world: int, machine: Machine) -> float:
    """Predict the bandwidth-optimal ring over links, reduce on arrival hidden behind the wire."""
    steps = _passes(operation) * (world - 1)
    return machine.call_s + steps * (machine.link_s + nbytes / world / machine.link_bps)


def halving_doubling(operation: str, nbytes: float, world: int, machine: Machine) -> float:
    """Predict log2 P exchanges of N/2, N/4, ...; all_reduce does them there and back.

    Odd ranks pair up first: one more.
    """
    rounds = math.floor(math.log2(world)) if world > 1 else 0
    power = 1 << rounds
    once = rounds * machine.link_s + nbytes * (power - 1) / power / machine.link_bps
    extra = (machine.link_s + nbytes / machine.link_bps) if power != world else 0.0
    return machine.call_s + _passes(operation) * (once + extra)


def _passes(operation: str) -> int:
    passes = OPERATIONS[operation].ring_passes
    if not passes:
        raise ValueError(f"no ring carries {operation}")
    return passes


def hierarchical(nbytes: float, local: int, hosts: int, machine: Machine) -> float:
    """Predict all_reduce by two levels.

    reduce_scatter inside the host, all_reduce of N/g by each rank with its peers, all_gather inside.
    """
    inside = symmetric("reduce_scatter", nbytes, local, machine) + symmetric("all_gather", nbytes, local, machine)
    return inside + ring("all_reduce", nbytes / local, hosts, machine)


def riding_along(nbytes: float, world: int, machine: Machine) -> float:
    """Predict small data in the messages of the entry: ceil(log2 P) of them, each rank's input to all ranks."""
    rounds = math.ceil(math.log2(world)) if world > 1 else 0
    return machine.call_s + rounds * machine.link_s + world * nbytes / machine.link_bps


def tree_broadcast(nbytes: float, world: int, machine: Machine, segment: float = 1 << 20) -> float:
    """Predict a binomial tree, pipelined by segments: the last leaf waits log2 P hops for the first segment."""
    hops = math.ceil(math.log2(world)) if world > 1 else 0
    segments = max(1, math.ceil(nbytes / segment))
    return machine.call_s + (hops + segments - 1) * (machine.link_s + nbytes / segments / machine.link_bps)


def pairwise_all_to_all(nbytes: float, world: int, machine: Machine) -> float:
    """Predict P-1 exchanges of N/P."""
    return machine.call_s + (world - 1) * (machine.link_s + nbytes / world / machine.link_bps)


def dissemination_barrier(world: int, machine: Machine) -> float:
    return machine.call_s + (math.ceil(math.log2(world)) if world > 1 else 0) * machine.link_s


def best_of_host(operation: str, variant: str, nbytes: float, world: int, machine: Machine) -> float:
    """Predict the best of the host's paths: the one-shot path up to its crossover, else the long one."""
    long = symmetric if variant == "symmetric" else private
    return min(one_shot(operation, nbytes, world, machine), long(operation, nbytes, world, machine))
