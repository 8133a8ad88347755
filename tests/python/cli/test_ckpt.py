"""`zcomm ckpt`: its lists, findings and files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn

import zcomm
from zcomm.cli.main import main
from zcomm.zero.checkpoint import read_manifest

Run = Callable[..., list[Any]]


class Net(nn.Module):
    """A model with tied and frozen parameters, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(19, 24)
        self.body = nn.Linear(24, 24)
        self.norm = nn.BatchNorm1d(24)
        self.scale = nn.Parameter(torch.full((24,), 0.5), requires_grad=False)
        self.head = nn.Linear(24, 19, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.body(self.embed(x))) * self.scale)


def write(folder: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    model = Net()
    opt = zcomm.ZeroOptimizer(model, "adamw", lr=0.02, stage=3, precision="bf16")
    for step in range(3):
        x = torch.randint(0, 19, (8,), generator=torch.Generator().manual_seed(step))
        opt.backward(nn.functional.cross_entropy(model(x).float(), x))
        opt.step()
        opt.zero_grad()
    opt.save(f"{folder}/runs/a", client_state={"epoch": 1})
    masters = {name: zcomm.zero.full_param(p) for name, p in model.named_parameters() if p.requires_grad}
    opt.close()
    return {name: tensor.numpy() for name, tensor in masters.items()}


@pytest.fixture
def saved(run_ranks: Run, tmp_path: Path) -> dict[str, torch.Tensor]:
    """Save tmp_path/runs/a on two ranks; return its exact masters."""
    masters = run_ranks(write, 2, str(tmp_path))[0]
    return {name: torch.from_numpy(array) for name, array in masters.items()}


def test_ls(saved: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "ls", str(tmp_path / "runs")]) == 0
    said = capsys.readouterr().out
    assert "step 3, world 2, stage 3, bf16, adamw" in said
    parameters = 19 * 24 + 24 * 24 + 3 * 24
    assert f"{parameters} trained parameters in 5 tensors, 4 other tensors, 1 tied names" in said
    assert "with client_state" in said and "exp_avg" not in said
    assert main(["ckpt", "ls", "--tensors", str(tmp_path / "runs" / "a")]) == 0
    said = capsys.readouterr().out
    assert "exp_avg/body.weight  F32 [24, 24]" in said and "head.weight  is embed.weight" in said
    assert main(["ckpt", "ls", str(tmp_path)]) == 2
    assert "there is no checkpoint" in capsys.readouterr().err


