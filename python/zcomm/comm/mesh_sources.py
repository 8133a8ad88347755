"""Meshes of other libraries, read into a MeshLayout: torch's DeviceMesh, DeepSpeed's mesh_param, Megatron's mpu.

An mpu ("model parallel unit") is an object or a module with getters of process groups. A rank learns only the ranks of
its own groups from it. So each rank makes a Report, and all ranks have all Reports. `agreed` makes one layout of them,
or one error, which is the same on all ranks. Only `of_device_mesh` and `of_mpu` ask torch for this rank's number.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from zcomm.comm.mesh_layout import MeshLayout

# axis -> beginnings of the names of getters, in the order of preference; then those of larger groups and the axis
# along which these are larger. DeepSpeed 0.19 asks for these names.
_GETTERS = {
    "pipe": (("pipeline_model_parallel", "pipe_parallel"), "", ""),
    "data": (("data_parallel",), "sequence_data_parallel", "sequence"),
    "sequence": (("sequence_parallel",), "", ""),
    "tensor": (("tensor_model_parallel", "slice_parallel"), "model_parallel", "pipe"),
}
_UNNAMED = {1: ("shard",), 2: ("replicate", "shard")}
Groups = dict[str, list[int]]


@dataclass(frozen=True)
class Report:
    """One rank's view of the mesh: a layout, or the groups of an mpu, or an error. other: words about the caller's
    arguments, the same on all ranks."""

    layout: MeshLayout | None = None
    groups: Groups = field(default_factory=dict)
    torch_rank: tuple[int, int] | None = None  # rank and world size of torch.distributed, if the source has them
    error: str = ""
    other: str = ""


def of_device_mesh(mesh: Any, world_size: int) -> Report:
    """Read a DeviceMesh of all ranks. Raises: as device_mesh_layout, and without a process group."""
    torch_rank = _torch_rank()
    return Report(device_mesh_layout(mesh, world_size), torch_rank=torch_rank)


def device_mesh_layout(mesh: Any, world_size: int) -> MeshLayout:
    """Return the layout of a DeviceMesh. Unnamed: one axis is "shard", two are ("replicate", "shard").

    Raises: ValueError.
    """
    if not hasattr(mesh, "mesh_dim_names") or not hasattr(mesh, "mesh"):
        raise ValueError(f"expected a DeviceMesh of torch, got {type(mesh).__name__}")
    ranks = mesh.mesh
    axes = mesh.mesh_dim_names or _UNNAMED.get(ranks.dim())
    if axes is None:
        raise ValueError(f"a DeviceMesh of {ranks.dim()} axes without names: give it mesh_dim_names")
    if ranks.numel() != world_size:
        raise ValueError(
            f"the DeviceMesh has {ranks.numel()} ranks, but the world has {world_size}: give the mesh of all ranks, "
            "not a slice of it"
        )
    return MeshLayout.of(axes, tuple(ranks.shape), ranks.flatten().tolist())


def of_mesh_param(mesh_param: Any, world_size: int) -> Report:
    """Read DeepSpeed's pair (data_parallel_size, sequence_parallel_size). Raises: ValueError."""
    if not isinstance(mesh_param, (tuple, list)) or len(mesh_param) != 2:
        raise ValueError(f"mesh_param={mesh_param!r}: expected a pair (data_parallel_size, sequence_parallel_size)")
    return Report(MeshLayout.of(("data", "sequence"), tuple(mesh_param), range(world_size)))


def of_mpu(mpu: Any) -> Report:
    """Read the ranks of this rank's groups. Raises: as mpu_groups, and without a process group."""
    torch_rank = _torch_rank()
    return Report(groups=mpu_groups(mpu, dist.get_process_group_ranks), torch_rank=torch_rank)


def mpu_groups(mpu: Any, ranks_of: Callable[[Any], Sequence[int]]) -> Groups:
    """Return the ranks of this rank's groups, by axis. ranks_of: of a process group.

    Raises: ValueError if there is none for data.
    """
    groups = {}
    for axis, (names, larger, _) in _GETTERS.items():
        for name in (*names, larger):
            if name == "model_parallel" and hasattr(mpu, "initialize_sequence_parallel"):
                continue  # DeepSpeed's mpu for Ulysses: another name of its sequence groups
            if name and (found := _ranks(mpu, name, ranks_of)) is not None:
                groups[name if name == larger else axis] = found
                break
    if not {"data", "sequence_data_parallel"} & set(groups):
        raise ValueError("the mpu has neither get_data_parallel_group nor get_sequence_data_parallel_group")
    return groups


def _ranks(mpu: Any, name: str, ranks_of: Callable[[Any], Sequence[int]]) -> list[int] | None:
    if (get := getattr(mpu, f"get_{name}_group", None)) is not None:
        return [int(rank) for rank in ranks_of(get())]
    if (get := getattr(mpu, f"get_{name}_group_ranks", None)) is not None:
        return [int(rank) for rank in get()]
    return None


def _torch_rank() -> tuple[int, int]:
    if not dist.is_initialized():
        raise ValueError("torch.distributed has no process group: call init_process_group before making the mesh")
    return dist.get_rank(), dist.get_world_size()


