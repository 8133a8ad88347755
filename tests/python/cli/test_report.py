"""The report of a run: its contents, that it loads nothing, and its layout in a browser at 400 and 1400 pixels."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser import PROGRAM, QUIET
from test_demo import check_html
from tiers import long
from zcomm.watch import html
from zcomm.watch.html import Series
from zcomm.watch.rank import records_name
from zcomm.watch.report import NAME, build, prepare, seconds

EVIL = "<script>alert('&')</script>\x1b[2J"
MIB = 2**20


def head(rank: int, **other: Any) -> dict[str, Any]:
    known = {"kind": "head", "rank": rank, "world_size": 3, "pid": 100 + rank, "host": "node", "name": "train.py"}
    return {**known, "job": "abc", "backend": "shm", "command": "python train.py", **other}


def steps(comm_s: float, count: int = 40) -> Iterator[dict[str, Any]]:
    """Yield records of steps of 100 ms with ``comm_s`` seconds of waiting and 10 ms of swap."""
    for step in range(2, count + 2):
        drive = {"path": "/mnt/a", "read_nbytes": 1e9, "read_s": 0.5, "written_nbytes": 5e8, "write_s": 0.5}
        yield {
            "kind": "steps", "at": 0.0, "step": step, "steps": 1, "wall_s": 0.1, "comm_s": comm_s, "swap_s": 0.01,
            "update_s": 0.03, "link_nbytes": 1e6, "drives": [drive], "losses": [[step, 4.0 / step]],
            "memory": [4.0 * MIB, 0.0, 9.0 * MIB], "slots": [MIB, 0.5 * MIB, 0.0], "plan": [4.0 * MIB, 0.0, 8.0 * MIB],
        }  # fmt: skip


def write(folder: Path, rank: int, *records: dict[str, Any], more: str = "") -> None:
    text = "".join(json.dumps(each) + "\n" for each in records) + more
    (folder / records_name(rank)).write_text(text)


def a_run(folder: Path) -> Path:
    """Write a run of three ranks: the second is slow, the third was killed."""
    end = {"kind": "end", "state": "ended", "message": "", "losses": []}
    warning = {"kind": "warning", "at": 0.0, "text": "rank 1 is late"}
    write(folder, 0, head(0), *steps(0.06), warning, end)
    write(folder, 1, head(1), *steps(0.01), {**end, "state": "failed", "message": f"ValueError: {EVIL}"})
    write(folder, 2, head(2), *steps(0.05), more='{"kind": "steps", "step": 99, "st')
    return build(folder, 1)


def test_the_report_has_time_memory_swap_and_the_slowest_rank(tmp_path: Path) -> None:
    page = a_run(tmp_path).read_text()
    checker = check_html(page)
    for words in (
        "The job failed, exit code 1",
        "Rank 1 is the slowest: the others wait 45.0 ms of each step for it.",
        "Rank 2 was killed",
        "Rank 1 has failed: ValueError: <script>alert('&')</script>\ufffd[2J",
        "rank 1 is late",
        "41 steps, 100.0 ms each, last loss 0.09756",
        "+12.5%",  # of the memory on the drive, relative to the formula
    ):
        assert words in checker.text, words
    assert "\x1b" not in page and "<script" not in page and "http" not in page and "There are no records" not in page
    assert page.count("<svg") == 5 and page.count("<figure>") == 5
    swap = re.search(r"<td>/mnt/a</td><td class=\"number\">([\d.]+)</td><td class=\"number\">([\d.]+)</td>", page)
    assert swap is not None and swap.groups() == ("40.00", "2.00")


def test_waiting_is_what_goes_beyond_the_rank_that_waits_least(tmp_path: Path) -> None:
    from zcomm.watch.report import _read

    a_run(tmp_path)
    ranks = [_read(tmp_path / records_name(rank)) for rank in range(3)]
    parts = seconds([each for each in ranks if each is not None])
    assert parts[0] == pytest.approx((0.03, 0.01, 0.05, 0.01))
    assert parts[1] == pytest.approx((0.08, 0.01, 0.0, 0.01))
    assert all(sum(each) == pytest.approx(0.1) for each in parts.values())


def test_a_report_of_nothing_says_so(tmp_path: Path) -> None:
    (tmp_path / records_name(0)).write_text("")
    (tmp_path / records_name(1)).write_text("no json\n[1]\n{}\n")
    assert "has not come to zcomm.init()" in build(tmp_path, 0).read_text()
    write(tmp_path, 0, head(0))  # killed before its first step
    page = build(tmp_path, 137).read_text()
    check_html(page)
    assert "There are no records of rank 1, 2." in page
    assert "exit code 137" in page and "was killed" in page and "<svg" not in page


def test_a_folder_of_a_run_before_is_emptied_of_its_records_alone(tmp_path: Path) -> None:
    for name in (records_name(7), NAME, "mine.jsonl", "rank0.jsonl"):
        (tmp_path / name).touch()
    assert prepare(tmp_path) == {"ZCOMM_REPORT": str(tmp_path)}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.jsonl", "rank0.jsonl"]


def test_lines_are_cut_where_there_is_no_number() -> None:
    drawn = html.line_chart("x", "y", [Series("", [(1, 1.0), (2, math.nan), (3, 3.0), (4, 2.0)], "a")])
    assert drawn.count("<polyline") == 2 and "nan" not in drawn
    assert html.line_chart("x", "y", [Series("", [(1, math.nan)], "a")]) == ""
    assert html.stacked_chart("x", "y", [Series("", [], "a")]) == "" == html.bars("x", "y", [], [])


def test_many_points_are_thinned_and_keep_their_ends() -> None:
    points = [(float(n), float(n % 2)) for n in range(100_000)]
    few = html.thinned(points)
    assert len(few) <= 401 and few[0] == points[0] and few[-1] == points[-1]
    assert all(0.4 < y < 0.6 for _, y in few[1:-1]), "means of neighbours"


@pytest.mark.parametrize(("low", "high"), [(0.0, 1e-7), (0.0, 3.2), (-5.0, 0.0), (0.0, 0.0), (0.0, 1e12), (7.0, 7.0)])
def test_axes_have_round_numbers_around_the_values(low: float, high: float) -> None:
    drawn = html.line_chart("x", "y", [Series("", [(1, low), (2, high)], "a")])
    heights = [float(place.split(",")[1]) for place in re.findall(r'points="([^"]*)"', drawn)[0].split()]
    assert all(12 <= height <= 212 for height in heights), heights
    assert 2 <= drawn.count('class="grid"') <= 7


# --- zcomm run --report ---------------------------------------------------------------------------------------------

TRAIN = """
import sys, torch, zcomm
comm = zcomm.init()
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16))
opt = zcomm.ZeroOptimizer(model, "adamw", lr=1e-2, stage=3, offload="nvme", nvme_path=sys.argv[1])
for step in range(300):
    x = torch.randn(8, 16)
    loss = (model(x) - x.flip(1)).square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    zcomm.log(loss=loss)
    if step == 20 and comm.rank == 1 and len(sys.argv) > 2:
        raise ValueError("no such sample")
