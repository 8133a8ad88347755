"""Bytes between hosts, inside of a host and in memory for each way to cut stage 3 over the ranks of several hosts.

One way is over all ranks. HSDP and MiCS cut it over the ranks of one host or of some hosts, and have equal copies. hpZ
cuts weights over the ranks of a host, and state over all. Counts are of one rank and one optimizer step. Sums between
hosts are fp32.
Pure arithmetic. Source: ZeRO++ (arXiv:2306.10209), MiCS (arXiv:2205.00119); docs/clusters.md derives the counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

_SUM_NBYTES = 4  # of a partial sum between hosts


@dataclass(frozen=True)
class Cluster:
    """Hosts with equally many ranks each. shared: ranks of a host have one copy of its weights, as CPU ranks do."""

    hosts: int
    per_host: int
    shared: bool

    @property
    def world_size(self) -> int:
        return self.hosts * self.per_host


@dataclass(frozen=True)
class Cut:
    """A way to cut stage 3. shard: ranks that have a whole model together; replicate: equal copies of it.

    hpz: weights are cut over ``shard`` ranks, gradients and state over all.
    """

    replicate: int
    shard: int
    hpz: bool = False

    @property
    def state_ranks(self) -> int:
        """The ranks among which gradients and optimizer state are divided between steps."""
        return self.shard * (self.replicate if self.hpz else 1)

    def sum_ranks(self, micro_steps: int) -> int:
        """Return the ranks among which sums of gradients are divided. With hpZ sums of several micro-steps wait for the
        last one before they leave the host."""
        return self.shard if micro_steps > 1 else self.state_ranks

    def __str__(self) -> str:
        if self.hpz:
            return f"hpZ, weights over {self.shard}"
        if self.replicate == 1:
            return "over all ranks"
        return f"replicate={self.replicate}, shard={self.shard}"


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends in a step: to other hosts, and to ranks of its own."""

    across_nbytes: float
    inside_nbytes: float


def cuts(cluster: Cluster, hpz: bool = False) -> Iterator[Cut]:
    """Yield the ways to cut stage 3: over all ranks, then over fewer and fewer hosts, one at last. hpz: and hpZ."""
    hosts, per_host = cluster.hosts, cluster.per_host
    for of_shard in range(hosts, 0, -1):
        if hosts % of_shard == 0:
            yield Cut(hosts // of_shard, of_shard * per_host)
    if hpz and hosts > 1 and per_host > 1:
        yield Cut(hosts, per_host, hpz=True)


def traffic(
    cut: Cut, cluster: Cluster, numel: int, weight_nbytes: int, gradient_nbytes: int, micro_steps: int = 1
) -> Traffic:
    """Return the bytes of a step. weight_nbytes, gradient_nbytes: of an element, gradients as they travel in a host.

    Each micro-step gathers all weights for forward and for backward, and sums all gradients inside of the shard group.
    Sums go to the other copies once, in the last micro-step, and return as complete sums (hpZ: as new weights).
    """
    hosts, per_host = cluster.hosts, cluster.per_host
    of_shard = cut.shard // per_host  # hosts of a shard group
    gathers = 2 * micro_steps * weight_nbytes
    sums = micro_steps * _SUM_NBYTES
    within = (of_shard - 1) / cut.shard * (gathers + sums)
    copies = hosts // of_shard
    back = weight_nbytes if cut.hpz else _SUM_NBYTES
    between = (copies - 1) / (copies * cut.shard) * (_SUM_NBYTES + back)
    in_host = gathers * (not (cluster.shared and of_shard == 1)) + micro_steps * gradient_nbytes
    return Traffic(numel * (within + between), numel * in_host * (per_host - 1) / per_host)