def agreed(reports: Sequence[Report]) -> MeshLayout:
    """Return the layout of all ranks' reports, by rank. Raises: ValueError, the same on all ranks."""
    errors = [report.error for report in reports]
    for rank, error in enumerate(errors):
        if error:
            raise ValueError(error if len(set(errors)) == 1 else f"rank {rank}: {error}")
    for rank, report in enumerate(reports):
        of_torch = report.torch_rank
        if of_torch is not None and of_torch != (rank, len(reports)):
            raise ValueError(
                f"rank {rank} of {len(reports)} is rank {of_torch[0]} of {of_torch[1]} in torch.distributed: the mesh "
                "needs the same ranks in both"
            )
    layout = reports[0].layout
    for rank, report in enumerate(reports):
        if report.other != reports[0].other:
            raise ValueError(f"rank 0 gives {reports[0].other}, but rank {rank} gives {report.other}")
        if report.layout != layout:
            first, other = (each.describe() if each else "an mpu" for each in (layout, report.layout))
            raise ValueError(f"rank 0 has {first}, but rank {rank} has {other}; give the same mesh on all ranks")
    return layout or of_groups([report.groups for report in reports])


def of_groups(groups: Sequence[Groups]) -> MeshLayout:
    """Return the layout of which each rank's groups are given, in the order of their ranks.

    groups: by rank; those of an axis, or larger ones (see _GETTERS). Raises: ValueError naming ranks and axes that do
    not make a box.
    """
    names = list(groups[0])
    for rank, own in enumerate(groups):
        if list(own) != names:
            raise ValueError(f"rank 0 has groups of {', '.join(names)}, but rank {rank} of {', '.join(own)}")
    by_axis = {name: [own[name] for own in groups] for name in names}
    for name, of_ranks in by_axis.items():
        _check_groups(name, of_ranks)
    for axis, (_, larger, along) in _GETTERS.items():
        if larger in by_axis:
            by_axis[axis] = _smaller(by_axis.pop(larger), by_axis.get(along))
    by_axis = {axis: by_axis[axis] for axis in _GETTERS if axis in by_axis}
    shape = [len(of_ranks[0]) for of_ranks in by_axis.values()]
    text = " x ".join(f"{axis}={size}" for axis, size in zip(by_axis, shape, strict=True))
    if math.prod(shape) != len(groups):
        raise ValueError(f"the mpu's groups are {text}, which is {math.prod(shape)} ranks; the world has {len(groups)}")
    _check_meetings(by_axis)
    coordinates = [tuple(of_ranks[rank].index(rank) for of_ranks in by_axis.values()) for rank in range(len(groups))]
    places = {coordinate: rank for rank, coordinate in enumerate(coordinates)}
    for rank, coordinate in enumerate(coordinates):
        if places[coordinate] != rank:
            raise ValueError(
                f"the mpu's groups are {text}, but ranks {rank} and {places[coordinate]} have the same places in them"
            )
    for number, (axis, of_ranks) in enumerate(by_axis.items()):
        for rank, group in enumerate(of_ranks):
            _check_line(axis, list(by_axis), number, rank, group, coordinates)
    return MeshLayout.of(tuple(by_axis), shape, [places[coordinate] for coordinate in sorted(places)])


def _check_groups(name: str, of_ranks: Sequence[list[int]]) -> None:
    """Check that the groups of one getter are parts of the world, of one size."""
    for rank, group in enumerate(of_ranks):
        if rank not in group or len(set(group)) != len(group) or not set(group) <= set(range(len(of_ranks))):
            raise ValueError(f"the {name} group of rank {rank} has ranks {group}, of a world of {len(of_ranks)}")
        for member in group:
            if of_ranks[member] != group:
                raise ValueError(
                    f"the {name} group of rank {rank} has ranks {group}, but the one of rank {member} has "
                    f"{of_ranks[member]}"
                )
        if len(group) != len(of_ranks[0]):
            raise ValueError(
                f"the {name} group of rank 0 has {len(of_ranks[0])} ranks, but the one of rank {rank} has {len(group)}"
            )


def _check_meetings(by_axis: dict[str, list[list[int]]]) -> None:
    """Check that groups of different axes meet in one rank."""
    for (axis, groups), (other, others) in itertools.combinations(by_axis.items(), 2):
        for rank, (mine, theirs) in enumerate(zip(groups, others, strict=True)):
            if len(shared := sorted(set(mine) & set(theirs))) > 1:
                raise ValueError(
                    f"the {axis} and {other} groups of rank {rank} share ranks {shared}; groups of different axes must "
                    "meet in one rank"
                )


def _smaller(larger: Sequence[list[int]], along: Sequence[list[int]] | None) -> list[list[int]]:
    """Return the part of each rank's larger group with the rank's own place in its group ``along``.

    If the larger groups do not contain those, they are groups of the axis already: model_parallel without pipes.
    """
    if along is None or not all(set(inner) <= set(outer) for inner, outer in zip(along, larger, strict=True)):
        return list(larger)
    places = [inner.index(rank) for rank, inner in enumerate(along)]
    return [[other for other in outer if places[other] == places[rank]] for rank, outer in enumerate(larger)]


def _check_line(
    axis: str,
    axes: Sequence[str],
    number: int,
    rank: int,
    group: Sequence[int],
    coordinates: Sequence[tuple[int, ...]],
) -> None:
    """Check that ranks of a group have equal coordinates on the other axes."""
    own = coordinates[rank]
    for member in group:
        for other, (mine, theirs) in enumerate(zip(own, coordinates[member], strict=True)):
            if other != number and mine != theirs:
                raise ValueError(
                    f"ranks {rank} and {member} are in one {axis} group, but at places {mine} and {theirs} of their "
                    f"{axes[other]} groups"
                )
