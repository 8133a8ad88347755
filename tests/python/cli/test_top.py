"""`zcomm top`: which ranks it names in a job with a slow, a stopped and a dead one, post-mortems, and other hosts."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import zcomm
from ranks import World
from test_pages import head
from zcomm.cli.main import main
from zcomm.watch.jobs import Job, Rank, choose, findings, frame, read_jobs, slowest, time_words
from zcomm.watch.page import PageWriter, Record

NOW = 1_000_000.0


@pytest.fixture(autouse=True)
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the folder for pages of this test's jobs."""
    folder = tmp_path / "pages"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("ZCOMM_WATCH", str(folder))
    yield folder


def top(*words: str) -> str:
    """Run `zcomm top --once` as a user does, and return its output."""
    command = [sys.executable, "-m", "zcomm.cli", "top", "--once", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- findings in made-up jobs ---------------------------------------------------------------------------------------


def rank(number: int, comm_s: float = 0.0, state: str = "running", size: int = 3, **record: Any) -> Rank:
    """Return a rank of steps of 100 ms that waits for ``comm_s`` seconds in each of its last 10 steps."""
    known = {"recent_steps": 10.0, "recent_wall_s": 1.0, "recent_comm_s": 10 * comm_s, "updated_at": NOW, "since": NOW}
    return Rank(head(number, size, pid=100 + number), Record(**{**known, **record}), state)


def words(*ranks: Rank) -> str:
    return "\n".join(findings(Job("j", list(ranks)), NOW))


def test_a_rank_for_which_all_others_wait_is_slow() -> None:
    ranks = [rank(0, 0.05), rank(1, 0.002), rank(2, 0.06)]
    found = slowest(ranks)
    assert found is not None and found[0] == 1 and found[1:] == pytest.approx((0.053, 0.1))
    assert words(*ranks) == "rank 1 is slow: the others wait 53 ms of each step of 100 ms for it"
    data = frame(Job("j", ranks), NOW)
    assert data["slowest_rank"] == 1 and [each["waits_for"] for each in data["ranks"]] == [1, None, 1]
    assert data["ranks"][0]["communication_s"] == pytest.approx(0.002)
    assert data["ranks"][0]["waiting_s"] == pytest.approx(0.048)
    assert data["ranks"][0]["compute_s"] == pytest.approx(0.05)
    json.dumps(data, allow_nan=False)


@pytest.mark.parametrize("comm_s", [(0.05, 0.052, 0.051), (0.001, 0.009, 0.001), (0.0, 0.0, 0.0)])
def test_equal_ranks_are_not_slow(comm_s: tuple[float, ...]) -> None:
    assert words(*(rank(number, seconds) for number, seconds in enumerate(comm_s))) == ""


def test_states_are_said_in_words() -> None:
    there = {"operation": "all_reduce", "site": "train.py:9", "updated_at": NOW - 30}
    text = words(
        rank(0, state="failed", message="PeerLost: rank 1"), rank(1, state="dead", **there), rank(2, state="stopped")
    )
    assert "rank 0 (pid 100) has failed: PeerLost: rank 1" in text
    assert "rank 1 (pid 101) is dead" in text and "last seen 30 s ago in all_reduce() at train.py:9" in text
    assert "rank 2 (pid 102) is stopped by a signal" in text and "kill -CONT 102" in text


def test_a_rank_that_waits_for_long_names_those_that_are_elsewhere() -> None:
    waits = {"phase": "communication", "operation": "step", "site": "t.py:7", "since": NOW - 60}
    text = words(rank(0, **waits), rank(1, phase="compute", site="t.py:3", since=NOW - 61), rank(2, **waits))
    assert text == "rank 0 waits since 60 s in step() at t.py:7, for rank 1 (at t.py:3)"
    assert words(rank(0, **{**waits, "since": NOW - 2}), rank(1, phase="compute"), rank(2)) == "", "not for long"


def test_ranks_without_a_page_are_named() -> None:
    assert "ranks 1, 2 of 3 have no page here" in words(rank(0))


def test_a_job_is_found_by_name_script_and_pid() -> None:
    jobs = [Job("abc1", [rank(0, state="ended")]), Job("abd2", [rank(0)]), Job("xyz3", [rank(0)])]
    assert choose(jobs, None) == jobs[1:] and choose(jobs[:1], None) == jobs[:1]
    assert choose(jobs, "ab") == jobs[:2] and choose(jobs, "xyz3") == [jobs[2]]
    assert choose(jobs, "train.py") == jobs == choose(jobs, "100") and choose(jobs, "none") == []


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0 ms"), (0.0123, "12.3 ms"), (3.21, "3.21 s"), (300, "5 min"), (86400, "24 h")]
)
def test_times_are_read_easily(seconds: float, text: str) -> None:
    assert time_words(seconds) == text


