"""Nodes of a job: lines of a hostfile, and the hosts and slots that are chosen of them. Pure functions.

A hostfile has a line "HOST slots=N" per host. A slot is a GPU of the host, by number, and runs one rank.
Invariant: a host name that these functions return is safe as an argument of ssh, pdsh, mpirun and srun.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

DEFAULT = Path("/job/hostfile")  # read if it exists and no other is named
Pool = dict[str, list[int]]
"""Hosts in the order of their ranks, each with its slots."""

_NAME = re.compile(r"[A-Za-z0-9_.:][A-Za-z0-9_.:-]*")
_LINE = re.compile(r"(?P<host>\S+)\s+slots=(?P<slots>[0-9]+)(\s+max[-_]slots=[0-9]+)?\s*(#.*)?", re.ASCII)
_MOST_SLOTS = 4096


def check_host(host: str) -> str:
    """Return ``host``. Raises: ValueError if it is not a host name or an address, or could be read as an option."""
    if not _NAME.fullmatch(host):
        raise ValueError(f"{host!r} is not a host name; expected letters, digits, '.', '-' and '_', or an IP address")
    if ":" in host:
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise ValueError(f"{host!r} is neither a host name nor an IPv6 address; --ssh_port takes a port") from None
    return host


def parse(lines: Iterable[str], name: str = "hostfile") -> dict[str, int]:
    """Return the number of slots of each host.

    name: of the file, for errors. Raises: ValueError with file, number and text of the line that cannot be right.
    """
    found: dict[str, int] = {}
    number_of: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        where = f"{name}, line {number}: {text!r}"
        match = _LINE.fullmatch(text)
        if match is None:
            raise ValueError(f"{where} is not a line of a hostfile; expected HOST slots=N")
        try:
            host = check_host(match["host"])
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        slots = int(match["slots"][:9])
        if not 1 <= slots <= _MOST_SLOTS:
            raise ValueError(f"{where}: slots={match['slots']} is not a number of slots; expected 1 to {_MOST_SLOTS}")
        if host in found:
            raise ValueError(f"{where}: host {host} is in line {number_of[host]} already")
        found[host], number_of[host] = slots, number
    if not found:
        raise ValueError(f"{name}: no host in it; expected lines HOST slots=N")
    return found


def read(path: Path) -> dict[str, int]:
    """Return the number of slots of each host of a file. Raises: OSError; ValueError as ``parse``."""
    try:
        return parse(path.read_text(encoding="utf-8").split("\n"), str(path))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a text file ({error})") from None


def slots_of(counts: Mapping[str, int]) -> Pool:
    """Return the slots, 0 to N - 1, of hosts with N of them."""
    return {host: list(range(count)) for host, count in counts.items()}


def choose(pool: Mapping[str, Sequence[int]], include: str = "", exclude: str = "") -> Pool:
    """Return the hosts and slots of ``pool`` that are included, or not excluded, in the order of ``pool``.

    include, exclude: HOST[:SLOT,SLOT...][@HOST...]; a host without slots means all of them.
    Raises: ValueError naming the missing host or slot.
    """
    if include and exclude:
        raise ValueError("--include and --exclude exclude each other")
    if not include and not exclude:
        return {host: list(slots) for host, slots in pool.items()}
    named: dict[str, set[int]] = {}
    for part in (include or exclude).split("@"):
        host, slots = _host_and_slots(part, pool)
        named.setdefault(host, set()).update(slots)
    if include:
        return {host: sorted(named[host]) for host in pool if host in named}
    left = {host: [slot for slot in slots if slot not in named.get(host, ())] for host, slots in pool.items()}
    return {host: slots for host, slots in left.items() if slots}


def _host_and_slots(part: str, pool: Mapping[str, Sequence[int]]) -> tuple[str, list[int]]:
    if part in pool:  # an IPv6 address has colons of its own
        return part, list(pool[part])
    host, colon, text = part.rpartition(":")
    if not colon:
        host = part
    if host not in pool:
        raise ValueError(f"{part!r}: no such host; there are {_shortened(list(pool))}")
    numbers = text.split(",")
    if not all(number.isascii() and number.isdecimal() for number in numbers):
        raise ValueError(f"{part!r}: expected HOST:SLOT,SLOT... with slots as numbers")
    slots = [int(number) for number in numbers]
    for slot in slots:
        if slot not in pool[host]:
            raise ValueError(f"{part!r}: host {host} has no slot {slot}; it has {_shortened(pool[host])}")
    return host, slots


def limit(pool: Mapping[str, Sequence[int]], num_nodes: int = -1, num_gpus: int = -1) -> Pool:
    """Return the first ``num_nodes`` hosts and the first ``num_gpus`` slots of each; -1: all.

    Raises: ValueError if there are not as many.
    """
    for word, value in (("--num_nodes", num_nodes), ("--num_gpus", num_gpus)):
        if value != -1 and value < 1:
            raise ValueError(f"{word} {value}: expected at least 1")
    if num_nodes > len(pool):
        raise ValueError(f"--num_nodes {num_nodes}: there are {len(pool)} hosts, {_shortened(list(pool))}")
    chosen = dict(list(pool.items())[: num_nodes if num_nodes > 0 else None])
    for host, slots in chosen.items():
        if num_gpus > len(slots):
            raise ValueError(f"--num_gpus {num_gpus}: host {host} has {len(slots)} slots")
    return {host: list(slots[: num_gpus if num_gpus > 0 else None]) for host, slots in chosen.items()}


def _shortened(values: Sequence[object], most: int = 8) -> str:
    shown = [str(value) for value in values[:most]]
    return ", ".join(shown) + (f" and {len(values) - most} more" if len(values) > most else "")
