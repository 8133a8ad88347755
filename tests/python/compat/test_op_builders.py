"""deepspeed.ops.op_builder: a builder is compatible exactly if zcomm has the operation, which load() returns."""

from __future__ import annotations

import pytest
import torch

from zcomm.compat.deepspeed import accelerator, git_version_info, ops
from zcomm.compat.deepspeed.ops import op_builder


def test_builders_load_what_they_promise() -> None:
    for name, builder in op_builder.ALL_OPS.items():
        assert builder.name == name
        if builder.is_compatible(verbose=True):
            builder.load()
        else:
            with pytest.raises(NotImplementedError, match=rf"{type(builder).__name__}\(\).load\(\) is not available: "):
                builder.load()
    assert op_builder.CPUAdamBuilder().load().CPUAdam and op_builder.CPUAdagradBuilder().load().CPUAdagrad
    assert op_builder.CPULionBuilder().load().CPULion and op_builder.FusedAdamBuilder().load().FusedAdam
    assert ops.__compatible_ops__ == git_version_info.compatible_ops == git_version_info.installed_ops
    assert ops.__compatible_ops__["cpu_adam"] and not ops.__compatible_ops__["gds"]
    with pytest.raises(AttributeError, match="has no 'NoBuilder'"):
        _ = op_builder.NoBuilder


def test_builders_of_other_modules() -> None:
    """Programs ask them whether a drive may be used; handles raise when they are constructed."""
    from zcomm.compat.deepspeed.ops.aio import AsyncIOBuilder, aio_handle
    from zcomm.compat.deepspeed.ops.gds import GDSBuilder, gds_handle

    assert AsyncIOBuilder is op_builder.AsyncIOBuilder and GDSBuilder is op_builder.GDSBuilder
    assert AsyncIOBuilder.NAME == "async_io" and AsyncIOBuilder().load().aio_handle is aio_handle
    with pytest.raises(NotImplementedError, match=r"gds_handle is not available: ops\.aio\.aio_handle reads and"):
        gds_handle()


def test_flatten() -> None:
    tensors = [torch.arange(6.0).view(2, 3), torch.ones(2)]
    utils = op_builder.UtilsBuilder().load()
    flat = utils.flatten(tensors)
    assert flat.tolist() == [0, 1, 2, 3, 4, 5, 1, 1]
    assert all(map(torch.equal, utils.unflatten(flat, tensors), tensors))


def test_the_accelerator_gives_them() -> None:
    found = accelerator.get_accelerator()
    assert type(found.create_op_builder("CPUAdamBuilder")) is op_builder.CPUAdamBuilder
    assert found.create_op_builder("NoBuilder") is None
