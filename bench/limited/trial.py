"""One try: a process that builds a model and trains it, and the watch over its memory and time.

The process is this file as a program, with a Job as JSON. It imports neither the harness nor, for the peers, zcomm.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_SAYS = "zcomm-bench "
_LOOK_S = 0.02
# With these DeepSpeed needs half: tensors that are freed leave. zcomm sets its own.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(256 << 10), "MALLOC_ARENA_MAX": "2"}


@dataclass(frozen=True)
class Job:
    """A try. limit_nbytes: of the wall, None: no limit. folder: on the drive. wall: "VmHWM" or "anon".

    more_losses: losses after the last step, which all its updates decide.
    """

    variant: str
    layers: int
    width: int
    heads: int
    context: int
    steps: int
    limit_nbytes: int | None
    folder: str
    wall: str = "VmHWM"
    more_losses: int = 0


@dataclass
class Outcome:
    """Result of a try. why: None if it took its steps, else "memory", "time", "drive", "absent" or "error".

    peak_nbytes: of the wall. files_nbytes: the most pages of files. step_s: of each step.
    """

    why: str | None
    said: str = ""
    peak_nbytes: int = 0
    files_nbytes: int = 0
    drive_nbytes: int = 0
    seconds: float = 0.0
    step_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def run(job: Job, python: str, max_s: float, leave_nbytes: int) -> Outcome:
    """Run a try, and remove its processes and files. Raises: OSError."""
    with tempfile.TemporaryDirectory(prefix="zcomm-largest-", dir=job.folder) as folder:
        inside = json.dumps(asdict(job) | {"folder": folder})
        out = Path(folder, "said")
        path = os.pathsep.join((str(Path(python).parent), os.environ.get("PATH", "")))  # ninja, next to the interpreter
        env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **os.environ, "PATH": path}
        env |= {} if job.variant.startswith("zcomm") else _MALLOC
        with out.open("wb") as stream:
            process = subprocess.Popen(
                [python, str(Path(__file__)), inside], stdout=stream, stderr=stream, env=env, start_new_session=True
            )
        try:
            found = _watch(process, job, max_s, leave_nbytes)
        finally:
            _end(process)
        return _heard(found, out.read_text(errors="replace"), process.returncode, job)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill all processes of a session, because ninja gives each compiler its own process group."""
    process.kill()
    process.wait()
    while left := [pid for pid in _session(process.pid) if pid != process.pid]:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_LOOK_S)


def _session(number: int) -> list[int]:
    """Return the processes of a session that have not ended."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if words[0] not in "ZX" and int(words[3]) == number:
                found.append(int(folder.name))
    return found


def _watch(process: subprocess.Popen[bytes], job: Job, max_s: float, leave_nbytes: int) -> Outcome:
    """Look until the process ends, or has to."""
    found, begin, free = Outcome(None), time.monotonic(), shutil.disk_usage(job.folder).free
    while process.poll() is None:
        with contextlib.suppress(OSError, ValueError, KeyError):
            held = _status(process.pid)
            peak = held["VmHWM"] if job.wall == "VmHWM" else held["RssAnon"] + held["RssShmem"]
            found.peak_nbytes = max(found.peak_nbytes, peak)
            found.files_nbytes = max(found.files_nbytes, held["RssFile"])
        found.seconds, left = time.monotonic() - begin, shutil.disk_usage(job.folder).free
        found.drive_nbytes = max(found.drive_nbytes, free - left)
        if job.limit_nbytes is not None and found.peak_nbytes > job.limit_nbytes:
            found.why = "memory"
        elif found.seconds > max_s:
            found.why = "time"
        elif left < leave_nbytes:
            found.why = "drive"
        if found.why:
            break
        time.sleep(_LOOK_S)
    return found


def _heard(found: Outcome, text: str, code: int, job: Job) -> Outcome:
    """Add the result that the process has printed."""
    if found.why:
        return found
    lines = text.splitlines()
    said = [json.loads(line.removeprefix(_SAYS)) for line in lines if line.startswith(_SAYS)]
    if code or not said:
        found.why, found.said = "error", (lines or [f"ended with {code}"])[-1][:300]
        if "too small for this model" in text or "Cannot allocate memory" in text or "not enough memory" in text:
            found.why = "memory"
    elif "absent" in said[-1]:
        found.why, found.said = "absent", said[-1]["absent"]
    else:
        found.step_s, found.losses = said[-1]["step_s"], said[-1]["losses"]
        if job.wall == "VmHWM":  # the last look of this process is of its end
            found.peak_nbytes = max(found.peak_nbytes, said[-1]["peak_nbytes"])
        if job.limit_nbytes is not None and found.peak_nbytes > job.limit_nbytes:
            found.why = "memory"
    return found


def _status(pid: int | str) -> dict[str, int]:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    pairs = (line.split() for line in lines if line.startswith(("VmHWM:", "Rss")))
    return {words[0][:-1]: 1024 * int(words[1]) for words in pairs}


def main(text: str) -> int:
    """Be the process of a try."""
    from variants import Absent, batches, make  # next to this file

    job = Job(**json.loads(text))
    answer: dict[str, Any]
    try:
        step, loss_after = make(job)
        answer = {"step_s": [], "losses": []}
        tokens = batches(job)
        for number in range(job.steps):
            begin = time.perf_counter()
            answer["losses"].append(step(tokens[number]))
            answer["step_s"].append(time.perf_counter() - begin)
        answer["losses"] += [loss_after(tokens[0]) for _ in range(job.more_losses)]
        answer["peak_nbytes"] = _status("self")["VmHWM"]
    except Absent as error:
        answer = {"absent": str(error)[:300]}
    print(_SAYS + json.dumps(answer), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
