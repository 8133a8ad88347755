"""A cable of a known rate between two ranks, each in its own network namespace. Needs root, `ip` and `tc`.

The rate bounds transfers over it, not memory, so the ranks of this machine are like two hosts of a cluster. The
namespaces are deleted at the end, and the cable with them. Source: tc-tbf(8), veth(4).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field

MTU = 9000
BURST = "256kb"  # bytes sent at once: some 0.2 ms at 10 Gbit/s
QUEUE = "50ms"


@dataclass(frozen=True)
class Link:
    names: tuple[str, str]
    env: dict[str, str] = field(default_factory=lambda: {"MASTER_ADDR": _address(0)})

    def command(self, rank: int) -> list[str]:
        """Return the words before the program of a rank."""
        return ["ip", "netns", "exec", self.names[rank]]


def _address(rank: int) -> str:
    return f"10.231.79.{rank + 1}"


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


@contextlib.contextmanager
def link(gbit: float) -> Iterator[Link]:
    """Link two ranks, ``gbit`` Gbit/s each way. Raises: OSError with the message of `ip` or `tc`."""
    names = (f"zcb{os.getpid()}a", f"zcb{os.getpid()}b")
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        _run(*f"ip -n {names[0]} link add link0 mtu {MTU} type veth peer name link0 netns {names[1]}".split())
        for rank, name in enumerate(names):
            _run(*f"ip -n {name} link set lo up".split())
            _run(*f"ip -n {name} link set link0 mtu {MTU} up".split())
            _run(*f"ip -n {name} address add {_address(rank)}/24 dev link0".split())
            shape = f"rate {round(1e3 * gbit)}mbit burst {BURST} latency {QUEUE}"
            _run(*f"tc -n {name} qdisc add dev link0 root tbf {shape}".split())
        yield Link(names)
    finally:
        for name in names:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                _run("ip", "netns", "delete", name)
