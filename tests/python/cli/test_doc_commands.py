"""Commands and programs of the pages: each block `sh` is run, or a marker before it names a requirement.

A page's blocks run in their order, in a scratch folder with the page's own files: blocks with a title. Two values are
replaced: /mnt/nvme by a folder in it, and a port 295xx by a free one. A block of output directly after a block `sh` is
compared line by line, without its numbers.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from places import BENCH, DOCS, EXAMPLES, ROOT
from tiers import long
from zcomm.cli.main import build_parser
from zcomm.compat.deepspeed.launcher import runner

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", BENCH / "README.md"]
PAGES += [*sorted(DOCS.rglob("*.md")), *sorted(EXAMPLES.rglob("*.md"))]
NEEDS = {
    "a GPU",
    "several hosts",  # tests/python/cli/test_real_nodes.py has its own hosts
    "pip",  # it installs packages
    "minutes",  # it builds, or measures
    "other libraries",  # tests/programs/test_pages.py runs it
    "an error",  # it ends with an error
}
LANGUAGES = {"", "text", "sh", "python", "json", "diff", "mermaid"}
FENCE = re.compile(
    r'(?:<!-- needs: (?P<needs>[^>]*) -->\n)?^```(?P<language>\w*)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$',
    re.DOTALL | re.MULTILINE,
)
COMMAND = re.compile(r"^(\$ )?(zcomm (run|top|plan|doctor|ckpt|demo|bench) |(python3?|torchrun|mpirun|pip|make) \S)")

PROGRAMS = {
    "zcomm": "-m zcomm.cli.main",
    "python": "",
    "python3": "",
    "torchrun": "-m torch.distributed.run",
    "deepspeed": "-m zcomm.compat.deepspeed.launcher.runner",
}
FOREIGN = ("RANK", "WORLD", "LOCAL", "MASTER", "TORCHELASTIC", "ZCOMM_")
RANK = "import os\nprint('rank', os.environ['RANK'])\n"
PARTS = """import torch


def make():
    blocks = (torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.Linear(2048, 512)) for _ in range(8))
    return torch.nn.Sequential(*blocks), torch.zeros(8192, 512)
"""
FILES = {  # files that a page requires
    "launch.md": {"train.py": RANK, "my/training.py": RANK, "program": "#!/bin/sh\necho rank $RANK\n"},
    "fit.md": {
        "mynet.py": "import torch\n\n\ndef make():\n    return torch.nn.Linear(512, 512)\n",
        "parts.py": PARTS,
    },
}
BEFORE = {"watch.md": "zcomm run -n 2 train.py"}  # a job to look at


@dataclass(frozen=True)
class Block:
    """A fenced block. needs: from the marker before it, if any; begin, end: its offsets in the page's text."""

    page: Path
    language: str
    title: str | None
    needs: str | None
    text: str
    begin: int
    end: int

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {self.text.splitlines()[0] if self.text else ''}"


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page."""
    text = page.read_text(encoding="utf-8")
    assert re.search(r"^[ \t]+```", text, re.MULTILINE) is None, f"{page}: a block that is indented is not seen here"
    found = [
        Block(page, match["language"], match["title"], match["needs"], match["text"], match.start(), match.end())
        for match in FENCE.finditer(text)
    ]
    assert len(found) * 2 == len(re.findall(r"^```", text, re.MULTILINE)), f"{page}: a fence is not understood"
    return found


BLOCKS = [block for page in PAGES for block in blocks(page)]
COMMANDS = [block for block in BLOCKS if block.language == "sh"]
RUN = list(dict.fromkeys(block.page for block in COMMANDS if block.needs is None))


def test_commands_stand_in_blocks_of_the_shell() -> None:
    assert len(COMMANDS) > 30 and len(RUN) > 8
    for block in BLOCKS:
        assert block.language in LANGUAGES, block
        assert block.language == "sh" or not any(map(COMMAND.match, block.text.splitlines())), block


def test_each_marker_is_known_and_stands_before_commands() -> None:
    for page in PAGES:
        markers = re.findall(r"^<!-- needs: (.*?) -->", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert markers == [block.needs for block in blocks(page) if block.needs is not None], page
    for block in BLOCKS:
        assert block.needs is None or (block.language == "sh" and block.needs in NEEDS), block
    assert {block.needs for block in COMMANDS} == {None, *NEEDS}, "a word that no page needs"


def test_the_parsers_take_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Includes the blocks that are not run."""
    parsers = {"zcomm": build_parser(), "deepspeed": runner.build_parser()}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    seen = 0
    for block in COMMANDS:
        for line in block.text.splitlines():
            words = shlex.split(line.rstrip("& "), comments=True)
            while words and re.match(r"[A-Z_]+=", words[0]):
                words.pop(0)
            if words and words[0] in parsers:
                seen += 1
                try:
                    parsers[words[0]].parse_args(words[1:])
                except SystemExit:
                    pytest.fail(f"{block.page}: {line}\n{capsys.readouterr().err}")
            elif words and words[0] == "make":
                named = [word for word in words[1:] if "=" not in word]
                assert named and targets.issuperset(named), f"{block.page}: {line}"
            elif words and words[0].startswith(("bench/", ".ci/")):
                assert (ROOT / words[0]).exists(), f"{block.page}: {line}"
    assert seen > 40


