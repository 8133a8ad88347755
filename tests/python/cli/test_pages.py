"""The page of a rank: its format, reading of damaged or foreign pages, and the call site of a thread."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import zcomm
from zcomm.machine.process import Process
from zcomm.watch import folder as folders
from zcomm.watch import rank as watch
from zcomm.watch.page import NBYTES, Drive, Head, PageError, PageWriter, Record, read_page
from zcomm.watch.rank import Numbers, RankPage, records_name
from zcomm.watch.where import Looker, Place, place_in

PACKAGE = os.path.dirname(zcomm.__file__)
TORCH = "/usr/lib/python3/site-packages/torch"


def head(rank: int = 0, world_size: int = 1, pid: int | None = None, started: str | None = None) -> Head:
    process = Process.own()
    return Head(
        pid=process.pid if pid is None else pid,
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        started_at=time.time(),
        started=process.started if started is None else started,
        space=process.space,
        job="0123456789ab",
        host="here",
        name="train.py",
        backend="shm",
        command="python train.py",
    )


DRIVES = tuple(Drive(f"/mnt/{n}", 1e9 * n, n, 2e9 * n, 0.5 * n) for n in range(1, 4))


def test_a_page_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = Record(step=7.0, loss=0.5, memory=(1.0, 2.0, 3.0), plan=(math.nan, 2.0, 0.0), drives=DRIVES, site="a.py:3")
    writer = PageWriter(tmp_path / "1-1.page", head(), replace(record, step=6.0))
    writer.write(record)
    writer.close()
    file = tmp_path / "1-1.page"
    assert [each.name for each in tmp_path.iterdir()] == ["1-1.page"]
    assert file.stat().st_size == NBYTES and file.stat().st_mode & 0o777 == 0o600
    seen, read = read_page(file)
    assert seen == head() or seen == replace(head(), started_at=seen.started_at)
    assert math.isnan(read.plan[0]) and replace(read, plan=record.plan) == record


def test_text_is_cut_at_a_character_and_has_no_control_characters(tmp_path: Path) -> None:
    writer = PageWriter(
        tmp_path / "1-1.page", replace(head(), name="ä" * 100), Record(message="a\x1b[2J\nb" + "x" * 600)
    )
    writer.close()
    seen, read = read_page(tmp_path / "1-1.page")
    assert seen.name == "ä" * 32
    assert (
        read.message.startswith("a\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}b") and len(read.message) <= 512
    )


def test_drives_without_a_place_are_added_up(tmp_path: Path) -> None:
    many = (*DRIVES, Drive("/mnt/4", 1.0, 2.0, 3.0, 4.0), Drive("/mnt/5", 10.0, 20.0, 30.0, 40.0))
    PageWriter(tmp_path / "1-1.page", head(), Record(drives=many)).close()
    _, read = read_page(tmp_path / "1-1.page")
    assert read.drives == (*DRIVES, Drive("2 more", 11.0, 22.0, 33.0, 44.0))


def test_half_of_a_record_is_never_read(tmp_path: Path) -> None:
    file = tmp_path / "1-1.page"
    writer = PageWriter(file, head(), Record(step=1.0))
    writer.write(Record(step=2.0))  # in the first slot, from 4096 on
    writer.close()
    assert read_page(file)[1].step == 2.0
    with file.open("r+b") as opened:
        opened.seek(4096 + 100)
        opened.write(b"torn")
    assert read_page(file)[1].step == 1.0, "the slot that is whole"
    with file.open("r+b") as opened:
        opened.seek(4096 + 2048 + 100)
        opened.write(b"torn")
    with pytest.raises(PageError, match="no whole record"):
        read_page(file)


WRITER = """
import sys
from pathlib import Path
from test_pages import head
from zcomm.watch.page import PageWriter, Record
writer = PageWriter(Path(sys.argv[1]), head(), Record())
print("begun", flush=True)
step = 0
while True:
    step += 1
    writer.write(Record(step=step, wall_s=step, loss=step, site=f"train.py:{step}"))
"""


def test_a_reader_beside_a_writer_sees_whole_records(start_program: Callable[..., Any], tmp_path: Path) -> None:
    program = start_program(WRITER, tmp_path / "1-1.page")
    assert program.stdout.readline().strip() == "begun"
    seen = set()
    deadline = time.monotonic() + 60
    while len(seen) < 300 and time.monotonic() < deadline:
        record = read_page(tmp_path / "1-1.page")[1]
        seen.add(record.step)
        same = record.step == record.wall_s == record.loss
        assert record.step == 0 or (same and record.site == f"train.py:{record.step:.0f}")
    program.send_signal(signal.SIGKILL)
    program.wait(30)
    assert len(seen) == 300
    assert read_page(tmp_path / "1-1.page")[1].step >= max(seen), "killed amid its writes"


_TOGETHER = """
import sys, threading
from pathlib import Path
from zcomm.watch import rank as watch
from zcomm.watch.page import read_page

