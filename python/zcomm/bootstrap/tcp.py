"""Joining over TCP: from listening sockets to one authenticated connection for each line of a rank.

[Note: join] The higher rank of a pair calls, the lower rank listens, all in one selector loop and one thread. Each new
connection begins with the handshake of [Note: proof]. A listener silently drops a caller that fails it, and continues.
It bounds the number of unproven connections (by dropping the oldest) and the bytes that it reads from each. So a slow
member has until the deadline. A caller that is dropped or cannot connect retries until the deadline.
A member has ended if its connections close, or if it refuses them (it was bound before its address was sent): PeerLost.
Invariant: only the proof is read from a connection before it is accepted, and not one byte beyond it.
Thread rule: one call per rank. Signals end it (KeyboardInterrupt). Source: selectors, [Note: proof].
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import selectors
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from zcomm import _core
from zcomm.bootstrap.auth import ANSWER_NBYTES, CHALLENGE_NBYTES, VERDICT_NBYTES, CallerProof, Line, ListenerProof

_MOST_STRANGERS = 128  # unproven connections in addition to the expected ones
_LOOK_S = 0.25  # between checks for signals
_RETRY_S = 0.05  # before a call is tried again
_GRACE_S = 0.5  # after a rank's end: if all time out at about one time, all raise TimeoutError
_WOULD_BLOCK = (errno.EAGAIN, errno.EWOULDBLOCK, errno.EINTR)
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
_FREE_DESCRIPTORS = 16  # in addition to the connections: selector, files, a stranger or two

Endpoint = tuple[str, int]


class TcpListener:
    """A listening socket on ``address``, on a port of the kernel's choice or of ``ports``."""

    def __init__(self, address: str, ports: range | None = None) -> None:
        self.socket = _listening(address, ports)
        self.endpoint: Endpoint = self.socket.getsockname()[:2]

    def close(self) -> None:
        self.socket.close()


@contextlib.contextmanager
def descriptor_limit_named(what: str) -> Iterator[None]:
    """Append the limit of open files to an OSError inside the block if descriptors ran out."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_DESCRIPTOR or "ulimit" in str(error):
            raise
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        text = f"{what}: {error.strerror or error}; this process may open {limit} files (ulimit -n)"
        raise OSError(error.errno, text) from error


def require_descriptors(what: str, count: int) -> None:
    """Check that ``count`` more descriptors can be opened. Raises: OSError (EMFILE) naming the limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 0
    if limit != resource.RLIM_INFINITY and used + count + _FREE_DESCRIPTORS > limit:
        text = f"{what} needs {count} connections, {used} files are open, and this process may open {limit} (ulimit -n)"
        raise OSError(errno.EMFILE, text)


def connect_lines(
    rank: int,
    endpoints: Sequence[Endpoint],
    lines: Sequence[Line],
    listener: TcpListener,
    key: bytes,
    timeout_s: float,
) -> dict[Line, socket.socket]:
    """Return connected, proven, non-blocking sockets for ``lines``.

    lines: all connections of ``rank``; both ends list the same. endpoints: of each rank's listener. key: the group's
    common secret.
    Raises: TimeoutError naming the missing ranks, PeerLost if one ended meanwhile, OSError (descriptors). Then only
    ``listener`` remains open.
    """
    require_descriptors(f"rank {rank}", len(lines))
    return _Join(rank, endpoints, lines, listener, key, timeout_s).run()


