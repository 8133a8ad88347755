"""`zcomm ckpt convert`: DeepSpeed's ZeRO checkpoints, written by hand and, if possible, by DeepSpeed.

ZCOMM_TEST_DEEPSPEED=PYTHON names a Python with DeepSpeed for the second kind.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import types
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from places import LIBRARIES
from zcomm.cli.main import main
from zcomm.zero.checkpoint import read_manifest
from zcomm.zero.files.folder import Folder
from zcomm.zero.files.tensor_file import read_whole

PYTHON = os.environ.get("ZCOMM_TEST_DEEPSPEED") or (sys.executable if importlib.util.find_spec("deepspeed") else None)
WORLD = 2


class Net(nn.Module):
    """The network of deepspeed_writer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(19, 7)
        self.body = nn.Linear(7, 7)
        self.norm = nn.LayerNorm(7)
        self.register_buffer("seen", torch.zeros(4, dtype=torch.int64))
        self.scale = nn.Parameter(torch.zeros(7), requires_grad=False)
        self.head = nn.Linear(7, 19, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.body(self.embed(x))) * self.scale)


GROUPS = [["embed.weight", "body.weight"], ["body.bias", "norm.weight", "norm.bias"]]


def values() -> dict[str, torch.Tensor]:
    """Return masters and state, by "ARRAY/NAME"."""
    generator = torch.Generator().manual_seed(1)
    shapes = {name: p.shape for name, p in Net().named_parameters()}
    names = [name for group in GROUPS for name in group]
    return {
        f"{key}/{name}": torch.randn(shapes[name], generator=generator)
        for key in ("master", "exp_avg", "exp_avg_sq")
        for name in names
    }


