"""gpu-check's runner with fake parts: budgets, limits, failures, nonsense, resuming; and its own parts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from places import ROOT

sys.path.insert(0, str(ROOT / "tools"))
from gpucheck import page, work
from gpucheck.parts import Place, all_parts, chosen
from gpucheck.runner import (
    MARGIN,
    ROWS,
    Part,
    Result,
    exit_status,
    plan,
    read_rows,
    run_part,
    run_parts,
    seconds_of,
)


def fake(name: str, program: str, budget_s: float = 20.0, **options: object) -> Part:
    return Part(name, f"a fake {name}", budget_s, [sys.executable, "-c", program], **options)  # type: ignore[arg-type]


def row(**columns: object) -> str:
    return f"import json, os; open(os.environ['{ROWS}'], 'a').write(json.dumps({columns!r}) + '\\n');"


GOOD = fake("good", row(table="Figures", share=0.5, goal=0.4) + "print('done')")
BAD = fake("bad", row(table="Figures", share=0.3, goal=0.4) + "print('the last words'); raise SystemExit(7)")
SLOW = fake("slow", row(table="Figures", share=0.1) + "import time; time.sleep(60)", budget_s=1.5)
SKIP = fake("skip", "print('noise'); print('skipped: nothing here'); raise SystemExit(77)")
NONSENSE = fake("nonsense", f"import os; open(os.environ['{ROWS}'], 'w').write('no json')")
KILLED = fake("killed", "import os; os.kill(os.getpid(), 9)")


def run(
    parts: list[Part], folder: Path, seconds: float = 100.0, result: Result | None = None
) -> tuple[int, Result, str]:
    said: list[str] = []
    found = result or Result(folder / "result.json", {"gpu": "a fake", "revision": "1"})
    status = run_parts(parts, found, folder / "log", time.monotonic() + seconds, said.append)
    return status, found, "\n".join(said)


def test_one_part_fails_the_others_go_on(tmp_path: Path) -> None:
    status, result, said = run([BAD, SLOW, SKIP, NONSENSE, KILLED, GOOD], tmp_path)
    states = {name: record["state"] for name, record in result.parts.items()}
    assert states == {
        "bad": "failed",
        "slow": "timeout",
        "skip": "skipped",
        "nonsense": "failed",
        "killed": "failed",
        "good": "passed",
    }
    assert status == 1
    assert result.parts["bad"]["reason"] == "exit status 7" and "the last words" in result.parts["bad"]["tail"]
    assert "the last words" in said and result.parts["skip"]["reason"] == "skipped: nothing here"
    assert result.parts["slow"]["rows"] == [{"table": "Figures", "share": 0.1}], "what it had until then is kept"
    assert "1.5" in result.parts["slow"]["reason"] or "2 s" in result.parts["slow"]["reason"]
    assert "rows are not JSON" in result.parts["nonsense"]["reason"]
    assert result.parts["killed"]["reason"] == "killed by signal 9"
    assert json.loads((tmp_path / "result.json").read_text())["parts"] == result.parts
    assert "## Figures" in (tmp_path / "result.md").read_text()
    log = (tmp_path / "log").read_text()
    assert "==== bad:" in log and "the last words" in log and "done" in log


def test_nothing_of_a_part_outlives_it(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    child = (
        f"import subprocess, sys; p = subprocess.Popen(['sleep', '77']); open({str(note)!r}, 'w').write(str(p.pid));"
    )
    for program, budget_s in ((child, 20.0), (child + "import time; time.sleep(60)", 2.0)):
        begin = time.monotonic()
        run_part(fake("parent", program, budget_s), budget_s, tmp_path / "log")
        assert time.monotonic() - begin < 15
        pid = int(note.read_text())
        for _ in range(100):
            if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                break
            time.sleep(0.05)
        else:
            pytest.fail("the child lives")


def test_results_of_finished_parts_survive_a_kill(tmp_path: Path) -> None:
    """SIGKILL during the second part: file, page and the machine's copy have the first one, and a run resumes."""
    program = f"""
import sys, time
sys.path.insert(0, {str(ROOT / "tools")!r})
from pathlib import Path
from gpucheck.runner import Part, Result, run_parts
folder = Path(sys.argv[1])
good = Part("good", "good", 20.0, [sys.executable, "-S", "-c", "print('done')"])
kill = Part("kill", "kill", 20.0, [sys.executable, "-S", "-c", "import os; os.kill(os.getppid(), 9)"])
result = Result(folder / "result.json", {{"gpu": "a fake"}}, folder / "work/last.json")
run_parts([good, kill], result, folder / "log", time.monotonic() + 80, print)
"""
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path)], env=env, check=False).returncode == -9
    for file in ("result.json", "work/last.json"):
        parts = json.loads((tmp_path / file).read_text())["parts"]
        assert [(name, part["state"]) for name, part in parts.items()] == [("good", "passed")]
    assert "| good: good | passed |" in (tmp_path / "result.md").read_text()
    again = Result(tmp_path / "again.json", {"gpu": "a fake"})
    again.adopt(tmp_path / "work/last.json", ("gpu",), print)
    status, _, said = run([GOOD, fake("kill", "")], tmp_path, result=again)
    assert status == 0 and "good: passed before" in said and "kill: passed in" in said


