"""ProcessMesh: its arithmetic for all boxes of 1 to 24 ranks, and communicators in worlds of threads."""

from __future__ import annotations

import itertools
import math
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import zcomm
from thread_world import thread_world
from zcomm.bootstrap.join import Joined
from zcomm.comm.communicator import Communicator
from zcomm.comm.mesh_layout import MeshLayout
from zcomm.comm.mesh_sources import Groups, Report, agreed, device_mesh_layout, mpu_groups, of_groups, of_mesh_param

NAMES = ("pipe", "data", "sequence", "tensor")


def shapes(count: int, axes: int) -> Iterator[tuple[int, ...]]:
    """Yield all sizes of this many axes that multiply to ``count``."""
    if axes == 1:
        yield (count,)
        return
    for size in range(1, count + 1):
        if count % size == 0:
            for rest in shapes(count // size, axes - 1):
                yield (size, *rest)


def along(box: np.ndarray, numbers: Sequence[int]) -> set[tuple[int, ...]]:
    """Return the groups along these axes of an array of ranks, by numpy's transposition."""
    last = np.moveaxis(box, numbers, range(box.ndim - len(numbers), box.ndim))
    size = math.prod(box.shape[number] for number in numbers)
    return {tuple(row) for row in last.reshape(-1, size).tolist()}


def subsets(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for length in range(len(names) + 1):
        yield from itertools.combinations(names, length)


@pytest.mark.parametrize("count", range(1, 25))
def test_groups_and_coordinates_of_every_box(count: int) -> None:
    orders = (np.arange(count), np.random.default_rng(count).permutation(count))
    for axes, order in itertools.product((1, 2, 3), orders):
        for shape in shapes(count, axes):
            box, names = order.reshape(shape), NAMES[:axes]
            layout = MeshLayout.of(names, shape, order.tolist())
            for place in itertools.product(*map(range, shape)):
                assert layout.coordinate(box[place]) == place
            for chosen in subsets(names):
                groups = layout.groups(*chosen)
                assert set(groups) == along(box, [names.index(name) for name in chosen])
                assert sorted(itertools.chain(*groups)) == list(range(count))
                assert {len(group) for group in groups} == {layout.size(*chosen)}
                assert layout.groups(*reversed(chosen)) == groups, "in the order of the box"


@pytest.mark.parametrize("count", range(1, 25))
def test_factors_are_the_box_that_they_multiply_to(count: int) -> None:
    whole = MeshLayout.of(("pipe", "dp", "tp"), (2, count, 3), range(6 * count))
    for outer, inner in shapes(count, 2):
        view = whole.factor("data", {"dp_replicate": outer, "fsdp": inner})
        assert view == MeshLayout.of(("pipe", "replicate", "shard", "tensor"), (2, outer, inner, 3), range(6 * count))
        assert view.groups("replicate", "shard") == whole.groups("data")
        again = view.factor("shard", {"expert_data": inner, "ep": 1})
        assert again.axes == ("pipe", "replicate", "expert_data", "expert", "tensor")
        assert again.groups("expert_data") == view.groups("shard")


@pytest.fixture
def default_group() -> Iterator[None]:
    """Yield with a process group of one rank, of which every DeviceMesh asks the own rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def fake_mpu(groups: dict[str, Sequence[int]]) -> Any:
    """Make an mpu with lists of ranks as its process groups."""
    return types.SimpleNamespace(**{f"get_{name}_group": lambda ranks=ranks: ranks for name, ranks in groups.items()})


def own(groups: set[tuple[int, ...]], rank: int) -> tuple[int, ...]:
    return next(group for group in groups if rank in group)


def mpus(box: np.ndarray, getters: dict[str, str]) -> list[Groups]:
    """Return the groups that each rank reads. getters: name of a getter -> letters of its axes ("pt")."""
    letters = "pdst"
    found = []
    for rank in range(box.size):
        groups = {
            name: own(along(box, [letters.index(letter) for letter in axes]), rank) for name, axes in getters.items()
        }
        found.append(mpu_groups(fake_mpu(groups), list))
    return found


MEGATRON = {"data_parallel": "d", "tensor_model_parallel": "t", "pipeline_model_parallel": "p", "model_parallel": "pt"}
DEEPSPEED = {"data_parallel": "d", "slice_parallel": "t", "pipe_parallel": "p", "model_parallel": "pt"}
WITH_PIPE = {"data_parallel": "d", "model_parallel": "pt", "pipe_parallel": "p"}
WITHOUT_PIPE = {"data_parallel": "d", "model_parallel": "t"}
ULYSSES = {"sequence_parallel": "s", "sequence_data_parallel": "ds"}
SEQUENCES = {"data_parallel": "d", "sequence_parallel": "s", "sequence_data_parallel": "ds"}


@pytest.mark.parametrize(
    "getters", [MEGATRON, DEEPSPEED, WITH_PIPE, WITHOUT_PIPE, ULYSSES, SEQUENCES], ids=lambda g: "-".join(g.values())
)
@pytest.mark.usefixtures("default_group")
def test_an_mpu_and_a_device_mesh_have_the_same_groups(getters: dict[str, str]) -> None:
    used = [name for name in NAMES if name[0] in "".join(getters.values())]
    for count in (1, 2, 6, 8, 12, 24):
        for part in itertools.islice(shapes(count, len(used)), 0, None, 1 if count < 12 else 3):
            shape = tuple(part[used.index(name)] if name in used else 1 for name in NAMES)
            for order in ((0, 1, 2, 3), (3, 1, 0, 2)):  # which axis changes fastest
                box = np.arange(count).reshape([shape[number] for number in order]).transpose(np.argsort(order))
                layout = of_groups(mpus(box, getters))
                mesh = DeviceMesh("cpu", box.copy(), mesh_dim_names=NAMES, _init_backend=False)
                other = device_mesh_layout(mesh, count)
                assert set(layout.axes) == set(used) and sorted(layout.shape) == sorted(part)
                for chosen in subsets(used):
                    assert layout.groups(*chosen) == other.groups(*chosen)


@pytest.mark.usefixtures("default_group")
def test_other_sources() -> None:
    pair = of_mesh_param((2, 3), 6).layout
    assert pair == MeshLayout.of(("dp", "sp"), (2, 3), range(6)) and pair.axes == ("data", "sequence")
    with_list = types.SimpleNamespace(get_data_parallel_group_ranks=lambda: [0, 1])
    assert mpu_groups(with_list, list) == {"data": [0, 1]}

    def unnamed(*shape: int) -> MeshLayout:
        mesh = DeviceMesh("cpu", torch.arange(math.prod(shape)).view(shape), _init_backend=False)
        return device_mesh_layout(mesh, math.prod(shape))

    assert unnamed(4).axes == ("shard",) and unnamed(2, 3).axes == ("replicate", "shard")
    with pytest.raises(ValueError, match="3 axes without names: give it mesh_dim_names"):
        unnamed(2, 2, 2)


def of(**sizes: int) -> MeshLayout:
    return MeshLayout.of(tuple(sizes), tuple(sizes.values()), range(math.prod(sizes.values())))


def square(data: list[int], tensor: list[int]) -> MeshLayout:
    """Read the groups of four ranks, of which ranks 2 and 3 have ``data``, and ranks 1 and 3 have ``tensor``."""
    by_data, by_tensor = ([0, 1], [0, 1], data, data), ([0, 2], tensor, [0, 2], tensor)
    return of_groups([{"data": one, "tensor": other} for one, other in zip(by_data, by_tensor, strict=True)])


SLICE = types.SimpleNamespace(mesh=torch.tensor([0, 2]), mesh_dim_names=("data",))
WRONG: dict[str, Callable[[], Any]] = {
    r"data=2 x tensor=3 has places for 6, but the world has 4 rank": lambda: MeshLayout.of(
        ("data", "tp"), (2, 3), range(4)
    ),
    r"data=0: expected a number of ranks": lambda: of(data=0),
    r"data=True: expected a number of ranks": lambda: of(data=True),
    r"data=2\.0: expected a number of ranks": lambda: MeshLayout.of(("data",), (2.0,), range(2)),  # type: ignore
    r"axis='sequence' comes twice \('sp' and 'cp' mean the same\)": lambda: of(cp=2, sp=2),
    r"axis='two words': expected a name": lambda: MeshLayout.of(("two words",), (1,), (0,)),
    r"data=2 has ranks 0, 2: expected each of 0 to 1 once": lambda: MeshLayout.of(("data",), (2,), (0, 2)),
    r"axis='dtaa' is not one of data, tensor; did you mean 'data'": lambda: of(data=2, tensor=2).groups("dtaa"),
    r"axis='pp' is not one of data$": lambda: of(data=2).size("pp"),
    r"axis='data' comes twice \('dp' and 'data' mean the same\)": lambda: of(data=2).groups("data", "dp"),
    r"replicate=2 x shard=3 does not multiply to data=8": lambda: of(data=8).factor("dp", {"replicate": 2, "fsdp": 3}),
    r"axis='tensor' comes twice": lambda: of(data=4, tensor=2).factor("data", {"tensor": 4}),
    r"shard=0: expected a number of ranks": lambda: of(data=4).factor("data", {"shard": 0}),
    r"expected a DeviceMesh of torch, got tuple": lambda: device_mesh_layout((2, 2), 4),
    r"the DeviceMesh has 2 ranks, but the world has 4: .* not a slice": lambda: device_mesh_layout(SLICE, 4),
    r"mesh_param=4: expected a pair": lambda: of_mesh_param(4, 4),
    r"mesh_param=\(1, 2, 2\): expected a pair": lambda: of_mesh_param((1, 2, 2), 4),
    r"data=2 x sequence=3 has places for 6": lambda: of_mesh_param((2, 3), 4),
    r"neither get_data_parallel_group nor": lambda: mpu_groups(fake_mpu({"pipe_parallel": [0]}), list),
    # groups that are no box
    r"rank 0 has groups of data, but rank 1 of data, tensor": lambda: of_groups(
        [{"data": [0, 1]}, {"data": [0, 1], "tensor": [1]}]
    ),
    r"the data group of rank 1 has ranks \[0\], of a world of 2": lambda: of_groups([{"data": [0]}, {"data": [0]}]),
    r"the data group of rank 0 has ranks \[0, 2\], of a world of 2": lambda: of_groups(
        [{"data": [0, 2]}, {"data": [1, 0]}]
    ),
    r"of rank 0 has ranks \[0, 1\], but the one of rank 1 has \[1, 0\]": lambda: of_groups(
        [{"data": [0, 1]}, {"data": [1, 0]}]
    ),
    r"the data group of rank 0 has 1 ranks, but the one of rank 1 has 2": lambda: of_groups(
        [{"data": [0]}, {"data": [1, 2]}, {"data": [1, 2]}]
    ),
    r"groups are data=2, which is 2 ranks; the world has 4": lambda: of_groups(
        [{"data": [0, 1]}] * 2 + [{"data": [2, 3]}] * 2
    ),
    r"the data and tensor groups of rank 0 share ranks \[0, 1\]; .* must meet in one rank": lambda: of_groups(
        [{"data": [0, 1], "tensor": [0, 1]}] * 2 + [{"data": [2, 3], "tensor": [2, 3]}] * 2
    ),
    r"data=2 x tensor=2, but ranks 0 and 3 have the same places": lambda: square([3, 2], [3, 1]),
    r"ranks 0 and 2 are in one tensor group, but at places 0 and 1 of their data groups": lambda: square(
        [3, 2], [1, 3]
    ),
    # ranks that disagree
    r"^rank 1: no axis$": lambda: agreed([Report(of(data=2)), Report(error="no axis")]),
    r"^no axis$": lambda: agreed([Report(error="no axis")] * 2),
    r"rank 0 has data=2 x tensor=1, but rank 1 has data=2; give the same mesh": lambda: agreed(
        [Report(of(data=2, tensor=1)), Report(of(data=2))]
    ),
    r"rank 0 has data=2, but rank 1 has data=2 of ranks 1, 0;": lambda: agreed(
        [Report(of(data=2)), Report(MeshLayout.of(("data",), (2,), (1, 0)))]
    ),
    r"rank 0 has an mpu, but rank 1 has data=2": lambda: agreed([Report(groups={"data": [0, 1]}), Report(of(data=2))]),
    r"rank 0 of 2 is rank 1 of 2 in torch\.distributed": lambda: agreed(
        [Report(of(data=2), torch_rank=(1, 2)), Report(of(data=2), torch_rank=(0, 2))]
    ),
    r"rank 0 of 1 is rank 0 of 2 in torch\.distributed": lambda: agreed([Report(of(data=1), torch_rank=(0, 2))]),
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_meshes_are_named(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        WRONG[text]()


# ---- communicators ----
def checked(part: Communicator, members: Sequence[int], rank: int) -> None:
    """Check the members and their order, and a sum that no other set of ranks has."""
    assert (part.rank, part.world_size) == (list(members).index(rank), len(members))
    assert part.all_gather(torch.tensor([rank])).tolist() == list(members)
    value = torch.tensor([10**rank, 7])
    part.all_reduce(value)
    assert value.tolist() == [sum(10**member for member in members), 7 * len(members)]


def along_axes(world: Communicator, mesh: zcomm.ProcessMesh) -> None:
    """Make the communicators of all sets of axes."""
    box, rank = np.arange(world.world_size).reshape(mesh.shape), world.rank
    assert box[mesh.coordinate] == rank and mesh.world is world
    assert repr(mesh).startswith("<zcomm.ProcessMesh: ") and f"rank {rank} is at {mesh.coordinate}" in repr(mesh)
    for chosen in subsets(mesh.axes):
        members = own(along(box, [mesh.axes.index(name) for name in chosen]), rank)
        part = mesh.comm(*chosen)
        checked(part, members, rank)
        assert mesh.ranks(*chosen) == members and mesh.size(*chosen) == len(members)
        assert mesh.comm(*reversed(chosen)) is part
    assert mesh.comm("one") is mesh.comm(), "the same ranks"
    assert mesh.comm("dp", use="norm") is mesh.comm("data", use="norm") is not mesh.comm("data")
    checked(mesh.comm("data", use="norm"), mesh.ranks("data"), rank)
    view = mesh.factor("data", expert_data=1, ep=mesh.size("data"))
    assert view.comm("expert") is mesh.comm("data") and view.coordinate[-1] == mesh.coordinate[-1]
    outer, inner = mesh.size("data"), world.world_size // mesh.size("data")
    pairs = zcomm.ProcessMesh.from_mesh_param((outer, inner), world)
    checked(pairs.comm("sp"), range(rank // inner * inner, rank // inner * inner + inner), rank)

    first = mesh.comm("data")
    mesh.close()
    with pytest.raises(RuntimeError, match="close"):
        first.barrier()
    checked(mesh.comm("data"), mesh.ranks("data"), rank)
    world.barrier()


def wrong_meshes(world: Communicator) -> None:
    """Give a wrong mesh on rank 1 only: all ranks raise the same error, and the communicator remains usable."""
    count = world.world_size
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"data": count + 1}, rf"^ProcessMesh: rank 1: data={count + 1} has places for"),
        ({"data": "2"}, "^ProcessMesh: rank 1: data='2': expected"),
        ({"tensor": count}, rf"^ProcessMesh: rank 0 has data={count}, but rank 1 has tensor={count}"),
    ]
    for given, text in wrong:
        with pytest.raises(ValueError, match=text):
            zcomm.ProcessMesh(world, **(given if world.rank == 1 else {"data": count}))
    sizes = {"replicate": 1, "shard": count}
    whole = zcomm.ProcessMesh(world, data=count)
    with pytest.raises(ValueError, match=rf"replicate=1 x shard={count}, but rank 1 has replicate={count} x shard=1"):
        whole.factor("data", **(dict(zip(sizes, reversed(sizes.values()), strict=True)) if world.rank == 1 else sizes))
    with pytest.raises(ValueError, match="rank 1: factor: shard=1 does not multiply to data="):
        whole.factor("data", shard=1 if world.rank == 1 else count)
    made: list[Callable[[], zcomm.ProcessMesh]] = [
        lambda: zcomm.ProcessMesh.from_device_mesh(SLICE, world),
        lambda: zcomm.ProcessMesh.from_mpu(fake_mpu({"data_parallel": [0]}), world),
    ]
    for make in made:
        with pytest.raises(ValueError, match="no process group: call init_process_group before making the mesh"):
            make()


def other_axes(mesh: zcomm.ProcessMesh) -> None:
    mesh.comm("tensor" if mesh.world.rank == 1 else "data", use="new")


def other_uses(mesh: zcomm.ProcessMesh) -> None:
    mesh.comm("data", use="norm" if mesh.world.rank == 1 else "sums")


@pytest.mark.parametrize(
    ("sizes", "differs"),
    [({"one": 1, "pipe": 2, "data": 2}, other_uses), ({"tensor": 3, "one": 1, "data": 2}, other_axes)],
    ids=["4", "6"],
)
def test_communicators_along_axes(
    tmp_path: Path, sizes: dict[str, int], differs: Callable[[zcomm.ProcessMesh], None]
) -> None:
    def run(joined: Joined) -> None:
        world = Communicator(joined)
        try:
            mesh = zcomm.ProcessMesh(world, **sizes)
            assert (mesh.axes, mesh.shape) == (tuple(sizes), tuple(sizes.values()))
            along_axes(world, mesh)
            wrong_meshes(world)
            with pytest.raises(zcomm.CollectiveMismatch, match="mesh axes"):
                differs(mesh)
        finally:
            world.close()

    thread_world(math.prod(sizes.values()), tmp_path, run)
