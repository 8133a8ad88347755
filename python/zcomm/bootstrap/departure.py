"""Order of exits: if another rank's end fails this process, it exits after that rank.

A rank that raises says goodbye while its interpreter ends, which takes a while. The ranks that wait for it fail at
once and may exit first. Then the launcher names the wrong rank as the cause, or hides the program's error (torchrun,
torch.multiprocessing.spawn). So these ranks wait at exit until the launcher has reaped the failed rank's process.
Thread rule: any thread.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Sequence

from zcomm import _core
from zcomm.machine.process import Process

_PATIENCE_S = 5.0  # for a rank that has left the job and still runs
_COLLECT_S = 1.0  # for a parent that has not reaped an ended process
_LOOK_S = 0.01
_causes: set[Process] = set()


def note_cause(core: _core.Communicator, meshes: Sequence[_core.Mesh], processes: Sequence[Process]) -> None:
    """Note the rank that failed ``core`` by its end, if any. Call this before ``core`` is closed.

    processes: by rank of ``core``; empty: unknown.
    """
    if not processes or all(mesh.lost() is None for mesh in meshes):
        return
    try:
        core.suspend_deadline()  # raises the core's failure
    except _core.PeerLost as error:
        lost = error.group_rank
        if 0 <= lost < len(processes) and processes[lost] != Process.own():  # else that rank is a thread
            _causes.add(processes[lost])
    except Exception:  # closed, or failed otherwise
        return
    else:
        core.resume_deadline()


@atexit.register
def wait_for_causes() -> None:
    """Wait a few seconds for the noted processes of this host."""
    until = time.monotonic() + _PATIENCE_S
    while _causes and time.monotonic() < until:
        for process in list(_causes):
            if process.is_collected():
                _causes.discard(process)
            elif process.is_dead():
                until = min(until, time.monotonic() + _COLLECT_S)
        if _causes:
            time.sleep(_LOOK_S)


os.register_at_fork(after_in_child=_causes.clear)