def test_one_that_is_damaged_does_not_hide_the_others(
    saved: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("b", "c"):
        shutil.copytree(tmp_path / "runs" / "a", tmp_path / "runs" / name)
    manifest = tmp_path / "runs" / "b" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"bf16"', '"bf61"'))
    for action in ("ls", "verify"):
        assert main(["ckpt", action, str(tmp_path / "runs")]) == 1
        said = capsys.readouterr().out
        assert said.count("the manifest is damaged: its checksum is another") == 1
        for name in ("a", "c"):
            assert f"{tmp_path / 'runs' / name}" in said
        assert said.count("step 3, world 2") == (2 if action == "ls" else 0)
        assert said.count("tensors are what was written") == (2 if action == "verify" else 0)


def test_verify_names_file_and_tensor(saved: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "runs" / "a"
    assert main(["ckpt", "verify", str(folder)]) == 0
    tensors = len(read_manifest(folder).weights) + len(read_manifest(folder).optimizer)
    assert f"{tensors} tensors are what was written" in capsys.readouterr().out
    entry = read_manifest(folder).optimizer["exp_avg_sq/body.bias"]
    path = folder / entry.file
    whole = bytearray(path.read_bytes())
    whole[entry.begin + entry.nbytes - 1] ^= 1
    path.write_bytes(whole)
    assert main(["ckpt", "verify", str(folder)]) == 1
    said = capsys.readouterr().out
    assert "1 wrong" in said and f"wrong: {path}: the bytes of exp_avg_sq/body.bias" in said
    path.unlink()
    assert main(["ckpt", "verify", str(tmp_path / "runs")]) == 1
    assert f"{path} is missing" in capsys.readouterr().out
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"bf16"', '"bf61"'))
    assert main(["ckpt", "verify", str(folder)]) == 1
    assert "the manifest is damaged" in capsys.readouterr().out


def test_export_one_file(saved: dict[str, torch.Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = str(tmp_path / "runs" / "a"), tmp_path / "out" / "net.safetensors"
    assert main(["ckpt", "export", folder, str(out)]) == 0
    weights = load_file(out)
    assert "head.weight" not in weights and weights["embed.weight"].dtype == torch.bfloat16
    with safe_open(out, "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    model = Net().bfloat16()
    model.norm.num_batches_tracked.fill_(0)
    load_model(model, out)  # ties by itself, and requires every other tensor
    assert model.head.weight is model.embed.weight and int(model.norm.num_batches_tracked) == 3
    for name, master in saved.items():
        assert (weights[name].float() - master).abs().max() <= master.abs().max() / 256
    exact = tmp_path / "exact.safetensors"
    assert main(["ckpt", "export", folder, str(exact), "--dtype", "fp32", "--untie"]) == 0
    weights = load_file(exact)
    assert all(torch.equal(weights[name], master) for name, master in saved.items()), "the exact master"
    assert torch.equal(weights["head.weight"], saved["embed.weight"])
    Net().load_state_dict(weights)
    assert main(["ckpt", "export", folder, str(exact)]) == 2
    assert "there is something already" in capsys.readouterr().err
    assert exact.stat().st_mode & 0o777 == 0o600 and out.parent.stat().st_mode & 0o777 == 0o700


def test_an_engines_folder(saved: dict[str, torch.Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = str(tmp_path / "runs"), tmp_path / "net.safetensors"
    assert main(["ckpt", "export", folder, str(out)]) == 2
    assert "there is no checkpoint (the folder holds a: name one of them)" in capsys.readouterr().err
    (tmp_path / "runs" / "latest").write_text("a\n")
    assert main(["ckpt", "export", folder, str(out)]) == 0
    assert load_file(out).keys() >= saved.keys()


def test_export_shards_as_hugging_face_reads_them(saved: dict[str, torch.Tensor], tmp_path: Path) -> None:
    out = tmp_path / "hf"
    command = ["ckpt", "export", str(tmp_path / "runs" / "a"), str(out), "--dtype", "fp32", "--shard-size", "2KB"]
    assert main(command) == 0
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{k + 1:05d}-of-{len(files):05d}.safetensors" for k in range(len(files))] and len(files) > 2
    merged: dict[str, torch.Tensor] = {}
    for name in files:
        shard = load_file(out / name)
        assert {index["weight_map"][key] for key in shard} == {name}
        assert len(shard) == 1 or sum(t.numel() * t.element_size() for t in shard.values()) <= 2000
        merged.update(shard)
    assert set(merged) == set(index["weight_map"])
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in merged.values())
    assert all(torch.equal(merged[name], master) for name, master in saved.items())


def test_export_refuses_damage(saved: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "runs" / "a"
    entry = read_manifest(folder).weights["scale"]
    path = folder / entry.file
    whole = bytearray(path.read_bytes())
    whole[entry.begin] ^= 1
    path.write_bytes(whole)
    for out in (tmp_path / "x.safetensors", tmp_path / "x"):
        assert main(["ckpt", "export", str(folder), str(out)]) == 2
        assert "the bytes of scale are not those that were written" in capsys.readouterr().err
        assert not out.exists()


@pytest.mark.parametrize("size", ["0", "5XB", "lots", "-1"])
def test_sizes_are_checked(size: str) -> None:
    with pytest.raises(SystemExit):
        main(["ckpt", "export", "a", "b", "--shard-size", size])


MANY = 24


@pytest.mark.slow
def test_export_keeps_a_piece_in_memory(tmp_path: Path) -> None:
    model = nn.ParameterList(nn.Parameter(torch.zeros(1 << 20)) for _ in range(MANY))
    opt = zcomm.ZeroOptimizer(model, "sgd", stage=0, lr=0.1)
    opt.save(tmp_path / "c")
    opt.close()
    zcomm.shutdown()
    code = (
        "import re, sys\nfrom zcomm.cli.main import main\nimport torch, zcomm.zero\n"
        "def kib(key): return int(re.search(key + r':\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
        "main(['ckpt', 'export', sys.argv[1], sys.argv[2] + '/warm'])\n"
        "open('/proc/self/clear_refs', 'w').write('5')\n"  # the peak begins anew
        "before = kib('VmRSS')\n"
        "main(['ckpt', 'export', sys.argv[3], sys.argv[2] + '/out'])\n"
        "print(kib('VmHWM') - before)"
    )
    small = nn.Linear(2, 2)
    opt = zcomm.ZeroOptimizer(small, "sgd", stage=0, lr=0.1)
    opt.save(tmp_path / "small")
    opt.close()
    zcomm.shutdown()
    command = [sys.executable, "-c", code, str(tmp_path / "small"), str(tmp_path), str(tmp_path / "c")]
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1048576"}  # so that malloc returns freed tensors to the system
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100, env=env)
    grown = int(done.stdout.split()[-1]) << 10
    assert grown > 2 << 20, "it is measured (Linux counts pages in batches)"
    assert grown < (4 << 20) + (1 << 20), "two pieces, and 1 MiB for the manifest and what Python makes of it"


def test_export_to_another_kind_of_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("out.pt", "pytorch_model.bin"):
        assert main(["ckpt", "export", str(tmp_path), str(tmp_path / name)]) == 2
        said = capsys.readouterr().err
        assert f"{Path(name).suffix} files are not written" in said and "torch.save(safetensors.torch.load_file" in said
        assert not (tmp_path / name).exists()
