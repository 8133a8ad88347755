"""MeshComms: the communicators of one optimizer, for a mesh of its ranks.

[Note: groups] The ranks of a *shard group* divide gradients, optimizer state and, in stage 3, weights. Groups along
"replicate" have equal copies. Gradients are summed in a shard group, then across the groups, and divided once by the
number of ranks that feed different samples. Ranks along other axes ("tensor", "pipe") have other parameters, or the
same ones with equal gradients. Their gradients are never summed. Each element of the model is *counted* by one rank: by
the first of its copies. Norms and whole tensors are sums over the elements that ranks count.
[Note: hpZ] With ``hpz`` the groups have copies of the weights only. A bucket is cut over a shard group first, then over
the groups. Each rank keeps gradients and state of one such piece, and updates it. Sums go through the shard group, then
to the rank of the piece. New weights of the pieces are gathered across the groups once in a step.
Order of calls: no call of ``shard`` waits for one of ``across`` of the same or a later bucket. The main thread waits
for ``across`` and ``world`` only after it has queued its calls of ``shard``. So all waits go in one direction.
Thread rule: of each communicator, as Communicator.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from zcomm.comm.communicator import Communicator
from zcomm.comm.mesh import ProcessMesh
from zcomm.zero.agree import all_values
from zcomm.zero.layout.placement import Axes, ParamGroupPlacement, Placements

T = TypeVar("T")
_SHARD, _ACROSS, _OTHER = ("shard", "data", "sequence"), "replicate", ("tensor", "pipe")
_MARKS = ("tensor_model_parallel", "model_parallel")  # Megatron's, on parameters that ranks along "tensor" divide


@dataclass(frozen=True)
class MeshComms:
    """The communicators. world: all ranks, for norms, errors, decisions and checkpoints. data: ranks with the same
    tensors, for first weights and whole tensors; both are numbered as the job. shard: the shard group. across: this
    rank's place in all shard groups; None: there is one group. divide_by: ranks that feed different samples. hpz: see
    [Note: hpZ].

    With one axis the first three are one communicator.
    """

    mesh: ProcessMesh
    world: Communicator
    data: Communicator
    shard: Communicator
    across: Communicator | None
    divide_by: int
    is_own: bool = False  # no program calls ``world``
    hpz: bool = False

    @property
    def groups(self) -> int:
        """The number of groups that divide the state of a shard."""
        return self.across.world_size if self.hpz and self.across is not None else 1

    @property
    def state(self) -> Communicator:
        """The ranks that divide gradients and optimizer state."""
        return self.data if self.hpz else self.shard

    @property
    def first_of(self) -> list[int]:
        """For each rank, the first rank with the same tensors."""
        firsts = {rank: min(group) for group in self.mesh.groups(*_same(self.mesh)) for rank in group}
        return [firsts[rank] for rank in range(self.world.world_size)]

    @property
    def shard_groups(self) -> tuple[tuple[int, ...], ...]:
        """All shard groups of the job, as ranks of ``world``."""
        return self.mesh.groups(*(axis for axis in self.mesh.axes if axis in _SHARD))

    @property
    def hops(self) -> bool:
        """Return True if a sum over the shard group is not the mean yet."""
        return self.across is not None or self.divide_by != self.shard.world_size

    @property
    def every(self) -> list[Communicator]:
        """The communicators, each once."""
        found = (self.world, self.data, self.shard, self.across)
        return list({id(comm): comm for comm in found if comm is not None}.values())

    def placements(self, params: Iterable[torch.Tensor]) -> Placements:
        """Return the placement of each parameter."""
        groups, place = self.groups, self._coordinate(_ACROSS)
        first = self.hpz or place == 0
        shards = Axes(groups * self.shard.world_size, groups * self.shard.rank + (place if groups > 1 else 0))
        divided = ParamGroupPlacement(shards, groups, first, counted=first)
        counted = first and self._coordinate("tensor") == 0
        whole = ParamGroupPlacement(shards, groups, first, duplicate=True, counted=counted)
        has_copies = "tensor" in self.mesh.axes and self.mesh.size("tensor") > 1

        def of(param: torch.Tensor) -> ParamGroupPlacement:
            return whole if has_copies and not any(getattr(param, mark, False) for mark in _MARKS) else divided

        return {id(param): of(param) for param in params}

    def check_whole(self, call: str) -> None:
        """Raise NotImplementedError, on all ranks, for a ``call`` that needs the whole model on ``data``."""
        if self.data is not self.world:
            raise NotImplementedError(
                f"{call} with mesh={self.mesh.describe()}: ranks have different tensors of one name, and their parts "
                "are not joined: use zcomm.zero.full_param(p) and so on, which return this rank's tensors"
            )

    def check_device(self) -> None:
        """Raise NotImplementedError if a model on a device cannot use the mesh."""
        if self.world is not self.shard or self.hops:
            raise NotImplementedError(
                f"mesh={self.mesh.describe()} with a model on a device is not available: leave mesh= out, or use a "
                "model on the CPU"
            )

    def with_own_world(self, undo: ExitStack) -> MeshComms:
        """Return these with a duplicate of ``world``: gradients and weights need an order apart from the program's
        calls. Collective. undo: closes it."""
        if self.is_own:
            return self
        world = self.world.duplicate()
        undo.callback(world.close)
        data, shard = (world if comm is self.world else comm for comm in (self.data, self.shard))
        return replace(self, world=world, data=data, shard=shard)

    def _coordinate(self, axis: str) -> int:
        return dict(zip(self.mesh.axes, self.mesh.coordinate, strict=True)).get(axis, 0)

    def told(self, value: T, name: str) -> list[T]:
        """Return ``value`` (JSON) of all ranks; once if all have the same tensors. Collective otherwise."""
        return [value] if self.data is self.world else all_values(self.world, value, name)

    def leave_groups(self) -> None:
        """Make the other groups' calls raise, because this group has an error that they do not know."""
        for comm in (self.across, self.world):
            if comm is not None:
                comm.close()

    def close(self) -> None:
        for comm in self.every:
            comm.close()


