"""Report of the rank that failed first, and why. Pure functions over the supervisor's records.

A rank that ends because another has died (PeerLost) is a consequence, in any order of the kernel's reports.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from zcomm.launch.processes import signal_name
from zcomm.watch.rank import close_page

_CONSEQUENCE = re.compile(r"^(zcomm\.(\S+\.)?)?PeerLost\b")


@dataclass
class RankEnd:
    """End of one rank. code: exit status, or minus the signal. by_launcher: after the launcher's own signal.

    node: host of the rank; "" on one host. program: this is the end of the program that starts or is a whole node
    (ssh, mpirun), not of a rank; "" for a rank.
    """

    rank: int
    pid: int
    code: int
    peak_nbytes: int = 0
    by_launcher: bool = False
    oom_counter: Path | None = None
    stderr_tail: list[str] = field(default_factory=list)
    exception: str = ""  # last line of the traceback that ended its stderr and was shown
    error: str = ""
    message: str = ""
    node: str = ""
    program: str = ""

    @property
    def name(self) -> str:
        """Name of the ended rank or program in messages."""
        where = f"node {self.node}" if self.node else ""
        if self.program:
            return f"{where}: {self.program}" if where else self.program
        return ", ".join(filter(None, (where, f"rank {self.rank}"))) + f" (pid {self.pid})"

    @property
    def failed(self) -> bool:
        """True if this rank ended badly by itself."""
        return self.code != 0 and not self.by_launcher

    @property
    def consequence(self) -> bool:
        """True if this rank ended because another rank was lost."""
        return self.error == "PeerLost" or any(_CONSEQUENCE.match(line) for line in self.stderr_tail)

    @property
    def exit_code(self) -> int:
        """Exit code as in a shell: 128 + signal for a signal."""
        return self.code if self.code >= 0 else 128 - self.code


def leave_last_words(error: str, message: str) -> None:
    """Write `message` as the reason that the launcher will report. A rank calls it before it ends badly.

    error: "UserError" makes `message` the launcher's only line; otherwise the exception's name ("PeerLost").
    No file is written if no launcher asked for it.
    """
    close_page(f"{error}: {message}")
    file = os.environ.get("ZCOMM_ERROR_FILE")
    if file:
        with contextlib.suppress(OSError):  # the launcher has ended, so no process would read it
            Path(file).write_text(json.dumps({"error": error, "message": message}), encoding="utf-8")


def read_last_words(file: Path) -> tuple[str, str]:
    """Return (error, message) that a rank left, or two empty strings."""
    try:
        words = json.loads(file.read_text(encoding="utf-8"))
        return str(words["error"]), str(words["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return "", ""


def first_failure(ends: list[RankEnd]) -> RankEnd | None:
    """Return the failure that the others follow from. `ends` is in the order in which ranks ended."""
    failed = [end for end in ends if end.failed]
    return min(failed, key=lambda end: end.consequence, default=None)  # min keeps the order among equals


def describe(end: RankEnd) -> str:
    """Return one sentence: which rank, how it ended, and why."""
    rank = end.name
    if end.program:
        if end.message:
            return f"{f'node {end.node}' if end.node else end.program}: {end.message}"
        how = f"was killed by {signal_name(-end.code)}" if end.code < 0 else f"ended with status {end.code}"
        return f"{rank} {how}"
    if end.code < 0:
        name = signal_name(-end.code)
        by = ""
        if end.oom_counter:
            by = f": by the kernel's out-of-memory killer (oom_kill in {end.oom_counter} has risen)"
        elif name == "SIGKILL":
            by = ": from outside, no out-of-memory kill was counted"
        return f"{rank} was killed by {name}{by}; its peak memory was {end.peak_nbytes / 2**30:.2f} GiB"
    reason = f": {end.error}: {end.message}" if end.message else f": {end.exception}" if end.exception else ""
    return f"{rank} exited with status {end.code}{reason}"


def report(ends: list[RankEnd], name: str, show_tail: bool = True) -> list[str]:
    """Return the lines for the end of a failed job: the first failure, then its consequences."""
    first = first_failure(ends)
    if first is None:
        return []
    if first.error == "UserError":
        return [f"{name}: error: {first.message}"]
    lines = [f"{name}: {describe(first)}"]
    explained = first.message or (first.exception and first.code > 0)
    if first.program and not explained and len(first.stderr_tail) == 1:
        lines[0] += f": {first.stderr_tail[0]}"
    elif show_tail and not explained and first.stderr_tail:
        lines[0] += "; its last lines on stderr:"
        lines += [f"    {line}" for line in first.stderr_tail[-10:]]
    for end in ends:
        if end is not first and end.by_launcher and end.code != 0:
            reason = f", after {end.error}: {end.message}" if end.message else ""
            lines.append(f"{name}: {end.name} was then ended by the launcher{reason}")
        elif end is not first and end.failed:
            lines.append(f"{name}: then {describe(end)}")
    return lines
