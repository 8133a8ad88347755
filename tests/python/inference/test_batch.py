"""zcomm.inference.plan: the largest batch that fits a limit, and the bound by reading."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from small_stream import Net
from zcomm.inference import plan, stream, streamed
from zcomm.zero import MemoryLimit

limit: Any = importlib.import_module("zcomm.zero.memory.limit")


def net() -> Any:
    model: Any = Net(torch.bfloat16, blocks=12)
    text = SimpleNamespace(
        num_attention_heads=4, hidden_size=64, intermediate_size=256, num_hidden_layers=12, vocab_size=50
    )
    model.config = SimpleNamespace(get_text_config=lambda: text)
    return model


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count only the optimizer's bytes."""
    monkeypatch.setattr(limit, "_resident_nbytes", lambda: 0)


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_the_batch_fits_and_one_more_does_not(tmp_path: Path, quantize: Any) -> None:
    found = plan(net(), 100, memory="256MiB", quantize=quantize)
    assert 1 < found.batch < 1024 == plan(net(), 100, memory="16GiB", quantize=quantize).batch
    model = stream(
        net(), "nvme", quantize, memory=MemoryLimit("256MiB", found.activations_of(found.batch)), folder=tmp_path
    )
    kept = streamed(model).memory()
    every = sum(tier["parameters"] for tier in kept.values())
    assert every <= found.weights_nbytes <= 2 * every  # whole pages, on the drive
    streamed(model).close()
    with pytest.raises(ValueError, match="too small"):
        stream(net(), memory=MemoryLimit("256MiB", found.activations_of(found.batch + 1)), folder=tmp_path)


def test_bounds_and_refusals() -> None:
    found = plan(net(), 100, memory="256MiB", most=3)
    assert found.batch == 3
    assert found.tokens_per_s(1e9) == 3e9 / found.weights_nbytes
    assert plan(net(), 100, memory="64MiB").batch == 0
    assert plan(net(), 200, memory="256MiB").sequence_nbytes > 2 * found.sequence_nbytes
    device = {"memory": "256MiB", "device": "cuda"}
    assert plan(net(), 100, **device).sequence_nbytes == 0
    assert 0 < plan(net(), 100, kv="cpu", **device).sequence_nbytes < found.sequence_nbytes
    with pytest.raises(ValueError, match="Net has no configuration"):
        plan(Net(), 100, memory="1GiB")
