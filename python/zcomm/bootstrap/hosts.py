"""Hosts: which ranks share memory, and the address at which other hosts reach a rank.

Ranks are on one host if they have the same kernel boot and network namespace (unix sockets reach that far).
``ZCOMM_HOST_ID`` overrides this, so that two "hosts" can be tried on one machine.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

VARIABLES: tuple[tuple[str, str], ...] = (
    ("ZCOMM_HOST_ID", "name of this host: ranks with the same name share memory (default: boot and network namespace)"),
    ("ZCOMM_JOB_ID", "name of this job: ranks that come with another one are refused (default: the launcher's)"),
    ("ZCOMM_HOST_ADDRESS", "address on which this rank is reached from other hosts (default: by the route to rank 0)"),
    ("ZCOMM_SOCKET_IFNAME", "network interface that this address is taken from instead"),
    ("ZCOMM_PORT_RANGE", "LOW-HIGH: ports that this rank may listen on while joining (default: any free one)"),
    ("ZCOMM_TCP_SOCKETS", "more sockets between neighbours of the ring, for bandwidth (default: 4)"),
)

_ELSEWHERE = ("192.0.2.1", "2001:db8::1")  # RFC 5737 and 3849: documentation; a UDP connect sends nothing


def machine_id() -> str:
    """Return an identifier of this kernel boot and network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"


def host_id(env: Mapping[str, str] = os.environ) -> str:
    """Return the identifier that ranks with common memory share: ``ZCOMM_HOST_ID``, or else the machine's."""
    return env.get("ZCOMM_HOST_ID") or machine_id()


def _numbered(names: Iterable[Hashable]) -> tuple[int, ...]:
    """Assign equal numbers to equal names, from 0 in order of first appearance."""
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(name, len(numbers)) for name in names)


@dataclass(frozen=True)
class Hosts:
    """Hosts of the ranks of a communicator, numbered in order of their lowest rank."""

    of_rank: tuple[int, ...]
    machine_of_rank: tuple[int, ...]

    @staticmethod
    def of(hosts: Sequence[Hashable], machines: Sequence[Hashable]) -> Hosts:
        """Build the Hosts from each rank's ``host_id()`` and ``machine_id()``, or numbers of them."""
        return Hosts(_numbered(zip(machines, hosts, strict=True)), _numbered(machines))

    @property
    def world_size(self) -> int:
        return len(self.of_rank)

    @property
    def count(self) -> int:
        return max(self.of_rank) + 1

    @property
    def one_machine(self) -> bool:
        return max(self.machine_of_rank) == 0

    @property
    def is_even(self) -> bool:
        """True if all hosts have the same number of ranks."""
        return len({self.of_rank.count(host) for host in range(self.count)}) == 1

    def ranks_beside(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of ``rank``'s host, in order."""
        return tuple(other for other, host in enumerate(self.of_rank) if host == self.of_rank[rank])

    def local_rank(self, rank: int) -> int:
        return self.ranks_beside(rank).index(rank)

    def local_world_size(self, rank: int) -> int:
        return len(self.ranks_beside(rank))

    def of_ranks(self, ranks: Sequence[int]) -> Hosts:
        """Return the Hosts of a part of the ranks; ``ranks[i]`` becomes rank i."""
        return Hosts.of([self.of_rank[rank] for rank in ranks], [self.machine_of_rank[rank] for rank in ranks])

    def describe(self) -> str:
        """Describe the hosts: "1 host", "2 hosts x 4 ranks" or "3 hosts with 4, 4 and 2 ranks"."""
        if self.count == 1:
            return "1 host"
        counts = [self.of_rank.count(host) for host in range(self.count)]
        if self.is_even:
            return f"{self.count} hosts x {counts[0]} rank{'s' if counts[0] > 1 else ''}"
        shown = [str(count) for count in counts[:8]] + (["..."] if self.count > 8 else [])
        return f"{self.count} hosts with {', '.join(shown[:-1])} and {shown[-1]} ranks"


def choose_address(one_machine: bool, master: str | None, env: Mapping[str, str] = os.environ) -> str:
    """Choose the address on which the other ranks reach this one.

    The first available of:
    - ``ZCOMM_HOST_ADDRESS``
    - the address of ``ZCOMM_SOCKET_IFNAME``
    - loopback, if all ranks are on one machine
    - the source address of the route to ``master`` (a host name or address).
    Raises: ValueError naming an invalid variable, OSError if this machine has no route to other hosts.
    """
    if address := env.get("ZCOMM_HOST_ADDRESS"):
        try:
            return str(ipaddress.ip_address(address))
        except ValueError:
            raise ValueError(f"ZCOMM_HOST_ADDRESS={address}: expected an IPv4 or IPv6 address") from None
    if name := env.get("ZCOMM_SOCKET_IFNAME"):
        return _address_of_interface(name)
    if one_machine:
        return "127.0.0.1"
    for there in (*([master] if master else []), *_ELSEWHERE):
        here = _source_address(there)
        if here is not None and not ipaddress.ip_address(here).is_loopback:
            return here  # loopback: rank 0 looked up its own host, or /etc/hosts says 127.0.1.1
    raise OSError(f"no route from this host to {master or 'anywhere'}; name an interface in ZCOMM_SOCKET_IFNAME")


def _source_address(host: str) -> str | None:
    """Return the source address of packets to ``host``; sends nothing."""
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, where in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(where)
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return None


def _usable_addresses(name: str) -> list[str]:
    """Return an interface's addresses, IPv4 first, without link-local ones, which need a scope unknown to the peer."""
    families = (socket.AF_INET, socket.AF_INET6)
    found = [entry.address for entry in psutil.net_if_addrs().get(name, []) if entry.family in families]
    usable = [address for address in found if "%" not in address and not address.startswith("fe80:")]
    return sorted(usable, key=lambda address: ":" in address)


def _address_of_interface(name: str) -> str:
    interfaces = psutil.net_if_addrs()
    if name not in interfaces:
        raise ValueError(f"ZCOMM_SOCKET_IFNAME={name}: this host has {', '.join(sorted(interfaces))}")
    if addresses := _usable_addresses(name):
        return addresses[0]
    raise ValueError(f"ZCOMM_SOCKET_IFNAME={name}: that interface has no address")


def interface_of(address: str) -> str:
    """Return the name of the interface that has ``address``, or "?"."""
    return next((name for name in psutil.net_if_addrs() if address in _usable_addresses(name)), "?")


def port_range(env: Mapping[str, str] = os.environ) -> range | None:
    """Return the ports that ``ZCOMM_PORT_RANGE`` allows. Raises: ValueError naming the variable."""
    text = env.get("ZCOMM_PORT_RANGE")
    if not text:
        return None
    low, _, high = text.partition("-")
    if not (low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high) <= 65535):
        raise ValueError(f"ZCOMM_PORT_RANGE={text}: expected LOW-HIGH, for example 50000-50100")
    return range(int(low), int(high) + 1)


def ring_sockets(env: Mapping[str, str] = os.environ) -> int:
    """Read ``ZCOMM_TCP_SOCKETS``. Raises: ValueError naming the variable."""
    text = env.get("ZCOMM_TCP_SOCKETS") or "4"
    if not (text.isdecimal() and 1 <= int(text) <= 64):
        raise ValueError(f"ZCOMM_TCP_SOCKETS={text}: expected 1 to 64")
    return int(text)
