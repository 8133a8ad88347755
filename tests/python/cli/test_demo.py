"""`zcomm demo` end to end at its tiny size: its files, its errors in one line, and no files left behind."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from tiers import long, slow
from zcomm.cli.main import build_parser
from zcomm.demo import report
from zcomm.demo.command import make_config
from zcomm.demo.model import GPT, ModelConfig
from zcomm.demo.options import SIZES, DemoConfig
from zcomm.demo.progress import BarProgress, StepRecord
from zcomm.demo.text import DataError, load_text, unigram_entropy
from zcomm.demo.train import learning_rate, offload_of
from zcomm.launch.errors import UserError
from zcomm.zero.options import as_offload

COMMAND = [sys.executable, "-m", "zcomm.cli", "demo"]
TINY = ["--size", "tiny", "--name", "test"]


def demo(folder: Path, *options: str, timeout_s: float = 110.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *TINY, *options],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=plain_environment(),
    )


def plain_environment() -> dict[str, str]:
    return {**{k: v for k, v in os.environ.items() if k != "ZCOMM_DEBUG"}, "OMP_NUM_THREADS": "1"}


def without_notices(stderr: str) -> str:
    """Drop notices of lost speed on this machine: no io_uring (containers), no O_DIRECT (tmpfs)."""
    return "".join(line for line in stderr.splitlines(keepends=True) if not line.lstrip().startswith("SwapFile: "))


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 100.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"still waiting for {what} after {timeout_s} s"
        time.sleep(0.05)


def steps_of(metrics: Path) -> int:
    return metrics.read_text().count('"kind": "step"') if metrics.exists() else 0


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """Process ids of the ranks, which are children of the launcher's supervisor."""

    def children(pid: int) -> list[int]:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    (supervisor,) = children(process.pid)
    return children(supervisor)


# --- end to end ------------------------------------------------------------------------------------------------------


def test_run_with_stage_3_and_swap(tmp_path: Path) -> None:
    process = demo(tmp_path, "--steps", "12", "--accum", "2")
    assert process.returncode == 0, process.stderr
    assert without_notices(process.stderr) == ""
    run = tmp_path / "runs/test"
    assert sorted(file.name for file in run.iterdir()) == ["loss.png", "metrics.jsonl", "report.html"]

    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["kind"] == "step"]
    assert [record["step"] for record in steps] == list(range(1, 13))
    for record in steps:
        assert all(math.isfinite(value) for value in record.values() if isinstance(value, float))
        parts = record["compute_s"] + record["comm_s"] + record["swap_s"]
        assert 0 < parts <= record["step_s"] * 1.001 + 1e-6 or record["compute_s"] == 0.0
    assert steps[-1]["loss"] < steps[0]["loss"]

    (summary,) = (record for record in records if record["kind"] == "summary")
    assert records[-1] is summary
    assert f"validation loss {summary['validation_loss']:.3f}" in process.stdout
    assert f"unigram entropy {summary['unigram_entropy']:.3f}" in process.stdout
    assert summary["stats"]["swap_read_nbytes"] > 0 and summary["stats"]["swap_written_nbytes"] > 0
    assert "GB/s" in process.stdout
    for tier, purpose in (("nvme", "parameters"), ("nvme", "optimizer"), ("device", "gradients")):
        measured, formula = summary["memory"][tier][purpose], summary["formula"][tier][purpose]
        assert formula <= measured <= 1.1 * formula + 65536, (tier, purpose)
    assert summary["sample"].startswith("def ") and len(summary["sample"]) > 100

    picture = (run / "loss.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    page = (run / "report.html").read_text()
    checker = check_html(page)
    assert '<polyline class="training"' in page and checker.links == ["metrics.jsonl"]
    assert all(word in checker.text for word in ("Time of a step", "communication", "swap"))


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        ("--stage", "2", "--offload", "cpu", "--precision", "bf16"),
        ("--stage", "1", "--offload", "none", "--np", "3", "--no-overlap", "--clip", "0"),
    ],
)
def test_other_ways_to_run(tmp_path: Path, options: tuple[str, ...]) -> None:
    process = demo(tmp_path, "--steps", "3", *options)
    assert process.returncode == 0, process.stderr
    assert "validation loss" in process.stdout
    assert "swap:" not in process.stdout


