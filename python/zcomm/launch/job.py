"""A job to start: the ranks of one program on this host."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Job:
    """Ranks to start on this host.

    argv: command line of every rank. environment: variables set on top of the caller's and below the launcher's own.
    prefix: start each line with "[rank]". inherit_stdout: ranks write to the caller's stdout themselves (a progress bar
    needs the terminal). tee: directory that also gets rank<r>.out and rank<r>.err. once: a line of stderr that several
    ranks write is shown once. only_rank: show the output of this rank alone; None: of all. announce: name at the
    start of each line that the launcher itself writes.
    """

    argv: list[str]
    world_size: int
    environment: dict[str, str] = field(default_factory=dict)
    prefix: bool = True
    inherit_stdout: bool = False
    tee: Path | None = None
    once: bool = False
    only_rank: int | None = None
    announce: str = "zcomm run"
    settle_s: float = 1.5  # time to end by themselves after the first failure
    grace_s: float = 5.0  # time between SIGTERM (or Ctrl-C) and SIGKILL
