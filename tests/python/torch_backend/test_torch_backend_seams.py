"""Places at which torch builds on a backend: discovery, parts of a group, device meshes, torchcomms; and ProcessMesh.

One world of 4 runs all checks of groups.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import zcomm
from places import ROOT
from test_torch_backend_training import batch, model
from torch_world import world
from zcomm.torch_backend import Options, replaced

DISCOVERED = """
import importlib.metadata, sys
import torch, torch.distributed as dist

assert not hasattr(dist.Backend, "ZCOMM")
refusing = dist.split_group
register = importlib.metadata.EntryPoint("zcomm", sys.argv[1], "torch.distributed.backends").load()
register()
assert "ZCOMM" in dist.Backend._plugins and dist.Backend.ZCOMM == "zcomm" and dist.split_group is not refusing
before = dict(dist.Backend._plugins), dist.split_group, dist.monitored_barrier
register()
import zcomm.torch_backend
assert before == (dict(dist.Backend._plugins), dist.split_group, dist.monitored_barrier)
dist.init_process_group("zcomm", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
print(dist.get_backend())
dist.destroy_process_group()
"""


def test_the_entry_point_registers_the_backend_once(start_program: Callable[..., Any]) -> None:
    """Follow torch's steps for an unknown backend: load the entry point, call it, look into its table of plugins."""
    table = r'\[project\.entry-points\."torch\.distributed\.backends"\][^\n]*\nzcomm = "([\w.:]+)"\n'
    (value,) = re.findall(table, (ROOT / "pyproject.toml").read_text())
    program = start_program(DISCOVERED, value)
    out = program.stdout.read()
    assert program.wait() == 0, program.stderr
    assert out == "zcomm\n"


# ---- a world of 4 ----
def total(group: Any, rank: int) -> float:
    tensor = torch.full((3,), float(10**rank))
    dist.all_reduce(tensor, group=group)
    return float(tensor[2])


def halves(rank: int) -> None:
    """Check members, order, tables, descriptions, and operations of the parts of the whole group."""
    pending = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(3)]
    half = dist.split_group(split_ranks=[[1, 0], [2, 3]], group_desc="halves", timeout=timedelta(seconds=50))
    for work in pending:
        work.wait()
    members = [1, 0] if rank < 2 else [2, 3]
    assert dist.get_process_group_ranks(half) == members and half.rank() == members.index(rank)
    assert (half.group_desc, half.options._timeout) == ("halves", timedelta(seconds=50))
    assert (dist.get_backend(half), dist.get_world_size(half)) == ("zcomm", 2)
    assert total(half, rank) == sum(10**r for r in members)
    assert functional.all_reduce(torch.ones(2), "sum", half).tolist() == [2, 2], "found by its name"
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, half.group_name, group=half)
    assert gathered == [half.group_name] * 2
    dist.monitored_barrier(half)
    other = torch.full((1,), float(rank))
    if half.rank() == 0:
        dist.send(other, members[1], group=half)
    else:
        assert dist.recv(other, group=half) == members[0] and other.item() == members[0]

    one = dist.split_group(half, [[0], [1]])  # a part of a part
    assert total(one, rank) == 10**rank and dist.get_process_group_ranks(one) == [rank]
    assert one.group_desc == "halves:split:0" and one.options._timeout == c10d.default_pg_timeout
    dist.destroy_process_group(half)  # a part outlives its parent
    assert total(one, rank) == 10**rank
    with pytest.raises(ValueError, match="does not know the parent"):
        dist.split_group(half, [[0, 1]])
    with pytest.raises(RuntimeError, match="was destroyed"):
        half.split_group([0, 1])
    dist.destroy_process_group(one)
    assert total(None, rank) == 1111


