"""A model gets another ZeroOptimizer after close(), of any stage, tier and precision, and training continues."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zcomm
from zcomm.zero import Init, Offload, Units

Run = Callable[..., list[Any]]

UNITS = {"stage": 3, "share_parameters": False}
DRIVE = {"stage": 3, "offload": Offload("nvme", "nvme")}
ROWS = {"stage": 3, "offload": Offload("nvme", "nvme"), "units": Units(max_bytes="40KiB", min_bytes=0, rows=True)}
# The first optimizer, the second, whether zero.Init has made the model.
CASES: list[tuple[dict[str, Any], dict[str, Any], bool]] = [
    (DRIVE, DRIVE, True),
    (DRIVE, {"stage": 0}, False),
    ({**DRIVE, "precision": "bf16"}, {"stage": 2}, False),
    (UNITS, {**DRIVE, "precision": "bf16"}, True),
    (ROWS, UNITS, False),
    ({"stage": 1}, ROWS, False),
    ({"stage": 3, "offload": "cpu", "share_parameters": False, "bucket_mb": 0.001}, {"stage": 1}, False),
]


def network() -> nn.Sequential:
    net = nn.Sequential(nn.Embedding(3000, 8), nn.Linear(8, 33), nn.Tanh(), nn.Linear(33, 7))
    net[1].requires_grad_(False)
    return net


def train(net: nn.Module, opt: Any) -> None:
    tokens = torch.arange(12) * 250
    for _ in range(3):
        net(tokens).float().square().mean().backward()
        opt.step()
        opt.zero_grad()


def build_again(folder: str) -> None:
    """Compare with a twin that has both optimizers in stage 0: every stage and tier has the same bits."""
    comm = zcomm.init(timeout=60)
    for first, second, deferred in CASES:
        torch.manual_seed(7 + comm.rank)
        with Init(enabled=deferred, min_count=64):
            net = network()
        torch.manual_seed(7 + comm.rank)
        twin, shapes = network(), [param.shape for param in net.parameters()]
        for options in (first, second):
            opt = zcomm.ZeroOptimizer(net, "sgd", lr=0.5, nvme_path=folder, **options)
            plain = zcomm.ZeroOptimizer(twin, "sgd", lr=0.5, precision=options.get("precision", "fp32"))
            train(net, opt)
            train(twin, plain)
            if options is second:
                found = opt.full_state_dict()
                assert all(torch.equal(found[name], value) for name, value in twin.state_dict().items()), (
                    first,
                    second,
                )
            opt.close()  # with the update that is deferred to the next forward
            plain.close()
            assert [param.shape for param in net.parameters()] == shapes


def test_a_model_has_its_weights_in_the_next_optimizer(run_ranks: Run, tmp_path: Path) -> None:
    run_ranks(build_again, 2, str(tmp_path))


def lose_weights(folder: str) -> None:
    comm = zcomm.init(timeout=60)
    for losers in ([1], [0, 1]):
        net = network()
        wanted = {name: value.clone() for name, value in net.state_dict().items()}
        opt = zcomm.ZeroOptimizer(net, "sgd", lr=0.5, nvme_path=folder, **DRIVE)
        free = 0 if comm.rank in losers else 1 << 30
        with mock.patch("zcomm.zero.units.store.free_nbytes", lambda device, free=free: free):
            opt.close()
        with pytest.raises(RuntimeError, match="its ZeroOptimizer is closed"):
            net[0].weight.sum()
        words = (
            r"weight is .* not .* kept after 0 steps" if losers == [1] else "0.weight, .*: the ZeroOptimizer that had"
        )
        with pytest.raises(ValueError, match=words if comm.rank else None):
            zcomm.ZeroOptimizer(net, "sgd", lr=0.5)
        net.load_state_dict(wanted)
        zcomm.ZeroOptimizer(net, "sgd", lr=0.5).close()
        assert all(torch.equal(wanted[name], value) for name, value in net.state_dict().items())
        alone = comm.split(comm.rank)
        opt = zcomm.ZeroOptimizer(net, "sgd", lr=0.5, nvme_path=folder, **DRIVE)
        opt.close()
        with pytest.raises(ValueError, match=r"0\.weight is in shards of 2 ranks of a closed ZeroOptimizer"):
            zcomm.ZeroOptimizer(net, "sgd", lr=0.5, comm=alone)
        zcomm.ZeroOptimizer(net, "sgd", lr=0.5).close()  # the error has lost no weights
        assert all(torch.equal(wanted[name], value) for name, value in net.state_dict().items())


def test_weights_that_could_not_be_kept_are_an_error_on_all_ranks(run_ranks: Run, tmp_path: Path) -> None:
    run_ranks(lose_weights, 2, str(tmp_path))