@pytest.mark.long
def test_same_seed_same_losses_in_every_stage(tmp_path: Path) -> None:
    def losses(name: str, *options: str) -> list[float]:
        process = demo(tmp_path, "--steps", "4", "--quiet", "--name", name, *options)
        assert process.returncode == 0, process.stderr
        lines = (tmp_path / f"runs/{name}/metrics.jsonl").read_text().splitlines()
        return [record["loss"] for record in map(json.loads, lines) if record["kind"] in ("step", "validation")]

    drives = ("--swap-dir", "disk/one,disk/two")
    assert losses("a", "--stage", "3", *drives) == losses("b", "--stage", "1", "--offload", "none")
    assert not (tmp_path / "disk").exists(), "directories that the demo made go with it"


@pytest.mark.slow
def test_own_text(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    (tmp_path / "text/blob.dat").write_bytes(bytes(range(256)) * 40)  # not UTF-8: left out
    process = demo(tmp_path, "--steps", "2", "--data", "text", "--np", "1")
    assert process.returncode == 0, process.stderr
    assert "text: text, 1 files" in process.stdout


# --- errors are one line ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, words",
    [
        (("--stage", "7"), "--stage 7: must be 0, 1, 2 or 3"),
        (("--np", "0"), "--np 0"),
        (("--offload", "tape"), "'tape'"),
        (("--width", "65"), "--width 65 must be a multiple"),
        (("--steps", "0"), "--steps 0"),
        (("--lr", "-1"), "--lr -1.0"),
        (("--name", "../x"), "--name '../x'"),
        (("--data", "missing"), "--data missing: no such file"),
        (("--data", "empty"), "--data empty: the file is empty"),
        (("--data", "/dev/null"), "--data /dev/null: neither a file nor a directory"),
        (("--nvme-path", "empty/below"), "cannot swap there: Not a directory"),
        (("--nvme-path", "/proc"), "--nvme-path /proc: cannot swap there"),
        (("--swap-dir", "disk,/proc"), "--nvme-path /proc: cannot swap there"),
        (("--bucket", "4"), "--bucket"),
        (("--device", "tpu"), "--device tpu: must be cpu, cuda, or one GPU such as cuda:0"),
        (("--memory", "3x"), "--memory: '3x' is not a size such as 5GB or 512MiB"),
        (("--update", "forward", "--stage", "2"), "--update forward needs --stage 3 --offload nvme"),
        (("--update", "backward"), "--update backward cannot clip or accumulate"),
    ],
)
def test_wrong_use_before_any_rank(tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    (tmp_path / "empty").touch()
    process = demo(tmp_path, *options)
    assert process.returncode == 2
    assert len(process.stderr.splitlines()) == 1, process.stderr
    assert words in process.stderr
    assert not (tmp_path / "runs").exists() and not (tmp_path / "disk").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--mesh", "pipe"), "--mesh pipe: 'pipe' is not AXIS=RANKS"),
        (("--mesh", "pip=2"), "axis 'pip' is not one of .*; did you mean 'pipe'"),
        (("--mesh", "pipe=2,pp=2"), "axis='pipe' comes twice"),
        (("--mesh", "pipe=2", "--np", "3"), "has 2 ranks, but --np is 3"),
        (("--mesh", "pipe=3"), "--mesh pipe=3: pipe=3: 2 layers are fewer than the stages"),
        (("--mesh", "pipe=2", "--stage", "3"), "stage 3 with pipe"),
        (("--mesh", "data=2,tensor=2"), "--size tiny has the axes data, pipe, not tensor; use --size llama or"),
        (("--mesh", "expert=2"), "has the axes data, pipe, not expert"),
        (("--size", "llama", "--mesh", "tensor=8"), "tensor=8: 4 heads do not divide"),
        (("--mesh", "pipe=2", "--device", "cuda"), "with --device cuda is not available"),
        (("--mesh", "pipe=2", "--memory", "1GiB"), "with --memory 1GiB is not available"),
        (("--mesh", "pipe=2", "--microbatches", "9"), "--microbatches 9: must be from 1 to --batch, 8"),
        (("--microbatches", "2"), "--microbatches 2 needs --mesh with pipe=2"),
    ],
)
def test_wrong_meshes(options: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserError, match=words):
        make_config(build_parser().parse_args(["demo", *options])).check()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("--mesh", "data=1,pipe=2", "--accum", "2", "--steps", "4"),
        ("--size", "llama", "--mesh", "tensor=2,sequence=2", "--layers", "2", "--steps", "3"),
    ],
)
def test_a_run_over_a_mesh(tmp_path: Path, options: tuple[str, ...]) -> None:
    """The report has the bytes by axis, near the plan's, and the bubble next to its formula."""
    process = demo(tmp_path, *options)
    assert process.returncode == 0, process.stderr
    lines = (tmp_path / "runs/test/metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    config, summary = records[0], records[-1]
    axes, page = {row["axes"]: row for row in summary["axes"]}, (tmp_path / "runs/test/report.html").read_text()
    for axis in (axis for axis, size in config["mesh"].items() if size > 1):
        row = axes[axis]
        control_nbytes = 6000 + 2048 * row["calls"]  # headers of messages, norms
        assert 0.95 * row["planned"] <= row["nbytes"] < 1.2 * row["planned"] + control_nbytes, row
        assert f"<td>{axis}</td>" in page and axis in process.stdout
    if "pipe" in config["mesh"]:
        assert re.search(r"bubble: 0\.\d+ of a pass \(formula 0\.111\)", process.stdout), process.stdout
    steps = [record for record in records if record["kind"] == "step"]
    assert steps[-1]["loss"] < steps[0]["loss"] and summary["sample"].startswith("def ")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--data", "short.txt"), "short.txt holds 9 bytes of UTF-8 text; training needs at least 4096"),
        (("--device", "cuda:99"), "--device cuda:99: .*, or leave --device out to train on the CPU"),
    ],
)
def test_errors_at_set_up_are_one_line(tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    (tmp_path / "short.txt").write_text("too short")
    process = demo(tmp_path, *options)
    assert process.returncode == 2
    assert re.fullmatch(f"zcomm demo: error: {words}\n", process.stderr), process.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_full_disk_is_one_line(tmp_path: Path) -> None:
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, 8 << 20)); "
        f"from zcomm.cli.main import main; sys.exit(main(['demo', *{TINY!r}, '--layers', '8', '--width', '256']))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=110, env=plain_environment()
    )
    assert process.returncode == 2
    assert len(without_notices(process.stderr).splitlines()) == 1, process.stderr
    assert re.search(r"cannot reserve space in \S+/swap/zcomm-swap-\S+: \d+ bytes more needed", process.stderr)
    assert not (tmp_path / "runs").exists()


