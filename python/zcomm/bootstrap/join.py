"""Joining: from ranks that know their hosts to a communicator, for a whole job or a part of it.

Joining has two steps. Between them the ranks exchange addresses over an existing channel (a store, or the communicator
that they split). A `Door` holds the listeners that other ranks connect to; `enter` connects and creates the core's
communicator. `JOINERS` maps a backend's name to the module that joins a whole job in another way.
Thread rule: one join per rank and key at a time.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Protocol

from zcomm import _core
from zcomm.bootstrap import hosts as _hosts
from zcomm.bootstrap.auth import Line, Purpose, derive_key
from zcomm.bootstrap.deadlines import Deadlines
from zcomm.bootstrap.hosts import Hosts
from zcomm.bootstrap.tcp import TcpListener, connect_lines, descriptor_limit_named, require_descriptors
from zcomm.machine.process import Process
from zcomm.machine.tuning import Table, Tuning, load

if TYPE_CHECKING:
    import torch

    from zcomm.bootstrap.meeting import Watch

# backend -> module with `join(job, deadlines, generation) -> Joined`; modules of CUDA_BACKENDS accept a device, too.
JOINERS: dict[str, str] = {
    "mpi": "zcomm.backends.mpi.join",
    "nccl": "zcomm.backends.nccl",
    "cuda_ipc": "zcomm.backends.cuda_ipc",
}
CUDA_BACKENDS = ("nccl", "cuda_ipc")
AUTO_ON_CUDA = "zcomm.backends.devices"  # backend "auto" with a CUDA device
_MOST_REASON = 300  # characters of a rank's failure that it sends to the others
OWN_BACKENDS = ("auto", "shm", "tcp", "hierarchical")


class Splittable(Protocol):
    """The part of a communicator's interface that splitting needs (zcomm.comm is above this folder)."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def all_gather(self, shards: torch.Tensor, out: torch.Tensor, *, name: str) -> object:
        """Concatenate the shards of all ranks, in rank order."""


@dataclass(frozen=True)
class Settings:
    """Settings that rank 0 of a job decides for all ranks and all communicators."""

    ring_sockets: int = 4  # in addition to two, between neighbours of a ring over links
    table: Table = field(default_factory=lambda: Table({}, "built in"))

    @staticmethod
    def read() -> Settings:
        """Read the environment and this machine's tuning table. Raises: ValueError naming a variable."""
        return Settings(_hosts.ring_sockets(), load())

    def to_text(self) -> str:
        rows = {kind: asdict(row) for kind, row in self.table.rows.items()}
        return json.dumps({"ring_sockets": self.ring_sockets, "rows": rows, "origin": self.table.origin})

    @staticmethod
    def of_text(text: str) -> Settings:
        told = json.loads(text)
        table = Table({kind: Tuning(**row) for kind, row in told["rows"].items()}, told["origin"])
        return Settings(told["ring_sockets"], table)


@dataclass(frozen=True)
class Joined:
    """Parts of a Communicator."""

    core: _core.Communicator  # or an object with its interface
    hosts: Hosts
    backend: str  # in use: "shm", "tcp", "hierarchical", "mpi", "nccl", "cuda_ipc"
    requested: str  # the backend that split() requests for parts
    deadlines: Deadlines
    key: bytes  # the secret of these ranks
    settings: Settings = field(default_factory=Settings)
    address: str = ""  # of this rank; "" on one host
    meshes: tuple[_core.Mesh, ...] = ()  # left when the communicator is closed
    device: str = "cpu"  # of its tensors
    core_device: _core.Device | None = None  # on which the core allocates symmetric memory, if it does
    messenger: _core.Communicator | None = None  # for send and recv; None: the core
    host: Joined | None = None  # of a device's communicator: the same ranks in host memory
    splitter: Callable[[Splittable, Joined, int | None, int, str], Joined | None] | None = None  # None: zcomm's own
    processes: tuple[Process, ...] = ()  # by rank; empty: unknown
    places: tuple[int, ...] = ()  # by rank: its rank in the job; empty: the same
    watch: Callable[[Callable[[], None]], Watch] | None = None  # Meeting.watch, if the meeting needs one

    def describe(self) -> str:
        """Return one line with the number of ranks, their hosts, and the backend."""
        ranks = self.hosts.world_size
        line = f"{ranks} rank{'s' if ranks > 1 else ''} on {self.hosts.describe()}, backend {self.backend}"
        return f"{line}, {_hosts.interface_of(self.address)} {self.address}" if self.address else line


