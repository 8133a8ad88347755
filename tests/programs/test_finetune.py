"""examples/finetune.py on the CPU: it learns, resumes with the same bits, keeps a limit on memory, and names errors."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import zcomm

pytestmark = pytest.mark.needs("transformers")
SCRIPT = Path(__file__).parents[2] / "examples" / "finetune.py"
SMALL = ("--batch", "4", "--context", "32", "--device", "cpu", "--lr", "1e-2")


def tune(folder: Path, *options: str, out: str = "tuned") -> str:
    """Return standard output of a run in ``folder``, which has model and text."""
    command = [sys.executable, str(SCRIPT), "model", "text", "--out", out, *SMALL, *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def losses(said: str) -> dict[int, str]:
    return {int(step): loss for step, loss in re.findall(r"^step (\d+): loss ([\d.]+), \d+ tokens/s$", said, re.M)}


def test_it_learns_and_resumes_within_a_limit_on_memory(folder: Path) -> None:
    (folder / "text").write_text(" ".join(f"w{4 + 7 * number % 60}" for number in range(2000)))
    whole = losses(tune(folder, "--steps", "8", out="whole"))
    assert list(whole) == list(range(1, 9)) and float(whole[8]) < float(whole[1]) - 0.5
    limit = ("--memory", "4GiB", "--swap", "drive", "--save-every", "2")
    begun = tune(folder, "--steps", "4", *limit)
    resumed = tune(folder, "--steps", "8", *limit)
    assert "resumed from tuned/checkpoint at step 4" in resumed
    assert losses(begun) | losses(resumed) == whole, "the bits do not depend on tier, limit and interruption"
    assert 0.1 < float(re.findall(r"^peak memory of the process ([\d.]+) GiB$", resumed, re.M)[0]) < 4
    assert not list((folder / "drive").iterdir()) and not (folder / "tuned" / "swap").exists()
    assert (folder / "tuned" / "checkpoint" / "config.json").is_file(), "from_pretrained reads it"


def test_a_folder_with_only_a_config_has_random_weights_and_bytes(folder: Path) -> None:
    shutil.copy(folder / "model" / "config.json", folder)
    (folder / "model").unlink()
    (folder / "model").mkdir()
    (folder / "config.json").rename(folder / "model" / "config.json")
    (folder / "text").write_text("0123456789" * 200)  # of bytes below the model's 64 words
    said = tune(folder, "--steps", "6")
    assert "model has no weights" in said
    assert abs(float(losses(said)[1]) - math.log(64)) < 0.2 and float(losses(said)[6]) < 3.5


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """Return the script as a module, so that transformers is imported once."""
    spec = importlib.util.spec_from_file_location("finetune", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nowhere", "text"), "nowhere: not a folder with a config.json"),
        (("model", "nowhere"), "nowhere: no such file"),
        (("model", "empty"), "empty: no such file, or an empty one"),
        (("model", "short"), "short: 10 tokens; a batch of 4 x 32 needs more text"),
        (("bytes", "text"), "bytes: the model has 64 words, the text has token 119"),
        (("model", "text", "--memory", "3x"), "'3x' is not a size such as 5GB or 512MiB"),
        (("model", "text", "--memory", "1MiB"), "memory='1MiB' .* is too small for this model: .* works"),
        (("model", "text", "--memory", "4GiB", "--swap", "text/below"), "Not a directory: 'text/below'"),
        (("model", "text", "--steps", "0"), "--steps, --batch, --context and --save-every are at least 1"),
    ],
)
def test_wrong_use_is_one_line(
    folder: Path,
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    words: str,
) -> None:
    monkeypatch.chdir(folder)
    Path("text").write_text("w5 " * 200)
    Path("short").write_text("w5 " * 10)
    Path("empty").touch()
    Path("bytes").mkdir()
    shutil.copy("model/config.json", "bytes")
    monkeypatch.setattr(sys, "argv", ["finetune.py", *SMALL, *arguments])
    try:
        with pytest.raises(SystemExit) as ended:
            script.main()
    finally:
        zcomm.shutdown()
    said = [line for line in capsys.readouterr().err.splitlines() if line and "Loading weights" not in line]
    assert ended.value.code == 2 and len(said) == 1, said
    assert re.match(f"finetune.py: error: .*{words}", said[0]), said
