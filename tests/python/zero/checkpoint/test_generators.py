"""Random number generators in checkpoints: the host's, and the generator of the model's device."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import simulated
import zcomm
from zcomm.zero.checkpoint import rng_state

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)


class Cuda:
    """Replaces torch's generators of CUDA devices by counters."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.counts: dict[torch.device, int] = {CUDA: 7}
        patch.setattr(torch.cuda, "get_rng_state", self.get)
        patch.setattr(torch.cuda, "set_rng_state", self.set)

    def get(self, device: torch.device) -> torch.Tensor:
        return torch.tensor([self.counts[device], 0, 255], dtype=torch.uint8)

    def set(self, state: torch.Tensor, device: torch.device) -> None:
        self.counts[device] = int(state[0])


def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(numpy.random.rand())


def test_those_of_the_host_come_back() -> None:
    data = rng_state.pack(CPU)
    first = draw()
    assert draw() != first
    rng_state.parse(data, CPU, "file")()
    assert draw() == first


def test_that_of_the_models_device_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch)
    data = rng_state.pack(CUDA)
    cuda.counts[CUDA] = 9
    rng_state.parse(data, CUDA, "file")()
    assert cuda.counts == {CUDA: 7}


@pytest.mark.parametrize(("written", "read"), [(CPU, CUDA), (CUDA, CPU)])
def test_other_devices_load_all_the_same(
    monkeypatch: pytest.MonkeyPatch, written: torch.device, read: torch.device
) -> None:
    cuda = Cuda(monkeypatch)
    data = rng_state.pack(written)
    first, cuda.counts[CUDA] = draw(), 9
    rng_state.parse(data, read, "file")()
    assert draw() == first and cuda.counts == {CUDA: 9}


def test_save_and_load_ask_the_models_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    pack, parse = rng_state.pack, rng_state.parse
    monkeypatch.setattr(rng_state, "pack", lambda device: [asked.append(device), pack(device)][1])
    monkeypatch.setattr(
        rng_state, "parse", lambda data, device, source: [asked.append(device), parse(data, device, source)][1]
    )
    simulated.play()
    try:
        opt = zcomm.ZeroOptimizer(nn.Linear(4, 4), "adamw", offload="cpu")
        lane = opt._parts.lane
        where = lane.device = torch.device("cpu", 0)  # another object than any default
        opt.save(tmp_path / "c")
        opt.load(tmp_path / "c")
        assert [device is where for device in asked] == [True, True]
        opt.close()
    finally:
        simulated.stop()
        zcomm.shutdown()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "JSON"),
        (b"{}", "torch"),
        (b"[1]", "torch"),
        (b'{"torch": "%%%"}', "torch"),
        (b'{"torch": "AAAA"}', "torch"),
    ],
)
def test_garbage_is_named_before_anything_changes(content: bytes, said: str) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=rf"r\.json: '{said}' is not a state of random number generators"):
        rng_state.parse(content, CPU, "r.json")
    good = json.loads(rng_state.pack(CPU))
    for name, wrong in (("python", [3, [1], None]), ("numpy", ["MT19937", [1, 2], 3, 0, 0.0]), ("numpy", 4)):
        with pytest.raises(ValueError, match=rf"r\.json: '{name}' is not a state"):
            rng_state.parse(json.dumps({**good, name: wrong}).encode(), CPU, "r.json")
    assert torch.equal(torch.get_rng_state(), before)
