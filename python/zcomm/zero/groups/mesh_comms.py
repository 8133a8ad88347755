"""MeshComms: the communicators of one optimizer, for a mesh of its ranks.

[Note: groups] The ranks of a *shard group* divide gradients, optimizer state and, in stage 3, weights. Groups along
"replicate" have equal copies. Gradients are summed in a shard group, then across the groups, and divided once by the
number of ranks that feed different samples. Ranks along other axes ("tensor", "pipe") have other parameters, or the
same ones with equal gradients. Their gradients are never summed. Each element of the model is *counted* by one rank: by
the first of its copies. Norms and whole tensors are sums over the elements that ranks count.
[Note: hpZ] With ``hpz`` the groups have copies of the weights only. A bucket is cut over a shard group first, then over
the groups. Each rank keeps gradients and state of one such piece, and updates it. Sums go through the shard group, then
to the rank of the piece. New weights of the pieces are gathered across the groups once in a step.
[Note: experts] Ranks along "expert" read different samples, and have different experts. An expert sees the tokens of
all of them. So gradients of other parameters are summed over "expert", too, and an expert's over the rest of the data
ranks, which have the same experts. Both are divided by the number of all data ranks. Parameters of experts are marked
(``is_expert``), and lie in sections and buckets of their own, with communicators of their own (``of``).
Order of calls: no call of ``shard`` waits for one of ``across`` of the same or a later bucket. The main thread waits
for ``across`` and ``world`` only after it has queued its calls of ``shard``. So all waits go in one direction.
Thread rule: of each communicator, as Communicator.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from zcomm.bootstrap.rendezvous import find_job
from zcomm.comm.communicator import Communicator
from zcomm.comm.job import init, is_initialized
from zcomm.comm.mesh import ProcessMesh
from zcomm.memory.device_streams import NO_PEERS, Peers
from zcomm.zero.agree import all_values
from zcomm.zero.layout.cut import expert_part
from zcomm.zero.layout.flat import FlatBucket
from zcomm.zero.layout.local_param import as_given, is_divided, is_dtensor, is_local
from zcomm.zero.layout.placement import Axes, ParamGroupPlacement, Placements

T = TypeVar("T")
_SHARD, _ACROSS, _OTHER = ("shard", "data", "expert_data", "sequence", "expert"), "replicate", ("tensor", "pipe")
_MARKS = ("tensor_model_parallel", "model_parallel")  # Megatron's, on parameters that ranks along "tensor" divide
_COPY = "ds_pipe_replicated"  # DeepSpeed's, on parameters of which an earlier pipeline stage has a copy


def is_expert(param: torch.Tensor) -> bool:
    """Return True for a parameter that is marked as an expert's: DeepSpeed's ``allreduce = False``. An expert that all
    ranks have (group "ep_size_1") is a parameter as others."""
    return getattr(param, "allreduce", True) is False and getattr(param, "group_name", "") != "ep_size_1"


def is_copy(tensor: object) -> bool:
    """Return True for a tensor that is marked as a copy of an earlier pipeline stage's, such as a tied weight."""
    return bool(getattr(tensor, _COPY, False))