def flat_of(stage: int, key: str, group: int, rank: int, all_values: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return a rank's part of a group in DeepSpeed's layout, padding included."""
    tensors = [all_values[f"{key}/{name}"].flatten() for name in GROUPS[group]]
    if stage == 3:
        padded = [nn.functional.pad(t, (0, -t.numel() % WORLD)) for t in tensors]
        return torch.cat([t.chunk(WORLD)[rank] for t in padded])
    whole = torch.cat(tensors)
    part = nn.functional.pad(whole, (0, -whole.numel() % (2 * WORLD))).chunk(WORLD)[rank]
    lost = (
        -whole.numel() % (2 * WORLD) if key == "master" and rank == WORLD - 1 else 0
    )  # the last master has no padding
    return part[: part.numel() - lost].clone()


def write_by_hand(folder: Path, stage: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write DeepSpeed's files for ``values()``."""
    classes = {}
    for place, name in (
        ("deepspeed.runtime.zero.config", "ZeroStageEnum"),
        ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
    ):
        module = types.ModuleType(place)
        made = type(name, (int if name == "ZeroStageEnum" else object,), {"__module__": place})
        setattr(module, name, made)
        classes[name] = made
        monkeypatch.setitem(sys.modules, place, module)
        for parent in ("deepspeed", "deepspeed.runtime", place.rpartition(".")[0]):
            monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    everything = values()
    model = Net()
    folder.mkdir(parents=True)
    shapes = [OrderedDict((name, model.get_parameter(name).shape) for name in group) for group in GROUPS]
    for rank in range(WORLD):
        module_state = OrderedDict((name, tensor.to(dtype)) for name, tensor in model.state_dict().items())
        module_state["seen"] = torch.arange(4)
        module_state["scale"] = torch.full((7,), 0.5, dtype=dtype)
        fragment = torch.full((4,), 0.5, dtype=dtype)
        states = {
            "module": {k: v[:0] for k, v in module_state.items() if k != "seen"} | {"seen": torch.arange(4)}
            if stage == 3
            else module_state,
            "buffer_names": ["seen"],
            "param_shapes": shapes,
            "frozen_param_shapes": OrderedDict(scale=torch.Size([7])) if stage == 3 else None,
            "frozen_param_fragments": OrderedDict(scale=fragment) if stage == 3 else None,
            "shared_params": {"head.weight": "embed.weight"} if rank == 0 else {},
            "lr_scheduler": {"last_batch_iteration": 2},
            "skipped_steps": 1,
            "global_steps": 3,
            "global_samples": 24,
            "mp_world_size": 1,
            "ds_config": {"train_batch_size": 8, "gradient_accumulation_steps": 2},
            "ds_version": "0.19.8",
            "epoch": 2,
        }
        prefix = f"zero_pp_rank_{rank}_mp_rank_00"
        if stage == 3 or rank == 0:
            torch.save(states, folder / f"{prefix if stage == 3 else 'mp_rank_00'}_model_states.pt")
        scaler = classes["LossScaler"]()
        scaler.cur_scale = 1.0
        inner = {
            "state": {
                g: {"step": torch.tensor(3.0)}
                | {key: flat_of(stage, key, g, rank, everything) for key in ("exp_avg", "exp_avg_sq")}
                for g in range(2)
            },
            "param_groups": [
                {"lr": 0.02 / (g + 1), "betas": (0.9, 0.95), "eps": 1e-7, "weight_decay": 0.1, "fused": None}
                for g in range(2)
            ],
        }
        masters = [flat_of(stage, "master", g, rank, everything) for g in range(2)]
        own = (
            {"fp32_flat_groups": masters, "optimizer_state_dict": inner, "partition_count": WORLD}
            if stage == 3
            else {
                "single_partition_of_fp32_groups": masters,
                "base_optimizer_state": inner,
                "partition_count": [WORLD] * 2,
                "param_alignment_paddings": [[0, 0], [0, 0, 0]],
            }
        )
        optim = {"optimizer_state_dict": own | {"zero_stage": classes["ZeroStageEnum"](stage), "loss_scaler": scaler}}
        torch.save(optim, folder / f"{prefix}_optim_states.pt")


def compare(out: Path, expected: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Check that the files of ``out`` have the tensors of ``expected``, and that ZeroOptimizer loads them."""
    manifest = read_manifest(out)
    for key, wanted in expected.items():
        kind, _, name = key.partition("/")
        weight = read_whole(Folder(out), name, manifest.weights[name])
        if kind == "master" and dtype == torch.float32:
            assert torch.equal(weight, wanted), key
        else:
            assert torch.equal(read_whole(Folder(out), key, manifest.optimizer[key]), wanted), key
        if kind == "master":
            assert weight.dtype == dtype and torch.equal(weight, wanted.to(dtype)), "to the nearest, ties to even"
    model = Net()
    groups = [
        {"params": [model.get_parameter(name) for name in names], "weight_decay": decay}
        for names, decay in zip(GROUPS, (0.1, 0.0), strict=True)
    ]
    precision = "bf16" if dtype == torch.bfloat16 else "fp32"
    opt = zcomm.ZeroOptimizer(model, torch.optim.AdamW(groups), stage=3, precision=precision)
    client = opt.load(out)
    assert client["client_state"] == {"epoch": 2} and client["engine"]["global_steps"] == 3
    assert opt.step_count == 3 and [group["step"] for group in opt.param_groups] == [3, 3]
    assert [group["lr"] for group in opt.param_groups] == [0.02, 0.01]
    for name, param in model.named_parameters():
        if param.requires_grad:
            assert torch.equal(zcomm.zero.full_param(param), expected[f"master/{name}"])
            state = zcomm.zero.full_optim_state(param, "exp_avg_sq")
            assert f"exp_avg_sq/{name}" not in expected or torch.equal(state, expected[f"exp_avg_sq/{name}"])
    assert torch.equal(model.seen, torch.arange(4)) and torch.equal(model.scale.float(), torch.full((7,), 0.5))
    x = torch.arange(8)
    opt.backward(nn.functional.cross_entropy(model(x).float(), x))
    opt.step()
    assert opt.param_groups[0]["step"] == 4
    opt.close()
    zcomm.shutdown()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_by_hand(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stage: int,
    dtype: torch.dtype,
) -> None:
    with monkeypatch.context() as patch:
        write_by_hand(tmp_path / "ds" / "three", stage, dtype, patch)
    if stage == 3 and dtype == torch.bfloat16:
        (tmp_path / "ds" / "latest").write_text("three")
    source = tmp_path / "ds" if (tmp_path / "ds" / "latest").exists() else tmp_path / "ds" / "three"
    assert main(["ckpt", "convert", str(source), str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert f"stage {stage}, world 2, step 3: 5 parameters" in said and "not converted" not in said
    assert main(["ckpt", "verify", str(tmp_path / "out")]) == 0
    assert main(["ckpt", "convert", str(source), str(tmp_path / "out")]) == 2
    compare(tmp_path / "out", values(), dtype)
    manifest = read_manifest(tmp_path / "out")
    assert manifest.client_state["engine"]["micro_steps"] == 6 and manifest.frozen == ["scale"]


class Evil:
    """A pickle that calls a function."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_a_file_that_would_run_something_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        write_by_hand(tmp_path / "ds", 2, torch.float32, patch)
    path = tmp_path / "ds" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": Evil(tmp_path / "ran")}, path)
    assert main(["ckpt", "convert", str(tmp_path / "ds"), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert str(path) in said and ".system, which is not in the allowlist" in said
    assert not (tmp_path / "ran").exists() and not (tmp_path / "out").exists()


def test_what_is_missing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        write_by_hand(tmp_path / "ds", 2, torch.float32, patch)
    (tmp_path / "ds" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    assert main(["ckpt", "convert", str(tmp_path / "ds"), str(tmp_path / "out")]) == 2
    assert "2 ranks wrote it, but 1 *_optim_states.pt are there" in capsys.readouterr().err
    (tmp_path / "none").mkdir()
    assert main(["ckpt", "convert", str(tmp_path / "none"), str(tmp_path / "out")]) == 2
    assert "no ZeRO checkpoint of DeepSpeed" in capsys.readouterr().err


def test_client_state_comes_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Includes tensors; values that a checkpoint cannot keep are named."""
    with monkeypatch.context() as patch:
        write_by_hand(tmp_path / "ds", 2, torch.float32, patch)
    path = tmp_path / "ds" / "mp_rank_00_model_states.pt"
    states = torch.load(path, weights_only=True)
    torch.save(states | {"ema": {"decay": 0.5, "values": [torch.arange(3.0)]}, "odd": [{1}]}, path)
    assert main(["ckpt", "convert", str(tmp_path / "ds"), str(tmp_path / "out")]) == 0
    assert "not converted: of the client state odd, which a checkpoint cannot keep" in capsys.readouterr().out
    assert main(["ckpt", "verify", str(tmp_path / "out")]) == 0
    model = Net()
    groups = [{"params": [model.get_parameter(name) for name in group]} for group in GROUPS]
    opt = zcomm.ZeroOptimizer(model, torch.optim.AdamW(groups), stage=1)
    found = opt.load(tmp_path / "out")["client_state"]
    assert found.keys() == {"epoch", "ema"} and found["ema"]["decay"] == 0.5
    assert torch.equal(found["ema"]["values"][0], torch.arange(3.0))
    opt.close()
    zcomm.shutdown()


@pytest.mark.parametrize("stage", [2, 3])
def test_a_class_of_torch_goes_on_from_its_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int) -> None:
    """Its counts are loaded with its arrays; otherwise the next step would restart them."""
    with monkeypatch.context() as patch:
        write_by_hand(tmp_path / "ds", stage, torch.float32, patch)
        for path in (tmp_path / "ds").glob("*_optim_states.pt"):
            states = torch.load(path, weights_only=False)
            own = states["optimizer_state_dict"]
            for entry in own["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]["state"].values():
                del entry["exp_avg"]
                entry["square_avg"] = entry.pop("exp_avg_sq")
            torch.save(states, path)
    assert main(["ckpt", "convert", str(tmp_path / "ds"), str(tmp_path / "out")]) == 0
    model = Net()
    groups = [{"params": [model.get_parameter(name) for name in group]} for group in GROUPS]
    opt = zcomm.ZeroOptimizer(model, torch.optim.RMSprop(groups, lr=0.01, alpha=0.9), stage=1)
    opt.load(tmp_path / "out")
    weight = model.get_parameter("body.bias")
    before = zcomm.zero.full_optim_state(weight, "square_avg")
    assert torch.equal(before, values()["exp_avg_sq/body.bias"])
    for group in opt.param_groups:
        group["weight_decay"] = 0.0
    x = torch.arange(8)
    opt.backward(nn.functional.cross_entropy(model(x), x))
    grad = zcomm.zero.full_grad(weight)
    assert grad is not None
    opt.step()
    torch.testing.assert_close(zcomm.zero.full_optim_state(weight, "square_avg"), 0.9 * before + 0.1 * grad * grad)
    opt.close()
    manifest = tmp_path / "out" / "manifest.json"
    head, _, body = manifest.read_text().partition("\n")
    fields = {**json.loads(body), "progress": None}
    text = json.dumps(fields)
    manifest.write_text(json.dumps({**json.loads(head), "crc32": zlib.crc32(text.encode())}) + "\n" + text + "\n")
    opt = zcomm.ZeroOptimizer(model, torch.optim.RMSprop(groups, lr=0.01, alpha=0.9), stage=1)
    with pytest.raises(ValueError, match="3 steps without step of rmsprop"):
        opt.load(tmp_path / "out")
    opt.close()
    zcomm.shutdown()


def test_damaged_files_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        write_by_hand(tmp_path / "ds", 2, torch.float32, patch)
    paths = [
        tmp_path / "ds" / name for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt")
    ]
    for path in paths:
        whole = path.read_bytes()
        for content in (b"", b"garbage", whole[: len(whole) // 2]):
            path.write_bytes(content)
            assert main(["ckpt", "convert", str(tmp_path / "ds"), str(tmp_path / "out")]) == 2
            assert f"{path}: " in capsys.readouterr().err
        for other in ([1, 2], {}, {"optimizer_state_dict": 3}, {"module": {}, "param_shapes": 5}, torch.ones(3)):
            torch.save(other, path)
            assert main(["ckpt", "convert", str(tmp_path / "ds"), str(tmp_path / "out")]) == 2
            assert str(tmp_path / "ds") in capsys.readouterr().err
        path.write_bytes(whole)
    assert [each.name for each in tmp_path.iterdir()] == ["ds"]
    assert main(["ckpt", "convert", str(tmp_path / "ds"), str(tmp_path / "out")]) == 0


@pytest.mark.skipif(PYTHON is None, reason="no DeepSpeed; ZCOMM_TEST_DEEPSPEED=PYTHON names a Python that has it")
@pytest.mark.timeout_s(300)
@pytest.mark.parametrize(("stage", "precision"), [(1, "fp32"), (2, "bf16"), (3, "fp32"), (3, "bf16")])
def test_as_deepspeed_writes_it(tmp_path: Path, stage: int, precision: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(WORLD):
        env = {
            **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(WORLD),
            "LOCAL_SIZE": str(WORLD),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        script = str(LIBRARIES / "deepspeed_writer.py")
        command = [str(PYTHON), script, str(tmp_path / "ds"), str(stage), precision]
        ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    said = [process.communicate(timeout=250)[0] for process in ranks]
    for left in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
        left.unlink()
    assert [process.returncode for process in ranks] == [0, 0], said
    assert main(["ckpt", "convert", str(tmp_path / "ds"), str(tmp_path / "out")]) == 0
    expected = torch.load(tmp_path / "ds" / "expected.pt", weights_only=True)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    compare(tmp_path / "out", {key: tensor.float() for key, tensor in expected.items()}, dtype)