def _same(mesh: ProcessMesh) -> list[str]:
    """Return the axes along which ranks have the same tensors."""
    return [axis for axis in mesh.axes if axis in (*_SHARD, _ACROSS)]


def _check(mesh: ProcessMesh) -> None:
    """Raise for axes that ZeroOptimizer does not have, the same on all ranks: ValueError, NotImplementedError."""
    known = (*_SHARD, _ACROSS, *_OTHER)
    several = [axis for axis in mesh.axes if mesh.size(axis) > 1]
    for axis in several:
        if axis == "expert":
            raise NotImplementedError(f"mesh={mesh.describe()}: experts on different ranks are not available")
        if axis not in known:
            raise ValueError(f"mesh={mesh.describe()}: axis {axis!r} is not one of {', '.join(known)}")
    if {"shard", "data"} <= set(several):
        raise ValueError(
            f"mesh={mesh.describe()} has both 'shard' and 'data': name the axis with copies of shards 'replicate'"
        )


def connect(mesh: ProcessMesh, undo: ExitStack, hpz: bool = False) -> MeshComms:
    """Make the communicators, on all ranks in the same order. ``world`` is the job's still. Collective. undo: closes
    them. hpz: see [Note: hpZ]."""

    def kept(comm: Communicator) -> Communicator:
        undo.callback(comm.close)
        return comm

    _check(mesh)
    job = mesh.world
    sharded = [axis for axis in mesh.axes if axis in _SHARD]
    same = _same(mesh)
    divide_by = mesh.size(*(axis for axis in same if axis != "sequence"))
    across = kept(mesh.split(_ACROSS, use="sums")) if _ACROSS in same and mesh.size(_ACROSS) > 1 else None
    shard = None if mesh.ranks(*sharded) == tuple(range(job.world_size)) else kept(mesh.split(*sharded, use="shards"))
    data = None
    if mesh.size(*same) < job.world_size:
        groups = mesh.groups(*same)
        color = next(number for number, group in enumerate(groups) if job.rank in group)
        part = job.split(color, job.rank, name="ranks with the same tensors")
        assert part is not None
        data = kept(part)
    return MeshComms(mesh, job, data or job, shard or job, across, divide_by, hpz=hpz)


def on_host(job: Communicator, divides: bool, undo: ExitStack) -> MeshComms:
    """Make communicators in host memory for a ``job`` that moves tensors of devices. Collective.

    divides: a mesh was given. Raises: NotImplementedError for one.
    """
    if divides:
        raise NotImplementedError(
            f"mesh= with backend {job.backend!r} is not available: use zcomm.init(backend='auto'), or leave mesh= out"
        )
    world = job.host_twin()
    undo.callback(world.close)
    return replace(connect(ProcessMesh.of(None, world), undo), is_own=True)
