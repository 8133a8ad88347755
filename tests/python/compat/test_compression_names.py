"""deepspeed.compression: the names that programs import, and the loop of DeepSpeed's examples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from compression_parts import bits, config, everything, heads, model, tokens
from zcomm.compat.deepspeed import compression
from zcomm.compat.deepspeed.compression import basic_layer, compress, helper
from zcomm.compat.deepspeed.compression.config import get_compression_config
from zcomm.compat.deepspeed.compression.scheduler import compression_scheduler


def test_a_file_prepares_and_cleans_a_model(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config(bits(8, 4, ["fc"], 2, schedule_offset=1), heads("topk"))))
    net = compression.init_compression(model(), str(path))
    assert isinstance(net.blocks[0].fc, basic_layer.LinearLayer_Compress) and isinstance(net.blocks[0].fc, nn.Linear)
    assert not isinstance(net.blocks[0].q, basic_layer.LinearLayer_Compress)
    assert not isinstance(net.embed, basic_layer.Embedding_Compress)
    schedule = compression_scheduler(net, get_compression_config(json.loads(path.read_text())))
    (quantiser,) = net.blocks[0].fc.parametrizations["weight"]
    seen = []
    for _ in range(5):
        schedule.step(step_zero_check=True)
        seen.append((schedule.training_steps, quantiser.bits))
        schedule.step()
    assert seen == [(0, None), (1, 8), (2, 8), (3, 7), (4, 7)]
    assert compression.redundancy_clean(net, str(path)) is net
    assert type(net.blocks[0].o) is nn.Linear and net.blocks[0].o.in_features == 8
    with pytest.raises(NotImplementedError, match=r"prepares each nn.Linear of a model"):
        basic_layer.LinearLayer_Compress(3, 4)
    with pytest.raises(NotImplementedError, match=r"no snip_momentum"):
        helper.generate_pruners(None, net)


def test_a_student_begins_with_layers_of_its_teacher() -> None:
    reduction = {"enabled": True, "module_name_prefix": "blocks", "teacher_layer": [2], "other_module_name": "head"}
    student, teacher = model(blocks=1, seed=1), model(blocks=3)
    compression.student_initialization(student, teacher, config({"layer_reduction": reduction}))
    assert torch.equal(student.blocks[0].fc.weight, teacher.blocks[2].fc.weight)
    assert torch.equal(student.head.weight, teacher.head.weight)
    assert not torch.equal(student.embed.weight, teacher.embed.weight)


class Conv1D(nn.Module):
    """transformers' layer of GPT-2."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs)), nn.Parameter(torch.randn(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


def test_layers_of_gpt2_become_linear() -> None:
    net = nn.Sequential(Conv1D(6, 4), nn.Sequential(Conv1D(4, 6)))
    with pytest.raises(ValueError, match=r"only Conv1D.*: call convert_conv1d_to_linear first"):
        compression.init_compression(net, config(bits(8, 8, ["1"])))
    x = torch.randn(3, 4)
    before = net(x)
    assert compression.convert_conv1d_to_linear(net, Conv1D) is net
    torch.testing.assert_close(net(x), before)
    linear: Any = net[0]
    assert type(linear) is nn.Linear and (linear.in_features, linear.out_features) == (4, 6)
    compression.init_compression(net, config(bits(8, 8, ["1"])))


def test_names_of_modules_and_megatrons_layers() -> None:
    net, seen = model(), set[str]()
    names, seen = compress.get_module_name("g", net, "fc", seen)
    assert names == ["blocks.0.fc", "blocks.1.fc"] and seen == set(names)
    assert compress.get_module_name("g", net, r"blocks\.0", seen, verbose=False)[0] == [
        f"blocks.0.{name}" for name in ("q", "k", "v", "o", "out")
    ]
    with pytest.raises(ValueError, match="head is in another group"):
        compress.get_module_name("g", net, "head", {"head"})

    class mpu:
        ColumnParallelLinear = RowParallelLinear = nn.Linear

    with pytest.raises(NotImplementedError, match=r"blocks.0.q is Linear, a part of a layer"):
        compression.init_compression(net, everything(), mpu=mpu)
    assert compression.init_compression(net, everything(), mpu=object())(tokens()).shape == (3, 5, 3)
