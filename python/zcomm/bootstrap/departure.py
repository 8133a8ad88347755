"""Order of exits: a process that another rank's end has failed exits after that rank.

A rank that raises says goodbye while its interpreter ends, which takes a while. The ranks that wait for it fail at
once, and may exit first. Then the launcher names the wrong rank as the cause, or hides the program's error (torchrun,
torch.multiprocessing.spawn). So they wait at exit until the launcher has collected the process of that rank.
Thread rule: any thread.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Sequence

from zcomm import _core
from zcomm.machine.process import Process

_PATIENCE_S = 5.0  # for a rank that has left and goes on
_COLLECT_S = 1.0  # for a parent that has not collected an ended process
_LOOK_S = 0.01
_causes: set[Process] = set()


def note_cause(core: _core.Communicator, meshes: Sequence[_core.Mesh], processes: Sequence[Process]) -> None:
    """Note the rank that has ended and so failed ``core``, if there is one. Call it before ``core`` is closed.

    processes: by rank of ``core``; none: they are not known.
    """
    if not processes or all(mesh.lost() is None for mesh in meshes):
        return
    try:
        core.suspend_deadline()  # raises what has failed it
    except _core.PeerLost as error:
        if 0 <= error.rank < len(processes) and processes[error.rank] != Process.own():  # else a thread is that rank
            _causes.add(processes[error.rank])
    except Exception:  # closed, or failed otherwise
        return
    else:
        core.resume_deadline()


@atexit.register
def wait_for_causes() -> None:
    """Wait for the processes that have been noted; not for those of other hosts, and not for long."""
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
