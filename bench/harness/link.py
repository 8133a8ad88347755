"""A cable of a known rate between two hosts: network namespaces with one rank or several. Needs root, `ip` and `tc`.

The rate bounds transfers over it, not memory, so the namespaces of this machine are like two hosts of a cluster. A
delay needs the kernel's sch_netem; without it the Link has a note and no delay. The namespaces are deleted at the end,
and the cable with them. Source: tc-tbf(8), tc-netem(8), veth(4), proc_net(5).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

INTERFACE = "link0"
MTU = 9000
BURST = "256kb"  # bytes sent at once: some 0.2 ms at 10 Gbit/s
QUEUE = "50ms"


@dataclass(frozen=True)
class Link:
    """Two linked hosts. names: of the namespaces. per_host: ranks in each; ranks 0 to per_host - 1 are in the first."""

    names: tuple[str, str]
    per_host: int = 1
    delay_note: str = ""  # the reason if the delay that was asked for is missing
    env: dict[str, str] = field(default_factory=lambda: {"MASTER_ADDR": address_of(0), "GLOO_SOCKET_IFNAME": INTERFACE})

    def command(self, rank: int) -> list[str]:
        """Return the words before the program of a rank."""
        return ["ip", "netns", "exec", self.names[rank // self.per_host]]


def address_of(host: int) -> str:
    """Return a host's address on the cable."""
    return f"10.231.79.{host + 1}"


def sent_nbytes(interface: str = INTERFACE) -> int:
    """Return the bytes that this process's host has sent over the cable, with the headers of their packets."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    raise OSError(f"this host has no interface {interface}")


def why_not() -> str:
    """Return the missing requirements as text; "" if a link can be created."""
    if os.geteuid() != 0:
        return "a link needs root, for network namespaces"
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    return f"{' and '.join(missing)} not found (Debian: iproute2)" if missing else ""


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=20)
    if done.returncode != 0:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")


def _delay(name: str, delay_us: float) -> str:
    """Delay packets that leave a namespace; return the reason if that is not possible, else ""."""
    try:
        # The limit, in packets, is far above the packets of one delay; the default of netem is 1000.
        shape = f"delay {delay_us:g}us limit 1000000"
        _run(*f"tc -n {name} qdisc add dev {INTERFACE} parent 1:1 handle 2: netem {shape}".split())
    except OSError as error:
        return f"{delay_us:g} us not applied, netem: {str(error).splitlines()[0].rpartition(': ')[2].rstrip('.')}"
    return ""


@contextlib.contextmanager
def link(gbit: float, per_host: int = 1, delay_us: float = 0.0) -> Iterator[Link]:
    """Link two hosts, ``gbit`` Gbit/s each way. Raises: OSError with the message of `ip` or `tc`."""
    names = (f"zcb{os.getpid()}a", f"zcb{os.getpid()}b")
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        _run(
            *f"ip -n {names[0]} link add {INTERFACE} mtu {MTU} type veth peer name {INTERFACE} netns {names[1]}".split()
        )
        note = ""
        for host, name in enumerate(names):
            _run(*f"ip -n {name} link set lo up".split())
            _run(*f"ip -n {name} link set {INTERFACE} mtu {MTU} up".split())
            _run(*f"ip -n {name} address add {address_of(host)}/24 dev {INTERFACE}".split())
            shape = f"rate {round(1e3 * gbit)}mbit burst {BURST} latency {QUEUE}"
            _run(*f"tc -n {name} qdisc add dev {INTERFACE} root handle 1: tbf {shape}".split())
            note = _delay(name, delay_us) if delay_us > 0 else ""
        yield Link(names, per_host, note)
    finally:
        for name in names:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                _run("ip", "netns", "delete", name)
