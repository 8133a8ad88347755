"""Streamed models with quantised weights: the numbers of resident models with decoded weights, and fewer bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from small_stream import Net, check_equal, tokens
from zcomm.inference import stream, streamed

Run = Callable[..., list[Any]]
WEIGHTS: Any = ("nvme", "cpu")


def decoded(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Round by the definition in zcomm/codec.hpp, in torch's own operations."""
    largest = float(2 ** (bits - 1) - 1)
    flat = weight.detach().float().reshape(-1)
    blocks = nn.functional.pad(flat, (0, -flat.numel() % 256)).view(-1, 256)
    exact = blocks.abs().amax(1) / largest
    scale = exact.bfloat16()
    up = torch.nextafter(scale, torch.full_like(scale, torch.inf))
    scale = torch.where(scale.float() < exact, up, scale).float()[:, None].clamp_min(2.0**-118)
    return ((blocks / scale).round() * scale).reshape(-1)[: flat.numel()].view_as(weight).to(weight.dtype)


def resident(net: nn.Module, bits: int) -> nn.Module:
    """Return ``net`` with decoded weights."""
    with torch.no_grad():
        for name, param in net.named_parameters():
            if param.dim() > 1:
                param.copy_(decoded(param, 8 if "embed" in name else bits))
    return net


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_numbers_of_decoded_weights(tmp_path: Path, weights: Any, quantize: Any, dtype: torch.dtype) -> None:
    order = [3, 0, 5, 0, 1, 2, 4, 3]
    want, net = resident(Net(dtype, order=order), int(quantize[3])), Net(dtype, order=order)
    exact = sum(param.nbytes for block in net.blocks for param in block.parameters())
    net = stream(net, weights, quantize, folder=tmp_path)
    check_equal(net, want)
    assert all(torch.equal(value, want.state_dict()[name]) for name, value in net.state_dict().items())
    found = streamed(net)
    kept = found.memory()[weights]["parameters"]
    assert found.streamed_nbytes < kept < 2 * exact
    with torch.no_grad():
        net.blocks[1].linear.weight.add_(1)
        want.blocks[1].linear.weight.copy_(decoded(want.blocks[1].linear.weight + 1, int(quantize[3])))
    check_equal(net, want)  # no other weight is rounded again
    found.close()
    check_equal(net, want)


def test_a_forward_reads_all_images_but_one(tmp_path: Path) -> None:
    blocks, width = 9, 256
    net = nn.Sequential(nn.Linear(8, width), *(nn.Linear(width, width) for _ in range(blocks)))
    exact = width * width * 4 * blocks
    found = streamed(stream(net, "nvme", "int4", folder=tmp_path))
    assert 0.125 * exact < found.streamed_nbytes < 0.17 * exact
    x = torch.ones(1, 8)
    for _ in range(4):
        net(x)
    before = found.stats()["read_nbytes"]
    for _ in range(5):
        net(x)
    unit = found.streamed_nbytes // blocks
    ahead = 3 * unit  # images that may be read ahead
    assert abs(found.stats()["read_nbytes"] - before - 5 * (blocks - 1) * unit) <= ahead


def on_ranks(folder: str) -> None:
    comm = zcomm.init()
    for weights in WEIGHTS:
        net, want = Net(), Net()(tokens(1))
        stream(net, weights, "int8", folder=folder)
        mine = net(tokens(1))
        every = comm.all_gather(mine.reshape(-1))
        assert isinstance(every, torch.Tensor)
        assert torch.equal(*every.view(2, -1))
        assert 0 < (mine - want).norm() < 0.02 * want.norm()
        streamed(net).close()


def test_ranks_decode_the_same_weights(run_ranks: Run, tmp_path: Path) -> None:
    run_ranks(on_ranks, 2, str(tmp_path))


def test_a_wrong_form_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="quantize='int2'"):
        stream(Net(), "nvme", "int2", folder=tmp_path)  # type: ignore[arg-type]