def test_a_part_that_ignores_being_asked_is_killed(tmp_path: Path) -> None:
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    record = run_part(fake("stubborn", stubborn), 1.0, tmp_path / "log")
    assert record["state"] == "timeout" and record["seconds"] < 20


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    record = run_part(Part("none", "", 5, ["/no/such/program"]), 5, tmp_path / "log")
    assert record["state"] == "failed" and "No such file" in record["tail"]


def test_time_runs_out_and_resuming_goes_on(tmp_path: Path) -> None:
    first = fake("first", "")
    second = fake("second", row(table="T", x=1), budget_s=60.0)
    status, result, said = run([first, second, SKIP], tmp_path, seconds=30.0)
    states = [record["state"] for record in result.parts.values()]
    assert status == 3 and states == ["passed", "not started", "skipped"], "a shorter part still runs"
    assert "   second: not started: needs 40 s, and " in said and "--resume goes on here" in said
    again = Result(tmp_path / "result.json", {"gpu": "a fake", "revision": "1", "time": "later"})
    again.adopt(tmp_path / "result.json", ("gpu", "revision"), lambda text: None)
    assert run([GOOD], tmp_path, result=again)[1].parts["second"]["state"] == "not started", "it stays in the record"
    status, result, said = run([first, second, SKIP], tmp_path, result=again)
    assert status == 0 and "first: passed before" in said and result.parts["second"]["rows"] == [{"table": "T", "x": 1}]


def test_a_part_is_cut_to_the_time_that_is_left(tmp_path: Path) -> None:
    part = fake("part", "", budget_s=60.0)
    assert part.limit_s(100.0) == 60.0 and part.limit_s(59.0) == 59.0 and part.limit_s(40.0) == 40.0
    assert part.limit_s(39.9) is None and part.limit_s(-1.0) is None, "it took 40 s in the last run"
    maker = fake("maker", "", budget_s=600.0, made=tmp_path)
    said: list[str] = []
    result = Result(tmp_path / "result.json", {})
    assert run_parts([maker], result, tmp_path / "log", 50.0, said.append, clock=lambda: 0.0) == 0
    assert said[0] == "== maker: a fake maker (at most 50 s)", "others need it: all time that is left"


def test_the_plan_adds_up() -> None:
    long, short, over = (fake("", "", budget_s) for budget_s in (90.0, 15.0, 60.0))
    assert plan([long, over, short], 100.0) == ([90.0, None, 10.0], 100.0)
    assert plan([short, long, over], 200.0) == ([15.0, 90.0, 60.0], 165.0)
    at_once = [fake("", "", budget_s, beside=True) for budget_s in (30.0, 50.0, 90.0)]
    assert plan([short, *at_once, short], 70.0) == ([15.0, 30.0, 50.0, None, None], 65.0), "as long as the longest"
    assert plan([], 10.0) == ([], 0.0)


