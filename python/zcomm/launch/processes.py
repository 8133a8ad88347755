"""Linux process control that the standard library lacks: parent-death signal, subreaper, the tree of descendants.

Invariant: only descendants of the calling process are ever signalled, and their parent links are read just before.
Source: prctl(2), proc(5).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Ask the kernel for `signum` when the parent thread dies; send it now if `parent` has already died.

    It runs in a forked child before exec, so it uses only the C library.
    """
    if _libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os.kill(os.getpid(), signum)


def become_subreaper() -> None:
    """Adopt orphaned descendants from now on, so that none escapes to init."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def signal_name(signum: int) -> str:
    """Return SIGKILL for 9, and so on."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def process_table() -> dict[int, tuple[int, int]]:
    """Return pid -> (parent pid, session id) of every live process (zombies left out)."""
    table: dict[int, tuple[int, int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as stream:
                content = stream.read()
        except OSError:
            continue
        fields = content[content.rindex(b")") + 2 :].split()  # the name before may hold spaces and parentheses
        if fields[0] not in (b"Z", b"X"):
            table[int(name)] = (int(fields[1]), int(fields[3]))
    return table


def descendants(root: int | None = None) -> dict[int, int]:
    """Return pid -> session id of all live descendants of `root` (default: this process)."""
    table = process_table()
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in table.items():
        children.setdefault(parent, []).append(pid)
    found: dict[int, int] = {}
    todo = [os.getpid() if root is None else root]
    while todo:
        for pid in children.get(todo.pop(), []):
            if pid not in found:
                found[pid] = table[pid][1]
                todo.append(pid)
    return found


def send(pid: int, signum: int) -> None:
    """Signal a process that may have just ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def reap() -> list[tuple[int, int, int]]:
    """Collect every child that has ended: (pid, exit code or -signal, peak resident bytes)."""
    ended: list[tuple[int, int, int]] = []
    while True:
        try:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append((pid, os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024))


def end_descendants(grace_s: float = 1.0) -> None:
    """End every descendant: SIGTERM, SIGKILL after `grace_s`, and again until none is left."""
    signum = signal.SIGTERM
    deadline = time.monotonic() + grace_s
    signalled: set[int] = set()
    while pids := descendants():
        if time.monotonic() >= deadline:
            signum = signal.SIGKILL
        for pid in pids:
            if signum == signal.SIGKILL or pid not in signalled:
                send(pid, signum)
                signalled.add(pid)
        reap()
        time.sleep(0.01)
        if time.monotonic() > deadline + 10.0:  # stuck in the kernel (dead disk): nothing more can be done from here
            break
    reap()