@dataclass(frozen=True)
class Group:
    """Ranks that join into a communicator, seen from one of them."""

    what: str  # for errors: "init", "split"
    rank: int
    hosts: Hosts
    requested: str
    key: bytes
    deadlines: Deadlines
    settings: Settings

    @property
    def world_size(self) -> int:
        return self.hosts.world_size

    @property
    def beside(self) -> tuple[int, ...]:
        return self.hosts.ranks_beside(self.rank)

    @property
    def backend(self) -> str:
        """Backend that serves the group. Raises: ValueError if the requested backend cannot."""
        hosts, requested = self.hosts, self.requested
        if requested == "shm" and hosts.count > 1:
            raise ValueError(
                f"{self.what}: backend='shm' reaches the ranks of one host, but these are {hosts.describe()} "
                f"(rank {hosts.of_rank.index(1)} is on another host than rank 0); use 'auto' or 'tcp'"
            )
        layered = hosts.count > 1 and hosts.is_even and len(self.beside) > 1
        if requested == "hierarchical" and hosts.count > 1 and not layered:
            raise ValueError(
                f"{self.what}: backend='hierarchical' needs the same number of ranks, two or more, on each host, but "
                f"these are {hosts.describe()}; use 'auto' or 'tcp'"
            )
        if self.world_size == 1 or (hosts.count == 1 and requested != "tcp"):
            return "shm"
        return "hierarchical" if layered and requested != "tcp" else "tcp"


class Door:
    """Listeners that this rank opens for the others of its group before addresses are exchanged, or the failure.

    A failed rank still sends the failure to the others (as ``address``), so that all of them fail in `enter`, at once.
    """

    def __init__(self, group: Group, master: str | None = None, address: str = "") -> None:
        """Open the listeners, or record the failure.

        master: a host that all ranks have a route to. address: this rank's, if it is already known.
        """
        self.unix: _core.Listener | None = None
        self.tcp: TcpListener | None = None
        self.failure: Exception | None = None
        try:
            with descriptor_limit_named(f"{group.what}: rank {group.rank} cannot listen"):
                self._open(group, master, address)
        except Exception as error:
            self.close()
            self.failure = error
        told = [self.unix.address if self.unix else None, self.tcp.endpoint if self.tcp else None]
        why = f"{type(self.failure).__name__}: {self.failure}"[:_MOST_REASON]
        self.address = json.dumps(told if self.failure is None else why)

    def _open(self, group: Group, master: str | None, address: str) -> None:
        lines = [] if group.backend == "shm" else plan_lines(group)
        require_descriptors(f"{group.what}: rank {group.rank}", len(lines) + 4 * (len(group.beside) - 1))
        if group.backend != "tcp":
            self.unix = _core.Listener()
        if group.backend != "shm":
            address = address or _hosts.choose_address(group.hosts.one_machine, master)
            self.tcp = TcpListener(address, _hosts.port_range())

    def close(self) -> None:
        self.unix = None
        if self.tcp is not None:
            self.tcp.close()


def enter(group: Group, door: Door, addresses: Sequence[str], deadline: float) -> Joined:
    """Connect to the others of ``group``, by the addresses of their doors. Collective.

    deadline: by time.monotonic(). Raises: the failure of this rank's door, RuntimeError with the failure of another
    rank's door; TimeoutError naming the missing ranks, PeerLost, OSError.
    """
    if door.failure is not None:
        raise door.failure
    told = [json.loads(address) for address in addresses]
    for rank, each in enumerate(told):
        if isinstance(each, str):
            raise RuntimeError(f"{group.what}: rank {rank} cannot take part: {each}")
    meshes: list[_core.Mesh] = []
    try:
        with descriptor_limit_named(f"{group.what}: rank {group.rank} cannot connect"):
            core = _connect(group, door, told, deadline, meshes)
    except BaseException:
        for mesh in meshes:
            mesh.leave()
        raise
    return Joined(
        core=core,
        hosts=group.hosts,
        backend=group.backend,
        requested=group.requested,
        deadlines=group.deadlines,
        key=group.key,
        settings=group.settings,
        address=door.tcp.endpoint[0] if door.tcp else "",
        meshes=tuple(meshes),
    )