@dataclass(frozen=True)
class MeshComms:
    """The communicators. world: all ranks, for norms, errors, decisions and checkpoints. data: ranks with the same
    tensors, for first weights and whole tensors; both are numbered as the job. shard: the shard group. across: this
    rank's place in all shard groups; None: there is one group. divide_by: ranks that feed different samples. hpz: see
    [Note: hpZ]. each_pass: sums go across groups in each pass of a step ([Note: sums of groups]).
    experts: of parameters of experts; None: these are as all others. peers, peers_across: as shard and across, between
    the ranks' devices, for buckets that stay on them; NO_PEERS: there are none, or one rank.

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
    each_pass: bool = False
    experts: MeshComms | None = None
    peers: Peers = NO_PEERS
    peers_across: Peers = NO_PEERS

    def of(self, bucket: FlatBucket) -> MeshComms:
        """Return the communicators of a bucket."""
        return self.experts if bucket.experts and self.experts is not None else self

    def of_param(self, param: torch.Tensor) -> MeshComms:
        """Return the communicators of a parameter."""
        return self.experts if self.experts is not None and is_expert(param) else self

    def root_of(self, bucket: FlatBucket, root: int) -> int:
        """Return rank ``root`` of ``data`` as a rank of ``of(bucket).data``: of each group the one at its place."""
        if not bucket.experts or self.experts is None:
            return root
        rank = sorted(self.mesh.ranks(*_same(self.mesh)))[root]
        groups = self.mesh.groups(*_of_experts(_same(self.mesh)))
        return next(group.index(rank) for group in groups if rank in group)

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
    def stages(self) -> list[int]:
        """For each rank, its place along "pipe"."""
        groups = self.mesh.groups("pipe") if "pipe" in self.mesh.axes else ()
        places = {rank: place for group in groups for place, rank in enumerate(group)}
        return [places.get(rank, 0) for rank in range(self.world.world_size)]

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
        found = (self.world, self.data, self.shard, self.across, *(self.experts.every if self.experts else ()))
        return [*{id(comm): comm for comm in found if comm is not None}.values(), *self.joins]

    @property
    def joins(self) -> list[Communicator]:
        """The communicators between devices."""
        return [comm for comm in (self.peers, self.peers_across) if isinstance(comm, Communicator)]

    def placements(self, params: Iterable[torch.Tensor]) -> Placements:
        """Return the placement of each parameter. Raises: ValueError for an expert's that needs another mesh."""
        every = list(params)
        self._check_marks(every)
        placed: Placements = self._placements(every)
        if self.experts is None:
            return placed
        found = self.experts._placements(filter(is_expert, every))
        return {**placed, **{key: replace(value, experts=True) for key, value in found.items()}}

    def _check_marks(self, params: Iterable[torch.Tensor]) -> None:
        size = self.mesh.size("expert") if "expert" in self.mesh.axes else 1
        for param in filter(is_expert, params):
            group = str(getattr(param, "group_name", ""))
            if self.divide_by > 1 and group != f"ep_size_{size}" and (size == 1 or group.startswith("ep_size_")):
                raise ValueError(
                    f"a parameter of shape {tuple(param.shape)} is an expert's (allreduce=False, "
                    f"group_name={group!r}), but mesh={self.mesh.describe()}: give a mesh with the axis 'expert' of "
                    "that size"
                )

    def _placements(self, params: Iterable[torch.Tensor]) -> Placements:
        groups, place = self.groups, self._coordinate(_ACROSS)
        first = self.hpz or place == 0
        shards = Axes(groups * self.shard.world_size, groups * self.shard.rank + (place if groups > 1 else 0))
        divided = ParamGroupPlacement(shards, groups, first, counted=first)
        counted = first and self._coordinate("tensor") == 0
        whole = ParamGroupPlacement(shards, groups, first, duplicate=True, counted=counted)
        tied = ParamGroupPlacement(shards, groups, first, duplicate=True, counted=False)

        def of(param: torch.Tensor) -> ParamGroupPlacement:
            return tied if is_copy(param) else whole if self.is_duplicate(param) else divided

        return {id(param): of(param) for param in params}

    def is_duplicate(self, param: torch.Tensor) -> bool:
        """Return True if ranks along "tensor" have the same parameter, a DTensor, a LocalParam or a tensor."""
        if "tensor" not in self.mesh.axes or self.mesh.size("tensor") == 1:
            return False
        given = as_given(param)
        return not (is_divided(given) if is_dtensor(given) else any(getattr(given, mark, False) for mark in _MARKS))

    def check_parts(self, named: Iterable[tuple[str, torch.Tensor]], stage: int, memory: object) -> None:
        """Raise for a DTensor that is not in equal parts, or copies, over this mesh's axis "tensor", the same on all
        ranks: ValueError, NotImplementedError. Local."""
        for name, param in named:
            if is_dtensor(param):
                _check_part(name, param, self.mesh)
                if stage == 3:
                    raise NotImplementedError(f"stage=3 with the DTensor {name}: tensor parallelism has stages 0 to 2")
                if memory is not None:
                    raise NotImplementedError(f"memory={memory!r} with the DTensor {name}: leave memory= out")

    def check_whole(self, call: str) -> None:
        """Raise NotImplementedError, on all ranks, for a ``call`` that needs the whole model on ``data``."""
        if not self.is_one_model:
            raise NotImplementedError(
                f"{call} with mesh={self.mesh.describe()}: ranks have different tensors of one name, and their parts "
                "are not joined: use zcomm.zero.full_param(p) and so on, which return this rank's tensors"
            )

    def check_one_model(self, call: str, params: Iterable[torch.Tensor] = ()) -> None:
        """Raise NotImplementedError, on all ranks, for a ``call`` that needs whole tensors.

        Ranks may have known parts: DTensors, other stages, or experts of ``zcomm.parallel``."""
        params, joined = list(params), (*_same(self.mesh), *_OTHER)
        others = [axis for axis in self.mesh.axes if self.mesh.size(axis) > 1 and axis not in joined]
        in_parts = "tensor" in self.mesh.axes and self.mesh.size("tensor") > 1
        unknown = in_parts and any(getattr(p, mark, False) for p in params if not is_local(p) for mark in _MARKS)
        unknown = unknown or any(is_expert(param) and expert_part(param) is None for param in params)
        if others or unknown:
            self.check_whole(call)

    def check_device(self) -> None:
        """Raise NotImplementedError, on all ranks, if a model on a device cannot use the mesh."""
        for there, what in (
            (self.hpz, "hpz=True"),
            (self.experts is not None, "experts on different ranks"),
            (self.data is not self.world, "an axis with other tensors (tensor, pipe)"),
        ):
            if there:
                raise NotImplementedError(
                    f"mesh={self.mesh.describe()}: {what} with a model on a device is not available: use a model on "
                    "the CPU, or a mesh of 'replicate' and 'shard'"
                )

    def with_own_world(self, undo: ExitStack) -> MeshComms:
        """Return these with a duplicate of ``world``: gradients and weights need an order apart from the program's
        calls. Collective. undo: closes it."""
        if self.is_own:
            return self
        world = self.world.duplicate()
        undo.callback(world.close)
        data, shard = (world if comm is self.world else comm for comm in (self.data, self.shard))
        experts = None if self.experts is None else replace(self.experts, world=world)
        return replace(self, world=world, data=data, shard=shard, experts=experts)

    def _coordinate(self, axis: str) -> int:
        return dict(zip(self.mesh.axes, self.mesh.coordinate, strict=True)).get(axis, 0)

    def told(self, value: T, name: str) -> list[T]:
        """Return ``value`` (JSON) of all ranks; once if all have the same tensors. Collective otherwise."""
        return [value] if self.is_one_model else all_values(self.world, value, name)

    @property
    def is_one_model(self) -> bool:
        """True if all ranks have the same tensors."""
        return self.data is self.world and self.experts is None

    def fail(self, error: BaseException) -> None:
        """Make the calls of other ranks raise ``error`` of this rank, which they may not know of. Local.

        The main thread may have a call of its own on ``world`` then, so that the entries are not awaited.
        """
        if self.across is not None:
            for comm in self.every:
                comm.fail(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        for comm in self.every:
            comm.close()


def _check_part(name: str, param: Any, mesh: ProcessMesh) -> None:
    if TorchVersion(torch.__version__) < "2.7":
        raise NotImplementedError(
            f"{name} is a DTensor: tensor parallelism needs torch >= 2.7, not {torch.__version__}"
        )
    at, ranks = param.device_mesh, mesh.ranks("tensor") if "tensor" in mesh.axes else ()
    if at.ndim != 1 or tuple(at.mesh.flatten().tolist()) != ranks or dist.get_rank() != mesh.world.rank:
        raise ValueError(
            f'{name} is a DTensor over {at}, but the axis "tensor" of mesh={mesh.describe()} has ranks '
            f"{', '.join(map(str, ranks)) or 'none'}: distribute it over that axis (zcomm.parallel.tensor)"
        )
    (place,) = param.placements
    if type(place).__name__ not in ("Shard", "_StridedShard", "Replicate"):
        raise ValueError(f"{name} is a DTensor placed as {place}: a parameter is Shard(dimension) or Replicate()")
    if not place.is_replicate() and param.shape[place.dim] % (len(ranks) * getattr(place, "split_factor", 1)):
        raise ValueError(
            f"{name} has size {param.shape[place.dim]} in dimension {place.dim}, which is not divisible by the "
            f'{len(ranks)} ranks of the axis "tensor": choose another size, or leave it out of the plan'
        )


def _same(mesh: ProcessMesh) -> list[str]:
    """Return the axes along which ranks have the same tensors."""
    return [axis for axis in mesh.axes if axis in (*_SHARD, _ACROSS)]


def _of_experts(axes: Iterable[str]) -> list[str]:
    """Return the ``axes`` along which ranks have the same experts."""
    return [axis for axis in axes if axis != "expert"]


def _check(mesh: ProcessMesh) -> None:
    """Raise for axes that ZeroOptimizer does not have, the same on all ranks: ValueError, NotImplementedError."""
    known = (*_SHARD, _ACROSS, *_OTHER)
    several = [axis for axis in mesh.axes if mesh.size(axis) > 1]
    for axis in several:
        if axis not in known:
            raise ValueError(f"mesh={mesh.describe()}: axis {axis!r} is not one of {', '.join(known)}")
    if len(both := [axis for axis in ("shard", "data", "expert_data") if axis in several]) > 1:
        raise ValueError(
            f"mesh={mesh.describe()} has both {both[0]!r} and {both[1]!r}: name the axis with copies of shards "
            "'replicate'"
        )


def connect(mesh: ProcessMesh, undo: ExitStack, hpz: bool = False, each_pass: bool = False) -> MeshComms:
    """Make the communicators, on all ranks in the same order. ``world`` is the job's still. Collective. undo: closes
    them. hpz, each_pass: see MeshComms."""

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
    experts = None
    if "expert" in mesh.axes and mesh.size("expert") > 1:
        own = kept(mesh.split(*_of_experts(sharded), use="shards of experts"))
        alike = own if across is None else kept(mesh.split(*_of_experts(same), use="the same experts"))
        experts = MeshComms(mesh, job, alike, own, across, divide_by, each_pass=each_pass)
    more: dict[str, Any] = {"hpz": hpz, "each_pass": each_pass, "experts": experts}
    return MeshComms(mesh, job, data or job, shard or job, across, divide_by, **more)


def job_of(comm: Any, mesh: Any, refusal: BaseException | None) -> Communicator:
    """Return the communicator of an optimizer's ranks; join the job if none is given.

    refusal: an error of this rank's arguments, for example of ``comm``: other ranks may then wait in ``mesh``'s. It is
    raised at once if no other rank can wait for this one.
    """
    if isinstance(comm, Communicator) and not comm.is_closed:
        return comm
    if isinstance(mesh, ProcessMesh):
        return mesh.world
    if refusal is not None and not is_initialized() and find_job(None, None, None).world_size == 1:
        raise refusal
    return init()


def comms_of(
    job: Communicator,
    mesh: Any,
    undo: ExitStack,
    hpz: bool,
    each_pass: bool,
    refusal: BaseException | None,
    other: str,
) -> MeshComms:
    """Make the communicators of an optimizer on ``mesh``, once no rank has a ``refusal`` of its arguments. Collective.

    For a job that moves tensors of devices they are in host memory. other: see ProcessMesh.of.
    Raises: the refusal; on the other ranks ValueError with its text. NotImplementedError for a mesh of devices.
    """
    world = job
    if job.is_on_device:
        world = job.host_twin()
        undo.callback(world.close)
        if mesh is not None and refusal is None:
            refusal = NotImplementedError(
                f"mesh= with backend {job.backend!r} is not available: use zcomm.init(backend='auto'), or leave mesh= "
                "out"
            )
    kind = "" if refusal is None or isinstance(refusal, ValueError) else f"{type(refusal).__name__}: "
    try:
        layout = ProcessMesh.of(mesh, world, "" if refusal is None else f"{kind}{refusal}", other, "ZeroOptimizer")
    except Exception as error:
        if refusal is None:
            raise
        raise refusal from (None if isinstance(error, ValueError) else error)
    finally:
        del refusal  # else it would keep this frame, and with it all arguments, until a garbage collection
    comms = connect(layout, undo, hpz, each_pass)
    return replace(comms, is_own=True) if job.is_on_device else comms
