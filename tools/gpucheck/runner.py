"""Runner of parts, each in its own process with a time limit; it records their results.

Parts run one after the other, but consecutive parts that measure nothing (the last field of Part) run concurrently.

A part's budget is the time that it took in the last run, times MARGIN. It fits if the time that it took then is left.

Invariants: after every part the results are whole (a new file is written, then renamed), also if this program is
killed. No process of a part outlives it. A part that fails, hangs or writes nonsense does not stop the others, unless
they need its output. A part that does not fit does not stop shorter ones. A part's program prints any text, and
appends JSON lines to the file in $GPU_CHECK_ROWS. It ends with 0 (passed), 77 (skipped; its last line says why), else
failed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from gpucheck.page import page_of

SKIPPED = 77
ROWS = "GPU_CHECK_ROWS"
MARGIN = 1.5
TAIL = 3000  # characters of a failed part's output that are kept
_GRACE_S = 3.0
_FINISHED = ("passed", "skipped")
_running: set[subprocess.Popen[bytes]] = set()
_writing = threading.Lock()  # the log
Record = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """One part.

    budget_s: its time limit. needs: parts that must have passed. made: its output for other parts; if that is missing,
    the part counts as not done. Such a part may take all time that is left. The last field: other such parts may run
    at the same time.
    """

    name: str
    title: str
    budget_s: float
    command: Sequence[str]
    needs: tuple[str, ...] = ()
    made: Path | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    beside: bool = False

    def limit_s(self, left_s: float) -> float | None:
        """Return its time limit if ``left_s`` are left, or None: it does not fit."""
        return min(self.budget_s, left_s) if left_s >= self.budget_s / MARGIN else None


def seconds_of(files: Iterable[Path]) -> dict[str, float]:
    """Return the seconds that each part took in the last of ``files`` that has it. One that failed does not count."""
    found: dict[str, float] = {}
    for file in files:
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            for name, record in json.loads(file.read_text(encoding="utf-8"))["parts"].items():
                if record["state"] in ("passed", "timeout"):
                    found[name] = float(record["seconds"])
    return found


def plan(parts: Sequence[Part], seconds: float) -> tuple[list[float | None], float]:
    """Return the limits of the parts if each uses its own up (None: it does not fit), and the seconds of all."""
    found: list[float | None] = []
    left = seconds
    for together, run in groupby(parts, lambda part: part.beside):
        longest = 0.0
        for part in run:
            found.append(part.limit_s(left))
            longest = max(longest, found[-1] or 0.0)
            if not together:
                left, longest = left - longest, 0.0
        left -= longest
    return found, seconds - left


class Result:
    """The result: {"about": {...}, "parts": {name: record}} in ``file`` and ``copy``, and a page next to ``file``."""

    def __init__(self, file: Path, about: Record, copy: Path | None = None) -> None:
        self.file, self.about, self._copy = file, about, copy
        self.parts: dict[str, Record] = {}
        self._lock = threading.Lock()

    def adopt(self, earlier: Path, same: Sequence[str], say: Callable[[str], None]) -> None:
        """Adopt the parts of an earlier run with equal ``same`` (keys of about). An unreadable file is moved away.

        Parts that did not pass are run again if they are requested, and otherwise remain in the record.
        """
        try:
            text = json.loads(earlier.read_text(encoding="utf-8"))
            about, parts = dict(text["about"]), {str(k): dict(v) for k, v in text["parts"].items()}
            if any(not isinstance(part["state"], str) for part in parts.values()):
                raise ValueError("a part without a state")
        except OSError as error:
            say(f"nothing to resume: {error}")
            return
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            kept = earlier.with_name(f"{earlier.name}.broken")
            with suppress(OSError):
                earlier.replace(kept)
            say(f"{earlier} is not a result of gpu-check ({type(error).__name__}: {error}); moved to {kept.name}")
            return
        other = [key for key in same if about.get(key) != self.about.get(key)]
        if other:
            say(f"{earlier} is of another {', '.join(other)}: everything is done again")
            return
        self.parts = parts
        self.about["first_time"] = about.get("first_time") or about.get("time")

    def keep(self, name: str, record: Record) -> None:
        """Keep a part's record, and write the file."""
        with self._lock:
            self.parts[name] = record
            self.write()

    def write(self) -> None:
        text = json.dumps({"about": self.about, "parts": self.parts}, indent=1) + "\n"
        page = page_of(self.about, self.parts)
        for file, content in ((self.file, text), (self._copy, text), (self.file.with_suffix(".md"), page)):
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                new = file.with_name(f"{file.name}.new")
                new.write_text(content, encoding="utf-8")
                new.replace(file)


