"""RankPage: writer of this rank's page, and under ``zcomm run --report`` of its records.

The training thread writes numbers at the ends of steps. Another thread samples the training thread's place once or
twice a second. Each rests after a write for _RATIO times the processor time of the write. So both together cost less
than a thousandth of the time, in jobs of any step length.
If a page cannot be written, a warning is logged once, and training continues.
Thread rule: any thread; one lock. ``stepped`` on one thread at a time.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import operator
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from zcomm.machine.process import Process, start_of
from zcomm.watch.folder import pages_folder
from zcomm.watch.page import SUFFIX, TIERS, Drive, Head, PageWriter, Record
from zcomm.watch.where import Looker

REPORT = "ZCOMM_REPORT"
_RATIO = 4000.0
_LONGEST_S = 2.0  # between two records, however long one takes
_AFTER_FIRST_S = 0.05  # the first record is slow because of cold caches
_LOOK_S, _LONGEST_LOOK_S = 0.5, 4.0
_RECENT_S = 2.0  # of training that the "recent" numbers are of, at least
_MOST_LOSSES = 200  # between two lines of a report's records; of more every second one is left out
_LINES = 5000.0  # the time between two lines grows to this part of the time so far
_MOST_WARNINGS = 100
_KEEP_S, _KEEP_PAGES = 7 * 86400.0, 200
_NAME = re.compile(r"\.?(\d+)-(\d+)\.page(\.\d+)?")  # longer names are of unfinished pages
_log = logging.getLogger("zcomm")


@dataclass(frozen=True)
class Numbers:
    """Counters of the open optimizers. steps: updates so far; step: as checkpoints count. The rest: see page.Record."""

    steps: int = 0
    step: int = 0
    comm_s: float = 0.0
    swap_s: float = 0.0
    update_s: float = 0.0
    link_nbytes: float = 0.0
    memory: tuple[float, ...] = (0.0,) * len(TIERS)
    slots: tuple[float, ...] = (0.0,) * len(TIERS)
    plan: tuple[float, ...] = (math.nan,) * len(TIERS)
    drives: tuple[Drive, ...] = field(default=())


_COUNTERS = ("comm_s", "swap_s", "update_s", "link_nbytes")
_RECENT = ("steps", "wall_s", "comm_s", "swap_s", "link_nbytes")


class RankPage:
    """Page of this rank while it is in a job. report: a folder for its records, too."""

    def __init__(self, folder: Path, head: Head, report: Path | None) -> None:
        self._lock = threading.Lock()
        self._head = head
        now = time.time()
        self._record = Record(updated_at=now, since=now)
        self._page = PageWriter(folder / f"{head.pid}-{head.started}{SUFFIX}", head, self._record)
        self._open = True
        self._loss, self._losses = math.nan, list[tuple[int, float]]()
        self._given_step: int | None = None
        self._logged = 0
        self._next = 0.0  # when the next record may be written
        self._last_s = self._ended_s = 0.0  # when the last one was; when the last step ended
        self._seen: Numbers | None = None  # of the last record; None: before the first step's end
        self._from = self._line_from = self._record  # the recent numbers, and a report's next line, count from here
        self._begun_s = self._next_line = 0.0
        self._place = Looker(threading.get_ident())
        self._lines: TextIO | None = None
        self._warnings = _Warnings(self._line)
        if report is not None:
            self._open_report(report)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._look, name="zcomm-page", daemon=True)
        self._thread.start()

    # --- the training thread ------------------------------------------------------------------------------------

    def stepped(self, collect: Callable[[], Numbers]) -> None:
        """Write a record at the end of a step, if one is due. collect: returns the present numbers."""
        self._ended_s = now = time.perf_counter()
        if now < self._next:
            return
        begin, first = time.thread_time(), self._seen is None
        try:
            self._write_step(collect(), now)
            rest_s = min(_LONGEST_S, _RATIO * (time.thread_time() - begin))
            self._next = time.perf_counter() + (_AFTER_FIRST_S if first else rest_s)
        except Exception as error:
            self._next = math.inf
            _log.warning("zcomm top and reports see no more steps of this rank: %s: %s", type(error).__name__, error)

    def flush(self, collect: Callable[[], Numbers]) -> None:
        """Write the steps since the last record, before an optimizer is closed. Errors are dropped."""
        with contextlib.suppress(Exception):  # of an optimizer that is broken
            numbers = collect()
            if self._seen is not None and numbers.steps > self._seen.steps:
                self._write_step(numbers, self._ended_s, last=True)

    def log(self, loss: float | None, step: int | None) -> None:
        """Keep a loss for the next record. step: of the program's own count, which is then shown."""
        if step is not None:
            self._given_step = step
        if loss is not None:
            self._loss = loss
            if self._lines is not None:
                known = self._given_step if self._given_step is not None else self._seen.step if self._seen else 0
                self._losses.append((known, loss))
                if len(self._losses) >= _MOST_LOSSES:
                    del self._losses[::2]
        if step is not None and (self._seen is None or self._logged):  # no optimizer counts steps
            self._logged += 1
            self.stepped(lambda: Numbers(steps=self._logged, step=step))

    def _write_step(self, numbers: Numbers, now: float, last: bool = False) -> None:
        seen, self._seen = self._seen, numbers
        wall_s, self._last_s = now - self._last_s, now
        with self._lock:
            if not self._open:
                return
            old = self._record
            counted: dict[str, Any] = {}
            if seen is not None:  # time before the end of the first step is not counted
                # The counters of a closed optimizer are missing, so the sum falls.
                passed = {name: max(0, getattr(numbers, name) - getattr(seen, name)) for name in ("steps", *_COUNTERS)}
                counted = {name: getattr(old, name) + more for name, more in {**passed, "wall_s": wall_s}.items()}
                recent = {f"recent_{name}": counted[name] - getattr(self._from, name) for name in _RECENT}
                counted |= recent | {"recent_drives": _since(numbers.drives, self._from.drives)}
            new = replace(
                old,
                updated_at=time.time(),
                step_at=time.time(),
                step=float(numbers.step if self._given_step is None else self._given_step),
                loss=self._loss,
                memory=numbers.memory,
                slots=numbers.slots,
                plan=numbers.plan,
                drives=numbers.drives,
                **counted,
            )
            if seen is None or new.recent_wall_s >= _RECENT_S:
                self._from = new
            self._record = new
            self._page.write(new)
            self._place.thread = threading.get_ident()
            if seen is None:
                self._line_from, self._begun_s = new, now
            elif self._lines is not None and (last or now >= self._next_line):
                self._write_line(self._line_from, new)
                self._line_from, self._next_line = new, now + (now - self._begun_s) / _LINES

    def _write_line(self, old: Record, new: Record) -> None:
        losses, self._losses = self._losses, []
        passed = {name: getattr(new, name) - getattr(old, name) for name in ("steps", "wall_s", *_COUNTERS)}
        drives = [asdict(drive) for drive in _since(new.drives, old.drives)]
        plan = [None if math.isnan(nbytes) else nbytes for nbytes in new.plan]
        now = {"at": new.step_at, "step": new.step, "memory": new.memory, "slots": new.slots, "plan": plan}
        self._line({"kind": "steps", **now, **passed, "drives": drives, "losses": losses})

    # --- the looking thread -------------------------------------------------------------------------------------

    def _look(self) -> None:
        wait_s = _LOOK_S
        while not self._ends.wait(wait_s):
            begin = time.thread_time()
            self._write_place()
            wait_s = min(_LONGEST_LOOK_S, max(_LOOK_S, _RATIO * (time.thread_time() - begin)))

    def _write_place(self) -> None:
        place = self._place.look()
        with self._lock:
            if not self._open:
                return
            old, now = self._record, time.time()
            stays = place == (old.phase, old.operation, old.site) and not old.step_at > old.since
            self._record = replace(old, **place._asdict(), since=old.since if stays else now, updated_at=now)
            self._page.write(self._record)

    # --- records of a report ------------------------------------------------------------------------------------

    def _open_report(self, folder: Path) -> None:
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            file = os.open(folder / records_name(self._head.rank), flags, 0o600)
        except OSError as error:
            _log.warning("zcomm run --report: rank %d writes no records: %s", self._head.rank, error)
            return
        self._lines = os.fdopen(file, "w", encoding="utf-8")
        self._line({"kind": "head", **asdict(self._head)})
        _log.addHandler(self._warnings)

    def _line(self, record: dict[str, Any]) -> None:
        if self._lines is not None:
            self._lines.write(json.dumps(record) + "\n")
            self._lines.flush()

    # --- the end ------------------------------------------------------------------------------------------------

    def close(self, state: str, message: str = "") -> None:
        """Write the last state. The file is kept for ``zcomm top``. Idempotent: the first call counts."""
        self._ends.set()
        self._thread.join()
        with self._lock:
            if not self._open:
                return
            self._open = False
            last = replace(self._record, state=state, message=message, updated_at=time.time(), loss=self._loss)
            self._page.write(last)
            self._page.close()
        self._place.close()
        _log.removeHandler(self._warnings)
        with contextlib.suppress(OSError):
            os.utime(self._page.path)  # a page is removed a week after this
            self._line({"kind": "end", "state": state, "message": message, "losses": self._losses})
            if self._lines is not None:
                self._lines.close()
        self._lines = None


