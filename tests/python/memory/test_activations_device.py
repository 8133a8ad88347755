"""offload_activations on a device (a simulated one, with late copies): the same gradients, no early frees."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import simulated
import zcomm
from test_activations import gradients, made
from zcomm.memory import activations

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def device_shard() -> Iterator[None]:
    simulated.play(0.001)
    yield


@pytest.mark.parametrize("recompute", ["no", "reentrant", "checkpoint"])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_gradients_have_the_same_bits(tmp_path: Path, tier: str, recompute: str, passes: int) -> None:
    if recompute == "reentrant" and passes == 2:
        pytest.skip("a reentrant checkpoint frees what it saved")
    net, x = made(recompute)
    plain = gradients(net, x, passes=passes)
    offload = zcomm.offload_activations(tier, min_nbytes=1024, nvme_path=tmp_path)
    for _ in range(8):
        there = gradients(net, x, offload, passes)
        assert all(torch.equal(a, b) for a, b in zip(plain, there, strict=True))
    assert offload.stats()["offloaded_nbytes"] == 0
    offload.close()


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_buffers_are_used_again(tmp_path: Path, tier: str) -> None:
    net, x = made()
    offload = zcomm.offload_activations(tier, min_nbytes=1024, nvme_path=tmp_path)
    sizes = []
    for _ in range(6):
        gradients(net, x, offload)
        gc.collect()
        sizes.append(offload.stats()["buffer_nbytes"])
    if tier == "cpu":
        assert len(set(sizes[1:])) == 1
    else:  # as many as were pending at once
        flying = activations.LEAVING + activations.WRITES + activations.READS + 2
        assert max(sizes) <= flying * 24576
    offload.close()


def test_few_storages_are_kept_while_they_leave() -> None:
    deep = nn.Sequential(*(layer for _ in range(20) for layer in (nn.Linear(64, 64), nn.Tanh())))
    offload = zcomm.offload_activations(min_nbytes=1024)
    with offload:
        loss = deep(torch.randn(64, 64)).sum()
    kept = [ref() for ref in offload._leaving]
    assert offload.stats()["offloaded_count"] > 15 and len(kept) <= activations.LEAVING
    loss.backward()
    offload.close()


def test_graphs_that_are_dropped_with_copies_on_their_way(tmp_path: Path) -> None:
    net, x = made()
    plain = gradients(net, x)
    offload = zcomm.offload_activations(min_nbytes=1024)
    for _ in range(5):
        with offload:
            loss = net(x)
        del loss
        there = gradients(net, x, offload)
        assert all(torch.equal(a, b) for a, b in zip(plain, there, strict=True))
    with offload:
        loss = net(x)
    offload.close()
    del loss


def test_a_graph_that_outlives_its_offload() -> None:
    net, x = made()
    plain = gradients(net, x)
    offload = zcomm.offload_activations(min_nbytes=1024)
    torch.manual_seed(1)
    with offload:
        loss = net(x)
    offload.close()
    loss.backward()
    assert all(torch.equal(a, b.grad) for a, b in zip(plain, (*net.parameters(), x), strict=True) if b.grad is not None)
