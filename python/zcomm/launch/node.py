"""``python -m zcomm.launch.node MESSAGE [HOST]``: start a node's part of the ranks, for a front on another host.

MESSAGE is a Payload; "-": the first line of standard input; "@": the variable ZCOMM_NODE_PAYLOAD. HOST names this node
if the launcher's variables do not. With "-", each further line of standard input is the name of a signal for the
ranks, and EOF means that the front has ended. The ends of the ranks are reported as marked lines of stderr.
Exit code: as of `zcomm run`.
Invariant: when the front, the launcher or the connection ends, the ranks end.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import stat
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from zcomm.launch import processes
from zcomm.launch.environment import PAYLOAD, of_launcher
from zcomm.launch.failure_report import RankEnd
from zcomm.launch.front import launch
from zcomm.launch.job import Job
from zcomm.launch.output import ReaderGone, write_all
from zcomm.launch.payload import Payload, end_line, report_line
from zcomm.launch.records import record_lines, written_here
from zcomm.launch.supervisor import Supervisor

_ORDERS = {b"SIGINT": signal.SIGINT, b"SIGTERM": signal.SIGTERM, b"SIGHUP": signal.SIGHUP}
_BEAT_S = 5.0
_FLUSH_S = 0.2  # for a report to pass mpirun or srun, which end all processes when this one fails


class Agent(Supervisor):
    """Supervisor of a node's ranks. orders: bytes already read from standard input; None: it carries no orders.

    beats: write a line periodically, so that sshd detects a broken network or an ended client.
    """

    def __init__(self, job: Job, marker: bytes, orders: bytes | None, beats: bool) -> None:
        super().__init__(job)
        self._marker = marker
        self._orders = orders
        self._beat_at = time.monotonic() + _BEAT_S if beats else None

    def refuse(self, message: str) -> None:
        """Report why nothing could be started."""
        tell_error(self._marker, self._job.place.host if self._job.place else "", message, 126)

    def _start(self, private: Path) -> None:
        place = self._job.place
        assert place is not None
        self._private, self._job = private, written_here(self._job, private)
        write_all(2, report_line(self._marker, {"begin": place.host}))
        if self._orders is not None:
            self._take(b"")
            self._selector.register(0, selectors.EVENT_READ, self._read_orders)
        self._watch = select.epoll()
        for descriptor in (1, 2):
            mode = os.fstat(descriptor).st_mode
            if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
                self._watch.register(descriptor, 0)  # events 0: only for errors and hang-up, which epoll always reports
        self._selector.register(self._watch.fileno(), selectors.EVENT_READ, self._front_is_gone)
        super()._start(private)

    def _read_orders(self) -> bool:
        content = os.read(0, 4096)
        if content:
            self._take(content)
        elif self._ended_by_signal is None:
            self._signals.append(signal.SIGTERM)
        else:
            self._kill_at = time.monotonic()  # the front has waited long enough
        return bool(content)

    def _take(self, content: bytes) -> None:
        *lines, self._orders = ((self._orders or b"") + content).split(b"\n")
        self._signals += [_ORDERS[line] for line in lines if line in _ORDERS]

    def _front_is_gone(self) -> bool:
        if self._ended_by_signal is None:
            self._signals.append(signal.SIGTERM)
        return False

    def _deadlines(self) -> list[float | None]:
        return [*super()._deadlines(), self._beat_at]

    def _act_on_deadlines(self) -> None:
        super()._act_on_deadlines()
        if self._beat_at is not None and time.monotonic() >= self._beat_at:
            self._beat_at = time.monotonic() + _BEAT_S
            write_all(2, report_line(self._marker, {"alive": True}))

    def _record(self, end: RankEnd) -> None:
        super()._record(end)
        place = self._job.place
        write_all(2, end_line(self._marker, replace(end, node=place.host if place else "")))

    def _conclude(self) -> int:
        code, _ = self._judge()
        assert self._job.place is not None
        with contextlib.suppress(ReaderGone):
            with contextlib.suppress(OSError):  # the report names ranks without records
                for line in record_lines(self._marker, self._private):
                    write_all(2, line)
            write_all(2, report_line(self._marker, {"done": self._job.place.host, "code": code}))
        if code and self._orders is None:
            time.sleep(_FLUSH_S)
        return code


def tell_error(marker: bytes, host: str, message: str, code: int = 2) -> None:
    """Report why a node starts nothing. code: its exit code."""
    with contextlib.suppress(ReaderGone):
        write_all(2, report_line(marker, {"error": message, "node": host, "code": code}))
    time.sleep(_FLUSH_S)


def main(arguments: Sequence[str] | None = None) -> int:
    """Start this node's ranks and return the exit code."""
    processes.die_with_parent(os.getppid(), signal.SIGTERM)
    signal.signal(signal.SIGUSR1, lambda _number, _frame: os.kill(os.getpid(), signal.SIGTERM))  # srun passes it on
    text, *rest = sys.argv[1:] if arguments is None else arguments
    orders: bytes | None = None
    if text == "-":
        text, orders = _first_line()
    elif text == "@":
        text = os.environ.pop(PAYLOAD, "")
    try:
        payload = Payload.decode(text)
    except ValueError as error:
        print(f"zcomm: {error}", file=sys.stderr)
        return 2
    host = rest[0] if rest else None
    try:
        node = payload.node_of(host, os.environ)
        host = list(payload.nodes)[node]
        job = payload.job_of(node, os.environ)
        os.chdir(payload.cwd)
    except OSError as error:
        tell_error(payload.marker, host or "", f"the folder {payload.cwd} of the front is not there ({error.strerror})")
        return 2
    except ValueError as error:
        tell_error(payload.marker, host or os.uname().nodename, str(error))
        return 2
    for name in [name for name in os.environ if of_launcher(name)]:
        del os.environ[name]
    return launch(job, Agent(job, payload.marker, orders, beats=payload.launcher in ("ssh", "pdsh")))


def _first_line() -> tuple[str, bytes]:
    """Return the first line of standard input, and the bytes read after it."""
    content = b""
    while b"\n" not in content and (piece := os.read(0, 1 << 16)):
        content += piece
    line, _, rest = content.partition(b"\n")
    return line.decode("ascii", "replace"), rest


if __name__ == "__main__":
    sys.exit(main())
