"""A checkpoint's folder is also a Hugging Face folder: an index of the weights, and the model's config."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import zcomm

Run = Callable[..., list[Any]]


class Config:
    def __init__(self, width: int) -> None:
        self.width = width

    def to_json_string(self) -> str:
        if self.width < 0:
            raise ValueError("not a width")
        return json.dumps(vars(self))


class Net(nn.Module):
    """A model like transformers' ones: a tied weight, a buffer, a config."""

    config_class = Config

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.config = Config(width)
        width = abs(width)
        self.embedding = nn.Embedding(9, width)
        self.norm = nn.BatchNorm1d(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.head = nn.Linear(width, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embedding(x))
        out: torch.Tensor = self.head(hidden + self.down(self.up(hidden).relu()))
        return out


def train(model: nn.Module, opt: Any) -> None:
    opt.backward(model(torch.arange(9)).float().square().mean())
    opt.step()


def save_everywhere(folder: str) -> None:
    comm = zcomm.init(timeout=60)
    for stage in (0, 2, 3):
        torch.manual_seed(3)
        model = Net()
        opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1, stage=stage, precision="bf16", share_parameters=False)
        train(model, opt)
        opt.save(f"{folder}/{stage}")
        whole = opt.full_state_dict()
        index = json.loads(Path(f"{folder}/{stage}/model.safetensors.index.json").read_text())
        read = {name: load_file(f"{folder}/{stage}/{file}")[name] for name, file in index["weight_map"].items()}
        assert set(read) == set(whole) - {"head.weight"}, "tied weights are there once"
        for name, value in read.items():
            if not name.startswith("norm.running"):  # rank 0's
                assert torch.equal(value, whole[name]) and value.dtype == whole[name].dtype, (stage, name)
        assert index["metadata"]["total_size"] == sum(value.nbytes for value in read.values())
        config = json.loads(Path(f"{folder}/{stage}/config.json").read_text())
        assert config == {"width": 6, "architectures": ["Net"], "dtype": "bfloat16"}
        assert not hasattr(model.config, "architectures"), "the program's own config stays as it is"
        comm.barrier()
        opt.close()
    zcomm.shutdown()


def test_index_and_config(run_ranks: Run, tmp_path: Path) -> None:
    run_ranks(save_everywhere, 2, str(tmp_path))
    model = Net()  # zcomm reads the folder as a checkpoint, and as a Hugging Face folder
    opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1, precision="bf16")
    (tmp_path / "2" / "config.json").write_text("{}")  # programs edit it
    opt.load(tmp_path / "2")
    loaded = opt.full_state_dict()
    zcomm.zero.load_weights(opt, tmp_path / "3")
    assert all(torch.equal(value, loaded[name]) for name, value in opt.full_state_dict().items())
    opt.save(tmp_path / "2")
    assert json.loads((tmp_path / "2" / "config.json").read_text())["width"] == 6, "a save replaces an edited config"
    opt.close()


def test_a_model_that_is_not_of_transformers(world_of_one: None, tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1)
    opt.save(tmp_path / "c")
    names = {path.name for path in (tmp_path / "c").iterdir()}
    assert "model.safetensors.index.json" in names and "config.json" not in names
    opt.close()


def test_a_config_that_cannot_be_written(world_of_one: None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Net(-4)
    opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1)
    opt.save(tmp_path / "c")
    assert "no config.json: ValueError" in caplog.text
    assert not (tmp_path / "c" / "config.json").exists()
    opt.load(tmp_path / "c")
    opt.close()


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_reads_the_folder(
    world_of_one: None, tmp_path: Path, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    monkeypatch.setitem(sys.modules, "torchvision", None)  # no image is read
    from tqdm import tqdm
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # otherwise its monitor thread stays alive
    sizes = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32}
    model = GPT2LMHeadModel(GPT2Config(**sizes, tie_word_embeddings=tied))
    opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1, stage=3, share_parameters=False, precision="bf16")
    tokens = torch.arange(12).view(1, 12)
    opt.backward(model(input_ids=tokens, labels=tokens).loss)
    opt.step()
    opt.save(tmp_path / "c")
    model.eval()
    read, found = AutoModelForCausalLM.from_pretrained(tmp_path / "c", output_loading_info=True, dtype="auto")
    read.eval()
    with torch.no_grad():
        assert torch.equal(read(input_ids=tokens).logits, model(input_ids=tokens).logits)
    assert not any(found.values()), found
    opt.close()
