"""End of a default group's store: if rank 0 serves it, the other ranks leave ``destroy_process_group()`` after it.

torch's next ``init_process_group`` connects to the store that answers at the port. In the previous group's store, ranks
would read old values, and lose the store when rank 0 destroys that group. If another rank serves the next store, it
could not listen at the port. So each rank holds one more, silent connection, which ends with the store. The server
closes its connections before its listening socket, so a rank then connects until it is refused. A file, or a store
that torchrun's agent serves, does not end with the group, so ranks do not wait for it.

A store that the program holds outlives its group. torch drops its last reference to the store at the end of
``destroy_process_group()``, after the group's ``shutdown``. If the store still answers then, rank 0 writes _OUTLIVED
into it, and the others wait no longer.
Thread rule: as the group's ``shutdown``.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

_LEFT = "zcomm/left"  # key: rank 0 has begun to destroy its group
_OUTLIVED = "zcomm/outlived"  # key: rank 0 has destroyed its group, and something else holds the store
_CONNECT_S = 5.0
_LOOK_S = 0.05
_STANDS_S = 1.0  # a connection to a server that closes ends sooner; one that stands is to the next group's
RELEASE_S = 5.0  # most time from _LEFT to the end of the store: the program may hold the group's own store object


class StoreEnd:
    """One rank's part in the end of a store. A forked child has no part, because its parent owns the connections."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._server = _served_by_rank_0(store)
        self._rank = rank
        self._pid = os.getpid()
        self._line: socket.socket | None = None
        if self._server is not None:
            self._address = (self._server.host, self._server.port)
            with contextlib.suppress(OSError):  # then it is not waited for
                self._line = socket.create_connection(self._address, _CONNECT_S)
                self._line.setblocking(False)

    def announce(self) -> None:
        """Notify the others, as rank 0, that this rank is about to release the store, and later if it outlives that."""
        if self._server is None or self._rank != 0 or os.getpid() != self._pid:
            return
        with contextlib.suppress(dist.DistError):
            self._server.set(_LEFT, "1")
        if self._line is not None and dist.is_initialized():
            line, self._line = self._line, None
            released = weakref.finalize(c10d._get_default_store(), _tell_outlived, line, self._address, self._pid)
            released.atexit = False  # the process's end is the store's

    def wait(self, seconds: float) -> None:
        """Wait until the store has ended, for ``seconds`` at most: rank 0 may be busy with something else."""
        if self._line is None or self._rank == 0 or os.getpid() != self._pid:
            return
        until, has_left = time.monotonic() + seconds, False
        with selectors.DefaultSelector() as selector:
            selector.register(self._line, selectors.EVENT_READ)
            while (left_s := until - time.monotonic()) > 0:
                if selector.select(min(_LOOK_S, left_s)) and _has_ended(self._line):
                    _wait_until_refused(self._address, until)
                    return
                if self._has(_OUTLIVED):
                    return
                if not has_left and self._has(_LEFT):
                    has_left, until = True, min(until, time.monotonic() + RELEASE_S)

    def close(self) -> None:
        """Release the store. Idempotent."""
        self._server = None
        if self._line is not None:
            self._line.close()
            self._line = None

    def _has(self, key: str) -> bool:
        try:
            return self._server is None or self._server.check([key])
        except dist.DistError:  # it has ended
            return False


def forget_end(store: dist.Store) -> None:
    """Delete, as rank 0, the keys of an earlier group from a store that has outlived it."""
    server = _served_by_rank_0(store)
    if server is not None:
        for key in (_LEFT, _OUTLIVED):
            server.delete_key(key)


def _tell_outlived(line: socket.socket, address: tuple[str, int], pid: int) -> None:
    """Write _OUTLIVED into the store at ``address`` if ``line``, a connection to it, still stands."""
    if os.getpid() == pid and not _has_ended(line):
        with contextlib.suppress(dist.DistError):
            dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=_CONNECT_S)).set(_OUTLIVED, "1")
    line.close()


def _served_by_rank_0(store: Any) -> Any:
    """Return the TCPStore of a group's store if a rank serves it."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, dist.TCPStore) else None


def _wait_until_refused(address: tuple[str, int], until: float) -> None:
    """Connect to a server that is closing until nothing listens at ``address``, or ``until`` by the monotonic clock."""
    while (left_s := until - time.monotonic()) > 0:
        try:
            line = socket.create_connection(address, left_s)
        except OSError:
            return
        with line, contextlib.suppress(ConnectionError):
            line.settimeout(min(_STANDS_S, left_s))
            try:
                line.recv(1)
            except TimeoutError:
                return
        time.sleep(0.001)


def _has_ended(line: socket.socket) -> bool:
    try:
        return line.recv(1) == b""
    except OSError as error:
        return not isinstance(error, BlockingIOError)