def _connect(
    group: Group, door: Door, addresses: list[tuple[str, list[str | int]]], deadline: float, meshes: list[_core.Mesh]
) -> _core.Communicator:
    """Connect the ranks of ``group`` and create the core's communicator; appends each mesh to ``meshes``."""

    def left_s() -> float:
        return max(0.1, deadline - time.monotonic())

    host_mesh: _core.Mesh | None = None
    if door.unix is not None:
        beside = group.beside
        token = derive_key(group.key, b"host").hex()
        unix_addresses = [addresses[rank][0] for rank in beside]
        local_rank = beside.index(group.rank)
        host_mesh = _core.Mesh.connect(local_rank, len(beside), door.unix, unix_addresses, token, left_s())
        meshes.append(host_mesh)
    if door.tcp is None:
        assert host_mesh is not None
        tuning = group.settings.table.row(group.world_size)
        return _core.Communicator.create(host_mesh, **group.deadlines.as_arguments(), **asdict(tuning))

    lines = plan_lines(group)
    endpoints = [(str(host), int(port)) for _, (host, port) in addresses]
    connected = connect_lines(group.rank, endpoints, lines, door.tcp, derive_key(group.key, b"tcp"), left_s())
    by_rank: list[dict[tuple[Purpose, int], socket.socket]] = [{} for _ in endpoints]
    for line in sorted(connected):
        peer = line.caller if line.caller != group.rank else line.listener
        by_rank[peer][line.purpose, line.number] = connected[line]
    with contextlib.ExitStack() as unowned:  # sockets that the core does not own yet
        for each in connected.values():
            unowned.callback(each.close)
        pairs = [
            (each[Purpose.DATA, 0].detach(), each[Purpose.CONTROL, 0].detach()) if each else (-1, -1)
            for each in by_rank
        ]
        mesh = _core.Mesh.adopt(group.rank, group.world_size, pairs)
        meshes.append(mesh)
        links = [[one.detach() for (purpose, _), one in each.items() if purpose == Purpose.LINK] for each in by_rank]
    if host_mesh is None:
        return _core.Communicator.create_linked(mesh, links, **group.deadlines.as_arguments())
    tuning = group.settings.table.row(len(group.beside))
    return _core.Communicator.create_hierarchical(
        mesh,
        host_mesh,
        list(group.hosts.of_rank),
        links,
        **group.deadlines.as_arguments(),
        slot_nbytes=tuning.slot_nbytes,
        slot_count=tuning.slot_count,
    )


def plan_lines(group: Group) -> list[Line]:
    """List all TCP connections of this rank. Both ends apply the same rule, so that they agree.

    To every rank: data and control. Flat: to every rank two links, and ``ring_sockets`` more to the neighbours of the
    ring of all ranks. Hierarchical: the same among the ranks with this rank's local rank, and one link, for messages,
    to all others.
    """
    rank, hosts = group.rank, group.hosts
    ring = list(range(hosts.world_size))
    if group.backend == "hierarchical":
        ring = [other for other in ring if hosts.local_rank(other) == hosts.local_rank(rank)]
        ring.sort(key=lambda other: hosts.of_rank[other])
    place = ring.index(rank)
    neighbours = {ring[place - 1], ring[(place + 1) % len(ring)]}
    lines = []
    for peer in range(hosts.world_size):
        if peer == rank:
            continue
        pair = max(rank, peer), min(rank, peer)
        links = 1 if peer not in ring else 2 + group.settings.ring_sockets if peer in neighbours else 2
        lines += [Line(*pair, Purpose.DATA), Line(*pair, Purpose.CONTROL)]
        lines += [Line(*pair, Purpose.LINK, number) for number in range(links)]
    return lines