def outsiders(rank: int) -> None:
    """Check ranks outside the parts, and ranks that have made different numbers of groups."""
    pair = dist.new_group([0, 1] if rank < 2 else [2, 3], use_local_synchronization=True, group_desc="pair")
    assert pair.group_desc == "pair" and total(pair, rank) == (11 if rank < 2 else 1100)
    if rank == 3:  # torch's hashed names of groups now differ between the ranks
        assert total(dist.new_group([3], use_local_synchronization=True), rank) == 1000
    middle = dist.split_group(split_ranks=[[0, 3]])
    assert (middle is None) == (rank in (1, 2))
    if middle is not None:
        assert total(middle, rank) == 1001
    twin = dist.split_group(split_ranks=[[0, 3], [2]])
    assert (twin is None) == (rank == 1)
    if rank in (0, 3):
        assert twin.group_name != middle.group_name
        dist.destroy_process_group(middle)
        assert total(twin, rank) == 1001


def timeouts(rank: int) -> None:
    """Let a part's own, short timeout pass on one of its ranks: the parent remains usable."""
    assert dist.group.WORLD.options._timeout == timedelta(seconds=60)
    options = copy.deepcopy(dist.group.WORLD.options)
    options._timeout = timedelta(seconds=0.2)
    assert dist.group.WORLD.options._timeout == timedelta(seconds=60)
    assert dist.new_group(pg_options=Options(timedelta(seconds=7))).options._timeout == timedelta(seconds=7)
    assert dist.new_group(timeout=timedelta(seconds=9), pg_options=options).options._timeout == timedelta(seconds=9)
    pair = dist.split_group(split_ranks=[[0, 1], [2, 3]], pg_options=options)
    if pair.rank() == 0:
        with pytest.raises(TimeoutError, match=r"the timeout of this process group is 0\.2 s"):
            dist.all_reduce(torch.ones(1), group=pair)
    dist.barrier()


def refusals(rank: int) -> None:
    """Raise the same error on all ranks before any message is sent, or on the ranks that disagree."""
    refused: list[tuple[dict[str, Any], str]] = [
        ({"split_ranks": None}, "expected lists of ranks"),
        ({"split_ranks": [[0, 1], []]}, "expected lists of ranks"),
        ({"split_ranks": [[0, 1], [1, 2]]}, "rank 1 is in two parts"),
        ({"split_ranks": [[0, 0]]}, "rank 0 is in two parts, or twice in one"),
        ({"split_ranks": [[0, 1]], "backend": "cpu:gloo"}, "a part has the backend of its parent"),
    ]
    for arguments, text in refused:
        with pytest.raises(ValueError, match=text):
            dist.split_group(**arguments)
    for ranks in ([4, 0, 1, 2, 3], [-1], [], [2, 2]):
        with pytest.raises(ValueError, match="expected different ranks from 0 to 3"):
            dist.group.WORLD.split_group(ranks)
    with pytest.raises(ValueError, match=rf"rank {rank} asks for .* only 1 of them gave this list"):
        dist.group.WORLD.split_group([0, 1] if rank == 0 else [1, 0] if rank == 1 else [2, 3, rank - 2])
    assert dist.split_group(split_ranks=[[0, 1, 2, 3]], backend="cpu:zcomm") is not None
    gloo = dist.new_group(backend="gloo")
    with pytest.raises((RuntimeError, ValueError), match=r"(?i)split|device"):  # torch's own
        dist.split_group(gloo, [[0, 1, 2, 3]])