def options(parser: argparse.ArgumentParser, *command: str) -> Iterator[tuple[tuple[str, ...], set[str]]]:
    """Yield each command with all its options."""
    yield command, set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, each in action.choices.items():
                yield from options(each, *command, name)


def test_options_in_sentences_exist() -> None:
    known = dict(options(build_parser()))
    seen = 0
    for page in PAGES:
        for code in re.findall(r"`zcomm ([a-z]+[^`:]*)`", FENCE.sub("", page.read_text(encoding="utf-8"))):
            words = code.split()
            command = tuple(words[: 2 if words[0] == "ckpt" else 1])
            assert command in known, f"{page}: zcomm {code}"
            if command == ("bench",):  # passes its options on
                continue
            for word in words[len(command) :]:
                if command in (("run",), ("tune",)) and word.endswith(".py"):
                    break
                if word.startswith("-"):
                    seen += 1
                    assert word in known[command], f"{page}: zcomm {code}"
    assert seen > 25


def test_programs_are_python_and_use_names_that_exist() -> None:
    programs = [block for block in BLOCKS if block.language == "python"]
    assert len(programs) > 25
    seen = set()
    for block in programs:
        for node in ast.walk(ast.parse(block.text, str(block.page))):
            names = []
            while isinstance(node, ast.Attribute):
                names.append(node.attr)
                node = node.value
            if names and isinstance(node, ast.Name) and node.id == "zcomm":
                seen.add(".".join(reversed(names)))
    for name in seen:
        found = importlib.import_module("zcomm")
        for part in name.split("."):
            if not hasattr(found, part):
                importlib.import_module(f"{found.__name__}.{part}")  # fails for a name that does not exist
            found = getattr(found, part)
    assert len(seen) > 10


def test_the_first_program_is_the_same_everywhere() -> None:
    first = {block.text for block in BLOCKS if block.language == "python" and "mean loss" in block.text}
    assert len(first) == 1


def shape(line: str) -> str:
    """Return the line without parts that depend on the machine: numbers, widths, whether a plan fits."""
    line = re.sub(r"(yes|no: [a-z, ]+)$", "FITS", line.rstrip())
    line = re.sub(r"[\d.]+ ?([KMGT]i)?B\b", "BYTES", line)
    return " ".join(re.sub(r"[\d.]+", "0", line).split())


def output_of(block: Block) -> list[str]:
    """Return the lines of output that the page shows for the block."""
    for other in blocks(block.page):
        between = block.page.read_text(encoding="utf-8")[block.end : other.begin]
        if other.begin > block.end and not between.strip() and other.language in ("", "text") and not other.title:
            return [line for line in other.text.splitlines() if line.strip() and line != "..."]
    return []


def environment(folder: Path) -> dict[str, str]:
    """Return variables for a shell that finds the programs of the pages and no cache of this machine."""
    programs = folder / "bin"
    programs.mkdir()
    for name, module in PROGRAMS.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {module} "$@"\n')
        (programs / name).chmod(0o755)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(FOREIGN)}
    return kept | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "HOME": str(folder),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "ZCOMM_WATCH": str(folder / "pages"),
        "PET_MASTER_PORT": str(free_port()),  # torchrun's
    }


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


# Their commands are much like those of quickstart.md, migrate/ddp.md and launch.md.
REPEATED = {DOCS / name for name in ("fit.md", "several_machines.md", "migrate/deepspeed.md", "migrate/fsdp2.md")}


# Gloo aborts one run in six of ddp.md's before.py at its end ("terminate called"), in torch without zcomm, too.
@pytest.mark.flaky(reruns=3, only_rerun=["before.py FAILED"])
@pytest.mark.slow
@pytest.mark.timeout_s(300)
@pytest.mark.parametrize(
    "page", [long(page) if page in REPEATED else page for page in RUN], ids=lambda page: str(page.relative_to(ROOT))
)
def test_the_commands_of_a_page_run(page: Path, tmp_path: Path) -> None:
    variables, folder = environment(tmp_path), tmp_path / "work"
    (folder / "nvme").mkdir(parents=True)
    first = next(block.text for block in blocks(DOCS / "quickstart.md") if block.title == "train.py")
    given = {"train.py": first} | FILES.get(page.name, {})
    given |= {block.title: block.text for block in blocks(page) if block.title is not None}
    for name, text in given.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    port = str(free_port())

    def run(text: str, fails: bool = False) -> str:
        script = re.sub(r"\b295\d\d\b", port, text.replace("/mnt/nvme", str(folder / "nvme")))
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=200,
        )
        assert (done.returncode != 0) == fails, f"{page}\n{text}\n{done.stdout[-6000:]}"
        return done.stdout

    run(BEFORE.get(page.name, "true"))
    losses = []
    for block in COMMANDS:
        if block.page == page and block.needs in (None, "an error"):
            out = run(block.text, fails=block.needs is not None)
            printed = {shape(line) for line in out.splitlines()}
            shown = output_of(block) if block.needs is None else [" ".join(output_of(block))]  # an error is one line
            missing = [line for line in shown if shape(line) not in printed]
            assert not missing, f"{block}\nis shown and is not printed: {missing}\n{out[-6000:]}"
            losses += [float(loss) for loss in re.findall(r"last loss ([0-9.]+)", out)]
    assert not losses or max(losses) - min(losses) < 2e-5, losses