def test_a_budget_is_the_time_of_the_last_run(tmp_path: Path) -> None:
    texts = [
        {"a": ("passed", 10.0), "b": ("timeout", 20.0), "c": ("failed", 1.0), "d": ("not started", None)},
        {"a": ("passed", 30.0), "b": ("failed", 2.0), "e": ("skipped", 0.1)},
    ]
    files = [tmp_path / name for name in ("one", "two", "broken", "none")]
    for file, text in zip(files, texts, strict=False):
        parts = {name: {"state": state} | ({"seconds": s} if s else {}) for name, (state, s) in text.items()}
        file.write_text(json.dumps({"about": {}, "parts": parts}))
    files[2].write_text("{")
    took = seconds_of(files)
    assert took == {"a": 30.0, "b": 20.0}
    usual = {part.name: part.budget_s for part in all_parts(Place())}
    found = {part.name: part.budget_s for part in all_parts(Place(), {"build": 42.0, "cells-7b": 100.0})}
    assert found == usual | {"build": 42.0 * MARGIN, "cells-7b": 100.0 * MARGIN}


def test_parts_beside_each_other_run_at_once(tmp_path: Path) -> None:
    """Each waits for the other; the next part waits for both, and the page keeps their order."""
    meet = "import pathlib, sys, time\nhere, there = (pathlib.Path({!r}) / n for n in {!r})\nhere.touch()\n"
    meet += "while not there.exists(): time.sleep(0.01)\ntime.sleep({})"
    folder = str(tmp_path)
    one = fake("one", meet.format(folder, ("a", "b"), 0.5), beside=True)
    two = fake("two", meet.format(folder, ("b", "a"), 0.0), beside=True)
    after = fake("after", f"import pathlib; assert all((pathlib.Path({folder!r}) / n).exists() for n in 'ab')")
    status, result, said = run([GOOD, one, two, after], tmp_path)
    assert status == 0 and list(result.parts) == ["good", "one", "two", "after"], said
    assert said.index("two: passed") < said.index("one: passed") < said.index("== after")
    again = Result(tmp_path / "result.json", {"gpu": "a fake"})
    again.adopt(tmp_path / "result.json", ("gpu",), print)
    assert list(again.parts) == list(result.parts)


def test_sigterm_ends_parts_that_run_at_once(tmp_path: Path) -> None:
    program = f"""
import signal, sys, time
sys.path.insert(0, {str(ROOT / "tools")!r})
from pathlib import Path
from gpucheck.runner import Part, Result, run_parts
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
folder = Path(sys.argv[1])
sleep = [sys.executable, "-c", "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(90)"]
parts = [Part(name, name, 80.0, [*sleep, str(folder / name)], beside=True) for name in ("a", "b")]
run_parts(parts, Result(folder / "result.json", {{}}), folder / "log", time.monotonic() + 80, print)
"""
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)])
    notes = [tmp_path / name for name in "ab"]
    deadline = time.monotonic() + 30
    while not all(note.exists() and note.read_text() for note in notes) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.terminate()
    assert process.wait(30) == 143
    assert not any(psutil.pid_exists(int(note.read_text())) for note in notes)


def test_failed_parts_are_done_again_and_needs_are_kept(tmp_path: Path) -> None:
    dependent = fake("dependent", "", needs=("bad",))
    status, result, _ = run([BAD, dependent], tmp_path)
    assert status == 1 and result.parts["dependent"]["reason"] == "bad did not pass"
    again = Result(tmp_path / "result.json", dict(result.about))
    again.adopt(tmp_path / "result.json", ("gpu",), print)
    status, result, _ = run([fake("bad", ""), dependent], tmp_path, result=again)
    assert status == 0 and result.parts["dependent"]["state"] == "passed"


def test_what_a_part_made_and_is_gone_is_made_again(tmp_path: Path) -> None:
    made = tmp_path / "made"
    part = fake("maker", f"import pathlib; pathlib.Path({str(made)!r}).touch()", made=made)
    run([part], tmp_path)
    again = Result(tmp_path / "result.json", {"gpu": "a fake"})
    again.adopt(tmp_path / "result.json", ("gpu",), print)
    assert "passed before" in run([part], tmp_path, result=again)[2]
    made.unlink()
    run([part], tmp_path, result=again)
    assert made.exists()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"about": {}, "parts": {"a": 3}}', '{"about": {}, "parts": {"a": {}}}']
)
def test_a_broken_result_is_left_aside(tmp_path: Path, text: str) -> None:
    earlier = tmp_path / "earlier.json"
    earlier.write_text(text)
    said: list[str] = []
    result = Result(tmp_path / "result.json", {"gpu": "a fake"})
    result.adopt(earlier, ("gpu",), said.append)
    assert not result.parts and "is not a result of gpu-check" in said[0]
    assert not earlier.exists() and (tmp_path / "earlier.json.broken").read_text() == text
    result.adopt(earlier, ("gpu",), said.append)
    assert "nothing to resume" in said[1]


