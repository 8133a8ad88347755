"""A rank of the demo: `python -m zcomm.demo.rank CONFIG_JSON`. Signals, exit codes, last words; train.py does the work.

Exit codes: 0; 2 for an error that the user can mend (one line); 1 for a failure; 130 when interrupted.
Invariant: torch is imported only after the signal handlers are set, so that Ctrl-C is always quiet. A signal during the
import ends the process at once, because C++ code below an import turns a KeyboardInterrupt into abort().
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from zcomm.demo.options import DemoConfig
from zcomm.launch.errors import UserError
from zcomm.launch.failure_report import leave_last_words

_INTERRUPTED = 130


class Interrupt:
    """Handler of SIGINT and SIGTERM: ends a process that is still importing; later raises KeyboardInterrupt, once.

    It ignores later signals, because the rank is cleaning up.
    """

    def __init__(self) -> None:
        self.received = False
        self.importing = True
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self._handle)

    def _handle(self, _signum: int, _frame: object) -> None:
        if self.importing:  # nothing exists yet that needs cleaning up
            os._exit(_INTERRUPTED)
        if not self.received:
            self.received = True
            raise KeyboardInterrupt


def main(argv: list[str]) -> int:
    """Run the rank; returns its exit code."""
    interrupt = Interrupt()
    try:
        from zcomm.demo.train import run

        interrupt.importing = False
        return guarded(lambda: run(DemoConfig.from_json(argv[0])), interrupt)
    except KeyboardInterrupt:
        return _INTERRUPTED


def guarded(run: Callable[[], None], interrupt: Interrupt) -> int:
    """Call `run` and turn its failure into last words and an exit code."""
    import zcomm

    debug = bool(os.environ.get("ZCOMM_DEBUG"))
    try:
        run()
        return 0
    except KeyboardInterrupt:
        return _INTERRUPTED
    except Exception as error:
        if interrupt.received:  # a failure while all ranks leave is not reported
            return _INTERRUPTED
        if debug:
            traceback.print_exc()
        if isinstance(error, UserError):
            leave_last_words("UserError", str(error))
            return error.exit_code
        if not debug and not isinstance(error, OSError):  # a fault in the program: the traceback is the message
            traceback.print_exc()
        kind = "PeerLost" if isinstance(error, zcomm.PeerLost) else type(error).__name__
        leave_last_words(kind, str(error))
        return 1


def leave(code: int) -> NoReturn:
    """End the process once everything is closed, because the teardown of torch's modules would take seconds."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