start = threading.Barrier(4)
def open_pages(rank):
    for turn in range(20):
        start.wait()
        watch.open_page("0123456789ab", rank, 4, rank, "shm")
        page = watch.current()
        if page is not None:
            page.log(0.5, turn)
threads = [threading.Thread(target=open_pages, args=(rank,)) for rank in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
watch.close_page()
(file,) = Path(sys.argv[1]).iterdir()
assert read_page(file)[1].state == "ended"
assert not [t.name for t in threading.enumerate() if t.name == "zcomm-page"]
"""


def test_threads_of_a_process_open_pages_at_once(start_program: Callable[..., Any], tmp_path: Path) -> None:
    program = start_program(_TOGETHER, tmp_path, env={**os.environ, "ZCOMM_WATCH": str(tmp_path)})
    out, err = program.communicate()
    assert program.returncode == 0, f"{out}\n{err}"


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def _grown(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


def _open_to_others(file: Path) -> None:
    file.chmod(0o644)


def _other_version(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[8] = 99
    file.write_bytes(data)


def _damaged_head(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[60] ^= 1
    file.write_bytes(data)


def _another_file(file: Path) -> None:
    file.write_bytes(bytes(NBYTES))


def _a_link(file: Path) -> None:
    file.rename(file.with_name("other"))
    file.symlink_to(file.with_name("other"))


def _a_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file, 0o600)


DAMAGES = [_cut, _grown, _open_to_others, _other_version, _damaged_head, _another_file, _a_link, _a_pipe]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_page_is_an_error_and_left_out(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    from zcomm.watch.jobs import read_jobs

    file = tmp_path / "1-1.page"
    PageWriter(file, head(), Record()).close()
    assert len(read_jobs(tmp_path)) == 1
    damage(file)
    with pytest.raises((PageError, OSError)):
        read_page(file)
    assert read_jobs(tmp_path) == []


def test_a_page_of_another_user_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PageWriter(tmp_path / "1-1.page", head(), Record()).close()
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(PageError, match="private file of this user"):
        read_page(tmp_path / "1-1.page")


@pytest.mark.parametrize("wrong", ["open", "link", "foreign"])
def test_a_folder_that_others_can_reach_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    monkeypatch.setattr(folders.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.delenv("ZCOMM_WATCH", raising=False)
    owner = os.getuid()
    mine = tmp_path / f"zcomm-{owner}"
    assert folders.pages_folder(make=True) == mine / "pages" and mine.stat().st_mode & 0o777 == 0o700
    if wrong == "open":
        mine.chmod(0o755)
    elif wrong == "link":
        mine.rename(tmp_path / "other")
        mine.symlink_to(tmp_path / "other")
    else:
        (tmp_path / f"zcomm-{owner + 1}").mkdir(mode=0o700)
        monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(PermissionError, match="closed to others"):
        folders.pages_folder(make=True)


def test_the_variable_leaves_pages_out_or_names_their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for off in ("0", "off"):
        monkeypatch.setenv("ZCOMM_WATCH", off)
        assert folders.pages_folder(make=True) is None
    monkeypatch.setenv("ZCOMM_WATCH", "here")
    for call in (folders.pages_folder, zcomm.init):
        with pytest.raises(ValueError, match="ZCOMM_WATCH='here'"):
            call()
    assert not zcomm.is_initialized()
    monkeypatch.setenv("ZCOMM_WATCH", str(tmp_path / "pages"))
    assert folders.pages_folder(make=True) == tmp_path / "pages"
    zcomm.init()
    assert len(list((tmp_path / "pages").glob("*.page"))) == 1
    zcomm.shutdown()
    monkeypatch.setenv("ZCOMM_WATCH", "0")
    zcomm.init()
    assert watch.current() is None
    zcomm.log(loss=1.0)  # does nothing
    zcomm.shutdown()
    assert len(list((tmp_path / "pages").glob("*.page"))) == 1


def test_a_folder_that_cannot_be_used_is_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setenv("ZCOMM_WATCH", "/dev/null/pages")
    with caplog.at_level(logging.WARNING, "zcomm"):
        zcomm.init()
    zcomm.shutdown()
    assert "zcomm top does not see this rank" in caplog.text


# --- pages that a rank writes ----------------------------------------------------------------------------------------


@pytest.fixture
def page(tmp_path: Path) -> Any:
    made = RankPage(tmp_path, head(), tmp_path)
    yield made
    made.close("ended")


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / records_name(0)).read_text().splitlines()]


def step(page: RankPage, numbers: Numbers) -> Record:
    """Write a step even if none is due."""
    page._next = 0.0
    page.stepped(lambda: numbers)
    return page._record


def test_counters_are_of_steps_after_the_first(page: RankPage, tmp_path: Path) -> None:
    first = step(page, Numbers(steps=1, step=11, comm_s=5.0, swap_s=7.0))
    assert (first.step, first.steps, first.wall_s, first.comm_s) == (11.0, 0.0, 0.0, 0.0)
    page.log(0.25, None)
    second = step(page, Numbers(steps=3, step=13, comm_s=5.5, swap_s=7.0, drives=DRIVES))
    assert (second.steps, second.comm_s, second.swap_s) == (2.0, 0.5, 0.0)
    assert second.recent_steps == 2.0 and second.wall_s > 0 and second.loss == 0.25
    assert second.recent_drives == DRIVES
    page.close("ended")
    kinds = lines(tmp_path)
    assert [each["kind"] for each in kinds] == ["head", "steps", "end"]
    assert kinds[1]["losses"] == [[11, 0.25]] and kinds[1]["steps"] == 2 and kinds[1]["comm_s"] == 0.5


def test_an_optimizer_that_is_closed_takes_nothing_back(page: RankPage) -> None:
    step(page, Numbers(steps=1, comm_s=1.0))
    step(page, Numbers(steps=2, comm_s=3.0))
    again = step(page, Numbers(steps=1, comm_s=0.0))  # another optimizer
    assert (again.steps, again.comm_s) == (1.0, 2.0)
    assert step(page, Numbers(steps=2, comm_s=0.5)).comm_s == 2.5


def test_a_step_that_is_not_due_asks_for_no_numbers(page: RankPage) -> None:
    step(page, Numbers(steps=1))
    page._next = math.inf
    page.stepped(lambda: pytest.fail("not due"))


def test_the_last_steps_are_written_when_an_optimizer_is_closed(page: RankPage) -> None:
    step(page, Numbers(steps=1, step=1))
    page._next = math.inf
    for _ in range(2):
        page.stepped(lambda: pytest.fail("not due"))
    page.flush(lambda: Numbers(steps=3, step=3))
    assert (page._record.step, page._record.steps) == (3.0, 2.0) and 0 < page._record.wall_s < 60
    page.flush(lambda: Numbers(steps=1 // 0))  # an optimizer that is broken


def test_lines_of_a_long_run_are_of_more_steps_each(page: RankPage, tmp_path: Path) -> None:
    step(page, Numbers(steps=1))
    page._begun_s -= 86400.0  # the run began a day ago: a line each 17 s
    for number in range(2, 500):
        page.log(1.0 / number, None)
        step(page, Numbers(steps=number, comm_s=float(number)))
    page.flush(lambda: Numbers(steps=500, comm_s=500.0))
    counted = [each for each in lines(tmp_path) if each["kind"] == "steps"]
    assert [each["steps"] for each in counted] == [1, 498] and counted[1]["comm_s"] == 498.0
    assert 100 <= len(counted[1]["losses"]) < 200 and counted[1]["losses"][-1][1] == pytest.approx(1 / 499)


def test_an_error_of_the_numbers_ends_the_records_and_not_training(page: RankPage, caplog: Any) -> None:
    def broken() -> Numbers:
        raise RuntimeError("no such part")

    page._next = 0.0
    with caplog.at_level(logging.WARNING, "zcomm"):
        page.stepped(broken)
        page.stepped(broken)
    assert caplog.text.count("no such part") == 1


def test_warnings_come_into_the_records_once(page: RankPage, tmp_path: Path) -> None:
    for _ in range(3):
        logging.getLogger("zcomm").warning("rank %d is late", 1)
    page.close("failed", "ValueError: no")
    kinds = lines(tmp_path)
    assert [each["text"] for each in kinds if each["kind"] == "warning"] == ["rank 1 is late"]
    assert kinds[-1]["kind"] == "end" and kinds[-1]["message"] == "ValueError: no"
    assert read_page(next(tmp_path.glob("*.page")))[1].state == "failed"


@pytest.mark.parametrize("given", [{"loss": "high"}, {"loss": [1.0, 2.0]}, {"step": 1.5}])
def test_log_refuses_what_is_no_number(given: dict[str, Any]) -> None:
    zcomm.init()
    try:
        with pytest.raises(ValueError, match="one number"):
            zcomm.log(**given)
    finally:
        zcomm.shutdown()


def test_log_counts_the_steps_of_a_program_without_an_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setenv("ZCOMM_WATCH", str(tmp_path / "pages"))
    zcomm.init()
    made = watch.current()
    assert made is not None
    for number in range(5, 8):
        made._next = 0.0
        zcomm.log(loss=torch.tensor([0.1 * number], requires_grad=True), step=number)
    assert (made._record.step, made._record.steps) == (7.0, 2.0) and made._record.loss == pytest.approx(0.7)
    zcomm.shutdown()


def test_old_pages_of_ended_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_KEEP_PAGES", 5)
    process, now = Process.own(), time.time()
    for number in range(8):
        (tmp_path / f"{4_000_000 + number}-1.page").touch()
        os.utime(tmp_path / f"{4_000_000 + number}-1.page", (now, now - 100 + number))
    for other in ("notes.page", "1-2.page.txt", "a-1.page"):
        (tmp_path / other).touch()
        os.utime(tmp_path / other, (now, now - 30 * 86400))  # the user's: the folder may have other files
    (tmp_path / ".1-2.page.1").touch()
    os.utime(tmp_path / ".1-2.page.1", (now, now - 8 * 86400))  # left by a rank that was killed as it began
    mine = tmp_path / f"{process.pid}-{process.started}.page"
    mine.touch()
    os.utime(mine, (now, now - 30 * 86400))  # of a running process, so it is kept, however old
    os.utime(tmp_path / "4000007-1.page", (now, now - 8 * 86400))
    watch.clean(tmp_path)
    kept = {path.name for path in tmp_path.iterdir()}
    assert mine.name in kept and "4000007-1.page" not in kept and "4000000-1.page" not in kept
    assert {"4000006-1.page", "notes.page", "1-2.page.txt", "a-1.page"} <= kept and ".1-2.page.1" not in kept


# --- the call site of a thread ---------------------------------------------------------------------------------------


def frames(*names: str) -> list[tuple[str, str, str]]:
    """Return frames of "FILE FUNCTION"; FILE is relative to the package, or an absolute path."""
    found = []
    for each in names:
        file, function = each.split()
        found.append((file if file.startswith(("/", "<")) else f"{PACKAGE}/{file}", "42", function))
    return found


@pytest.mark.parametrize(
    ("stack", "place"),
    [
        (["/home/me/train.py main"], Place("compute", "", "train.py:42")),
        ([f"{TORCH}/nn/linear.py forward", "/home/me/train.py main"], Place("compute", "", "train.py:42")),
        (
            ["comm/reductions.py all_reduce", "comm/functions.py all_reduce", "/home/me/train.py main"],
            Place("communication", "all_reduce", "train.py:42"),
        ),
        (
            ["zero/gradients/host.py wait", "zero/steps/step.py run", "zero/optimizer.py step", "/home/me/train.py f"],
            Place("communication", "step", "train.py:42"),
        ),
        (
            ["zero/cache/swap.py _ends_in", "zero/steps/step.py run", "zero/optimizer.py step", "/home/me/train.py f"],
            Place("swap", "step", "train.py:42"),
        ),
        (
            ["zero/rules/rule.py step", "zero/optimizer.py step", f"{TORCH}/optim/lr.py wrapper", "/home/me/t.py f"],
            Place("compute", "step", "t.py:42"),
        ),
        (
            [
                "zero/gradients/host.py wait",
                "zero/gradients/reducer.py _hook",
                f"{TORCH}/x.py backward",
                "/home/me/a.py m",
            ],
            Place("communication", "backward", "a.py:42"),
        ),
        ([], Place("compute", "", "")),
    ],
)
def test_where_a_stack_is(stack: list[str], place: Place) -> None:
    assert place_in(frames(*stack)) == place


def test_a_look_at_another_thread_holds_none_of_its_frames() -> None:
    import gc
    import weakref

    class Kept:
        pass

    def inside(begun: threading.Event, ends: threading.Event, refs: list[Any]) -> None:
        kept = Kept()
        refs.append(weakref.ref(kept))
        begun.set()
        ends.wait()

    begun, ends, refs = threading.Event(), threading.Event(), []
    thread = threading.Thread(target=inside, args=(begun, ends, refs))
    thread.start()
    begun.wait()
    looker = Looker(thread.ident or 0)
    gc.disable()
    try:
        place = looker.look()
        ends.set()
        thread.join()
        assert refs[0]() is None
    finally:
        gc.enable()
        looker.close()
    assert place.site.startswith("test_pages.py:")
