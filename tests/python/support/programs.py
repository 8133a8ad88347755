"""Runs the text of a program in a process that is forked from the warm fork server of ``ranks``.

A new interpreter works for two to four seconds before a program trains: it imports torch, and torch._dynamo with the
first optimizer. A fork and its exit cost 0.3 s. The program has `__main__`, sys.argv, an environment, standard files
and signal handlers as in a new interpreter. It exits as an interpreter does: threads are joined, exit functions run,
modules are freed. Two things differ. After an uncaught KeyboardInterrupt the exit code is 130, as in a shell, instead
of the signal. /proc/<pid>/environ is the fork server's. A test of either starts an interpreter.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import signal
import sys
import time
import traceback
import types
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO

from ranks import context, start_process

INTERRUPTED = 130
FOREIGN = ("RANK", "WORLD", "LOCAL", "MASTER", "SLURM", "PMI", "OMPI", "ZCOMM_INIT", "ZCOMM_JOB", "TORCHELASTIC")


def environment_of_no_job() -> dict[str, str]:
    """Return this process's environment without a launcher's variables."""
    return {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}


class Program:
    """A running program, with an interface like subprocess.Popen's."""

    def __init__(self, text: str, args: tuple[Any, ...], folder: Path, env: Mapping[str, str] | None) -> None:
        self._log = folder / "stderr"
        self._log.touch()
        their_in, my_in = context.Pipe(duplex=False)
        my_out, their_out = context.Pipe(duplex=False)
        variables = dict(environment_of_no_job() if env is None else env)
        everything = (text, list(map(str, args)), variables, their_in, their_out, str(self._log))
        self._process = start_process(_main, *everything)
        their_in.close()
        their_out.close()
        self.stdin: TextIO = _file(my_in, "w")
        self.stdout: TextIO = _file(my_out, "r")
        self.pid = int(self._process.pid or 0)

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    @property
    def stderr(self) -> str:
        return self._log.read_text(errors="replace")

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout_s: float = 60.0) -> int:
        """Return the exit code. AssertionError with the stacks of all threads after ``timeout_s``."""
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            os.kill(self.pid, signal.SIGUSR1)  # stacks of all threads to stderr
            time.sleep(0.5)
            self.close()
            raise AssertionError(f"the program still ran after {timeout_s} s\n{self.stderr}")
        return int(self._process.exitcode)

    def communicate(self, text: str = "", timeout_s: float = 60.0) -> tuple[str, str]:
        """Write ``text`` to its standard input, wait for its end, and return its stdout and stderr."""
        with suppress(BrokenPipeError):
            self.stdin.write(text)
            self.stdin.close()
        self.wait(timeout_s)
        return self.stdout.read(), self.stderr

    def close(self) -> None:
        if self._process.exitcode is None:
            self._process.kill()
        self._process.join()
        with suppress(BrokenPipeError):
            self.stdin.close()
        self.stdout.close()


def _file(pipe: Connection, mode: str) -> TextIO:
    file = os.fdopen(os.dup(pipe.fileno()), mode)
    pipe.close()
    return file  # type: ignore[return-value]


def _main(text: str, args: list[str], env: dict[str, str], stdin: Connection, stdout: Connection, log: str) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(stdin.fileno(), 0)
    os.dup2(stdout.fileno(), 1)
    os.dup2(descriptor, 2)
    stdin.close()
    stdout.close()
    os.close(descriptor)
    sys.stdin = os.fdopen(0, closefd=False)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    os.environ.clear()
    os.environ.update(env)
    import torch

    torch.set_num_threads(1)
    gc.freeze()  # so that collection at exit visits only new objects; all of torch takes a second
    sys.argv = ["-c", *args]
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    code = _run(text, main)
    ctypes.pythonapi.Py_Exit(code)  # an interpreter's exit, which a forked process skips


def _run(text: str, main: types.ModuleType) -> int:
    try:
        exec(compile(text, "<program>", "exec"), main.__dict__)
    except SystemExit as end:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(end))  # objects of its frames stay alive, as in an interpreter
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        traceback.print_exc()
        sys.last_value, sys.last_traceback = error, error.__traceback__  # freed at exit, as in an interpreter
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    return 0
