"""bench/finetune_llama.py on the CPU: both tiers, one and two ranks, local weights; its output is true."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from places import BENCH

sys.path.insert(0, str(BENCH))
from offloaded import figures
from zcomm.demo.llama import PRESETS, Llama, LlamaConfig, loss_of, positions, rotate

pytestmark = pytest.mark.slow


def run(*arguments: str, ranks: int = 1) -> str:
    """Return standard output; the run must have exit status 0."""
    script = [str(BENCH / "finetune_llama.py"), "--model", "tiny", "--code", "own", *arguments]
    start = [sys.executable, *script]
    if ranks > 1:
        start = [sys.executable, "-m", "zcomm.cli", "run", "-n", str(ranks), "--no-prefix", *script]
    ended = subprocess.run(
        start, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def losses(said: str) -> list[str]:
    return re.findall(r"loss ([\d.]+)", said)


@pytest.mark.long
@pytest.mark.timeout_s(300)
def test_tiers_and_ranks_give_the_same_losses(tmp_path: Path) -> None:
    common = ("--steps", "6", "--print-every", "2", "--lr", "1e-2")
    nvme = ("--offload", "nvme", "--nvme-path", str(tmp_path))
    for ranks in (1, 2):
        cpu = run("--offload", "cpu", *common, ranks=ranks)
        drive = run(*nvme, "--stage", "3", "--no-reference", *common, ranks=ranks)
        found = losses(cpu)
        assert len(found) == 3 and losses(drive) == found, "the bitwise contract, to 4 digits"
        assert float(found[-1]) < float(found[0]) < 5.5, "it learns: ln 256 is 5.545"
        assert f"{ranks} rank" in cpu and "practicality" in cpu and "without offload" in cpu
        assert "hiding rule" in cpu and "the bf16 peak of 'cpu' is not known" in cpu and "overlap" in cpu
        assert re.search(r"memory, cpu: .*optimizer", cpu) and re.search(r"memory, nvme: .*optimizer", drive)
        assert re.search(r"NVMe: [\d.]+ MiB read and written per step", drive) and "NVMe:" not in cpu


@pytest.mark.timeout_s(200)
def test_local_weights(tmp_path: Path) -> None:
    config = PRESETS["tiny"]
    torch.manual_seed(9)
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in Llama(config).state_dict().items()}
    weights["lm_head.weight"] *= 40  # confident and wrong, so the loss is above any that random weights have
    names = list(weights)
    for number, part in enumerate((names[:5], names[5:]), start=1):
        save_file({name: weights[name] for name in part}, tmp_path / f"model-0000{number}-of-00002.safetensors")
    text = {**config.__dict__, "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(text))
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 400)
    script = [sys.executable, str(BENCH / "finetune_llama.py"), "--weights", str(tmp_path), "--code", "own"]
    script += [
        "--context",
        "32",
        "--batch",
        "1",
        "--steps",
        "2",
        "--print-every",
        "1",
        "--stage",
        "3",
        "--offload",
        "cpu",
    ]
    script += ["--data", str(tmp_path / "text.txt"), "--save", str(tmp_path / "out")]
    ended = subprocess.run(script, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    model = Llama(config).to(torch.bfloat16)
    model.load_state_dict(weights)
    text_bytes = bytearray((tmp_path / "text.txt").read_bytes())
    tokens = torch.frombuffer(text_bytes, dtype=torch.uint8)[None, :400].long()
    expected = loss_of(model, tokens).item()
    assert expected > 8.0 and abs(float(losses(ended.stdout)[0]) - expected) < 1.5, "not ln 256"
    assert (tmp_path / "out").is_dir()
    (tmp_path / "config.json").write_text(json.dumps({**text, "model_type": "gpt2"}))
    with pytest.raises(ValueError, match="model_type is 'gpt2'"):
        LlamaConfig.load(tmp_path)


def test_wrong_use_is_said() -> None:
    script = str(BENCH / "finetune_llama.py")
    ended = subprocess.run([sys.executable, script, "--offload", "nvme"], capture_output=True, text=True, check=False)
    assert ended.returncode == 2 and "--offload nvme needs --nvme-path" in ended.stderr


def test_the_model_is_causal_and_turns_pairs() -> None:
    torch.manual_seed(2)
    model = Llama(PRESETS["tiny"])
    x = torch.randint(256, (1, 12))
    changed = x.clone()
    changed[0, 8] += 1
    before, after = model(x), model(changed % 256)
    assert torch.equal(before[0, :8], after[0, :8]) and not torch.equal(before[0, 8:], after[0, 8:])
    recomputed = Llama(PRESETS["tiny"], recompute=True)
    recomputed.load_state_dict(model.state_dict())
    for each in (model, recomputed):
        loss_of(each, x).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), recomputed.parameters(), strict=True))
    cos, sin = positions(5, 4, 10000.0, torch.zeros(1))
    turned = rotate(torch.ones(1, 5, 4), cos, sin)
    norms = turned.reshape(5, 2, 2).square().sum(dim=1)  # pairs (0, 2) and (1, 3)
    assert torch.allclose(norms, torch.full((5, 2), 2.0))


def test_presets_have_the_sizes_that_they_say() -> None:
    sizes = {name: config.numel() for name, config in PRESETS.items()}
    assert sizes["1b"] == 1_100_048_384 and sizes["7b"] == 6_738_415_616, "TinyLlama's and Llama 2's"
    assert 3.4e9 < sizes["3b"] < 3.5e9
    for config in (*PRESETS.values(), replace(PRESETS["tiny"], tie_word_embeddings=True)):
        with torch.device("meta"):
            assert sum(parameter.numel() for parameter in Llama(config).parameters()) == config.numel()
    per_token = PRESETS["7b"].flops_per_token(2048)
    assert per_token == pytest.approx(6 * (sizes["7b"] - 32000 * 4096) + 12 * 32 * 4096 * 2048)


def test_figures() -> None:
    assert figures.host_nbytes(1) == 4 + 2 * (2 + 2 + 8) + 2 + 2 + 4, "sum, weight and state; slot, sum"
    assert figures.host_nbytes(3) == figures.host_nbytes(1) + 4 + 2 * 12, "norm; slots, sum read and written"
    assert figures.host_nbytes(1, 2) == figures.host_nbytes(1) + 4 + 4, "norm; another slot"
    host = figures.Host(step_bps=36e9, copy_bps=2e9)
    assert figures.offloaded_s(host, 10**9, 2, 0.25) == pytest.approx(1.0)
    assert figures.offloaded_s(host, 10**9, 2, 3.0) == 3.0
    assert figures.offloaded_s(figures.Host(36e9, 1e9), 10**9, 2, 0.0) == pytest.approx(2.0), "copies are the longest"
    assert figures.offloaded_s(host, 10**9, 2, 0.0, 3) == pytest.approx(3.0), "three micro-steps' gradients"
    times = figures.Times(step=4.25, compute=4.0, none=4.1)
    assert figures.overlap(times, 1.0) == pytest.approx(0.75)
    assert figures.overlap(figures.Times(5.0, 4.0, None), 1.0) == pytest.approx(0.0), "one after the other"
    assert figures.overlap(times, 0.01) is None and figures.overlap(figures.Times(1.0, None, None), 1.0) is None
    assert figures.hiding(10**9, 1000, 4.0, host) == pytest.approx(250), "1 s of CPU step, 4 ms a token"
    assert figures.mfu(6e9, 1000.0, 12e12) == pytest.approx(0.5) and figures.mfu(1.0, 1.0, None) is None
