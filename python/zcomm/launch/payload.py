"""Message to the nodes of a job with the ranks of each. It passes through shells, so it is base64 of JSON.

The front writes it, and `node` reads it. All text from a hostfile, a variable or an argument is inside.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zcomm.launch.environment import devices_of
from zcomm.launch.failure_report import RankEnd
from zcomm.launch.hostfile import Pool
from zcomm.launch.job import Job, Place

# Variables by which a launcher numbers its processes: one process per node, in the order of the nodes.
_NODE_VARIABLES = {
    "openmpi": ("OMPI_COMM_WORLD_RANK", "PMIX_RANK"),
    "mpich": ("PMI_RANK", "PMIX_RANK", "PALS_RANKID"),
    "impi": ("PMI_RANK", "PMIX_RANK"),
    "mvapich": ("MV2_COMM_WORLD_RANK", "PMI_RANK"),
    "slurm": ("SLURM_NODEID", "SLURM_PROCID"),
}
_LONGEST_REPORT = 4000  # bytes that a pipe accepts at once, so that reports of several nodes do not mix


@dataclass(frozen=True)
class Payload:
    """Job on several nodes. nodes: hosts and their slots, in order. address, port: where ranks meet. cwd: of the ranks.

    launcher: "ssh", "pdsh", "openmpi", "mpich", "impi", "mvapich" or "slurm". nonce: random name of the job, which
    marks the nodes' reports, too.
    """

    nonce: str
    launcher: str
    cwd: str
    nodes: Pool
    address: str
    port: int
    job: Job

    def encode(self) -> str:
        """Return the message: only letters, digits, "-", "_" and "="."""
        plain = dataclasses.asdict(self) | {"nodes": list(self.nodes.items())}
        if self.job.tee:
            plain["job"]["tee"] = str(self.job.tee)
        return base64.urlsafe_b64encode(json.dumps(plain).encode()).decode()

    @staticmethod
    def decode(text: str) -> Payload:
        """Return the Payload that was encoded. Raises: ValueError."""
        try:
            plain = json.loads(base64.b64decode(text, altchars=b"-_", validate=True))
            job = plain["job"] | {"tee": Path(plain["job"]["tee"]) if plain["job"]["tee"] else None}
            job["elastic"] = tuple(job["elastic"]) if job["elastic"] else None
            return Payload(**{**plain, "nodes": dict(plain["nodes"]), "job": Job(**job)})
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"the front's message cannot be read ({error}); is zcomm of one version?") from None

    @property
    def marker(self) -> bytes:
        """Beginning of a node's report, among lines of stderr."""
        return f"zcomm-node {self.nonce} ".encode()

    def node_of(self, host: str | None, env: Mapping[str, str]) -> int:
        """Return the number of the node that ``host`` names, or the launcher's variables. Raises: ValueError."""
        hosts = list(self.nodes)
        host = host or (env.get("SLURMD_NODENAME") if self.launcher == "slurm" else None)
        if host in hosts:
            return hosts.index(host)
        names = _NODE_VARIABLES.get(self.launcher, ())
        for name in names:
            if name in env:
                number = int(env[name]) if env[name].isdecimal() else -1
                if not 0 <= number < len(hosts):
                    raise ValueError(f"{name}={env[name]} is not the number of one of {len(hosts)} nodes")
                return number
        raise ValueError(
            f"which node is this? {host or ', '.join(names) or self.launcher} does not tell; there are {hosts}"
        )

    def job_of(self, node: int, env: Mapping[str, str]) -> Job:
        """Return the part of the job that a node starts. env: of that node. Raises: ValueError for its slots."""
        host, slots = list(self.nodes.items())[node]
        counts = [len(each) for each in self.nodes.values()]
        place = Place(
            host=host,
            node=node,
            nodes=len(counts),
            first_rank=sum(counts[:node]),
            count=counts[node],
            address=self.address,
            port=self.port,
            job_id=f"zcomm run {self.nonce}",
        )
        return dataclasses.replace(self.job, world_size=sum(counts), place=place, devices=devices_of(slots, env))


def report_line(marker: bytes, content: dict[str, Any]) -> bytes:
    """Return a report of a node as a line."""
    return marker + json.dumps(content).encode() + b"\n"


def end_line(marker: bytes, end: RankEnd) -> bytes:
    """Return the report of a rank's end; of its last lines as many as fit."""
    plain = dataclasses.asdict(end)
    plain["oom_counter"] = str(end.oom_counter) if end.oom_counter else None
    plain["error"] = end.error or ("PeerLost" if end.consequence else "")  # the tail may lack the line with the cause
    plain["message"], plain["exception"] = end.message[:1000], end.exception[:500]
    plain["stderr_tail"] = [line[:300] for line in end.stderr_tail[-10:]]
    while len(line := report_line(marker, {"end": plain})) > _LONGEST_REPORT and plain["stderr_tail"]:
        del plain["stderr_tail"][0]
    return line


def end_of(plain: dict[str, Any]) -> RankEnd:
    """Return the end that a node has reported. Raises: TypeError."""
    counter = plain.get("oom_counter")
    return RankEnd(**plain | {"oom_counter": Path(counter) if counter else None})
