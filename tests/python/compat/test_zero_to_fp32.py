"""deepspeed.utils.zero_to_fp32: the tensors that it reads and writes equal the saved model."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import zcomm
from zcomm.compat.deepspeed.utils import zero_to_fp32
from zcomm.zero import full_param
from zcomm.zero.checkpoint import read_manifest


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.frozen, self.head = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(requires_grad=False)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.frozen(self.embed(x))))


@pytest.fixture(params=["fp32", "bf16"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, dict[str, torch.Tensor]]]:
    """Yield a folder of a checkpoint, and the whole fp32 weights of its model."""
    torch.manual_seed(3)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": request.param == "bf16"},
    }
    engine, *_ = zcomm.initialize(model=Net(), config=config)
    for _ in range(2):
        engine.backward(engine(torch.arange(4)).float().square().mean())
        engine.step()
    engine.save_checkpoint(tmp_path / "runs")
    whole = engine.optimizer.full_state_dict()
    masters = {name: full_param(param) for name, param in engine.module.named_parameters(remove_duplicate=False)}
    engine.destroy()
    zcomm.shutdown()
    yield (
        tmp_path / "runs",
        {
            name: masters.get(name, tensor.float() if tensor.is_floating_point() else tensor)
            for name, tensor in whole.items()
        },
    )


def check(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert got[name].dtype == value.dtype and torch.equal(got[name], value), name


def test_the_weights_are_the_models(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, wanted = saved
    state = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder)
    check(state, wanted)
    assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
    check(zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder, tag="global_step2"), wanted)
    model = zero_to_fp32.load_state_dict_from_zero_checkpoint(Net(), folder)
    check(dict(model.state_dict()), wanted)
    with pytest.raises(FileNotFoundError, match="global_step7"):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder, tag="global_step7")
    with pytest.raises(ValueError, match="no file 'latest'"):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder.parent)


def test_frozen_parameters_are_left_out_on_request(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    folder, wanted = saved
    trained = {name: value for name, value in wanted.items() if not name.startswith("frozen.")}
    assert {"norm.running_mean", "norm.num_batches_tracked", "head.weight"} < trained.keys() < wanted.keys()
    check(zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder, exclude_frozen_parameters=True), trained)
    zero_to_fp32.main([str(folder), str(tmp_path / "out"), "--exclude_frozen_parameters", "--max_shard_size", "400B"])
    read = {}
    for file in (tmp_path / "out").glob("*.bin"):
        read |= torch.load(file, weights_only=True)
    check(read, trained)
    older = read_manifest(folder / "global_step2")
    older.frozen = None  # as written by a version without this field
    older.write(folder / "global_step2")
    with pytest.raises(NotImplementedError, match=r"frozen parameters from buffers: .*frozen\.weight"):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder, exclude_frozen_parameters=True)
    check(zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder), wanted)


def test_files_of_the_command(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    folder, wanted = saved
    zero_to_fp32.main([str(folder), str(tmp_path / "one")])
    check(torch.load(tmp_path / "one" / "pytorch_model.bin", weights_only=True), wanted)
    zero_to_fp32.main([str(folder), str(tmp_path / "safe"), "--safe_serialization", "-t", "global_step2"])
    tied = {name: value for name, value in wanted.items() if name != "head.weight"}
    check(load_file(tmp_path / "safe" / "model.safetensors"), tied)
    for safe in (False, True):
        out = tmp_path / f"shards {safe}"
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(folder, out, "400B", safe_serialization=safe)
        (index,) = out.glob("*.index.json")
        weight_map = json.loads(index.read_text())["weight_map"]
        assert len(set(weight_map.values())) > 2
        read = {}
        for file in set(weight_map.values()):
            read |= load_file(out / file) if safe else torch.load(out / file, weights_only=True)
        check(read, tied if safe else wanted)
        assert weight_map.keys() == read.keys()
    with pytest.raises(ValueError, match="max_shard_size='much'"):
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(folder, tmp_path / "no", "much")


def test_a_file_is_never_there_in_part(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank of a program converts into the same folder, and reads it at once."""
    folder, wanted = saved
    out = tmp_path / "out"
    file = out / "pytorch_model.bin"
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(folder, out)

    def fails(state: object, path: Path) -> None:
        Path(path).write_bytes(b"half")
        check(torch.load(file, weights_only=True), wanted)  # another rank may read the file meanwhile
        raise OSError("no space")

    monkeypatch.setattr(torch, "save", fails)
    with pytest.raises(OSError, match="no space"):
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(folder, out)
    check(torch.load(file, weights_only=True), wanted)
    assert list(out.iterdir()) == [file]


def test_the_program_beside_the_checkpoints(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = saved[0] / "zero_to_fp32.py"
    monkeypatch.setattr("sys.argv", [str(program), str(saved[0]), str(tmp_path / "out")])
    runpy.run_path(str(program), run_name="__main__")
    check(torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True), saved[1])