def test_a_result_of_another_machine_is_not_resumed(tmp_path: Path) -> None:
    run([GOOD], tmp_path)
    said: list[str] = []
    other = Result(tmp_path / "other.json", {"gpu": "another", "revision": "1"})
    other.adopt(tmp_path / "result.json", ("gpu", "revision"), said.append)
    assert not other.parts and "another gpu" in said[0]


def test_half_a_line_of_rows(tmp_path: Path) -> None:
    file = tmp_path / "rows"
    file.write_text('{"a": 1}\n[3]\n{"b": ')
    assert read_rows(file) == ([{"a": 1}], 2) and read_rows(tmp_path / "none") == ([], 0)
    assert exit_status([{"state": "passed"}, {"state": "not started"}, {"state": "timeout"}]) == 1


def test_the_page(tmp_path: Path) -> None:
    _, result, _ = run([GOOD, BAD, SKIP], tmp_path)
    text = page.page_of({"gpu": "1 x H100", "time": "2026-01-02T03", "revision": "abc"}, result.parts)
    assert "# GPU check, 2026-01-02" in text and "gpu 1 x H100; revision abc" in text
    assert "| good: a fake good | passed |" in text and "| **failed** |" in text and "skipped: nothing here" in text
    assert "## Figures" in text and "| 0.500 | 0.400 | holds |" in text and "| 0.300 | 0.400 | **misses** |" in text
    assert page.verdict({"share": "x", "goal": 1}) == "" and page.verdict({"judged": "y", "y": 2, "goal": 1}) == "holds"


def test_the_parts_are_whole(tmp_path: Path) -> None:
    parts = all_parts(Place())
    names = [part.name for part in parts]
    assert len(set(names)) == len(names) and names[:3] == ["build", "import", "python-newest"]
    cells = [name for name in names if name.startswith("cells-")]
    peers = [name for name in names if name.startswith("peers-")]
    assert cells == [f"cells-{name}" for name in ("1b", "3b", "7b", "3b-accum", "7b-backward", "7b-accum")]
    assert names[3 : 3 + len(cells) + len(peers)] == cells + peers and "peers-1b" in peers
    assert {part.budget_s for part in parts if part.name.startswith("peers-3b")} == {150}
    at_once = [part.name for part in parts if part.beside]
    assert len(at_once) in (0, 6) and "build" not in at_once
    assert not any("/bench/" in word for part in parts if part.beside for word in part.command), "measured alone"
    for part in parts:
        assert set(part.needs) <= set(names)
        words = list(part.command)
        if "--do" in words:
            assert words[words.index("--do") + 1] in work.WORK
        else:
            program = next(word for word in words if "/bench/" in word)
            assert os.access(program, os.X_OK), program
    assert [part.name for part in chosen(parts, "racecheck")] == ["build", "racecheck"]
    with pytest.raises(ValueError, match="--part nope"):
        chosen(parts, "nope")
    assert not Place().work.is_relative_to(ROOT), "a copied tree would replace builds"
    timelines = [word for part in all_parts(Place(), out=tmp_path) for word in part.command if word.endswith(".zip")]
    assert {Path(word).parent for word in timelines} == {tmp_path} and len(set(timelines)) == len(timelines)
    assert len(timelines) + 3 == 8, "files that a lent machine gives back"


def test_the_plan_of_nine_minutes(tmp_path: Path) -> None:
    """Cells of each model fit into it. The plan needs no GPU, and has the times of the last run."""
    parts = all_parts(Place(), {"build": 42.2, "import": 10.2})
    limits, total = plan(parts, 540.0)
    assert total <= 540.0 and [part.name for part, limit in zip(parts, limits, strict=True) if limit][:6] == [
        *("build", "import", "python-newest", "cells-1b", "cells-3b", "cells-7b")
    ]
    program = [sys.executable, str(ROOT / "tools/gpu_check.py"), "--work", str(tmp_path), "--plan"]
    *lines, last = subprocess.run(program, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split()[0] for line in lines] == [part.name for part in all_parts(Place(tmp_path))]
    assert any("does not fit" in line for line in lines), "all parts take longer"
    total, seconds = (int(word) for word in last.split() if word.isdigit())
    assert 0 < total <= seconds == 540
    (tmp_path / "last.json").write_text('{"parts": {"cells-1b": {"state": "passed", "seconds": 12.0}}}')
    said = subprocess.run([*program, "--part", "cells-1b", "--minutes", "1"], capture_output=True, text=True).stdout
    build, cells, _ = said.splitlines()
    assert "  18 s" in cells and "12 s last time" in cells and build.startswith("build ")