# --- states of processes --------------------------------------------------------------------------------------------


def test_a_pid_that_is_used_again_is_not_the_rank(pages: Path) -> None:
    PageWriter(pages / "1-1.page", head(started="1"), Record(updated_at=time.time())).close()
    PageWriter(pages / "2-2.page", head(rank=1, world_size=2), Record(updated_at=time.time())).close()
    (job,) = read_jobs(pages)
    assert [each.state for each in job.ranks] == ["dead", "running"]


def test_a_process_of_another_container_is_judged_by_its_page(pages: Path) -> None:
    from dataclasses import replace

    elsewhere = replace(head(pid=1, started="1"), space="elsewhere")
    PageWriter(pages / "1-1.page", elsewhere, Record(updated_at=time.time())).close()
    assert read_jobs(pages)[0].ranks[0].state == "running"
    assert read_jobs(pages, time.time() + 60)[0].ranks[0].state == "dead"


# --- real jobs ------------------------------------------------------------------------------------------------------


def train_until(stop: str, slow: int) -> None:
    """Train until the file ``stop`` exists. Rank ``slow`` takes longer for each step."""
    import torch

    comm = zcomm.init(timeout=60)
    model = torch.nn.Linear(32, 32)
    opt = zcomm.ZeroOptimizer(model, "adamw", lr=1e-3, stage=2)
    ends = torch.zeros(1)
    while not ends.item():
        loss = model(torch.randn(4, 32)).square().mean()
        loss.backward()
        time.sleep(0.06 if comm.rank == slow else 0.0)
        opt.step()
        opt.zero_grad()
        zcomm.log(loss=loss)
        ends.fill_(os.path.exists(stop))
        comm.all_reduce(ends, op="max")
    opt.close()
    zcomm.shutdown()


def until(look: Callable[[], str], *texts: str) -> str:
    """Call ``look`` until it has all of ``texts``, and return it."""
    deadline = time.monotonic() + 45
    while time.monotonic() < deadline:
        seen = look()
        if all(text in seen for text in texts):
            return seen
        time.sleep(0.2)
    raise AssertionError(f"no {texts} in\n{seen}")


def seen_here() -> str:
    """Return the findings of the only job, read in this process."""
    jobs = read_jobs(Path(os.environ["ZCOMM_WATCH"]))
    return "\n".join(findings(jobs[0], time.time())) if jobs else ""


def test_a_slow_a_stopped_and_a_dead_rank_are_named(start_ranks_in: Callable[..., World], tmp_path: Path) -> None:
    world = start_ranks_in(train_until, 4, str(tmp_path / "stop"), 1, env={"ZCOMM_WATCH": os.environ["ZCOMM_WATCH"]})
    until(seen_here, "rank 1 is slow: the others wait")
    text = top()
    assert "rank 1 is slow: the others wait" in text and "stopped" not in text and "dead" not in text
    assert "rank 1" in text and "ms" in text and "4 ranks, shm" in text

    world.kill(2, signal.SIGSTOP)
    until(seen_here, f"rank 2 (pid {world.processes[2].pid}) is stopped by a signal")
    text = top()
    assert f"rank 2 (pid {world.processes[2].pid}) is stopped by a signal" in text and "dead" not in text

    world.kill(3, signal.SIGKILL)
    until(seen_here, f"rank 3 (pid {world.processes[3].pid}) is dead")
    text = top()  # all three ranks at once
    assert f"rank 3 (pid {world.processes[3].pid}) is dead: its process is gone" in text
    assert f"rank 2 (pid {world.processes[2].pid}) is stopped" in text and "rank 1 is slow" in text
    world.kill(2, signal.SIGCONT)
    world.join(60)
    text = top()
    assert "rank 3" in text and "is dead" in text, "the post-mortem stays"


