"""The block of examples/evoformer.py: gradients are those of the formula, offloaded ones are equal to the bit."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import zcomm
from places import ROOT


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("evoformer_example", ROOT / "examples" / "evoformer.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def naive(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: None, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return the formula's result, with all scores in memory."""
    scores = torch.einsum("bnihd,bnjhd->bnhij", query, key) / query.shape[-1] ** 0.5
    weights = (scores if bias is None else scores + bias).softmax(-1)
    return torch.einsum("bnhij,bnjhd->bnihd", weights, value)


def inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(*shape, generator=generator, dtype=dtype) for shape in ((2, 3, 9, 16), (2, 9, 9, 8))]


def gradients(blocks: nn.ModuleList) -> list[torch.Tensor]:
    return [param.grad for param in blocks.parameters() if param.grad is not None]


def test_gradients_are_those_of_the_formula(example: ModuleType) -> None:
    torch.manual_seed(0)
    blocks = nn.ModuleList(example.Block(16, 8, 4) for _ in range(2)).double()
    plain = nn.ModuleList(example.Block(16, 8, 4, naive) for _ in range(2)).double()
    plain.load_state_dict(blocks.state_dict())
    losses = [example.step(each, *inputs(torch.float64), None) for each in (blocks, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    found, wanted = gradients(blocks), gradients(plain)
    assert len(found) == len(wanted) == len(list(blocks.parameters()))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_offloaded_activations_give_the_same_bits(example: ModuleType, tier: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    blocks = nn.ModuleList(example.Block(16, 8, 4) for _ in range(2))
    example.step(blocks, *inputs(torch.float32), None)
    wanted = [grad.clone() for grad in gradients(blocks)]
    blocks.zero_grad()
    path = {"nvme_path": str(tmp_path)} if tier == "nvme" else {}
    offload = zcomm.offload_activations(tier, min_nbytes=4096, **path)
    example.step(blocks, *inputs(torch.float32), offload)
    assert offload.stats()["peak_nbytes"] > 0
    assert all(map(torch.equal, gradients(blocks), wanted))
    offload.close()
