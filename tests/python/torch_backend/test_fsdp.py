"""FSDP2 on a group of Gloo gathers and reduces by zcomm: the weights equal those of FSDP2 with plain Gloo."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zcomm
from zcomm.torch_backend import fsdp


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 7), nn.Linear(7, 1))


def trained(dtype: torch.dtype, by_zcomm: bool, divide: float | None) -> tuple[list[torch.Tensor], int]:
    """Return the whole weights after three steps, and the number of the communicator's operations."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = network()
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mp_policy=policy)
    if divide is not None:
        model.set_gradient_divide_factor(divide)  # type: ignore[operator]
        model.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
    counted: list[str] = []
    if by_zcomm:
        fsdp.use(model)
        comm = zcomm.init()
        for kind in (fsdp.AllGather, fsdp.ReduceScatter):
            wrap(kind, counted)
        assert comm.world_size == dist.get_world_size()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(4, 20, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.full_tensor().detach() for param in model.parameters()], len(counted)  # type: ignore[attr-defined]


def wrap(kind: Any, counted: list[str]) -> None:
    call = kind.__call__

    def counts(self: Any, *args: Any, **kwargs: Any) -> None:
        counted.append(kind.__name__)
        call(self, *args, **kwargs)

    kind.__call__ = counts


def compare() -> None:
    method = os.environ["ZCOMM_INIT_METHOD"] + "-gloo"
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=size)
    with pytest.raises(ValueError, match=r"call fully_shard\(model\) first"):
        fsdp.use(network())
    for dtype, divide in ((torch.float32, None), (torch.bfloat16, None), (torch.float32, 4.0)):
        want, _ = trained(dtype, False, divide)
        got, calls = trained(dtype, True, divide)
        assert calls >= 3 * 2 * 3
        for one, other in zip(want, got, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)
    half = zcomm.init().split(rank)
    with pytest.raises(ValueError, match="as rank 0 of 1; give the communicator of the same ranks"):
        fsdp.AllGather(half)(torch.empty(2 * size), torch.empty(2), dist.group.WORLD)
    dist.destroy_process_group()


def losses(compression: zcomm.Compression | None, steps: int = 30) -> list[float]:
    """Train; return the mean loss of each step."""
    from torch.distributed.fsdp import fully_shard

    model = network()
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    if compression is None:
        fsdp.use(model)
    else:
        fsdp.compress(model, compression)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found = []
    x = torch.randn(16, 20, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(steps):
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    mean = torch.tensor(found)
    zcomm.all_reduce(mean, "avg")
    return mean.tolist()


def representable() -> None:
    """One step on values that int8 represents: weights and gradients of +-127, 0. The results equal exact ones."""
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(64, 4, bias=False)
    with torch.no_grad():
        model.weight.copy_(127.0 * torch.randint(-1, 2, (4, 64), generator=torch.Generator().manual_seed(1)))
    want = model.weight.detach().clone()
    fully_shard(model)
    fsdp.compress(model, zcomm.Compression(weights="int8", gradients="int4"))
    scatter = fsdp.ReduceScatter(None, zcomm.Compression(gradients="int4"))
    model.set_custom_reduce_scatter(scatter)  # type: ignore[operator]
    x = torch.zeros(1, 64)
    x[0, ::2] = 7.0 * (dist.get_rank() + 1)  # the gradient of the sum: x in each row
    out = model(x)
    assert torch.equal(out, x @ want.t())
    out.sum().backward()
    grad = model.weight.grad.full_tensor()  # type: ignore[union-attr]
    assert torch.equal(grad[:, ::2], torch.full((4, 32), 10.5)) and not grad[:, 1::2].any()
    assert scatter.error_nbytes == 4 * 256


def compare_compressed() -> None:
    method = os.environ["ZCOMM_INIT_METHOD"] + "-gloo"
    dist.init_process_group(
        "gloo", init_method=method, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
    )
    with pytest.raises(ValueError, match=r"compress\(\): no module of the model is sharded"):
        fsdp.compress(network(), zcomm.Compression(gradients="int8"))
    representable()
    exact = losses(None)
    for compression in (
        zcomm.Compression(weights="int8", gradients="int8"),
        zcomm.Compression(gradients="int4", keep=0.2, reset_steps=20),
        zcomm.Compression(),
    ):
        found = losses(compression)
        assert abs(found[-1] - exact[-1]) < 0.1 * exact[0], (compression, found[-1], exact[-1])
        assert (found == exact) == (compression == zcomm.Compression())
    with pytest.raises(ValueError, match="as bytes, because they have several dtypes"):
        fsdp.AllGather(codec="int8")(torch.zeros(4).byte(), torch.zeros(2).byte(), dist.group.WORLD)
    dist.destroy_process_group()


def test_weights_and_gradients_travel_encoded(run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(compare_compressed, 2)


def test_gathers_and_reduces_by_zcomm(run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(compare, 2)