# --- ends before its end ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("when", "signum", "expected"),
    [
        slow("training", signal.SIGINT, 130),
        long("training", signal.SIGTERM, 143),
        long("starting", signal.SIGINT, 130),
        slow("starting", signal.SIGTERM, 143),
    ],
)
def test_interrupted_run_leaves_nothing(tmp_path: Path, when: str, signum: int, expected: int) -> None:
    metrics = tmp_path / "runs/test/metrics.jsonl"
    process = subprocess.Popen(
        [*COMMAND, *TINY, "--steps", "100000"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=plain_environment(),
    )
    if when == "training":
        wait_until(lambda: steps_of(metrics) >= 2, "two steps")
    else:
        wait_until(lambda: metrics.parent.exists(), "the run's folder")
        time.sleep(0.7)
    process.send_signal(signum)
    _, err = process.communicate(timeout=60)
    assert process.returncode == expected
    assert without_notices(err) == f"zcomm demo: stopped by {signal.Signals(signum).name}; all ranks have ended\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout_s(300)  # two runs, which start five interpreters
@pytest.mark.leaves_swap
def test_killed_rank_is_named(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, *TINY, "--steps", "100000"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=plain_environment(),
    )
    wait_until(lambda: steps_of(tmp_path / "runs/test/metrics.jsonl") >= 2, "two steps")
    victim = ranks_of(process)[1]
    os.kill(victim, signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 137
    lines = without_notices(err).splitlines()
    assert re.match(rf"zcomm demo: rank 1 \(pid {victim}\) was killed by SIGKILL", lines[0])
    assert re.match(r"zcomm demo: then rank 0 \(pid \d+\) exited with status 1: PeerLost: .*rank 1", lines[1])
    swap = tmp_path / "runs/swap"
    assert len(list(swap.iterdir())) == 1, "rank 0 removed its files, rank 1 could not"
    assert demo(tmp_path, "--steps", "1", "--np", "1").returncode == 0
    assert list(swap.iterdir()) == [], "the next run removes what the killed rank left"


@pytest.mark.slow
def test_bar_on_a_terminal(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, *TINY, "--steps", "3", "--np", "1", "--stage", "0", "--offload", "none"],
        cwd=tmp_path,
        stdout=theirs,
        stderr=theirs,
        env={**plain_environment(), "TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # EIO: the other side has closed
            break
        if not part:
            break
        shown += part
    os.close(ours)
    assert process.wait(60) == 0
    assert b"3/3" in shown and b"tokens/s" in shown and b"validation loss" in shown
    assert b"swap:" not in shown


# --- parts, without processes ----------------------------------------------------------------------------------------


def test_where_weights_are_updated_is_an_option() -> None:
    gradients = {}
    for update in ("step", "forward", "backward", "auto"):
        config = dataclasses.replace(config_of("--clip", "0"), update=update)
        config.check()
        gradients[update] = as_offload(offload_of(config), 3)
    assert [each.update for each in gradients.values()] == list(gradients)
    assert [each.gradients for each in gradients.values()] == [None, None, "nvme", None]


def config_of(*options: str) -> DemoConfig:
    return make_config(build_parser().parse_args(["demo", *options]))


def test_options_change_the_size() -> None:
    config = config_of("--size", "medium", "--layers", "2", "--steps", "5")
    medium = SIZES["medium"]
    assert (config.layers, config.steps, config.width, config.lr) == (2, 5, medium["width"], medium["lr"])
    assert DemoConfig.from_json(config.to_json()) == config
    assert (config.stage, config.offload, config.world_size) == (3, "nvme", 2)
    assert config.tokens_per_step == 2 * medium["batch"] * medium["context"]


def test_default_sizes_are_allowed() -> None:
    for size in SIZES:
        config_of("--size", size).check()
    with pytest.raises(UserError, match="--context 4"):
        config_of("--context", "4").check()


def test_learning_rate_rises_and_falls() -> None:
    rates = [learning_rate(step, 100, 1.0) for step in range(100)]
    assert rates[0] == pytest.approx(0.2)
    assert max(rates) == rates[4] == 1.0
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert 0.05 <= rates[-1] < 0.06


def test_library_text_is_the_same_each_time() -> None:
    first, second = load_text(), load_text()
    assert np.array_equal(first.train, second.train) and np.array_equal(first.validation, second.validation)
    assert len(first.train) > 1_000_000
    assert 0.05 < len(first.validation) / len(first.train) < 0.3
    assert 2.5 < unigram_entropy(first.train, first.validation) < 4.0


def test_unigram_entropy_of_known_texts() -> None:
    two = np.frombuffer(b"ab" * 50_000, np.uint8)
    assert unigram_entropy(two, two) == pytest.approx(math.log(2.0), rel=0.01)
    even = np.tile(np.arange(256, dtype=np.uint8), 100)
    assert unigram_entropy(even, even) == pytest.approx(math.log(256.0))


def test_text_errors_name_the_path(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no files in this directory"):
        load_text(str(tmp_path))
    (tmp_path / "binary").write_bytes(b"\xff\xfe" * 10_000)
    with pytest.raises(DataError, match="holds 0 bytes of UTF-8 text"):
        load_text(str(tmp_path / "binary"))


def test_text_is_cut_inside_a_character(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("\N{SNOWMAN}" * 5000)
    text = load_text(str(tmp_path / "text"), max_nbytes=10_000)
    assert len(text.train) + len(text.validation) == 10_000


def test_model_is_causal_and_deterministic() -> None:
    config = ModelConfig(layers=2, heads=2, width=32, context=16, seed=3)
    model, twin = GPT(config), GPT(config)
    with torch.no_grad():
        for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(mine, other)
            mine.add_(torch.randn(mine.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
        tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(2))
        changed = tokens.clone()
        changed[:, 9] = (changed[:, 9] + 1) % 256
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=0, atol=1e-5)
    assert (before[:, 9:] - after[:, 9:]).abs().amax(dim=-1).min() > 1e-4
    with pytest.raises(ValueError, match="context of 16"):
        model(torch.zeros(1, 17, dtype=torch.int64))


def test_first_loss_is_that_of_a_blind_guess() -> None:
    model = GPT(ModelConfig(layers=1, heads=2, width=32, context=8))
    tokens = torch.randint(0, 256, (4, 9), generator=torch.Generator().manual_seed(0))
    assert model(tokens[:, :-1], tokens[:, 1:]).item() == pytest.approx(math.log(256.0), abs=1e-4)


def test_smoothing_starts_at_the_first_value() -> None:
    assert report.smoothed([3.0, 3.0, 3.0]) == pytest.approx([3.0, 3.0, 3.0])
    assert report.smoothed([]) == []


class _Checker(HTMLParser):
    """Collects tags and attributes that could load or run other content."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "iframe", "link")
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img", "br") and self.get_starttag_text()[-2:] != "/>":  # type: ignore[index]
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def check_html(page: str) -> _Checker:
    checker = _Checker()
    checker.feed(page)
    assert checker.open == []
    assert set(checker.links) <= {"metrics.jsonl"}, "the page loads nothing"
    assert "<th></th>" not in page and "prefers-color-scheme: dark" in page
    return checker


def test_page_escapes_what_comes_from_outside() -> None:
    from zcomm.demo.results import Summary, memory_rows

    evil = "<script>alert('&')</script>"
    memory = {"device": {"parameters": 4 << 20, "slots": 1 << 20}, "nvme": {"optimizer": 0}}
    summary = Summary(
        validation_loss=2.0,
        unigram_entropy=3.0,
        train_s=1.0,
        numel=10,
        source=evil,
        train_nbytes=1,
        validation_nbytes=1,
        memory=memory,
        formula={"device": {"parameters": 2 << 20}},
        stats={},
        sample=evil,
    )
    rows = memory_rows(summary)
    assert rows == [
        ("device", "parameters", "4.00", "2.00", "+100.0%"),
        ("device", "slots", "1.00", "0.00", "-"),
        ("all", "without slots", "4.00", "2.00", "+100.0%"),
    ]
    page = report.page(config_of("--data", evil), summary, evil, rows, [evil], [(evil,)])
    assert check_html(page).text.count(evil) == 6


def records(count: int) -> list[StepRecord]:
    return [
        StepRecord(step, 5.0 / step, 1e-3, 1.0, 123456.0, 1.0, compute_s=0.5, comm_s=0.3, swap_s=0.2)
        for step in range(1, count + 1)
    ]


def test_the_curve_and_the_times_need_no_matplotlib() -> None:
    steps = [dataclasses.asdict(record) for record in records(4)]
    drawn = report.curve(steps, [{"step": 2, "loss": 2.0}, {"step": 4, "loss": 1.0}], 3.0)
    check = _Checker()
    check.feed(drawn)
    assert check.open == [] and drawn.count("<polyline") == 4
    points = re.findall(r'class="raw" points="([^"]*)"', drawn)[0].split()
    heights = [float(point.split(",")[1]) for point in points]
    assert len(points) == 4 and heights == sorted(heights), "a loss that falls goes down the page"
    assert report.curve([], [], 3.0) == ""
    assert "<circle" in report.curve(steps, [{"step": 4, "loss": 1.0}], 3.0), "a single validation can be seen"
    assert "Time of a step, rank 0, ms" in report.time_chart(steps)
    assert "Time of a step, rank 0, s" in report.time_chart([{**steps[0], "step_s": 12.0}])
    assert report.time_rows(steps, "step_s") == [
        ("compute", "500.0", "2.0", "50%"),
        ("communication", "300.0", "1.2", "30%"),
        ("swap", "200.0", "0.8", "20%"),
        ("step", "1000.0", "4.0", "100%"),
    ]


@pytest.mark.parametrize("width", [80, 120])
def test_the_bar_has_room(width: int) -> None:
    console = Console(width=width, force_terminal=True, file=io.StringIO())
    progress = BarProgress(2000, console=console)
    for record in records(1999):
        progress.step(record)
    with console.capture() as shown:
        console.print(progress._bar.get_renderable())
    line = re.sub(r"\x1b\[[0-9;]*m", "", shown.get()).rstrip("\n")
    assert "\n" not in line and "\N{HORIZONTAL ELLIPSIS}" not in line and "..." not in line, line
    assert "1999/2000" in line and "123,456 tok" in line, line
    assert ("communication 30%" if width == 120 else "comp/comm/swap 50/30/20%") in line, line
