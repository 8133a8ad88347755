"""End of a default group's store: where rank 0 serves it, the other ranks leave ``destroy_process_group()`` after it.

torch's next ``init_process_group`` connects to the store that answers at the port. In the store of the group before,
ranks find old values, and lose the store when rank 0 destroys that group. So each rank holds one more connection, on
which nothing is sent: its end is the end of the store. A file, or a store that torchrun's agent serves, does not end
with the group, and is not waited for.
Thread rule: as the group's ``shutdown``.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from typing import Any

import torch.distributed as dist

LEFT = "left"  # key: rank 0 has destroyed its group
_CONNECT_S = 5.0
_LOOK_S = 0.05
_RELEASE_S = 0.3  # from rank 0's word to the end of the store, unless the program holds the store


class StoreEnd:
    """One rank's part in the end of a store. A forked child has no part: the connections are its parent's."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        server = _served_by_rank_0(store)
        self._store = store if server is not None else None
        self._rank = rank
        self._pid = os.getpid()
        self._line: socket.socket | None = None
        if server is not None and rank != 0:
            with contextlib.suppress(OSError):  # then it is not waited for
                self._line = socket.create_connection((server.host, server.port), _CONNECT_S)
                self._line.setblocking(False)

    def announce(self) -> None:
        """Tell the others, as rank 0, that this rank is about to release the store."""
        if self._store is not None and self._rank == 0 and os.getpid() == self._pid:
            with contextlib.suppress(dist.DistError):
                self._store.set(LEFT, "1")

    def wait(self, seconds: float) -> None:
        """Wait until the store has ended, for ``seconds`` at most: rank 0 may be busy with something else."""
        if self._line is None or self._store is None or os.getpid() != self._pid:
            return
        until, has_left = time.monotonic() + seconds, False
        with selectors.DefaultSelector() as selector:
            selector.register(self._line, selectors.EVENT_READ)
            while (left_s := until - time.monotonic()) > 0:
                if selector.select(min(_LOOK_S, left_s)) and _has_ended(self._line):
                    return
                if not has_left and self._is_announced():
                    has_left, until = True, min(until, time.monotonic() + _RELEASE_S)

    def close(self) -> None:
        """Release the store. Idempotent."""
        self._store = None
        if self._line is not None:
            self._line.close()
            self._line = None

    def _is_announced(self) -> bool:
        try:
            return self._store is None or self._store.check([LEFT])
        except dist.DistError:
            return True


def _served_by_rank_0(store: Any) -> Any:
    """Return the TCPStore of a group's store if a rank serves it."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, dist.TCPStore) else None


def _has_ended(line: socket.socket) -> bool:
    try:
        return line.recv(1) == b""
    except OSError as error:
        return not isinstance(error, BlockingIOError)