def meshes(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "data"))
    pipe, data = mesh["pipe"].get_group(), mesh["data"].get_group()
    assert dist.get_process_group_ranks(pipe) == [rank % 2, rank % 2 + 2]
    assert dist.get_process_group_ranks(data) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert [group.group_desc for group in (pipe, data)] == ["mesh_pipe", "mesh_data"]
    assert list(mesh.get_coordinate() or ()) == [rank // 2, rank % 2] and mesh.get_local_rank("pipe") == rank // 2
    assert (total(pipe, rank), total(data, rank)) == ((101, 1010)[rank % 2], (11, 1100)[rank // 2])
    activation = torch.full((4,), float(rank))
    if mesh.get_local_rank("pipe") == 0:
        dist.send(activation, rank + 2, group=pipe)
    else:
        assert dist.recv(activation, rank - 2, group=pipe) == rank - 2 and activation.tolist() == [rank - 2] * 4
    flat = mesh["pipe", "data"]._flatten("all")
    assert total(flat.get_group(), rank) == 1111 and mesh["all"].size() == 4
    turned = DeviceMesh("cpu", [[3, 1], [2, 0]], mesh_dim_names=("a", "b"))
    assert dist.get_process_group_ranks(turned.get_group("a")) == ([2, 3] if rank > 1 else [0, 1])
    assert total(turned.get_group("b"), rank) == (1010 if rank in (1, 3) else 101)
    lone = init_device_mesh("cpu", (4, 1), mesh_dim_names=("data", "tensor"))
    assert total(lone.get_group("tensor"), rank) == 10**rank and total(lone.get_group("data"), rank) == 1111
    if "backend_override" in inspect.signature(init_device_mesh).parameters:
        chosen: dict[Any, Any] = {"data": "gloo", "pipe": ("zcomm", Options(timedelta(seconds=8)))}
        mixed = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "data"), backend_override=chosen)
        groups = [mixed.get_group(name) for name in ("pipe", "data")]
        assert [dist.get_backend(group) for group in groups] == ["zcomm", "gloo"]
        assert groups[0].options._timeout == timedelta(seconds=8)
        assert [total(group, rank) for group in groups] == [(101, 1010)[rank % 2], (11, 1100)[rank // 2]]


def hybrid_sharding(rank: int) -> None:
    """Train by FSDP2 on a mesh of two axes: shards in a pair, copies across pairs. Two steps give DDP's weights."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    replicated, sharded = DistributedDataParallel(model()), model()
    for layer in sharded:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (replicated, sharded)]
    for _ in range(2):
        for net, optimizer in zip((replicated, sharded), optimizers, strict=True):
            optimizer.zero_grad()
            net(batch(rank)).square().mean().backward()
            optimizer.step()
    for want, got in zip(replicated.module.parameters(), sharded.parameters(), strict=True):
        assert got.to_local().numel() < want.numel()  # type: ignore[attr-defined]
        torch.testing.assert_close(got.full_tensor(), want, rtol=1e-5, atol=1e-6)  # type: ignore[attr-defined]


class Mpu:
    """Groups of pipes of two ranks, as Megatron makes them: neighbours are in one data group."""

    def __init__(self) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "data"))
        self.get_pipe_parallel_group = lambda: mesh.get_group("pipe")
        self.get_data_parallel_group = lambda: mesh.get_group("data")


def process_meshes(rank: int) -> None:
    """Make meshes of zcomm.init()'s ranks from torch's groups: sums over axes are those of torch's groups."""
    comm = zcomm.init()
    device_mesh, mpu = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp")), Mpu()
    of_device_mesh, of_mpu = zcomm.ProcessMesh.from_device_mesh(device_mesh), zcomm.ProcessMesh.from_mpu(mpu)
    for mesh in (of_device_mesh, of_mpu):
        assert (mesh.axes, mesh.shape, mesh.coordinate) == (("pipe", "data"), (2, 2), (rank // 2, rank % 2))
        for axis in mesh.axes:
            value = torch.tensor([10**rank])
            mesh.comm(axis).all_reduce(value)
            assert value.item() == total(device_mesh.get_group({"pipe": "pp", "data": "dp"}[axis]), rank)
    turned = zcomm.ProcessMesh.from_device_mesh(DeviceMesh("cpu", [[3, 1], [2, 0]], mesh_dim_names=("a", "b")))
    assert turned.ranks("a") == ((3, 2) if rank > 1 else (1, 0))
    assert turned.comm("a").all_gather(torch.tensor([rank])).tolist() == list(turned.ranks("a"))

    with pytest.raises(ValueError, match="the DeviceMesh has 2 ranks, but the world has 4"):
        zcomm.ProcessMesh.from_device_mesh(device_mesh["dp"])
    with pytest.raises(ValueError, match=r"rank 0 of 4 is rank 3 of 4 in torch\.distributed"):
        zcomm.ProcessMesh.from_device_mesh(device_mesh, comm.split(0, key=-rank))
    if rank == 2:
        del mpu.get_data_parallel_group
    with pytest.raises(ValueError, match="ProcessMesh: rank 2: the mpu has neither get_data_parallel_group"):
        zcomm.ProcessMesh.from_mpu(mpu)
    if rank == 2:
        mpu.get_data_parallel_group = lambda: 1 / 0  # type: ignore[assignment, return-value]
    with pytest.raises(ValueError, match="ProcessMesh: rank 2: ZeroDivisionError: division by zero"):
        zcomm.ProcessMesh.from_mpu(mpu)
    zcomm.shutdown()


@contextlib.contextmanager
def torchcomms_asked_for() -> Iterator[None]:
    """Set the option to which torch's import copies TORCH_DISTRIBUTED_USE_TORCHCOMMS."""
    from torch.distributed import config

    with config.patch(use_torchcomms=True):  # type: ignore[attr-defined]
        yield


def without_torchcomms(rank: int) -> None:
    """Ask for torchcomms, which is not installed: torch uses the backend, and device meshes split groups."""
    splits = []
    original, is_available = replaced.ProcessGroup.split_group, torch.accelerator.is_available

    def counts(self: Any, *args: Any, **kwargs: Any) -> Any:
        splits.append(args[0])
        return original(self, *args, **kwargs)

    with torchcomms_asked_for():
        meshes(rank)
        assert total(dist.split_group(split_ranks=[[0, 1, 2, 3]]), rank) == 1111
        replaced.ProcessGroup.split_group = counts  # type: ignore[method-assign]
        torch.accelerator.is_available = lambda: True
        try:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "data"))
        finally:
            replaced.ProcessGroup.split_group = original  # type: ignore[method-assign]
            torch.accelerator.is_available = is_available
    assert splits == [[rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1]]
    assert [mesh.get_group(name).group_desc for name in ("pipe", "data")] == ["mesh_pipe", "mesh_data"]
    assert total(mesh.get_group("data"), rank) == (11, 1100)[rank // 2]


def _groups() -> None:
    knows_torchcomms = hasattr(c10d, "_use_torchcomms_enabled")
    with world() as (rank, _):
        for check in (halves, outsiders, timeouts, refusals, meshes, process_meshes):
            check(rank)
        if torch.__version__ >= "2.7":  # before that FSDP2 asks the CPU's streams for events
            hybrid_sharding(rank)
        if knows_torchcomms:
            without_torchcomms(rank)
        kept = dist.split_group(split_ranks=[[0, 1], [2, 3]])  # destroyed with the default group
    with pytest.raises(RuntimeError):
        kept.split_group([0])


def _on_gloo() -> None:
    """Make a mesh with an axis of "zcomm" in a world of Gloo."""
    rank = int(os.environ["RANK"])
    method = os.environ["ZCOMM_INIT_METHOD"] + "-gloo"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=4)
    pair = dist.new_group([0, 1] if rank < 2 else [2, 3], backend="zcomm", use_local_synchronization=True)
    assert total(pair, rank) == (11, 1100)[rank // 2]
    half = dist.split_group(pair, [[0, 1]])
    assert total(half, rank) == (11, 1100)[rank // 2]
    dist.destroy_process_group()


def _all() -> None:
    _groups()
    _on_gloo()


def test_groups_and_meshes(run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(_all, 4)


@pytest.mark.skipif(not hasattr(c10d, "_use_torchcomms_enabled"), reason="this torch does not know torchcomms")
def test_torchcomms_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for torchcomms, which torch asks for every backend's communicator."""
    asked = []
    monkeypatch.setattr(c10d, "new_comm", lambda backend, *_, **__: asked.append(backend), raising=False)
    monkeypatch.setattr(c10d, "_TORCHCOMM_AVAILABLE", True)
    replaced._refuse_torchcomms()
    with torchcomms_asked_for(), pytest.raises(RuntimeError, match="unset TORCH_DISTRIBUTED_USE_TORCHCOMMS"):
        dist.init_process_group("zcomm", store=dist.HashStore(), rank=0, world_size=1)
    assert not dist.is_initialized() and not asked
    c10d.new_comm("gloo", torch.device("cpu"))
    assert asked == ["gloo"]
