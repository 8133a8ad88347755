"""Supervisor of the nodes of a job: of the programs that start them, one per node (ssh) or one for all.

Each node judges its own ranks and reports their ends; the first failure on any node ends all of them. A node without a
report has failed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
from dataclasses import replace
from pathlib import Path

from zcomm.launch import processes
from zcomm.launch.failure_report import RankEnd
from zcomm.launch.output import Stream, write_all
from zcomm.launch.payload import Payload, end_of
from zcomm.launch.records import Records
from zcomm.launch.runners import Client, Options, clients
from zcomm.launch.supervisor import Child, Supervisor
from zcomm.watch.rank import REPORT

# Lines of pdsh, and of ssh that pdsh or mpirun has started; mpirun of MPICH goes on without the node.
_LOST = re.compile(r"pdsh@\S*: (?P<host>\S+): ssh exited with exit code (?P<code>[1-9][0-9]*)$")
_UNREACHED = re.compile(
    r"((ssh: (connect to host|Could not resolve hostname)|Connection (closed|reset) by) |(?P<user>[^\s@]+@))"
    r"(?P<host>[^\s:]+)(?(user): Permission denied|[\s:])"
)
_MORE_GRACE_S = 1.0  # than the nodes allow their ranks
_PIPE_NBYTES = 1 << 16  # capacity of a pipe; a longer message needs more


class NodeSupervisor(Supervisor):
    """Supervisor of the nodes of one job. Use once."""

    def __init__(self, payload: Payload, options: Options) -> None:
        super().__init__(replace(payload.job, grace_s=payload.job.grace_s + _MORE_GRACE_S))
        self._payload = payload
        self._options = options
        self._clients: list[Client] = []
        self._begun: set[str] = set()  # nodes that have reported that they start their ranks
        self._codes: dict[str, int] = {}  # of the nodes that have reported their end
        folder = payload.job.environment.get(REPORT)
        self._records = Records(Path(folder)) if folder else None

    def _start(self, private: Path) -> None:
        self._private = private
        self._clients = clients(self._payload, self._options)
        for number, client in enumerate(self._clients):
            if self._signals:
                return
            orders = client.message is not None
            child = self._spawn(
                number,
                client.argv,
                {**os.environ, **client.environment},
                self._stream,
                takes_orders=orders,
                parting=signal.SIGKILL if orders else client.polite,  # mpirun and srun clear up on other hosts
            )
            if child.process.stdin and client.message is not None:
                if len(client.message) >= _PIPE_NBYTES:
                    fcntl.fcntl(child.process.stdin, fcntl.F_SETPIPE_SZ, 1 << 20)
                os.set_blocking(child.process.stdin.fileno(), False)
                self._order(child, client.message)

    def _stream(self, pipe: int, target: int) -> Stream:
        return Stream(pipe, target, alone=True, sieve=self._sieve if target == 2 else None)

    def _sieve(self, line: bytes) -> list[bytes]:
        """Remove a node's report from a line of stderr; text before it was an unterminated line."""
        if self._payload.launcher != "ssh":
            self._look_for_lost(line.decode("utf-8", "replace").strip())
        before, marker, content = line.partition(self._payload.marker)
        if not marker:
            return [line]
        self._hear(content)
        return [before + b"\n"] if before else []

    def _look_for_lost(self, line: str) -> None:
        """Record the end of a node that the launcher's stderr names; the launcher itself may wait for the others."""
        code = 255
        if lost := _LOST.match(line):
            code = int(lost["code"])
        elif not (lost := _UNREACHED.match(line)) or lost["host"] in self._begun:
            return
        host = lost["host"]
        if host in self._payload.nodes and host not in self._codes and not self._is_ending:
            self._codes[host] = code
            self._record(RankEnd(-1, 0, code, node=host, program="ssh", message=line))

    def _hear(self, content: bytes) -> None:
        """Process a node's report; ignore a broken one, so that its node counts as silent."""
        try:
            told = json.loads(content)
            if "begin" in told:
                self._begun.add(str(told["begin"]))
            elif "end" in told:
                self._record(end_of(told["end"]))
            elif "records" in told and self._records is not None:
                self._records.add(told)
            elif "done" in told:
                self._codes[str(told["done"])] = int(told["code"])
            elif "error" in told:
                host = str(told["node"])
                self._codes[host] = code = int(told["code"])
                self._record(RankEnd(-1, 0, code, node=host, program="node", message=str(told["error"])))
        except OSError as error:
            self._records = None  # the report names ranks without records
            write_all(2, f"{self._job.announce}: --report: {error}\n".encode())
        except (ValueError, KeyError, TypeError):
            pass

    def _ended(self, child: Child, code: int, peak_nbytes: int) -> None:
        client = self._clients[child.number]
        silent = [host for host in client.hosts if host not in self._codes]
        bad = [host for host in client.hosts if self._codes.get(host)]
        explained = not silent and (any(end.failed for end in self._ends) or (code == 0 and not bad))
        if explained or child.signalled:
            return
        one = client.hosts[0] if len(client.hosts) == 1 else ""
        end = RankEnd(-1, child.process.pid, code or 1, node=one, program=client.name)
        if code == 0:
            without = "without a report" + ("" if one else f" of {', '.join(silent[:8])}")
            why = without if silent else f"node {bad[0]} with status {self._codes[bad[0]]}"
            end.message = f"{client.name} ended with status 0, but {why}"
        tail = list(child.streams[-1].tail)
        end.stderr_tail = tail[-1:] if one else tail
        self._record(end)

    def _judge(self) -> tuple[int, list[str]]:
        code, lines = super()._judge()
        elastic = self._job.elastic
        if elastic is not None and self._ended_by_signal is None and list(self._codes.values()).count(0) >= elastic[0]:
            return 0, lines
        return code, lines

    def _order(self, child: Child, line: bytes) -> None:
        if child.process.stdin and not child.process.stdin.closed:
            with contextlib.suppress(BrokenPipeError, BlockingIOError):  # it has ended, or reads nothing any more
                os.write(child.process.stdin.fileno(), line + b"\n")

    def _ask(self, child: Child, signum: int) -> None:
        client = self._clients[child.number]
        if child.process.stdin:
            self._order(child, processes.signal_name(signum).encode())
        elif self._ended_by_signal is not None or not client.ends_all:
            processes.send(child.process.pid, client.polite)

    def _insist(self, child: Child) -> None:
        """Close the node's standard input, so that it kills its ranks; later end the program itself."""
        child.orders += 1
        if child.orders == 1 and child.process.stdin:
            child.process.stdin.close()
        else:
            processes.send(child.process.pid, signal.SIGTERM if child.orders <= 2 else signal.SIGKILL)
