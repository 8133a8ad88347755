"""Hosts on one machine: network namespaces joined by virtual cables, for tests of jobs between hosts.

`networks(hosts)` makes namespaces that see each other through two bridged networks, "fast0" and "slow0". If it cannot
(no root, no `ip`, no namespaces), it skips the test with the reason. `enter` moves a rank into one of them.
In the end the namespaces are deleted, and their cables with them.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

_CLONE_NEWNET = 0x40000000
_numbers = itertools.count()


@dataclass(frozen=True)
class Networks:
    """Host h has address 10.231.77.(h + 1) on slow0, 10.231.78.(h + 1) and fd00:231::(h + 1) on fast0."""

    names: tuple[str, ...]

    def slow(self, host: int) -> str:
        return f"10.231.77.{host + 1}"

    def fast(self, host: int) -> str:
        return f"10.231.78.{host + 1}"

    def fast6(self, host: int) -> str:
        return f"fd00:231::{host + 1}"

    def cut(self, host: int) -> None:
        """Pull both cables of a host."""
        for cable in ("slow0", "fast0"):
            _ip("-n", self.names[host], "link", "set", cable, "down")


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20)
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@contextlib.contextmanager
def networks(hosts: int) -> Iterator[Networks]:
    """Connect hosts by two networks: bridges in a namespace of their own."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if shutil.which("ip") is None:
        pytest.skip("`ip` is not installed (Debian: iproute2)")
    tag = f"zc{os.getpid()}n{next(_numbers)}"
    made = Networks(tuple(f"{tag}h{host}" for host in range(hosts)))
    switch = f"{tag}s"
    everything = [*made.names, switch]
    try:
        for name in everything:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        for cable in ("slow0", "fast0"):
            _ip("-n", switch, "link", "add", cable, "type", "bridge")
            _ip("-n", switch, "link", "set", cable, "up")
        for host, name in enumerate(made.names):
            for cable, addresses in (("slow0", [made.slow(host)]), ("fast0", [made.fast(host), made.fast6(host)])):
                plug = f"{cable[0]}{host}"
                _ip("-n", name, "link", "add", cable, "type", "veth", "peer", "name", plug, "netns", switch)
                _ip("-n", switch, "link", "set", plug, "master", cable, "up")
                for address in addresses:
                    size, extra = ("64", ["nodad"]) if ":" in address else ("24", [])
                    _ip("-n", name, "address", "add", f"{address}/{size}", "dev", cable, *extra)
                _ip("-n", name, "link", "set", cable, "up")
            _ip("-n", name, "route", "add", "default", "dev", "slow0")
    except (RuntimeError, OSError) as error:
        _delete(everything)
        pytest.skip(f"no network namespaces here: {error}")
    try:
        yield made
    finally:
        _delete(everything)


def _delete(names: list[str]) -> None:
    for name in names:
        with contextlib.suppress(RuntimeError):
            _ip("netns", "delete", name)


def enter(name: str) -> None:
    """Move this thread, and processes that it starts, into a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns {name}")
