"""deepspeed.checkpointing: recomputation draws the same random numbers, also from the tracker's generators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from zcomm.compat.deepspeed import checkpointing
from zcomm.compat.deepspeed.runtime.activation_checkpointing import checkpointing as same


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    checkpointing.get_cuda_rng_tracker().reset()
    checkpointing.reset()


def block(x: torch.Tensor, weight: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    with checkpointing.get_cuda_rng_tracker().fork():
        x = F.dropout(x @ weight, 0.5)
    return F.dropout(x.sin(), 0.5) * scale


def gradients(run: Callable[..., Any]) -> list[torch.Tensor]:
    checkpointing.model_parallel_cuda_manual_seed(3)
    x = torch.linspace(-1, 1, 64).view(8, 8).requires_grad_()
    weight = torch.eye(8).requires_grad_()
    out = run(block, run(block, x, weight), weight, scale=2.0)
    out.sum().backward()
    return [out.detach(), x.grad, weight.grad, torch.rand(2)]


def plain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


@pytest.mark.parametrize("run", [checkpointing.checkpoint, checkpointing.non_reentrant_checkpoint])
@pytest.mark.parametrize("on_host", [False, True])
def test_a_checkpointed_block_has_the_gradients_of_a_plain_one(run: Callable[..., Any], on_host: bool) -> None:
    wanted = gradients(plain)
    checkpointing.configure(checkpoint_in_cpu=on_host)
    for got, value in zip(gradients(run), wanted, strict=True):
        assert torch.equal(got, value)


def test_generators_under_names() -> None:
    tracker = same.get_cuda_rng_tracker()
    checkpointing.model_parallel_cuda_manual_seed(5)
    assert torch.initial_seed() == 5
    after = torch.rand(2)
    with tracker.fork():
        first = torch.rand(2)
    with tracker.fork("model-parallel-rng"):
        second = torch.rand(2)
    torch.manual_seed(5 + 2718)
    assert torch.equal(torch.rand(4), torch.cat([first, second])) and not torch.equal(first, after)
    with pytest.raises(Exception, match="seed 2723 already exists"):
        tracker.add("other", 2723)
    with pytest.raises(Exception, match="model-parallel-rng already exists"):
        tracker.add("model-parallel-rng", 1)
    with pytest.raises(Exception, match="none is not added"), tracker.fork("none"):
        pass


def test_split_activations_are_refused() -> None:
    checkpointing.partition_activations_in_checkpoint(False)
    with pytest.raises(NotImplementedError, match=r"partition_activations_in_checkpoint\(True\) is not available"):
        checkpointing.partition_activations_in_checkpoint(True)
