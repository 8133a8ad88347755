"""examples/finetune.py on the CPU: it learns, resumes with the same bits, keeps a limit, divides the text by rank."""

from __future__ import annotations

import re
import runpy
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import zcomm
from running import run

pytestmark = pytest.mark.needs("transformers")
SCRIPT = Path(__file__).parents[2] / "examples" / "finetune.py"
SMALL = ("--batch", "4", "--context", "32", "--lr", "1e-2")
WORDS = [f"w{4 + 7 * number % 60}" for number in range(20 * 32)]  # five batches, then the next epoch begins
Tune = Callable[..., dict[int, str]]


@pytest.fixture
def tune(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Tune]:
    """Return a function that runs the script in ``folder``, and returns its losses by step."""

    def run_script(*options: str, model: str = "model", text: str = "text") -> dict[int, str]:
        monkeypatch.setattr(sys, "argv", ["finetune.py", model, text, *SMALL, *options])
        try:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        finally:
            zcomm.shutdown()
        said = capsys.readouterr().out
        found = re.findall(r"^step (\d+): loss ([\d.]+), \d+ tokens/s$", said, re.MULTILINE)
        assert len(found) == len(said.splitlines()), said
        return {int(step): loss for step, loss in found}

    monkeypatch.chdir(folder)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    Path("text").write_text(" ".join(WORDS))
    yield run_script
    zcomm.shutdown()


def test_it_learns_and_resumes_within_a_limit_on_memory(tune: Tune) -> None:
    whole = tune("--steps", "8", "--out", "whole")
    assert list(whole) == list(range(1, 9)) and float(whole[8]) < float(whole[1]) - 0.5
    begun = tune("--steps", "4", "--memory", "4GiB")
    resumed = tune("--steps", "8", "--memory", "4GiB")
    assert list(begun) == [1, 2, 3, 4] and list(resumed) == [5, 6, 7, 8], "it resumes at step 5"
    assert begun | resumed == whole, "the bits do not depend on tier, limit and interruption"
    assert [path.name for path in Path("tuned").iterdir()] == ["checkpoint"], "the swap file is gone"
    assert Path("tuned/checkpoint/config.json").is_file(), "from_pretrained reads it"
    for file in Path("model").glob("tokenizer*"):
        shutil.copy(file, "tuned/checkpoint")
    again = tune("--steps", "1", "--out", "again", model="tuned/checkpoint")
    assert float(again[1]) < float(whole[1]) - 0.5, "it begins with trained weights"


def test_random_weights_of_a_config(folder: Path, tune: Tune) -> None:
    (folder / "config").mkdir()
    for file in (folder / "model").glob("*.json"):
        shutil.copy(file, folder / "config")
    with pytest.raises(OSError, match="no file named"):
        tune("--steps", "1", model="config")
    losses = tune("--steps", "2", "--random", model="config")
    assert abs(float(losses[1]) - 4.159) < 0.2 and list(losses) == [1, 2], "ln 64: nothing is known"


def test_two_ranks_have_other_samples_and_the_same_weights(folder: Path, tune: Tune) -> None:
    alone = tune("--steps", "3", "--out", "alone")
    (one, two) = run("finetune", folder, "--steps", "3", *SMALL, "--batch", "2", ranks=2)
    assert len(one["seen"]) == len(two["seen"]) == 2
    assert not [sample for sample in one["seen"] if sample in two["seen"]] and one["loss"] != two["loss"]
    assert one["weights"] == two["weights"]
    assert one["mean"] == two["mean"] == pytest.approx((one["loss"] + two["loss"]) / 2)
    assert one["mean"] == pytest.approx(float(alone[3]), abs=0.02), "together they have the batch of one rank"


@pytest.mark.parametrize(
    ("model", "text", "options", "error", "words"),
    [
        ("nowhere", "text", (), SystemExit, "error: nowhere: not a folder with a config.json"),
        ("model", "short", (), SystemExit, "error: short: 10 tokens; 1 x 4 x 32 need more text"),
        ("model", "nowhere", (), FileNotFoundError, "No such file or directory: 'nowhere'"),
        ("model", "text", ("--memory", "3x"), ValueError, "'3x' is not a size such as 5GB or 512MiB"),
        ("model", "text", ("--memory", "1MiB"), ValueError, "memory='1MiB' .* is too small for this model: .* works"),
    ],
)
def test_wrong_use_names_the_remedy(
    tune: Tune,
    capsys: pytest.CaptureFixture[str],
    model: str,
    text: str,
    options: tuple[str, ...],
    error: type[BaseException],
    words: str,
) -> None:
    Path("short").write_text("w5 " * 10)
    with pytest.raises(error) as ended:
        tune(*options, model=model, text=text)
    said = capsys.readouterr().err if error is SystemExit else str(ended.value)
    assert re.search(words, said), said
    assert error is not SystemExit or ended.value.code == 2
