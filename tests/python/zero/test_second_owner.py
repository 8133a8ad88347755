"""A weight has one owner: models that torch has sharded or wrapped are refused, before and after construction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from torch_world import world

Act = Callable[[nn.Module], object]
SETTINGS: list[dict[str, Any]] = [{"stage": 2}, {"stage": 3}, {"stage": 3, "share_parameters": False}]


def acts() -> dict[str, Act]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    return {
        "fully_shard": fully_shard,
        "fully_shard of a module": lambda model: fully_shard(model[2]),  # type: ignore[index]
        "parallelize_module": lambda model: parallelize_module(model, mesh, {"2": ColwiseParallel()}),
    }


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))


def error_of(act: Act, after: bool, setting: dict[str, Any]) -> BaseException | None:
    """Return the error of construction, of the action or of the first step."""
    model, opt = net(), None
    try:
        if not after:
            act(model)
        opt = zcomm.ZeroOptimizer(model, "sgd", lr=1.0, **setting)
        if after:
            act(model)
        model(torch.ones(2, 8)).sum().backward()
        opt.step()
    except (RuntimeError, ValueError) as error:
        return error
    finally:
        if opt is not None:
            opt.close()
    return None


def errors() -> list[str]:
    """List actions that are not refused, or refused with an error that does not name the second owner."""
    wrong = []
    with world():
        zcomm.init(timeout=60)
        for name, act in acts().items():
            for after in (False, True):
                for setting in SETTINGS:
                    error = error_of(act, after, setting)
                    named = f"{name.split()[0]}" in str(error) and "a weight has one owner" in str(error)
                    if not named or isinstance(error, ValueError) == after:
                        wrong.append(f"{name}, after: {after}, {setting}: {error!r}")
        for setting in SETTINGS:
            error = error_of(lambda model: None, False, setting)
            if error is not None:
                wrong.append(f"nothing, {setting}: {error!r}")
            for wrapped in (nn.parallel.DistributedDataParallel(net()), nn.Sequential(net())):
                if isinstance(wrapped, nn.Sequential):
                    wrapped[0] = nn.parallel.DistributedDataParallel(net())
                try:
                    zcomm.ZeroOptimizer(wrapped, "sgd", lr=1.0, **setting)
                    wrong.append(f"DDP, {setting}: built")
                except ValueError as refused:
                    if "wrapped by DistributedDataParallel" not in str(refused):
                        wrong.append(f"DDP, {setting}: {refused}")
    return wrong


def test_a_second_owner_is_refused(run_ranks: Callable[..., list[Any]]) -> None:
    for wrong in run_ranks(errors, 2):
        assert not wrong, "\n".join(wrong)


def test_dtensors_are_refused_in_param_groups(world_of_one: None) -> None:
    import torch.distributed.tensor as tensors
    from torch.distributed import HashStore, destroy_process_group, init_process_group

    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        param = nn.Parameter(tensors.distribute_tensor(torch.ones(4), mesh, [tensors.Shard(0)]))
        with pytest.raises(ValueError, match=r"parameter\.0 is a DTensor"):
            zcomm.ZeroOptimizer([param], "sgd", lr=1.0)
    finally:
        destroy_process_group()
