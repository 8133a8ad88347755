"""deepspeed.init_inference: whole and streamed models, and arguments that are refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import zcomm
import zcomm.compat.deepspeed as deepspeed
from small_stream import Net, tokens


@pytest.fixture
def job() -> Iterator[None]:
    """Leave the world of one that a streamed model joins."""
    yield
    zcomm.shutdown()


def test_whole_and_streamed_models_have_the_values_of_the_module(job: None, tmp_path: Path) -> None:
    want = Net(torch.bfloat16)
    offload = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"dtype": "bfloat16", "zero": offload, "mp_size": 1}))
    cases: list[tuple[Any, dict[str, Any]]] = [
        ({}, {}),
        (None, {"dtype": torch.bfloat16, "replace_with_kernel_inject": True, "tensor_parallel": {"tp_size": 1}}),
        ({"zero": offload}, {"dtype": torch.bfloat16}),
        (str(file), {"dtype": "bfloat16"}),
        ({"zero": {"stage": 3, "offload_param": {"device": "cpu"}}}, {}),
    ]
    for config, more in cases:
        engine = deepspeed.init_inference(Net(torch.bfloat16), config, **more)
        assert isinstance(engine, deepspeed.InferenceEngine) and not engine.module.training
        engine.profile_model_time()
        with torch.no_grad():
            assert torch.equal(engine(tokens(0)), want(tokens(0)))
        assert len(engine.model_times()) == 1 and not engine.model_times()
        engine.destroy()


def test_eight_bits(job: None, tmp_path: Path) -> None:
    exact = Net()(tokens(0))
    for more in ({"dtype": torch.int8}, {"dtype": "float32", "quant": {"weight": {"num_bits": 8}}}):
        engine = deepspeed.init_inference(Net(), **more)
        found = engine(tokens(0))
        assert 0 < (found - exact).norm() < 0.02 * exact.norm()
        engine.destroy()


def test_refused_arguments_are_named() -> None:
    for words, more in (
        (r"tensor_parallel=\{'tp_size': 2\}.*zcomm.parallel.tensor", {"tp": {"tp_size": 2}}),
        ("mp_size=2", {"mp_size": 2}),
        ("checkpoint='x'.*zcomm.inference.stream", {"checkpoint": "x"}),
        ("enable_cuda_graph=True", {"enable_cuda_graph": True}),
        (r"moe=\{'ep_size': 2\}", {"moe": {"ep_size": 2}}),
        (r"quant\.activation", {"quant": {"activation": {"enabled": True}}}),
    ):
        with pytest.raises(NotImplementedError, match=words):
            deepspeed.init_inference(Net(), **more)
    for words, config, more in (
        ("'max_token' is not an argument", {"max_token": 5}, {}),
        ("is 1 in config, and 2 as an argument", {"mp_size": 1}, {"mp_size": 2}),
        ("expected a dict", [], {}),
        ("num_bits.: 3", {"quant": {"weight": {"num_bits": 3}}}, {}),
        ('needs "stage": 3', {"zero": {"stage": 2}}, {}),
        ("device.: 'disk'", {"zero": {"stage": 3, "offload_param": {"device": "disk"}}}, {}),
    ):
        with pytest.raises(ValueError, match=words):
            deepspeed.init_inference(Net(), config, **more)  # type: ignore[arg-type]
    assert deepspeed.default_inference_config()["max_out_tokens"] == 1024
