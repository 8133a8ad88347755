"""ProcessMesh: the ranks of a job as a box with named axes, and a communicator for any of its axes.

Making a mesh is collective, and an error of one rank is the error of all. A communicator is made when it is asked for
first. Invariant: all ranks have the same layout, so that they find the same communicators made, or make the same one.
Thread rule: as Communicator.split.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch

from zcomm.comm import job
from zcomm.comm.communicator import Communicator
from zcomm.comm.mesh_layout import MeshLayout
from zcomm.comm.mesh_sources import Report, agreed, of_device_mesh, of_mesh_param, of_mpu

Parts = dict[tuple[tuple[tuple[int, ...], ...], str], Communicator]  # by all groups of ranks, and use


class ProcessMesh:
    """Ranks of the job as a box with named axes, outermost first: ``ProcessMesh(replicate=2, shard=4)``.

    The last axis changes fastest: ranks 0 to 3 are one ``shard`` group. Names are free; other libraries' short ones
    ("dp", "tp", ...) mean "data", "tensor" and so on (docs/collectives.md). Collective over ``world``.
    world: the ranks; None: the job's. sizes: ranks along each axis, which multiply to the number of ranks.
    Raises: ValueError, the same on all ranks, if a rank has a wrong mesh or another one; as all_gather.
    """

    def __init__(self, world: Communicator | None = None, /, **sizes: int) -> None:
        world = world or job.current()
        every = range(world.world_size)
        self._begin(world, lambda: Report(MeshLayout.of(tuple(sizes), tuple(sizes.values()), every)), {})

    def _begin(
        self, world: Communicator, read: Callable[[], Report], parts: Parts, caller: str = "ProcessMesh"
    ) -> None:
        try:
            mine = read()
        except Exception as error:
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            mine = Report(error=f"{kind}{error}")
        try:
            layout = agreed(_exchange(world, mine))
        except ValueError as error:
            raise ValueError(f"{caller}: {error}") from None
        self.world = world
        self.axes = layout.axes
        self.shape = layout.shape
        self.coordinate = layout.coordinate(world.rank)
        self._layout = layout
        self._parts = parts

    @classmethod
    def from_device_mesh(cls, mesh: Any, world: Communicator | None = None) -> ProcessMesh:
        """Create the mesh of torch's DeviceMesh of all ranks. Collective.

        Without names one axis is "shard", and two are ("replicate", "shard"). Ranks of a group are in the order of the
        DeviceMesh. Raises: as the constructor, also if torch.distributed has other ranks than ``world``.
        """
        world = world or job.current()
        return cls._made(world, lambda: of_device_mesh(mesh, world.world_size), {})

    @classmethod
    def from_mesh_param(cls, mesh_param: tuple[int, int], world: Communicator | None = None) -> ProcessMesh:
        """Create the mesh of DeepSpeed's ``mesh_param``: a pair of sizes, of "data" and "sequence". Collective.

        Raises: as the constructor.
        """
        world = world or job.current()
        return cls._made(world, lambda: of_mesh_param(mesh_param, world.world_size), {})

    @classmethod
    def from_mpu(cls, mpu: Any, world: Communicator | None = None) -> ProcessMesh:
        """Create the mesh of an ``mpu`` of Megatron or DeepSpeed: axes of "pipe", "data", "sequence", "tensor".

        Only the ranks of its groups are read (``get_data_parallel_group()`` and so on); an axis without a getter is not
        in the mesh. Collective. Raises: as the constructor, also if torch.distributed has other ranks than ``world``.
        The sizes must multiply to the world, and groups of different axes must meet in one rank.
        """
        return cls._made(world or job.current(), lambda: of_mpu(mpu), {})

    @classmethod
    def of(
        cls,
        mesh: Any,
        world: Communicator,
        refusal: str = "",
        other: str = "",
        caller: str = "ProcessMesh",
    ) -> ProcessMesh:
        """Create a mesh of ``world`` from a ProcessMesh, torch's DeviceMesh, or None: one axis, "data". Collective.

        refusal: the text of an error of this rank in other arguments of the ``caller``; all ranks raise it. other:
        words about them, the same on all ranks. Raises: as the constructor, also if ranks give different ones.
        """

        def read() -> Report:
            if refusal:
                raise ValueError(refusal)
            if mesh is None:
                return Report(MeshLayout.of(("data",), (world.world_size,), range(world.world_size)), other=other)
            if not isinstance(mesh, ProcessMesh):
                if not hasattr(mesh, "mesh_dim_names"):
                    raise ValueError(f"mesh={mesh!r} is neither a zcomm.ProcessMesh nor torch's DeviceMesh")
                return replace(of_device_mesh(mesh, world.world_size), other=other)
            if (mesh.world.rank, mesh.world.world_size) != (world.rank, world.world_size):
                raise ValueError(
                    f"mesh={mesh!r} is of a communicator with {mesh.world.world_size} ranks, but the world has "
                    f"{world.world_size}: give comm= that communicator, too"
                )
            return Report(mesh._layout, other=other)

        return cls._made(world, read, {}, caller)

    @classmethod
    def _made(
        cls, world: Communicator, read: Callable[[], Report], parts: Parts, caller: str = "ProcessMesh"
    ) -> ProcessMesh:
        mesh = cls.__new__(cls)
        mesh._begin(world, read, parts, caller)
        return mesh

    def __repr__(self) -> str:
        return f"<zcomm.ProcessMesh: {self.describe()}; rank {self.world.rank} is at {self.coordinate}>"

    def size(self, *axes: str) -> int:
        """Return the number of ranks along these axes. Raises: ValueError for an unknown axis."""
        return self._layout.size(*axes)

    def ranks(self, *axes: str) -> tuple[int, ...]:
        """Return this rank's group along these axes, by place: ranks of ``world``. Raises: as ``size``."""
        return next(group for group in self.groups(*axes) if self.world.rank in group)

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Return all groups along these axes, each by place: ranks of ``world``. Raises: as ``size``."""
        return self._layout.groups(*axes)

    def describe(self) -> str:
        """Return axes, sizes and, if they are not in order, ranks as one text."""
        return self._layout.describe()

    def comm(self, *axes: str, use: str = "") -> Communicator:
        """Return the communicator of this rank's group along these axes, made by ``world.split`` when it is new.

        Its ranks are in the order of places, for any order of ``axes``. An axis of size 1 adds no rank, so the
        communicator may be of one rank. Calls for the same ranks and use return the same Communicator, also from views
        (``factor``). use: a communicator of its own, with its own order of calls, for each word.
        Collective over ``world`` when it is new: all ranks ask for the same axes and uses in the same order. Code that
        needs several asks in sorted order. Raises: ValueError for an unknown axis; CollectiveMismatch if ranks ask for
        different ones; as Communicator.split.
        """
        groups = self._layout.groups(*axes)
        if (groups, use) not in self._parts:
            self._parts[groups, use] = self.split(*axes, use=use)
        return self._parts[groups, use]

    def split(self, *axes: str, use: str = "") -> Communicator:
        """Return a new communicator of this rank's group along these axes, which the caller closes. Collective.

        Otherwise as ``comm``.
        """
        chosen = self._layout.chosen(axes)
        color, group = next((n, group) for n, group in enumerate(self.groups(*chosen)) if self.world.rank in group)
        name = f"mesh axes {' x '.join(chosen)}{use and f' for {use}'}"
        part = self.world.split(color, group.index(self.world.rank), name=name)
        assert part is not None
        return part

    def factor(self, axis: str, **sizes: int) -> ProcessMesh:
        """Return a view in which several axes, outermost first, take the place of one.

        ``factor("data", replicate=2, shard=4)`` of data=8. Both meshes share their communicators. Collective. Raises:
        as the constructor, also if the sizes do not multiply to the size of ``axis``.
        """
        return self._made(self.world, lambda: Report(self._layout.factor(axis, sizes)), self._parts)

    def close(self) -> None:
        """Close the communicators of this mesh and its views; ``world`` stays open. Idempotent; not collective."""
        for part in self._parts.values():
            part.close()
        self._parts.clear()


def _exchange(world: Communicator, mine: Report) -> list[Report]:
    """Return the reports of all ranks, by rank. Collective."""
    told = json.dumps(asdict(mine)).encode()
    count = torch.tensor([len(told)], device=world.device)
    counts = _gathered(world, count).tolist()
    record = torch.zeros(max(counts), dtype=torch.uint8, device=world.device)
    record[: len(told)] = torch.frombuffer(bytearray(told), dtype=torch.uint8)
    rows = _gathered(world, record).view(world.world_size, -1).cpu()
    return [_report(bytes(row[:n].tolist())) for row, n in zip(rows, counts, strict=True)]


def _gathered(world: Communicator, shard: torch.Tensor) -> torch.Tensor:
    whole = torch.empty(shard.numel() * world.world_size, dtype=shard.dtype, device=shard.device)
    world.all_gather(shard, out=whole, name="ProcessMesh")
    return whole


def _report(told: bytes) -> Report:
    fields = json.loads(told)
    layout, rank = fields["layout"], fields["torch_rank"]
    if layout is not None:
        layout = MeshLayout(tuple(layout["axes"]), tuple(layout["shape"]), tuple(layout["ranks"]))
    return Report(layout, fields["groups"], None if rank is None else tuple(rank), fields["error"], fields["other"])