def script(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("#!/bin/sh\n" + text)
    (folder / name).chmod(0o755)


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    for text in ("exit 9\n", "echo 'No devices were found'\n"):
        script(tmp_path / "bin", "nvidia-smi", text)
        env = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
        program = [sys.executable, str(ROOT / "tools/gpu_check.py")]
        done = subprocess.run(program, capture_output=True, text=True, env=env, check=False)
        assert done.returncode == 0 and done.stdout == "gpu-check: no GPU on this machine; nothing was checked\n"


def test_the_whole_on_a_machine_that_is_played(tmp_path: Path) -> None:
    """A GPU by name only, and no nvcc: the build fails, later parts are not started, and all results are written."""
    out, binaries = tmp_path / "out", tmp_path / "bin"
    script(binaries, "nvidia-smi", 'case "$1" in -L) echo "GPU 0: Played" ;; *) echo "Played, 580.1, 80 GiB" ;; esac\n')
    env = {**os.environ, "PATH": f"{binaries}:/usr/bin:/bin", "OUT": str(out), "CUDA_HOME": "/no/cuda"}
    program = [sys.executable, str(ROOT / "tools/gpu_check.py"), "--part", "import", "--minutes", "2"]
    program += ["--work", str(tmp_path / "work")]
    done = subprocess.run(program, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    result = json.loads((out / "gpu-check.json").read_text())
    assert result["about"]["gpu"] == "1 x Played, 80 GiB" and result["parts"]["build"]["state"] == "failed"
    assert "no nvcc" in result["parts"]["build"]["tail"]
    assert result["parts"]["import"]["reason"] == "build did not pass"
    assert "**failed**" in (out / "gpu-check.md").read_text() and "no nvcc" in (out / "gpu-check.log").read_text()
    again = subprocess.run([*program, "--resume"], capture_output=True, text=True, env=env, check=False)
    assert again.returncode == 1 and "build did not pass" in again.stdout
    assert json.loads((tmp_path / "work/last.json").read_text())["parts"].keys() == {"build", "import"}


def test_sanitizer_and_tests_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(tmp_path)
    rows = tmp_path / "rows"
    monkeypatch.setenv(ROWS, str(rows))
    (tmp_path / "cmake/tests").mkdir(parents=True)
    tests, binaries = tmp_path / "cmake/tests/cpp", tmp_path / "bin"
    script(tests, "test_device", 'echo "args: $*"; echo "12 passed, 0 failed"\n')
    script(tests, "test_coll", 'test "$1" = cuda && echo "0 passed, 0 failed" && exit 2\n')
    monkeypatch.setenv("PATH", f"{binaries}:{os.environ['PATH']}")
    script(binaries, "cmake", 'echo "$*"; exit 1\n')
    assert work.cpp_tests(place) == 1, "a test program that does not compile"
    rows.unlink()
    script(binaries, "cmake", f'test "$*" = "--build {tmp_path}/cmake -- -k 0"\n')
    assert work.cpp_tests(place) == 0
    script(tests, "test_mem", 'echo "3 passed, 1 failed"; exit 1\n')
    script(tests, "test_optim", "kill -11 $$\n")
    assert work.cpp_tests(place) == 1
    found = read_rows(rows)[0]
    assert [(r["program"], r["passed"]) for r in found[1:]] == [
        ("test_device", "12"),
        ("test_mem", "3"),
        ("test_optim", "?"),
    ]
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    for text, code in (
        ("echo '========= ERROR SUMMARY: 0 errors'\n", 0),
        ("echo '========= ERROR SUMMARY: 3 errors'; exit 86\n", 1),
        ("exit 0\n", 1),
    ):
        script(binaries, "compute-sanitizer", text)
        assert work.sanitize(place, "memcheck") == code
    script(binaries, "compute-sanitizer", "echo 'Error: Device not supported'; exit 1\n")
    with pytest.raises(SystemExit) as ended:
        work.sanitize(place, "racecheck")
    assert ended.value.code == 77


def test_what_a_program_said_until_its_limit_is_kept(tmp_path: Path) -> None:
    hangs = "import time; print('the test that hangs', end='', flush=True); time.sleep(60)"
    program = f"from gpucheck import work; import sys; work.call([sys.executable, '-c', {hangs!r}])"
    part = fake("hangs", program, env={"PYTHONPATH": str(ROOT / "tools")})
    record = run_part(part, 3.0, tmp_path / "log")
    assert record["state"] == "timeout" and "\nthe test that hangs" in record["tail"]
    assert work.call([sys.executable, "-c", "print('a\\nb'); raise SystemExit(3)"]) == (3, "a\nb\n")


@pytest.mark.parametrize(("version", "without"), [("9.2.0", False), ("8.4.2", True)])
def test_python_tests_are_in_four_parts(monkeypatch: pytest.MonkeyPatch, version: str, without: bool) -> None:
    called: list[list[str]] = []
    monkeypatch.setattr(work, "call", lambda command, env: (called.append(list(command)), (0, "== 3 passed =="))[1])
    monkeypatch.setattr(work.metadata, "version", lambda package: version)
    for name in ("python-newest", "python-training", "python-ranks", "python-tests"):
        assert work.WORK[name](Place()) == 0
    newest, training, ranks, others = (
        [word.removeprefix("tests/python/") for word in words if "/test_" in word] for words in called
    )
    assert (training, ranks) == ([work.TRAINING], [work.RANKS]) and not {*training, *ranks} & {*others}
    assert newest == work.NEWEST and {name.partition("::")[0] for name in newest} <= {*work.marked()}
    assert {*newest, *training, *ranks, *others} >= {*work.marked()}
    assert others[-1] == "device/test_cuda_ipc.py", "it kills a rank that shares the GPU"
    device = {f"device/test_{name}.py" for name in ("cuda_ipc", "device_gpu", "nccl")}
    assert {*device, "optim/test_fused_adam.py"} <= {*others, *newest}
    assert "zero/test_zero.py" not in others and all(("-c" in words) == without for words in called)
    assert all("faulthandler_exit_on_timeout=false" in words for words in called), "one slow test would end all"
    monkeypatch.setattr(work, "call", lambda command, env: (0, "== 35 skipped =="))
    assert work.WORK["python-tests"](Place()) == 1, "on a GPU some must run"
    with pytest.raises(SystemExit) as ended:
        work.python_tests(Place(), [])
    assert ended.value.code == 77, "without names pytest would run all tests"


def test_another_tree_without_git_is_another_revision(tmp_path: Path) -> None:
    for tree in ("one", "two"):
        (tmp_path / tree / "src/net").mkdir(parents=True)
        (tmp_path / tree / "python").mkdir()
        (tmp_path / tree / "src/net/a.cpp").write_text("int a;")
        (tmp_path / tree / "CMakeLists.txt").write_text("project(a)")
    one, two = (tmp_path / tree for tree in ("one", "two"))
    assert work.revision(one) == work.revision(two)
    (two / "python/_core.so").write_text("what is built, and results, are no sources")
    (two / "bench/results").mkdir(parents=True)
    (two / "bench/results/gpu-check.json").write_text("{}")
    (two / "build").mkdir()
    (two / "build/a.cpp").write_text("int b;")
    assert work.revision(one) == work.revision(two)
    for path in ("src/net/a.cpp", "CMakeLists.txt"):
        before = work.revision(two)
        (two / path).write_text("changed")
        assert work.revision(two) not in (before, work.revision(one))
    before = work.revision(two)
    (two / "src/net/a.cpp").rename(two / "src/net/b.cpp")
    assert work.revision(two) != before


def test_make_needs_no_venv() -> None:
    makefile = (ROOT / "Makefile").read_text()
    target = makefile[makefile.index("gpu-check:") :].split("\n\n")[0]
    assert "tools/gpu_check.py" in target and "setup" not in target.splitlines()[0].split("##")[0]