class _Warnings(logging.Handler):
    """Warnings of the logger "zcomm" for the report, each text once."""

    def __init__(self, write: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(logging.WARNING)
        self._write, self._seen = write, set[str]()

    def emit(self, record: logging.LogRecord) -> None:
        """Write a warning."""
        text = record.getMessage()
        if text not in self._seen and len(self._seen) < _MOST_WARNINGS:
            self._seen.add(text)
            with contextlib.suppress(OSError, ValueError):
                self._write({"kind": "warning", "at": record.created, "text": text[:2000]})


def records_name(rank: int | str) -> str:
    """Return the name of a rank's records in the folder of a report."""
    return f"rank{rank}.records.jsonl"


def _since(new: tuple[Drive, ...], old: tuple[Drive, ...]) -> tuple[Drive, ...]:
    """Return bytes and seconds of the drives since ``old``."""
    known = {drive.path: drive for drive in old}
    found = []
    for drive in new:
        before = known.get(drive.path, Drive())
        names = ("read_nbytes", "read_s", "written_nbytes", "write_s")
        moved = (max(0.0, getattr(drive, name) - getattr(before, name)) for name in names)
        found.append(Drive(drive.path, *moved))
    return tuple(found)


# --- the page of this process ---------------------------------------------------------------------------------------

_page: RankPage | None = None
_finalized = 0  # the process that ends its page at its end
_changes = threading.RLock()  # one thread at a time opens or ends it; a signal's handler may come in between


def current() -> RankPage | None:
    """Return the page of this process; None outside of a job and with ``ZCOMM_WATCH=0``."""
    return _page


def log(loss: Any = None, *, step: int | None = None) -> None:
    """Show a loss, and the program's own number of the step, in ``zcomm top`` and in the report of a run.

    loss: a number, or a tensor of one element (of one on a device the value is waited for). step: by default the
    optimizer's count. A program without ZeroOptimizer gives it, and each call with it is the end of a step.
    Not collective: each rank shows its own. Does nothing outside of a job. Raises: ValueError for other values.
    """
    page = _page
    if page is None:
        return
    try:
        value = None if loss is None else float(loss.detach() if hasattr(loss, "detach") else loss)
        number = None if step is None else operator.index(step)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"log(loss={loss!r}, step={step!r}): expected one number each ({error})") from None
    page.log(value, number)


