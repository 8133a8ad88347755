"""`zcomm run`: environment of the ranks, their output, which failure is named, and that no process outlives a job.

The scripts import neither torch nor zcomm, so a job costs a tenth of a second.
"""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from zcomm.launch.failure_report import RankEnd, first_failure, report
from zcomm.launch.oom import OomWatch, counter_files
from zcomm.launch.output import Stream

COMMAND = [sys.executable, "-m", "zcomm.cli"]
JobStarter = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[JobStarter]:
    """Start `zcomm run` on a script given as text; its temporary files are in tmp_path."""
    (tmp_path / "tmp").mkdir()
    started: list[subprocess.Popen[str]] = []

    def run(script: str, *options: str, args: tuple[str, ...] = (), ranks: int = 2) -> subprocess.Popen[str]:
        file = tmp_path / "script.py"
        file.write_text("import os, signal, subprocess, sys, time\nRANK = int(os.environ['RANK'])\n" + script)
        environment = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "ZCOMM_DEBUG")}
        process = subprocess.Popen(
            [*COMMAND, "run", "-n", str(ranks), *options, str(file), *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={**environment, "TMPDIR": str(tmp_path / "tmp")},
        )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()
    assert not list((tmp_path / "tmp").iterdir())  # the job removed its private directory


def finish(process: subprocess.Popen[str], timeout_s: float = 60.0) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=timeout_s)
    return process.returncode, out, err


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"still waiting for {what} after {timeout_s} s"
        time.sleep(0.02)


def pids_from(folder: Path, count: int) -> list[int]:
    """Return the process ids in files named pid-N of a script's processes, once all ``count`` exist."""
    wait_until(lambda: len(list(folder.glob("pid-*"))) >= count, f"{count} processes")
    return [int(file.name.removeprefix("pid-")) for file in folder.glob("pid-*")]


# --- environment and output ----------------------------------------------------------------------------------------


