"""Jobs of this user, from their ranks' pages: the ranks, and which of them keep the others waiting.

Pure except for reading pages and /proc. ``frame`` returns a job as plain data, ``findings`` its troubles in words.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zcomm.machine.process import Process, stat_of
from zcomm.watch.page import SUFFIX, TIERS, Drive, Head, PageError, Record, read_page

_SLOW_SHARE = 0.1  # of a step that the others wait for a rank, and more than
_SLOW_S = 1e-3
_STUCK_S, _STUCK_STEPS = 5.0, 10.0
_ALIVE_S = 10.0  # limit of a page's age for a process in another namespace: it writes once a second or more
_ENDED = ("ended", "failed", "dead")


@dataclass(frozen=True)
class Rank:
    """A rank. state: "running", "stopped" (by a signal), "ended", "failed", or "dead": ended without a record."""

    head: Head
    record: Record
    state: str


@dataclass(frozen=True)
class Job:
    """The ranks of one job on this host, in their order. ``name``: of rank 0's script."""

    job: str
    ranks: list[Rank]

    @property
    def head(self) -> Head:
        """The head of the first rank."""
        return self.ranks[0].head

    @property
    def is_running(self) -> bool:
        """True while a rank's process runs that has not ended its job."""
        return any(rank.state not in _ENDED for rank in self.ranks)


def read_jobs(folder: Path | None, now: float | None = None) -> list[Job]:
    """Read all jobs, those that began last first. Files that are no pages are left out."""
    found: dict[str, list[Rank]] = {}
    for path in folder.glob(f"*{SUFFIX}") if folder is not None else ():
        try:
            head, record = read_page(path)
        except (PageError, OSError):
            continue
        found.setdefault(head.job, []).append(Rank(head, record, state_of(head, record, now)))
    jobs = [Job(job, sorted(ranks, key=lambda rank: rank.head.rank)) for job, ranks in found.items()]
    return sorted(jobs, key=lambda job: -max(rank.head.started_at for rank in job.ranks))


def state_of(head: Head, record: Record, now: float | None = None) -> str:
    """Return the state of a rank: as written, unless its process contradicts it. now: seconds since 1970."""
    if record.state != "running":
        return record.state if record.state in _ENDED else "dead"
    if head.space != Process.own().space:  # of a container, or before this boot: no process to look at
        return "running" if (time.time() if now is None else now) - record.updated_at < _ALIVE_S else "dead"
    try:
        fields = stat_of(head.pid)
    except OSError:
        return "dead"
    if fields[0] in "ZX" or fields[19] != head.started:
        return "dead"
    return "stopped" if fields[0] in "Tt" else "running"


def choose(jobs: Sequence[Job], wanted: str | None) -> list[Job]:
    """Return the jobs that ``wanted`` names: by the begin of the job's name, by a pid or by the script's name.

    None: all that run, or else the last one.
    """
    if wanted is None:
        return [job for job in jobs if job.is_running] or list(jobs[:1])
    exact = [job for job in jobs if job.job == wanted or any(str(rank.head.pid) == wanted for rank in job.ranks)]
    return exact or [job for job in jobs if job.job.startswith(wanted) or job.head.name == wanted]


# --- findings in a job ----------------------------------------------------------------------------------------------


def findings(job: Job, now: float) -> list[str]:
    """Return one sentence for each rank that has failed, died or stopped, or keeps the others waiting."""
    found = [text for rank in job.ranks if (text := _state_words(rank, now))]
    missing = sorted(set(range(job.head.world_size)) - {rank.head.rank for rank in job.ranks})
    if missing:
        names = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        found.append(
            f"{_ranks(len(missing))} {names} of {job.head.world_size} have no page here: on other hosts, or gone"
        )
    slow = slowest(job.ranks)
    if slow is not None:
        rank, waited_s, step_s = slow
        found.append(
            f"rank {rank} is slow: the others wait {time_words(waited_s)} of each step of {time_words(step_s)} for it"
        )
    late = stuck(job.ranks, now)
    if late is not None:
        waiting, since_s, ranks = late
        names = ", ".join(f"rank {rank.head.rank} ({_place(rank.record)})" for rank in ranks)
        found.append(
            f"rank {waiting.head.rank} waits since {time_words(since_s)} {_place(waiting.record)}, for {names}"
        )
    return found


def _state_words(rank: Rank, now: float) -> str:
    name, record = f"rank {rank.head.rank} (pid {rank.head.pid})", rank.record
    last = f"last seen {time_words(now - record.updated_at)} ago {_place(record)}"
    if rank.state == "failed":
        return f"{name} has failed: {record.message}"
    if rank.state == "dead":
        return f"{name} is dead: its process is gone and has not left the job; {last}"
    if rank.state == "stopped":
        return f"{name} is stopped by a signal, {last}; kill -CONT {rank.head.pid} lets it go on"
    return ""


def _place(record: Record) -> str:
    inside = f"in {record.operation}() " if record.operation else ""
    return f"{inside}at {record.site}" if record.site else inside.strip() or "outside of the program's own lines"


