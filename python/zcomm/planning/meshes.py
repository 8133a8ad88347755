"""Bytes between hosts, inside of a host and in memory for each way to cut stage 3 over the ranks of several hosts.

One way is over all ranks. HSDP and MiCS cut it over the ranks of one host or of some hosts, and have equal copies. hpZ
cuts weights over the ranks of a host, and state over all. Counts are of one rank and one optimizer step. Sums between
hosts are fp32, or encoded.
Pure arithmetic. Source: ZeRO++ (arXiv:2306.10209), MiCS (arXiv:2205.00119); docs/clusters.md derives the counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

_SUM_NBYTES = 4  # of a partial sum between hosts, without a codec


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

    hpz: the copies are of the weights only; optimizer state is divided among all ranks.
    """

    replicate: int
    shard: int
    hpz: bool = False

    @property
    def groups(self) -> int:
        """The number of shard groups that divide the state of a shard."""
        return self.replicate if self.hpz else 1

    def __str__(self) -> str:
        if self.hpz:
            return f"hpZ, {self.replicate} x {self.shard}"
        if self.replicate == 1:
            return "over all ranks"
        return f"replicate={self.replicate}, shard={self.shard}"


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends in a step: to other hosts, and to ranks of its own."""

    across_nbytes: float
    inside_nbytes: float


def cuts(cluster: Cluster) -> Iterator[Cut]:
    """Yield the ways to cut stage 3: over all ranks, then over fewer and fewer hosts, one at last, and hpZ on CPUs."""
    hosts, per_host = cluster.hosts, cluster.per_host
    for of_shard in range(hosts, 0, -1):
        if hosts % of_shard == 0:
            yield Cut(hosts // of_shard, of_shard * per_host)
    if hosts > 1 and cluster.shared:
        yield Cut(hosts, per_host, hpz=True)


def errors_nbytes(cut: Cut, cluster: Cluster, numel: int) -> int:
    """Return the bytes that a rank keeps for error feedback of encoded sums between hosts: fp32.

    Copies have the residues of a shard and, unless only state is divided (hpZ), of a part of its sum. A shard group of
    several hosts has one of the sums of each host.
    """
    if cut.replicate == 1:
        return 4 * numel * cluster.hosts // cluster.world_size if cluster.hosts > 1 else 0
    shard = 4 * numel // cut.shard
    return shard if cut.hpz else shard + shard // cut.replicate


def traffic(
    cut: Cut,
    cluster: Cluster,
    numel: int,
    weight_nbytes: float,
    gradient_nbytes: float,
    micro_steps: int = 1,
    gathered: int | None = None,
    sum_nbytes: float = _SUM_NBYTES,
) -> Traffic:
    """Return the bytes of a step. weight_nbytes, gradient_nbytes: of an element, gradients as they travel in a host.
    sum_nbytes: of an element of a sum between hosts; with a codec these are of its encoded elements.

    gathered: weights that a step gathers (``gathered_count``); None: in each micro-step all for forward and all for
    backward, which is an upper bound. Each micro-step sums all gradients in the shard group. In the last one these sums
    go to the other copies, and return as complete ones (hpZ: as new weights).
    """
    hosts, per_host = cluster.hosts, cluster.per_host
    of_shard = cut.shard // per_host  # hosts of a shard group
    gathers = (2 * micro_steps * numel if gathered is None else gathered) * weight_nbytes
    sums = micro_steps * numel * sum_nbytes
    within = (of_shard - 1) / cut.shard * (gathers + sums)
    copies = hosts // of_shard
    back = weight_nbytes if cut.hpz else sum_nbytes
    between = (copies - 1) / (copies * cut.shard) * numel * (sum_nbytes + back)
    in_host = gathers * (not (cluster.shared and of_shard == 1)) + micro_steps * numel * gradient_nbytes
    return Traffic(within + between, in_host * (per_host - 1) / per_host)