def test_a_job_that_ended_well_stays_readable(
    start_ranks_in: Callable[..., World], tmp_path: Path, pages: Path
) -> None:
    (tmp_path / "stop").touch()
    results = start_ranks_in(train_until, 2, str(tmp_path / "stop"), -1, env={"ZCOMM_WATCH": str(pages)}).join()
    assert all(result.exitcode == 0 for result in results), [result.describe() for result in results]
    (job,) = read_jobs(pages)
    assert [each.state for each in job.ranks] == ["ended", "ended"] and not job.is_running
    text = top()
    assert "ended; began" in text and "* has ended" in text


def wait_in_torch(folder: str) -> list[str]:
    """Join only by torch.distributed; while rank 0 waits in an all_reduce, rank 1 returns the phases and call sites."""
    import torch
    import torch.distributed as dist

    import zcomm.torch_backend  # noqa: F401

    rank = int(os.environ["RANK"])
    dist.init_process_group("zcomm", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    found = []
    if rank == 1:
        time.sleep(1.5)
        (job,) = read_jobs(Path(os.environ["ZCOMM_WATCH"]))
        found = [each.record.phase + " " + each.record.site for each in job.ranks]
    dist.all_reduce(torch.ones(2))
    dist.destroy_process_group()
    return found


def test_a_program_on_torch_distributed_has_pages(
    start_ranks_in: Callable[..., World], tmp_path: Path, pages: Path
) -> None:
    results = start_ranks_in(wait_in_torch, 2, str(tmp_path), env={"ZCOMM_WATCH": str(pages)}).join()
    assert all(result.exitcode == 0 for result in results), [result.describe() for result in results]
    waiting, elsewhere = results[1].value
    assert waiting.startswith("communication test_top.py:") and elsewhere.startswith("compute test_top.py:")
    assert [each.state for each in read_jobs(pages)[0].ranks] == ["ended", "ended"]


def test_an_error_of_the_program_is_in_the_post_mortem(start_program: Callable[..., Any], pages: Path) -> None:
    program = start_program("import zcomm\nzcomm.init()\nraise ValueError('no such data')")
    program.wait(60)
    (job,) = read_jobs(pages)
    assert job.ranks[0].state == "failed"
    assert "has failed: ValueError: no such data" in top()


def test_a_forked_child_leaves_the_page_to_its_parent(start_program: Callable[..., Any], pages: Path) -> None:
    program = start_program(
        "import os, time, zcomm\n"
        "zcomm.init()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n    zcomm.shutdown()\n    os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
        "from zcomm.watch.rank import current\n"
        "print(current()._record.state, flush=True)\n"
        "zcomm.shutdown()\n"
    )
    assert program.stdout.readline().strip() == "running"
    assert program.wait(60) == 0
    assert read_jobs(pages)[0].ranks[0].state == "ended"


# --- the command ----------------------------------------------------------------------------------------------------


def test_several_jobs_are_listed_and_none_is_an_error(pages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from dataclasses import replace

    assert main(["top", "--once"]) == 1
    assert "no job of this user" in capsys.readouterr().err
    for number, name in enumerate(("aaa", "bbb")):
        made = replace(head(), job=name, name=f"{name}\x1b]0;x\x07.py")
        PageWriter(pages / f"{number}-1.page", made, Record(updated_at=time.time())).close()
    assert main(["top"]) == 0
    text = capsys.readouterr().out
    assert "aaa" in text and "bbb" in text and "\x1b" not in text and "\x07" not in text
    assert main(["top", "--list"]) == 0
    listed = capsys.readouterr().out
    assert "aaa" in listed and "bbb" in listed and "running" in listed
    assert main(["top", "bbb", "--once"]) == 0
    assert "aaa" not in capsys.readouterr().out
    assert main(["top", "zzz"]) == 1
    assert main(["top", "--json"]) == 0
    assert {each["job"] for each in json.loads(capsys.readouterr().out)["jobs"]} == {"aaa", "bbb"}


def test_looking_makes_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZCOMM_WATCH", raising=False)
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    assert main(["top"]) == 1 and list(folder.iterdir()) == []
    (folder / f"zcomm-{os.getuid()}").symlink_to("/nowhere")  # stands for another user's symlink
    assert main(["top"]) == 2


def test_the_live_view_goes_on_until_the_job_ends(start_program: Callable[..., Any]) -> None:
    program = start_program("import zcomm\nzcomm.init()\nprint('begun', flush=True)\ninput()\nzcomm.shutdown()")
    assert program.stdout.readline().strip() == "begun"
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "zcomm.cli", "top", "--interval", "0.2"]
    view = subprocess.Popen(
        command, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm", "COLUMNS": "150"}
    )
    os.close(theirs)
    text = ""
    try:
        while text.count("runs since") < 3:
            text += os.read(ours, 65536).decode()
        program.communicate("go on\n")
        with contextlib.suppress(OSError):  # the other side of the terminal is closed
            while piece := os.read(ours, 65536):
                text += piece.decode()
        assert view.wait(30) == 0
    finally:
        view.kill()
        view.wait()
        os.close(ours)
    assert "ended; began" in text.rpartition("runs since")[2], "the last frame stays"


FAKE_SSH = """#!/bin/sh
printf '%s\\n' "$@" > "$(dirname "$0")/words"
shift 6
exec sh -c "$1"
"""


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a program that runs the command locally in ssh's place. Returns: the file with its arguments."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ssh").write_text(FAKE_SSH)
    (folder / "ssh").chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder / "words"


def test_another_host_is_asked_by_ssh(pages: Path, ssh: Path, capsys: pytest.CaptureFixture[str]) -> None:
    PageWriter(pages / "1-1.page", head(), Record(updated_at=time.time(), site="train.py:3")).close()
    assert main(["top", "--host", "me@node-2", "--once"]) == 0
    assert "train.py:3" in capsys.readouterr().out
    assert ssh.read_text().splitlines()[:6] == ["-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "--", "me@node-2"]


@pytest.mark.parametrize("job", ["$(touch {0})", "`touch {0}`", "; touch {0}", "'; touch {0} '", "a\ntouch {0}"])
def test_a_hostile_name_of_a_job_starts_nothing(
    tmp_path: Path, ssh: Path, job: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", job.format(tmp_path / "made"), "--host", "node", "--once"]) == 1
    assert "no such job" in capsys.readouterr().err and not (tmp_path / "made").exists()


@pytest.mark.parametrize("host", ["", "-oProxyCommand=x", "a b", "a;b", "$(a)", "a\nb", "@a$"])
def test_a_hostile_name_of_a_host_is_refused(ssh: Path, host: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", f"--host={host}"]) == 2
    assert "expected the name or address of a host" in capsys.readouterr().err and not ssh.exists()


@pytest.mark.parametrize("answer", ["", "no json", "[]", '{"jobs": [1]}', '{"jobs": [{}]}', '{"jobs": 3}'])
def test_an_answer_that_is_no_frame_is_an_error(ssh: Path, answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    script = ssh.with_name("ssh")
    script.write_text(f"#!/bin/sh\nprintf 'first\\nno \\033[2J route\\n' >&2\nprintf '%s' '{answer}'\nexit 255\n")
    assert main(["top", "--host", "node"]) == 2
    error = capsys.readouterr().err
    assert "--host node: no \ufffd[2J route (ssh ended with 255)" in error