def run_parts(
    parts: Sequence[Part],
    result: Result,
    log: Path,
    deadline: float,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Run all that are not finished, in order, until ``deadline`` (of the clock).

    Returns: 0; 1 if one failed or took too long; 3 if none did, but some were not started.
    """
    for together, run in groupby(parts, lambda part: part.beside):
        if not together:
            for part in run:
                _run_one(part, result, log, deadline, say, clock)
            continue
        _run_at_once(list(run), lambda part: _run_one(part, result, log, deadline, say, clock))
    records = {part.name: result.parts.pop(part.name) for part in parts}
    result.parts |= records  # in their order, after an earlier run's
    result.write()
    return exit_status(list(records.values()))


def _run_at_once(parts: Sequence[Part], run: Callable[[Part], None]) -> None:
    """Call ``run`` for each part in a separate thread. An exception in this thread (SIGTERM's) ends all of them."""
    with ThreadPoolExecutor(len(parts)) as pool:
        waiting = [pool.submit(run, part) for part in parts]
        try:
            for done in waiting:
                done.result()
        except BaseException:
            for process in list(_running):
                _signal_all(process, signal.SIGKILL)
            raise


def _run_one(
    part: Part, result: Result, log: Path, deadline: float, say: Callable[[str], None], clock: Callable[[], float]
) -> None:
    earlier = result.parts.get(part.name)
    if earlier and earlier["state"] in _FINISHED and (part.made is None or part.made.exists()):
        say(f"== {part.name}: {earlier['state']} before")
        return
    left = deadline - clock()
    limit = left if part.made is not None and left > 0 else part.limit_s(left)
    missing = [name for name in part.needs if result.parts.get(name, {}).get("state") != "passed"]
    if missing:
        record: Record = {"state": "not started", "reason": f"{', '.join(missing)} did not pass"}
    elif limit is None:
        short = f"needs {part.budget_s / MARGIN:.0f} s, and {max(left, 0):.0f} s are left"
        record = {"state": "not started", "reason": f"{short}; --resume goes on here"}
    else:
        say(f"== {part.name}: {part.title} (at most {limit:.0f} s)")
        record = run_part(part, limit, log)
    record = {"title": part.title, "budget_s": part.budget_s, "time": time.strftime("%Y-%m-%dT%H:%M:%S"), **record}
    result.keep(part.name, record)
    say(f"   {part.name}: {_verdict(record)}")


def exit_status(records: Sequence[Record]) -> int:
    states = {record["state"] for record in records}
    if states & {"failed", "timeout"}:
        return 1
    return 3 if "not started" in states else 0


def _verdict(record: Record) -> str:
    reason = f": {record['reason']}" if record.get("reason") else ""
    took = f" in {record['seconds']:.1f} s" if "seconds" in record else ""
    tail = f"\n{record['tail']}" if record.get("tail") else ""
    return f"{record['state']}{took}{reason}{tail}"


def run_part(part: Part, limit_s: float, log: Path) -> Record:
    """Run a part and return its record. Its rows count, also when it failed."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        rows, output = Path(folder) / "rows.jsonl", Path(folder) / "output"
        code: int | None
        with output.open("wb") as stream:
            try:
                code = _run(part, limit_s, stream, {**os.environ, **part.env, ROWS: str(rows)})
            except OSError as error:
                code = 127
                stream.write(f"{part.command[0]}: {error}\n".encode())
        text = output.read_text(encoding="utf-8", errors="replace")
        found, broken = read_rows(rows)
    with _writing, log.open("a", encoding="utf-8") as stream:
        stream.write(f"\n==== {part.name}: {' '.join(part.command)} ====\n{text}")
    record: Record = {"state": _state(code), "seconds": round(time.monotonic() - begin, 1), "rows": found}
    lines = text.strip().splitlines() or [""]
    if code is None:
        record["reason"] = f"still ran after {limit_s:.0f} s"
    elif code == SKIPPED:
        record["reason"] = lines[-1][:300]
    elif code:
        record["reason"] = f"killed by signal {-code}" if code < 0 else f"exit status {code}"
    if broken and record["state"] == "passed":
        record["state"], record["reason"] = "failed", f"{broken} of its rows are not JSON"
    if record["state"] in ("failed", "timeout"):
        record["tail"] = text.strip()[-TAIL:]
    return record


def _state(code: int | None) -> str:
    return "timeout" if code is None else {0: "passed", SKIPPED: "skipped"}.get(code, "failed")


def read_rows(file: Path) -> tuple[list[Any], int]:
    """Return rows, and how many lines could not be read (a part that is killed may leave half a line)."""
    found, broken = [], 0
    text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    for line in text.splitlines():
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("not an object")
            found.append(row)
        except ValueError:
            broken += 1
    return found, broken


def _run(part: Part, limit_s: float, output: Any, env: Mapping[str, str]) -> int | None:
    """Run a part; return its exit code, or None: time was over. The part's session is killed whole in any case."""
    process = subprocess.Popen(
        list(part.command),
        stdout=output,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        env=dict(env),
        start_new_session=True,
    )
    _running.add(process)
    # If memory runs out, it is the part that must go, and not this program.
    with suppress(OSError):
        Path(f"/proc/{process.pid}/oom_score_adj").write_text("900")
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        _signal_all(process, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
        return None
    finally:
        _signal_all(process, signal.SIGKILL)
        process.wait()
        _running.discard(process)


def _signal_all(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
