"""A job to start: the ranks of one program, on this host or a node's part of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Place:
    """Part of a job on several nodes that one node starts: `count` ranks from `first_rank` on.

    host: name of this node in the hostfile. node, nodes: its number, and the count of nodes. address, port: the meeting
    point of all ranks. job_id: name that all ranks of this job share and no other job has.
    """

    host: str
    node: int
    nodes: int
    first_rank: int
    count: int
    address: str
    port: int
    job_id: str


@dataclass(frozen=True)
class Job:
    """Ranks to start on this host.

    argv: command line of every rank. environment: variables set on top of the caller's and below the launcher's own.
    prefix: start each line with "[rank]". inherit_stdout: ranks write to the caller's stdout themselves (a progress bar
    needs the terminal). tee: directory that also gets rank<r>.out and rank<r>.err. shown: False shows no output of the
    ranks. once: a line of stderr that several ranks write is shown once. only_rank: show only the output of this rank;
    None: of all. announce: name at the start of each line that the launcher itself writes. place: part of the ranks
    that is started here; None: all of them. port: MASTER_PORT of a job on one host; None: a free one. devices: GPUs of
    the ranks that are started here; None: CUDA_VISIBLE_DEVICES is not changed. local_rank_at: index of --local_rank=N
    in argv; None: it is not passed. cores: list such as "0,4-7" that ranks are bound to parts of; "": all usable
    ones; None: ranks are not bound. deepspeed: set CROSS_RANK, CROSS_SIZE and LOCAL_SIZE, too. elastic: fewest and most
    nodes; torchrun starts the ranks, as it starts them again.
    """

    argv: list[str]
    world_size: int
    environment: dict[str, str] = field(default_factory=dict)
    prefix: bool = True
    inherit_stdout: bool = False
    tee: Path | None = None
    shown: bool = True
    once: bool = False
    only_rank: int | None = None
    announce: str = "zcomm run"
    settle_s: float = 1.5  # time to end by themselves after the first failure
    grace_s: float = 5.0  # time between SIGTERM (or Ctrl-C) and SIGKILL
    place: Place | None = None
    port: int | None = None
    devices: tuple[str, ...] | None = None
    local_rank_at: int | None = None
    cores: str | None = None
    deepspeed: bool = False
    elastic: tuple[int, int] | None = None

    @property
    def ranks(self) -> range:
        """Ranks that this host starts."""
        if self.place is None:
            return range(self.world_size)
        return range(self.place.first_rank, self.place.first_rank + self.place.count)

    @property
    def single(self) -> bool:
        """True if the output of only one process is shown, so that its progress bars keep their line."""
        return self.world_size == 1 or self.only_rank is not None
