"""transformers' generate() on models that are streamed, and `zcomm generate`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from running import run

pytestmark = pytest.mark.needs("transformers")


@pytest.mark.parametrize("ranks", [1, 2])
def test_tokens_of_the_resident_model(folder: Path, ranks: int) -> None:
    for result in run("inference", folder, ranks=ranks):
        assert not result["wrong"]


def generate(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zcomm.cli.main", "generate", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_command(folder: Path) -> None:
    """Print the prompts with new words, within a limit; a limit that is too small is one line."""
    model, given = folder / "model", ["--prompt", "w5 w6 w7", "--prompt", "w9", "--tokens", "5", "--dir", folder]
    done = generate(model, *given, "--memory", "2GiB", "--quantize", "int8")
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("w5 w6 w7 w") and second.startswith("w9 w")
    assert "10 tokens" in done.stderr and "GiB at most in the process" in done.stderr
    for more, words in ((["--memory", "64MiB"], "works"), (["--batch", "0"], "--batch 0"), ([], "config.json")):
        failed = generate(model if more else folder, *given, *more)
        assert failed.returncode == 2 and failed.stderr.splitlines()[-1].startswith("zcomm generate: error: ")
        assert words in failed.stderr and "Traceback" not in failed.stderr
