"""`launch`: the call that starts a job.

Two processes manage the ranks. The *front* is the caller: it only waits and forwards signals. The *supervisor* is its
fork: it starts the ranks, forwards their output, and judges their end. If one is killed by SIGKILL, the other ends all
processes. The kernel signals the supervisor when the front dies. Both are subreapers, so that a rank's orphans are
reparented to them and not to init.
Thread rule: call `launch` from the main thread of a process without other threads (it forks).
"""

from __future__ import annotations

import os
import signal
import sys
import traceback

from zcomm.launch import processes
from zcomm.launch.job import Job
from zcomm.launch.supervisor import Supervisor

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def launch(job: Job, supervisor: Supervisor | None = None) -> int:
    """Run the job to its end and return the exit code: 0, the first failure's, or 128 + signal.

    supervisor: of the job; by default one that starts all its ranks here.
    Raises: OSError if no process can be started.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    processes.become_subreaper()
    # Blocked over the fork: a signal in between would find the child without handlers, or the front with its old ones.
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    try:
        front = os.getpid()
        child = os.fork()
    except BaseException:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        raise
    if child == 0:
        _supervise(supervisor or Supervisor(job), front, old_mask)
    return _wait(child, job, old_mask)


def _supervise(supervisor: Supervisor, front: int, old_mask: set[int | signal.Signals]) -> None:
    """Run the child to its end; never return."""
    code = 70
    try:
        os.setpgid(0, 0)  # a signal for the front's group (Ctrl-C, kill) reaches this process once, through the front
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # a background group, which may still write to the terminal
        processes.become_subreaper()
        processes.die_with_parent(front, signal.SIGTERM)
        code = supervisor.run(old_mask)
    except (OSError, ValueError) as error:  # no such program, no room for another process, no such core
        code = 126
        supervisor.refuse(str(error))
    except BaseException:  # a fault of the launcher itself: show it; the clean-up below still runs
        traceback.print_exc()
    finally:
        processes.end_descendants()
        os._exit(code)


def _wait(child: int, job: Job, old_mask: set[int | signal.Signals]) -> int:
    """Forward signals to the supervisor until it ends; if it was killed, end its ranks."""

    def forward(signum: int, _frame: object) -> None:
        processes.send(child, signum)

    old_handlers = {s: signal.signal(s, forward) for s in _FORWARDED}
    signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
    try:
        _, status = os.waitpid(child, 0)
    finally:
        for signum, handler in old_handlers.items():
            signal.signal(signum, handler)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        processes.end_descendants()
        print(f"{job.announce}: the launcher was killed by {processes.signal_name(-code)}", file=sys.stderr)
        return 128 - code
    return code