def per_step(rank: Rank) -> dict[str, float] | None:
    """Return seconds of a step by part: the mean of the last steps; None before there are two."""
    record = rank.record
    if record.recent_steps < 1 or not record.recent_wall_s > 0:
        return None
    wall, comm, swap = (
        getattr(record, name) / record.recent_steps for name in ("recent_wall_s", "recent_comm_s", "recent_swap_s")
    )
    return {"step_s": wall, "compute_s": max(0.0, wall - comm - swap), "comm_s": comm, "swap_s": swap}


def slowest(ranks: Sequence[Rank]) -> tuple[int, float, float] | None:
    """Return the rank that the others wait for, how long they wait for it in a step, and the step's seconds.

    Communication itself takes all ranks as long. So the wait beyond the least wait of any rank is a wait for that rank.
    None if it is less than a tenth of a step.
    """
    parts = {rank.head.rank: each for rank in ranks if (each := per_step(rank)) is not None}
    if len(parts) < 2:
        return None
    least = min(parts, key=lambda rank: parts[rank]["comm_s"])
    others = [each["comm_s"] for rank, each in parts.items() if rank != least]
    waited_s = statistics.median(others) - parts[least]["comm_s"]
    step_s = statistics.median(each["step_s"] for each in parts.values())
    return (least, waited_s, step_s) if waited_s > max(_SLOW_S, _SLOW_SHARE * step_s) else None


def stuck(ranks: Sequence[Rank], now: float) -> tuple[Rank, float, list[Rank]] | None:
    """Return a rank that waits in one operation for long, the seconds since, and the ranks that do not communicate."""
    there = [rank for rank in ranks if rank.state in ("running", "stopped")]
    waiting = [rank for rank in there if rank.record.phase == "communication" and rank.state == "running"]
    elsewhere = [rank for rank in there if rank not in waiting]
    if not waiting or not elsewhere:
        return None
    first = min(waiting, key=lambda rank: rank.record.since)
    since_s = now - first.record.since
    steps = [each["step_s"] for rank in ranks if (each := per_step(rank)) is not None]
    return (first, since_s, elsewhere) if since_s > max(_STUCK_S, _STUCK_STEPS * max(steps, default=0.0)) else None


# --- a job as data --------------------------------------------------------------------------------------------------


def frame(job: Job, now: float) -> dict[str, Any]:
    """Return a job as plain data for JSON; unknown numbers are None. Seconds and bytes; rates are of the last steps."""
    slow = slowest(job.ranks)
    head = job.head
    return {
        "job": job.job,
        "name": head.name,
        "host": head.host,
        "backend": head.backend,
        "command": head.command,
        "world_size": head.world_size,
        "running": job.is_running,
        "age_s": now - head.started_at,
        "slowest_rank": None if slow is None else slow[0],
        "ranks": [_rank_data(rank, job.ranks, slow, now) for rank in job.ranks],
        "findings": findings(job, now),
    }


def _rank_data(rank: Rank, ranks: Sequence[Rank], slow: tuple[int, float, float] | None, now: float) -> dict[str, Any]:
    record, parts = rank.record, per_step(rank)
    least = min((each["comm_s"] for other in ranks if (each := per_step(other)) is not None), default=0.0)
    waits = parts is not None and slow is not None and slow[0] != rank.head.rank
    return {
        "rank": rank.head.rank,
        "pid": rank.head.pid,
        "local_rank": rank.head.local_rank,
        "state": rank.state,
        "message": record.message,
        "step": int(record.step),
        "loss": _known(record.loss),
        "step_s": parts and parts["step_s"],
        "compute_s": parts and parts["compute_s"],
        "communication_s": parts and min(least, parts["comm_s"]),
        "waiting_s": parts and parts["comm_s"] - min(least, parts["comm_s"]),
        "waits_for": slow[0] if waits and slow is not None else None,
        "swap_s": parts and parts["swap_s"],
        "memory": {tier: _known(nbytes) for tier, nbytes in zip(TIERS, record.memory, strict=True)},
        "slots": {tier: _known(nbytes) for tier, nbytes in zip(TIERS, record.slots, strict=True)},
        "plan": {tier: _known(nbytes) for tier, nbytes in zip(TIERS, record.plan, strict=True)},
        "link_gbps": _rate(record.recent_link_nbytes, record.recent_wall_s),
        "drives": [_drive_data(drive) for drive in record.recent_drives],
        "phase": record.phase,
        "operation": record.operation,
        "site": record.site,
        "place_age_s": (now if rank.state in ("running", "stopped") else record.updated_at) - record.since,
        "updated_s": now - record.updated_at,
    }


def _drive_data(drive: Drive) -> dict[str, Any]:
    return {
        "path": drive.path,
        "read_gbps": _rate(drive.read_nbytes, drive.read_s),
        "write_gbps": _rate(drive.written_nbytes, drive.write_s),
    }


def _rate(nbytes: float, seconds: float) -> float | None:
    return nbytes / seconds / 1e9 if seconds > 0 else None


def _known(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _ranks(count: int) -> str:
    return "rank" if count == 1 else "ranks"


def time_words(seconds: float) -> str:
    """Return a time for reading: "12 ms", "3.4 s", "5 min", "2 h"."""
    seconds = max(0.0, seconds)
    for limit, factor, unit in ((0.9995, 1e3, "ms"), (119.5, 1.0, "s"), (7170.0, 1 / 60, "min")):
        if seconds < limit:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds / 3600:.3g} h"