class _Call:
    """Connection of this rank to a lower rank, until its reply has arrived."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.next_try = 0.0
        self.reset()

    def reset(self) -> None:
        self.socket: socket.socket | None = None
        self.proof: CallerProof | None = None
        self.connected = False
        self.answered = False
        self.received = b""


@dataclass(eq=False)
class _Guest:
    """An accepted connection without a proof."""

    socket: socket.socket
    proof: ListenerProof
    received: bytes = b""


class _Join:
    def __init__(
        self,
        rank: int,
        endpoints: Sequence[Endpoint],
        lines: Sequence[Line],
        listener: TcpListener,
        key: bytes,
        timeout_s: float,
    ) -> None:
        self._rank = rank
        self._endpoints = endpoints
        self._listener = listener
        self._key = key
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._calls = [_Call(line) for line in lines if line.caller == rank]
        self._due = {line for line in lines if line.listener == rank}  # not connected yet
        self._guests: dict[_Guest, None] = {}  # oldest first
        self._done: dict[Line, socket.socket] = {}
        self._troubles: dict[int, str] = {}  # by rank that this one calls: the last failure
        self._ended: int | None = None
        self._give_up_at = float("inf")
        self._selector = selectors.DefaultSelector()

    def run(self) -> dict[Line, socket.socket]:
        try:
            self._selector.register(self._listener.socket, selectors.EVENT_READ, self._accept)
            while self._calls or self._due:
                _core.check_stop()
                self._dial()
                self._check_time()
                for key, _ in self._selector.select(self._patience_s()):
                    key.data()
        except BaseException:
            for connected in self._done.values():
                connected.close()
            raise
        finally:
            self._selector.close()
            for guest in self._guests:
                guest.socket.close()
            for call in self._calls:
                if call.socket is not None:
                    call.socket.close()
        return self._done

    # --- time -------------------------------------------------------------------------------------------------

    def _patience_s(self) -> float:
        """Return the time to the next deadline or retry, at most _LOOK_S, as a signal may not wake the selector."""
        wake_at = min([self._deadline, self._give_up_at, *(call.next_try for call in self._calls if not call.socket)])
        return max(0.0, min(wake_at - time.monotonic(), _LOOK_S))

    def _check_time(self) -> None:
        now = time.monotonic()
        if now >= self._deadline:
            raise TimeoutError(f"{self._missing()} within {self._timeout_s:g} s{self._whys()}")
        if now >= self._give_up_at and self._ended is not None:
            lost = _core.PeerLost(
                f"rank {self._ended} ended before all were connected; {self._missing()}{self._whys()}"
            )
            lost.rank = lost.group_rank = self._ended
            raise lost

    def _missing(self) -> str:
        ranks = sorted({call.line.listener for call in self._calls} | {line.caller for line in self._due})
        shown = ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
        where = "{}, port {}".format(*self._listener.endpoint)
        return f"rank {self._rank} of {len(self._endpoints)} (at {where}) had no connection with rank(s) {shown}"

    def _whys(self) -> str:
        open_calls = {call.line.listener for call in self._calls}
        reasons = [
            f"; rank {peer} at {self._endpoints[peer][0]}, port {self._endpoints[peer][1]}: {trouble}"
            for peer, trouble in sorted(self._troubles.items())
            if peer in open_calls
        ]
        return "".join(reasons[:4])

    def _note_end(self, peer: int) -> None:
        if self._ended is None:
            self._ended = peer
            self._give_up_at = time.monotonic() + _GRACE_S

    # --- calls to lower ranks ----------------------------------------------------------------------------------

    def _dial(self) -> None:
        now = time.monotonic()
        for call in self._calls:
            if call.socket is not None or call.next_try > now:
                continue
            address, port = self._endpoints[call.line.listener]
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            try:
                call.socket = socket.socket(family, socket.SOCK_STREAM)
            except OSError as error:
                self._make_room(error, f"connecting to rank {call.line.listener}")
                continue
            call.socket.setblocking(False)
            call.proof = CallerProof(self._key, call.line, len(self._endpoints))
            refusal = call.socket.connect_ex((address, port))
            if refusal not in (0, errno.EINPROGRESS, *_WOULD_BLOCK):
                self._hang_up(call, refusal)
                continue
            self._selector.register(call.socket, selectors.EVENT_WRITE, lambda call=call: self._go_on(call))

    def _hang_up(self, call: _Call, error: int | None, trouble: str = "") -> None:
        assert call.socket is not None
        with contextlib.suppress(KeyError):
            self._selector.unregister(call.socket)
        call.socket.close()
        call.reset()
        call.next_try = time.monotonic() + _RETRY_S
        self._troubles[call.line.listener] = trouble or os.strerror(error or 0)
        if error == errno.ECONNREFUSED:
            self._note_end(call.line.listener)

    def _go_on(self, call: _Call) -> None:
        """Continue the handshake on a ready connection to a lower rank."""
        assert call.socket is not None and call.proof is not None
        if not call.connected:
            error = call.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                return self._hang_up(call, error)
            call.connected = True
            self._selector.modify(call.socket, selectors.EVENT_READ, lambda: self._go_on(call))
            return None
        due = VERDICT_NBYTES if call.answered else CHALLENGE_NBYTES
        more = _receive(call.socket, due - len(call.received))
        if more is None:
            return None
        call.received += more
        if not more:
            return self._hang_up(call, None, "closed our connection: is it of the same job (token, world size)?")
        if len(call.received) < due:
            return None
        message, call.received = call.received, b""
        if not call.answered:
            answer = call.proof.answer(message)
            if answer is None or not _send_whole(call.socket, answer):
                return self._hang_up(call, None, "something else answers there")
            call.answered = True
            return None
        if not call.proof.accepts(message):
            return self._hang_up(call, None, "the peer there does not know the job's token")
        self._calls.remove(call)
        self._keep(call.line, call.socket, call.line.listener)
        return None

    # --- guests from higher ranks, and strangers ---------------------------------------------------------------

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.socket.accept()
        except OSError as error:
            if error.errno in _NO_DESCRIPTOR:
                self._make_room(error, "accepting a connection")
            return None  # else the caller has disconnected
        accepted.setblocking(False)
        guest = _Guest(accepted, ListenerProof(self._key, self._rank, len(self._endpoints)))
        if not _send_whole(accepted, guest.proof.challenge):
            return accepted.close()
        self._guests[guest] = None
        self._selector.register(accepted, selectors.EVENT_READ, lambda: self._take_answer(guest))
        if len(self._guests) > _MOST_STRANGERS + len(self._due):
            self._dismiss(next(iter(self._guests)))
        return None

    def _make_room(self, error: OSError, doing: str) -> None:
        """Dismiss the oldest stranger when descriptors run out. Raises: OSError if there is none."""
        if error.errno in _NO_DESCRIPTOR and self._guests:
            return self._dismiss(next(iter(self._guests)))
        with descriptor_limit_named(f"rank {self._rank}: {doing}"):
            raise error

    def _dismiss(self, guest: _Guest) -> None:
        del self._guests[guest]
        self._selector.unregister(guest.socket)
        guest.socket.close()

    def _take_answer(self, guest: _Guest) -> None:
        more = _receive(guest.socket, ANSWER_NBYTES - len(guest.received))
        if more is None or guest not in self._guests:
            return None
        guest.received += more
        if more and len(guest.received) < ANSWER_NBYTES:
            return None
        judged = guest.proof.judge(guest.received) if more else None
        if judged is None or judged[0] not in self._due or not _send_whole(guest.socket, judged[1]):
            return self._dismiss(guest)
        line, _ = judged
        del self._guests[guest]
        self._due.remove(line)
        self._keep(line, guest.socket, line.caller)
        return None

    def _keep(self, line: Line, connected: socket.socket, peer: int) -> None:
        """Keep an authenticated connection. Until the join ends, watch it for EOF without reading its bytes."""
        self._done[line] = connected

        def look() -> None:
            try:
                ended = connected.recv(1, socket.MSG_PEEK) == b""
            except OSError as error:
                if error.errno in _WOULD_BLOCK:
                    return
                ended = True
            self._selector.unregister(connected)
            if ended:
                self._note_end(peer)

        self._selector.modify(connected, selectors.EVENT_READ, look)


def _listening(address: str, ports: range | None) -> socket.socket:
    for port in ports or (0,):
        try:
            return _listening_on(address, port)
        except OSError as error:
            if ports is None or error.errno != errno.EADDRINUSE:
                raise OSError(error.errno, f"cannot listen on {address}, port {port}: {error.strerror}") from error
    assert ports is not None
    raise OSError(errno.EADDRINUSE, f"no free port on {address} in {ports.start}-{ports.stop - 1} (ZCOMM_PORT_RANGE)")


def _listening_on(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        if port != 0:  # else the last job's connections keep its ports for a minute (TIME_WAIT)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(4096)  # at most net.core.somaxconn; EADDRINUSE of a bound port is raised only here
    except BaseException:
        listener.close()
        raise
    return listener


def _receive(connected: socket.socket, nbytes: int) -> bytes | None:
    """Return the available bytes, at most ``nbytes``; b"" at EOF or an error, None if there are none yet."""
    try:
        return connected.recv(nbytes)
    except OSError as error:
        return None if error.errno in _WOULD_BLOCK else b""


def _send_whole(connected: socket.socket, message: bytes) -> bool:
    """Send without waiting, as a new connection has room for a message. Return True if all bytes were sent."""
    try:
        return connected.send(message) == len(message)
    except OSError:
        return False