opt.close()
zcomm.shutdown()
"""


def run_with_report(folder: Path, script: str, *args: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(script)
    command = [sys.executable, "-m", "zcomm.cli", "run", "-n", "2", "--report", str(folder / "report")]
    environment = {**os.environ, "ZCOMM_WATCH": "0" if script != TRAIN else str(folder / "pages")}
    argv = [*command, str(folder / "train.py"), *args]
    return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=100)


@pytest.mark.slow
@pytest.mark.parametrize("fails", [long(False), True])
def test_zcomm_run_writes_the_report(tmp_path: Path, fails: bool) -> None:
    done = run_with_report(tmp_path, TRAIN, str(tmp_path), *(["fail"] if fails else []))
    assert done.returncode == int(fails), done.stderr
    assert f"zcomm run: {tmp_path / 'report' / NAME}" in done.stderr
    page = (tmp_path / "report" / NAME).read_text()
    text = check_html(page).text
    assert "2 ranks, shm" in text and "Loss" in text and "nvme" in text
    assert ("All ranks ended well." in text) is not fails
    assert ("Rank 1 has failed: ValueError: no such sample" in text) is fails


def test_a_report_of_a_program_without_zcomm(tmp_path: Path) -> None:
    done = run_with_report(tmp_path, "print('no zcomm here')")
    assert done.returncode == 0 and "has not come to zcomm.init()" in (tmp_path / "report" / NAME).read_text()


def test_a_folder_that_cannot_be_made_is_an_error_before_any_rank(tmp_path: Path) -> None:
    (tmp_path / "report").write_text("a file")
    done = run_with_report(tmp_path, "print('a rank ran')")
    assert done.returncode == 2 and "--report" in done.stderr and "a rank ran" not in done.stdout


# --- a browser ------------------------------------------------------------------------------------------------------

LOOK = """
<script>
addEventListener("load", () => {
  const found = {width: innerWidth, page: document.documentElement.scrollWidth, small: [], empty: [], outside: []};
  for (const svg of document.querySelectorAll("svg")) {
    const box = svg.getBoundingClientRect();
    if (box.width < 100 || box.height < 20) found.empty.push(svg.getAttribute("aria-label"));
    for (const text of svg.querySelectorAll("text")) {
      const place = text.getBoundingClientRect();
      if (place.height < 10) found.small.push(text.textContent + " " + place.height);
      if (place.left < box.left - 1 || place.right > box.right + 1 || place.bottom > box.bottom + 1)
        found.outside.push(text.textContent);
    }
    for (const drawn of svg.querySelectorAll("polyline, polygon")) {
      const place = drawn.getBoundingClientRect();
      if (!(place.width > 10) || place.right > box.right + 2) found.empty.push(drawn.getAttribute("class") || "area");
    }
  }
  const pre = document.createElement("pre");
  pre.id = "found";
  pre.textContent = JSON.stringify(found);
  document.body.append(pre);
});
</script>
"""


@pytest.mark.slow
@pytest.mark.skipif(PROGRAM is None, reason="no chromium (apt-get install chromium)")
@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("which", ["run", "demo"])
def test_a_browser_shows_all_pictures(tmp_path: Path, width: int, which: str) -> None:
    if which == "run":
        page = a_run(tmp_path).read_text()
    else:
        page = demo_page()
    # The page runs no script, so a copy is measured in a frame of the width wanted (a window is at least 500 wide).
    (tmp_path / "page.html").write_text(page.replace("</body>", LOOK.replace("\n", " ") + "</body>"))
    outer = f'<iframe src="page.html" style="width: {width}px; height: 3000px; border: 0"></iframe>'
    script = "onload = () => { document.title = frames[0].document.getElementById('found').textContent }"
    (tmp_path / "outer.html").write_text(f"<!DOCTYPE html><body style='margin: 0'>{outer}<script>{script}</script>")
    argv = [str(PROGRAM), *QUIET, f"--user-data-dir={tmp_path / 'browser'}", "--enable-logging=stderr", "--v=0"]
    argv += ["--allow-file-access-from-files", f"--window-size={max(width, 500)},3000", "--virtual-time-budget=5000"]
    done = subprocess.run(
        [*argv, "--dump-dom", (tmp_path / "outer.html").as_uri()], capture_output=True, text=True, timeout=100
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title is not None, done.stdout[:2000] + done.stderr[-2000:]
    from html import unescape

    found = json.loads(unescape(title[1]))
    assert found["width"] == width and found["page"] <= width, "no horizontal overflow"
    assert found["empty"] == found["small"] == found["outside"] == []


def demo_page() -> str:
    """Return the demo's report of made-up steps."""
    import dataclasses

    from test_demo import config_of, records
    from zcomm.demo import report
    from zcomm.demo.results import Summary, memory_rows

    memory = {"device": {"parameters": 4 << 20, "slots": 1 << 20}, "nvme": {"optimizer": 8 << 20}}
    formula = {"device": {"parameters": 4 << 20}}
    summary = Summary(2.0, 3.0, 1.0, 10, "text", 1, 1, memory, formula, {}, "def f(): " * 30)
    made = [dataclasses.asdict(record) for record in records(60)]
    return report.page(config_of(), summary, "a conclusion", memory_rows(summary), ["swap"], made, made[::20])
