"""Peers of SwapFile in the bench; a peer that is not here is skipped with its reason."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, Protocol

from swap.deepspeed_peer import DeepSpeed
from swap.fio import Fio


class Peer(Protocol):
    def tune(self, what: str, file: str, keep: Callable[[dict[str, object]], None]) -> dict[str, Any]:
        """Find its best flags for write, read or mixed; each trial is kept as a record."""

    def seconds(self, what: str, nbytes: int, tensor_nbytes: int, file: str) -> float:
        """Return the seconds of one pass; `file` has been written once and may be overwritten."""

    def close(self) -> None: ...


def open_peers(arguments: argparse.Namespace) -> tuple[dict[str, Peer], dict[str, str]]:
    makers: dict[str, Callable[[], Peer]] = {
        "fio": lambda: Fio(arguments.size, arguments.sweep),
        "deepspeed": lambda: DeepSpeed(max(arguments.size, arguments.batch_total), arguments.deepspeed_python),
    }
    opened, skipped = {}, {}
    for name in arguments.peers:
        try:
            opened[name] = makers[name]()
        except (OSError, RuntimeError) as error:
            skipped[name] = str(error)
    return opened, skipped