def test_environment_and_arguments(start: JobStarter) -> None:
    script = """
import json
mode = oct(os.stat(os.environ['ZCOMM_INIT_METHOD'][7:].rsplit('/', 1)[0]).st_mode & 0o777)
print({**os.environ, 'argv': sys.argv[1:], 'session': os.getsid(0) == os.getpid(), 'mode': mode})
"""
    code, out, err = finish(start(script, "--env", "COLOUR=a=b", ranks=3, args=("-n", "7", "--env", "x")))
    assert (code, err) == (0, "")
    ranks = {}
    for line in out.splitlines():
        tag, _, content = line.partition(" ")
        ranks[tag] = ast.literal_eval(content)
    assert sorted(ranks) == ["[0]", "[1]", "[2]"]
    for tag, environment in ranks.items():
        assert f"[{environment['RANK']}]" == tag
        assert environment["LOCAL_RANK"] == environment["RANK"]
        assert environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"] == "3"
        assert environment["MASTER_ADDR"] == "127.0.0.1"
        assert environment["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 3))
        assert environment["COLOUR"] == "a=b"
        assert environment["argv"] == ["-n", "7", "--env", "x"]
        assert environment["session"]
        assert environment["mode"] == "0o700"
    for name in ("MASTER_PORT", "ZCOMM_INIT_METHOD"):
        assert len({environment[name] for environment in ranks.values()}) == 1
    assert ranks["[0]"]["ZCOMM_INIT_METHOD"].startswith("file:///")


def test_module_and_thread_count_of_the_user(start: JobStarter, tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text("import os, sys; print(os.environ['OMP_NUM_THREADS'], sys.argv[1:])")
    process = subprocess.run(
        [*COMMAND, "run", "-n", "1", "--env", "OMP_NUM_THREADS=5", "-m", "tool", "--deep"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (process.returncode, process.stdout, process.stderr) == (0, "[0] 5 ['--deep']\n", "")


def test_lines_are_never_cut_and_tee_has_them(start: JobStarter, tmp_path: Path) -> None:
    script = """
for i in range(300):
    sys.stdout.write(str(RANK) * 50); sys.stdout.flush(); sys.stdout.write(f' {i}\\n')
sys.stdout.write('no newline at the end')
"""
    code, out, _ = finish(start(script, "--tee", "logs"))
    assert code == 0
    lines = out.splitlines()
    for rank in (0, 1):
        mine = [line for line in lines if line.startswith(f"[{rank}] ")]
        assert mine == [f"[{rank}] {str(rank) * 50} {i}" for i in range(300)] + [f"[{rank}] no newline at the end"]
        assert len((tmp_path / f"logs/rank{rank}.out").read_text().splitlines()) == 301
    assert len(lines) == 602


def test_the_same_traceback_is_printed_once(start: JobStarter) -> None:
    code, _, err = finish(start("def f(): raise ValueError('both')\nf()", ranks=2))
    assert code == 1 and err.count("Traceback") == 1 and err.count("in f") == 1, err
    assert err.count("ValueError: both (traceback: as rank") == 1
    assert re.search(r"zcomm run: rank [01] \(pid \d+\) exited with status 1: ValueError: both\n", err), err
    assert "last lines" not in err


def test_only_one_rank_is_shown(start: JobStarter, tmp_path: Path) -> None:
    script = "print('of', RANK); print('20%', end='\\r'); print('end'); sys.stderr.write('error of %d\\n' % RANK)"
    code, out, err = finish(start(script, "--only-rank", "1", "--tee", "logs"))
    assert (code, out, err) == (0, "[1] of 1\n[1] 20%\n[1] end\n", "[1] error of 1\n")
    assert "of 0" in (tmp_path / "logs/rank0.out").read_text()
    code, out, err = finish(start("if RANK == 0: sys.exit('the reason')", "--only-rank", "1"))
    assert code == 1 and "its last lines on stderr:\n    the reason" in err, "a failure is shown in any case"
    code, _, err = finish(start("", "--only-rank", "2"))
    assert code == 2 and "--only-rank 2: ranks are 0 to 1" in err


@pytest.mark.parametrize("word", [["-np", "2"], ["--np", "2"]])
def test_mpiruns_word_for_the_number_of_ranks(word: list[str], tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("import os; print(os.environ['WORLD_SIZE'])")
    process = subprocess.run([*COMMAND, "run", *word, "x.py"], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert process.stdout == "[0] 2\n[1] 2\n" or process.stdout == "[1] 2\n[0] 2\n", process.stderr


def test_no_prefix(start: JobStarter) -> None:
    code, out, _ = finish(start("print('plain')", "--no-prefix"))
    assert (code, out) == (0, "plain\nplain\n")


def test_reader_gone_ends_the_job(start: JobStarter) -> None:
    process = start("while True: print('x' * 1000)")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(30) == 128 + signal.SIGPIPE


# --- failures --------------------------------------------------------------------------------------------------------


def test_exit_status_ends_all_and_is_named_first(start: JobStarter) -> None:
    script = """
if RANK == 1:
    print('the reason', file=sys.stderr); sys.exit(7)
time.sleep(300)
"""
    code, _, err = finish(start(script, ranks=3))
    assert code == 7
    lines = err.splitlines()
    assert lines[0] == "[1] the reason"
    assert lines[1].startswith("zcomm run: rank 1 (pid ") and "exited with status 7" in lines[1]
    assert lines[2] == "    the reason"
    assert sorted(line.split(" (")[0] for line in lines[3:]) == ["zcomm run: rank 0", "zcomm run: rank 2"]


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGABRT"])
def test_signal_is_decoded(start: JobStarter, name: str) -> None:
    script = f"""
import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
if RANK == 0: os.kill(os.getpid(), signal.{name})
time.sleep(300)
"""
    code, _, err = finish(start(script))
    assert code == 128 + getattr(signal, name)
    assert err.splitlines()[0].startswith("zcomm run: rank 0 (pid ")
    assert f"was killed by {name}" in err.splitlines()[0]
    assert "out-of-memory killer" not in err


def test_others_may_say_that_they_lost_a_peer(start: JobStarter) -> None:
    script = """
if RANK == 1: os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0.3); print('zcomm.PeerLost: rank 1 has gone', file=sys.stderr); sys.exit(1)
"""
    code, _, err = finish(start(script))
    assert code == 137
    assert err.splitlines()[0] == "[0] zcomm.PeerLost: rank 1 has gone"
    assert "rank 1 (pid" in err.splitlines()[1] and "SIGKILL" in err.splitlines()[1]
    assert "then rank 0" in err.splitlines()[2]


def test_rank_that_ignores_sigterm_is_killed(start: JobStarter) -> None:
    script = """
if RANK == 1: time.sleep(0.5); sys.exit(3)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True: time.sleep(1)
"""
    code, _, err = finish(start(script))
    assert code == 3
    assert "rank 0" in err


# --- no process is left ----------------------------------------------------------------------------------------------

CHILDREN = """
here = os.environ['FOLDER']
def leave_pid(): open(f'{here}/pid-{os.getpid()}', 'w').close()
leave_pid()
code = f"import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); " \\
       f"open(f'{here}/pid-' + str(os.getpid()), 'w').close(); time.sleep(300)"
subprocess.Popen([sys.executable, '-c', code])                          # in the rank's session
subprocess.Popen([sys.executable, '-c', code], start_new_session=True)  # and one that left it
while len([f for f in os.listdir(here) if f.startswith('pid-')]) < 6: time.sleep(0.02)
"""


@pytest.mark.parametrize("end, expected", [("sys.exit(0)", 0), ("sys.exit(4 * RANK)", 4)])
def test_grandchildren_end_with_their_rank(start: JobStarter, tmp_path: Path, end: str, expected: int) -> None:
    code, _, _ = finish(start(CHILDREN + end, "--env", f"FOLDER={tmp_path}"))
    assert code == expected
    assert [pid for pid in pids_from(tmp_path, 6) if alive(pid)] == []


def test_killed_launcher_leaves_nothing(start: JobStarter, tmp_path: Path) -> None:
    process = start(CHILDREN + "time.sleep(300)", "--env", f"FOLDER={tmp_path}")
    pids = pids_from(tmp_path, 6)
    process.kill()
    wait_until(lambda: not any(map(alive, pids)), "the end of ranks and their children")
    wait_until(lambda: not list((tmp_path / "tmp").iterdir()), "the removal of the private directory")


def test_killed_supervisor_leaves_nothing(start: JobStarter, tmp_path: Path) -> None:
    process = start(CHILDREN + "time.sleep(300)", "--env", f"FOLDER={tmp_path}")
    pids = pids_from(tmp_path, 6)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)
    code, _, err = finish(process)
    assert code == 137
    assert "the launcher was killed by SIGKILL" in err
    assert [pid for pid in pids if alive(pid)] == []
    for directory in (tmp_path / "tmp").iterdir():  # no process was left to remove it
        directory.rmdir()


@pytest.mark.parametrize("signum, expected", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupt_is_clean(start: JobStarter, tmp_path: Path, signum: int, expected: int) -> None:
    process = start(CHILDREN + "time.sleep(300)", "--env", f"FOLDER={tmp_path}")
    pids = pids_from(tmp_path, 6)
    process.send_signal(signum)
    code, _, err = finish(process)
    assert code == expected
    assert err == f"zcomm run: stopped by {signal.Signals(signum).name}; all ranks have ended\n"
    assert [pid for pid in pids if alive(pid)] == []


def test_second_interrupt_kills(start: JobStarter, tmp_path: Path) -> None:
    process = start(
        """
signal.signal(signal.SIGINT, lambda *_: print('got it', flush=True))
open(f'{os.environ["FOLDER"]}/pid-{os.getpid()}', 'w').close()
while True: time.sleep(0.1)
""",
        "--env",
        f"FOLDER={tmp_path}",
    )
    pids = pids_from(tmp_path, 2)
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    assert all(map(alive, pids))  # the first signal left the processes their grace time
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 130


def test_interrupt_lets_ranks_clean_up(start: JobStarter, tmp_path: Path) -> None:
    script = """
here = os.environ['FOLDER']
try:
    open(f'{here}/pid-{os.getpid()}', 'w').close()
    time.sleep(300)
finally:
    open(f'{here}/cleaned-{RANK}', 'w').close()
"""
    process = start(script, "--env", f"FOLDER={tmp_path}")
    pids_from(tmp_path, 2)
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 130
    assert sorted(file.name for file in tmp_path.glob("cleaned-*")) == ["cleaned-0", "cleaned-1"]


# --- errors of use ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, words",
    [
        (["run", "script.py"], "script.py: no such script"),
        (["run", "-n", "0", "x.py"], "'0' is not a whole number of at least 1"),
        (["run", "-n", "two", "x.py"], "'two'"),
        (["run", "--nnodes", "2", "x.py"], "did you mean --num-nodes 2, of the hosts of a hostfile?"),
        (["run", "--nnodes=2", "x.py"], "did you mean --num-nodes 2"),
        (["run", "--hosts", "a,b", "x.py"], "write lines HOST slots=N into a file, for --hostfile"),
        (["run", "--nproc-per-node", "2", "x.py"], "--nproc-per-node: did you mean -n 2?"),
        (["run", "--nproc_per_node=2", "x.py"], "did you mean -n 2?"),
        (["run", "-n", "2", "missing.py"], "missing.py: no such script"),
        (["run", "-n", "2", "--env", "NOVALUE", "x.py"], "'NOVALUE' is not NAME=VALUE"),
        (["run", "-n", "1", "--no-python", "/no/such/program"], "/no/such/program"),
        (["fly"], "fly"),
    ],
)
def test_wrong_use_is_one_line(options: list[str], words: str, tmp_path: Path) -> None:
    process = subprocess.run([*COMMAND, *options], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert process.returncode in (2, 126)
    assert len(process.stderr.splitlines()) == 1
    assert words in process.stderr


def test_the_launcher_imports_no_torch() -> None:
    code = "import sys, zcomm.launch.supervisor, zcomm.cli.main as m; m.build_parser(); print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert out == "False\n"


def test_version() -> None:
    out = subprocess.run([*COMMAND, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    assert out.startswith("zcomm 0.")


# --- judgement, without processes ------------------------------------------------------------------------------------


def test_first_failure_is_the_cause_and_not_its_consequence() -> None:
    lost = RankEnd(0, 10, 1, stderr_tail=["Traceback", "zcomm.PeerLost: rank 1 has gone"])
    lost_in_words = RankEnd(2, 12, 1, error="PeerLost", message="rank 1 has gone")
    ended = RankEnd(3, 13, -15, by_launcher=True)
    cause = RankEnd(1, 11, 1, stderr_tail=["ValueError: bad"])
    assert first_failure([lost, lost_in_words, ended, cause]) is cause
    assert first_failure([lost, lost_in_words]) is lost
    assert first_failure([RankEnd(0, 1, 0), ended]) is None
    lines = report([lost, lost_in_words, ended, cause], "zcomm run")
    assert lines[0].startswith("zcomm run: rank 1 (pid 11) exited with status 1")
    assert any("rank 2 (pid 12) exited with status 1: PeerLost: rank 1 has gone" in line for line in lines)
    assert any("rank 3 (pid 13) was then ended by the launcher" in line for line in lines)


def test_error_of_the_user_is_the_only_line() -> None:
    ends = [RankEnd(1, 11, 2, error="UserError", message="disk full"), RankEnd(0, 10, 1, error="PeerLost", message="x")]
    assert report(ends, "zcomm demo") == ["zcomm demo: error: disk full"]


def test_out_of_memory_is_named(tmp_path: Path) -> None:
    events = tmp_path / "memory.events"
    events.write_text("low 0\noom 3\noom_kill 3\n")
    watch = OomWatch([events])
    assert watch.risen() is None
    events.write_text("low 0\noom 4\noom_kill 4\n")
    end = RankEnd(1, 11, -9, peak_nbytes=3 << 30, oom_counter=watch.risen())
    line = report([end], "zcomm run")[0]
    assert "killed by SIGKILL: by the kernel's out-of-memory killer" in line
    assert "3.00 GiB" in line


def test_counter_files_of_both_cgroup_versions(tmp_path: Path) -> None:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text("4:cpu,memory:/job\n0::/slice/job\n")
    (proc / "vmstat").write_text("nr_free 5\noom_kill 0\n")
    for file in (cgroup / "memory/job/memory.oom_control", cgroup / "slice/job/memory.events"):
        file.parent.mkdir(parents=True)
        file.write_text("oom_kill_disable 0\noom_kill 0\n")
    assert counter_files(proc, cgroup) == [
        cgroup / "memory/job/memory.oom_control",
        cgroup / "slice/job/memory.events",
        proc / "vmstat",
    ]


def passed_on(content: bytes, hold: bool = False, **options: Any) -> bytes:
    """Return a Stream's output for the bytes of a rank."""
    source, rank_end = os.pipe()
    out, target = os.pipe()
    stream = Stream(source, target, b"[3] ", **options)
    if hold:
        stream.hold()
    os.write(rank_end, content)
    os.close(rank_end)
    assert stream.pump() is False
    stream.close()
    os.close(target)
    with os.fdopen(out, "rb") as reader:
        return reader.read()


def test_stream_splits_at_newline_and_carriage_return() -> None:
    content = b"a\r\nb\n10%\r20%\rlast"
    assert passed_on(content, alone=True) == b"[3] a\r\n[3] b\n[3] 10%\r[3] 20%\r[3] last\n"


def test_a_progress_bar_of_one_rank_among_several_is_lines() -> None:
    """A bar as tqdm writes it; between the first state and the last there is at most one line a second."""
    bar = b"".join(b"\r%3d%%|#" % percent for percent in range(101)) + b"\n"
    assert passed_on(bar) == b"[3]   0%|#\n[3] 100%|#\n"


def test_a_stream_that_is_not_shown_keeps_its_last_lines() -> None:
    assert passed_on(b"a\nb\n", shown=False) == b""


def test_a_traceback_that_another_rank_has_shown_is_one_line() -> None:
    trace = b'Traceback (most recent call last):\n  File "x", line 1\n    f()\n'
    tracebacks: dict[bytes, int] = {}
    first = passed_on(b"a\n" + trace + b"ValueError: of 2\n", tracebacks=tracebacks, rank=2)
    assert first.replace(b"[3] ", b"") == b"a\n" + trace + b"ValueError: of 2\n"
    content = b"b\n" + trace + b"ValueError: of 3\nsecond line\n" + trace.replace(b"f()", b"g()") + b"KeyError: 1\n"
    second = passed_on(content, tracebacks=tracebacks, rank=3)
    assert second.replace(b"[3] ", b"").splitlines() == [
        b"b",
        b"ValueError: of 3 (traceback: as rank 2's above)",
        b"second line",
        *trace.replace(b"f()", b"g()").splitlines(),
        b"KeyError: 1",
    ]
    cut = passed_on(trace, tracebacks={}, rank=3)
    assert cut.replace(b"[3] ", b"") == trace, "a rank that is killed within it"


def test_stream_shows_a_line_once() -> None:
    seen: set[bytes] = set()
    assert passed_on(b"warning\nmine\n", seen=seen) == b"[3] warning\n[3] mine\n"
    assert passed_on(b"warning\nother\n", seen=seen) == b"[3] other\n"


def test_stream_drops_the_tracebacks_of_an_interrupt_only() -> None:
    interrupt = b'Traceback (most recent call last):\n  File "x", line 1\n    f()\nKeyboardInterrupt\n'
    other = b'Traceback (most recent call last):\n  File "x", line 1\n    g()\nValueError: bad\n'
    assert passed_on(b"saved\n" + interrupt, hold=True) == b"[3] saved\n"
    assert passed_on(other + interrupt, hold=True).replace(b"[3] ", b"") == other


def test_last_words_are_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from zcomm.launch.failure_report import leave_last_words, read_last_words

    file = tmp_path / "error0.json"
    assert read_last_words(file) == ("", "")
    monkeypatch.setenv("ZCOMM_ERROR_FILE", str(file))
    leave_last_words("PeerLost", 'rank 1 "gone"')
    assert json.loads(file.read_text()) == {"error": "PeerLost", "message": 'rank 1 "gone"'}
    assert read_last_words(file) == ("PeerLost", 'rank 1 "gone"')
