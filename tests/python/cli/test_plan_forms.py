"""`zcomm plan --mesh`: bytes by axis equal formulas derived here; its choice fits, and wrong options are one error.

That the formulas equal the bytes of real steps: parallel/test_traffic.py.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from zcomm.cli.main import main
from zcomm.cli.sizes import shown

SHAPE = "layers=32,width=4096,heads=32,keys=8,tokens=2048,samples=2"
ACT = 2 * 2048 * 4096 * 2  # bf16 output of a layer for a micro-batch


def said(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    command = ["plan", "--params", "8e9", "--precision", "bf16", "--memory", "400GiB", *options]
    assert main(command) == 0
    return capsys.readouterr().out


def rows(text: str) -> dict[str, list[str]]:
    """Return the columns of the table of axes, by axis and purpose."""
    lines = text.partition("bytes by axis")[2].splitlines()[2:]
    cells = [[word.strip() for word in line.split("  ") if word.strip()] for line in lines]
    return {f"{each[0]}: {each[2]}": each[3:] for each in cells if len(each) > 5}


def test_bytes_by_axis(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "--mesh", "data=2,pipe=2,tensor=2", "--shape", SHAPE, "--link", "10GB", "--stage", "1")
    found = rows(text)
    assert found["pipe: activations"][:3] == ["send", "8", shown(8 * ACT)]
    calls = 8 * 16 * 7
    assert found["tensor: activations"][:3] == ["all_reduce", str(calls), shown(calls * ACT)]
    assert found["data: gradients"][2] == shown(8e9 / 4 * 2 / 2)
    assert f"{calls * ACT / 1e10:.3g} s" in text and "= 0.111 with P=2 stages, M=8 micro-batches" in text
    assert "take mesh data=2,pipe=2,tensor=2, stage 1, offload none" in text


def test_bytes_of_sequences_and_experts(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(said(capsys, "--mesh", "sequence=4", "--shape", SHAPE, "--stage", "3", "--accum", "3"))
    heads = 3 * 2 * 32 * 2 * (1 + 8 / 32) * ACT / 4 * 3 / 4
    assert found["sequence: heads"][:3] == ["all_to_all", str(3 * 32 * 4), shown(heads)]
    assert found["sequence: gradients"][2] == shown(3 * 8e9 * 2 * 3 / 4)
    experts = f"{SHAPE},experts=8,top=2,expert_params=6e9"
    found = rows(said(capsys, "--mesh", "expert_data=2,expert=2", "--shape", experts, "--stage", "2"))
    assert found["expert: tokens"][:3] == ["all_to_all", str(32 * 4), shown(32 * 4 * 2 * ACT / 2)]
    assert found["expert_data x expert: gradients"][2] == shown(2e9 * 2 * 3 / 4)
    assert found["expert_data: gradients of experts"][2] == shown(3e9 * 2 / 2)


def test_the_best_mesh_fits_and_sends_least(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "--mesh", "auto", "--world", "8", "--shape", SHAPE, "--offload", "none", "--microbatches", "16")
    chosen = text.splitlines()[0].partition("take mesh ")[2].split(", ")[0]
    assert math.prod(int(part.partition("=")[2]) for part in chosen.split(",")) == 8
    table = text.split("\n\n")[1].splitlines()[2:]
    assert all(line.split()[-1] == "yes" for line in table) and chosen in table[0]
    text = said(capsys, "--mesh", "auto", "--world", "2", "--shape", SHAPE, "--offload", "none", "--memory", "1GiB")
    assert "nothing fits 1.0 GiB of memory" in text


def test_the_sizes_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "import torch\nfrom zcomm.demo.llama import Llama, LlamaConfig\n\ndef make():\n    model = "
    text += "Llama(LlamaConfig(256, 64, 172, 2, 4, 2))\n    return model, torch.zeros(3, 16, dtype=torch.int64)\n"
    (tmp_path / "planned_forms.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["plan", "--model", "planned_forms:make", "--mesh", "pipe=2", "--stage", "1", "--offload", "none"]) == 0
    assert rows(capsys.readouterr().out)["pipe: activations"][:3] == ["send", "8", shown(8 * 3 * 16 * 64 * 4)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--mesh pipe", "--mesh pipe: 'pipe' is not AXIS=RANKS"),
        ("--mesh pip=2", "axis 'pip' is not one of"),
        ("--mesh pipe=2", "pipe=2 needs the model's sizes: give --shape"),
        (f"--mesh tensor=3 --shape {SHAPE}", "tensor=3: 32 heads do not divide"),
        (f"--mesh pipe=2 --stage 3 --shape {SHAPE}", "stage 3 with pipe: stages 0 to 2"),
        ("--mesh auto", "--mesh auto needs --world N"),
        ("--mesh data=2 --gpus 2", "leave out --gpus"),
        ("--mesh pipe=2 --shape layers=3", "width= is missing"),
        ("--mesh pipe=2 --shape rows=3", "'rows=3' is not NAME=N of"),
        (f"--mesh expert=2 --shape {SHAPE},experts=8", "experts= needs expert_params="),
        ("--mesh data=2 --microbatches 0", "--microbatches 0: must be at least 1"),
        ("--link 3GB", "--link 3000000000 needs --mesh"),
    ],
)
def test_wrong_options(options: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--params", "8e9", *options.split()]) == 2
    assert words in capsys.readouterr().err