def open_page(job: str, rank: int, world_size: int, local_rank: int, backend: str) -> None:
    """Begin the page of this rank, and end the previous one. job: see page.Head.

    If several threads are ranks of a process, the last caller has the page. A folder that cannot be used is logged as a
    warning.
    """
    with _changes:
        close_page()
        _open_page(job, rank, world_size, local_rank, backend)


def _open_page(job: str, rank: int, world_size: int, local_rank: int, backend: str) -> None:
    global _page, _finalized
    try:
        folder = pages_folder(make=True)
        if folder is None:
            return
        if local_rank == 0:
            clean(folder)
        process, report = Process.own(), os.environ.get(REPORT)
        head = Head(
            pid=process.pid,
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            started_at=time.time(),
            started=process.started,
            space=process.space,
            job=job,
            host=process.node,
            name=_name(),
            backend=backend,
            command=_command(),
        )
        _page = RankPage(folder, head, Path(report) if report else None)
        from multiprocessing.util import Finalize  # torch has it by now; a launcher does not need it

        if _finalized != os.getpid():
            _finalized = os.getpid()
            Finalize(None, close_page, exitpriority=0)  # ranks that multiprocessing forks skip atexit
    except (OSError, ValueError) as error:
        _log.warning("zcomm top does not see this rank: %s (ZCOMM_WATCH=0 leaves its page out)", error)


def close_page(message: str = "") -> None:
    """End the page of this rank. Idempotent.

    message: why the rank fails; by default the exception that ends the program, if one does.
    """
    global _page
    with _changes:
        page, _page = _page, None
        if page is None:
            return
        error = getattr(sys, "last_value", None)
        if not message and isinstance(error, Exception) and not hasattr(sys, "ps1"):
            message = f"{type(error).__name__}: {error}"
        page.close("failed" if message else "ended", message)


def _command() -> str:
    try:
        return " ".join(Path("/proc/self/cmdline").read_bytes().decode("utf-8", "replace").split("\0")).strip()
    except OSError:
        return " ".join(sys.argv)


def _name() -> str:
    """Return the script's name; of ``python -m`` the module's."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None and spec.name:
        return str(spec.name).removesuffix(".__main__")
    name = os.path.basename(sys.argv[0]) if sys.argv else ""
    return "python" if name in ("", "-c") else name


def clean(folder: Path) -> None:
    """Remove pages of ended processes: each one older than a week, and the oldest if there are more than 200."""
    now, found = time.time(), []
    for path in folder.iterdir():
        if _NAME.fullmatch(path.name) is None:
            continue  # the folder may be one that the variable names
        with contextlib.suppress(OSError):  # another job cleans, too
            found.append((path.lstat().st_mtime, path))
    surplus = len(found) - _KEEP_PAGES
    for number, (changed, path) in enumerate(sorted(found)):
        if (number < surplus or changed < now - _KEEP_S) and not _is_alive(path):
            with contextlib.suppress(OSError):
                path.unlink()


def _is_alive(path: Path) -> bool:
    named = _NAME.fullmatch(path.name)
    return named is not None and start_of(int(named[1])) == named[2]


def _leave_to_parent() -> None:
    """Reset the page in a forked child, because its parent owns the page and may hold the lock."""
    global _page, _changes
    _page, _changes = None, threading.RLock()


os.register_at_fork(after_in_child=_leave_to_parent)
