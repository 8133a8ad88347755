"""DataRanks: which ranks of the job read different samples, from mesh=, mesh_param=, mpu= or keys of the configuration.

Sources are compared between the ranks before any is used, because reading one is collective. So an error is the same on
all ranks, and no rank waits for another. Ranks along "data", "replicate", "shard" and "expert" read different samples.
Ranks along "sequence" read parts of the same ones: their gradients are added up, and not averaged. Ranks along "tensor"
and "pipe" read the same samples, and have other tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zcomm.config import Config

if TYPE_CHECKING:
    from zcomm.comm.communicator import Communicator
    from zcomm.comm.mesh import ProcessMesh

_DATA, _MODEL = ("data", "replicate", "shard", "expert_data", "expert"), ("tensor", "pipe")
_MICS, _HPZ = '"zero_optimization.mics_shard_size"', '"zero_optimization.zero_hpz_partition_size"'


@dataclass(frozen=True)
class DataRanks:
    """A rank among those that read different samples. size: their number. sequence: ranks that share a sample.

    mesh: of the job's ranks; None: all of them read different samples. mpu: as it was given. hpz: as of ZeroOptimizer.
    """

    rank: int
    size: int
    sequence: int = 1
    mesh: ProcessMesh | None = None
    mpu: Any = None
    hpz: bool = False

    @property
    def averages_sequences(self) -> bool:
        """True with DeepSpeed's mpu for Ulysses: each rank has the loss of the whole sequence."""
        return hasattr(self.mpu, "initialize_sequence_parallel")

    @property
    def name(self) -> str:
        """The name of ``size`` in messages about batch sizes."""
        return "world_size" if self.mesh is None or self.size == self.mesh.world.world_size else "data_parallel_size"

    @property
    def sums_over(self) -> tuple[int, ...]:
        """The ranks that this rank's gradients are summed with. Needs a mesh."""
        assert self.mesh is not None
        return self.mesh.ranks(*(axis for axis in self.mesh.axes if axis in (*_DATA, "sequence")))

    @property
    def model_parallel(self) -> int:
        """The number of ranks that divide the tensors of one model."""
        return 1 if self.mesh is None else self.mesh.world.world_size // (self.size * self.sequence)

    @property
    def zero_mesh(self) -> ProcessMesh | None:
        """The mesh of ZeroOptimizer; None: gradients and state are divided among all ranks."""
        mesh = self.mesh
        if mesh is None or (size_of(mesh, "replicate", "expert") == 1 and self.model_parallel == 1):
            return None
        return mesh


def size_of(mesh: ProcessMesh, *axes: str) -> int:
    """Return the number of ranks along those of ``axes`` that the mesh has."""
    return math.prod(size for axis, size in zip(mesh.axes, mesh.shape, strict=True) if axis in axes)


def data_ranks(comm: Communicator, settings: Config, mesh: Any, mesh_param: Any, mpu: Any) -> DataRanks:
    """Return the data ranks of the job. Collective. mesh: a ProcessMesh of all ranks, or torch's DeviceMesh.

    Errors are the same on all ranks. Raises: ValueError for several sources, or sizes that contradict keys or the
    number of ranks. It also names the ranks that give different ones.
    """
    from zcomm.comm.mesh import ProcessMesh
    from zcomm.zero.agree import all_values

    given = {"mesh": mesh, "mesh_param": mesh_param, "mpu": mpu}
    sizes = {name: getattr(settings, name) for name in ("data_parallel_size", "sequence_parallel_size")}
    zero = settings.zero_optimization
    copies = {"mics_shard_size": zero.mics_shard_size, "zero_hpz_partition_size": zero.zero_hpz_partition_size}
    told = all_values(comm, [_described(given, comm), {**sizes, **copies}], "mesh of initialize()")
    _check_alike([dict(sources) for sources, _ in told], [dict(keys) for _, keys in told])
    found: ProcessMesh | None = None
    if mesh is not None:
        found = mesh if isinstance(mesh, ProcessMesh) else ProcessMesh.from_device_mesh(mesh, comm)
    elif mesh_param is not None:
        found = ProcessMesh.from_mesh_param(mesh_param, comm)
    elif mpu is not None:
        found = ProcessMesh.from_mpu(mpu, comm)
    elif any(sizes.values()):
        found = _of_sizes(comm, sizes)
    if found is not None:
        _check_axes(found)
        for key, size in zip(sizes, (size_of(found, *_DATA), size_of(found, "sequence")), strict=True):
            if sizes[key] not in (None, size):
                raise ValueError(
                    f'initialize(): "{key}" is {sizes[key]}, but the ranks are {_axes(found)}; leave the key out'
                )
    asked = {_MICS: zero.mics_shard_size} if zero.mics_shard_size > 0 else {}
    if zero.zero_hpz_partition_size > 1:
        asked[_HPZ] = zero.zero_hpz_partition_size
    if len(asked) > 1:
        raise ValueError(f"initialize(): {' and '.join(asked)} are both set: give one of them")
    for key, shard in asked.items():
        if zero.stage != 3:
            raise ValueError(f'initialize(): {key} is {shard}, which needs "stage": 3, not {zero.stage}')
        found = _with_copies(comm, found, key, shard)
    if found is None:
        return DataRanks(comm.rank, comm.world_size)
    ranks = found.ranks(*(axis for axis in found.axes if axis in _DATA))
    hpz = _HPZ in asked and size_of(found, "replicate") > 1
    return DataRanks(ranks.index(comm.rank), len(ranks), size_of(found, "sequence"), found, mpu, hpz)


def _with_copies(comm: Communicator, mesh: ProcessMesh | None, key: str, shard: int) -> ProcessMesh:
    """Return the mesh in which ``shard`` ranks divide a model. Raises: ValueError if that is not possible."""
    from zcomm.comm.mesh import ProcessMesh

    if mesh is None:
        if comm.world_size % shard:
            raise ValueError(f"initialize(): {key} is {shard}, which does not divide the {comm.world_size} ranks")
        return ProcessMesh(comm, replicate=comm.world_size // shard, shard=shard)
    data, sequence = size_of(mesh, *_DATA), size_of(mesh, "sequence")
    if "data" in mesh.axes and "replicate" not in mesh.axes:
        if shard % sequence or data * sequence % shard:
            raise ValueError(
                f"initialize(): {key} is {shard}, but the ranks are {_axes(mesh)}: a shard group has all ranks of "
                f"sequences, a multiple of {sequence} that divides {data * sequence}"
            )
        return mesh.factor("data", replicate=data * sequence // shard, shard=shard // sequence)
    if size_of(mesh, "data", "shard", "sequence") != shard:
        raise ValueError(f"initialize(): {key} is {shard}, but the ranks are {_axes(mesh)}; leave the key out")
    return mesh


def _described(given: Mapping[str, Any], comm: Communicator) -> dict[str, str]:
    """Return the given sources as text that ranks compare. An mpu has other groups on each rank."""
    from zcomm.comm.mesh import ProcessMesh

    found = {name: type(value).__name__ for name, value in given.items() if value is not None}
    mesh = given["mesh"]
    if isinstance(mesh, ProcessMesh):
        found["mesh"] = f"{_axes(mesh)} of ranks {', '.join(map(str, mesh.ranks(*mesh.axes)))}"
        if (mesh.world.rank, mesh.world.world_size) != (comm.rank, comm.world_size):
            found["error"] = (
                f"rank {comm.rank} of {comm.world_size} is rank {mesh.world.rank} of {mesh.world.world_size} in mesh="
            )
    if mesh is not None and found["mesh"] != "DeviceMesh" and not isinstance(mesh, ProcessMesh):
        found["error"] = f"mesh={mesh!r}: expected a zcomm.ProcessMesh or torch's DeviceMesh"
    return found


def _check_alike(sources: list[dict[str, str]], sizes: list[dict[str, Any]]) -> None:
    for rank, source in enumerate(sources):
        if "error" in source:
            raise ValueError(f"initialize(): {source['error']}" + (f" (rank {rank})" if len(sources) > 1 else ""))
        if len(source) > 1:
            words = " and ".join(f"{name}=" for name in source)
            raise ValueError(f"initialize(): {words} were given on rank {rank}: give one of them")
        if source != sources[0]:
            raise ValueError(
                f"initialize(): rank 0 gives {_text(sources[0])}, but rank {rank} gives {_text(source)}; give the same "
                "on all ranks"
            )
        if sizes[rank] != sizes[0]:
            raise ValueError(
                f"initialize(): the configuration of rank 0 has {_text(sizes[0])}, but that of rank {rank} "
                f"{_text(sizes[rank])}"
            )


def _of_sizes(comm: Communicator, sizes: Mapping[str, int | None]) -> ProcessMesh:
    from zcomm.comm.mesh import ProcessMesh

    data, sequence = sizes["data_parallel_size"], sizes["sequence_parallel_size"]
    every = comm.world_size
    sequence = sequence or 1
    data = data or every // sequence
    if data * sequence != every:
        keys = ", ".join(f'"{key}": {size}' for key, size in sizes.items() if size is not None)
        raise ValueError(
            f"initialize(): {keys}: data_parallel_size x sequence_parallel_size must be the {every} ranks of the job"
        )
    return ProcessMesh(comm, data=data, sequence=sequence)


def _check_axes(mesh: ProcessMesh) -> None:
    for axis in mesh.axes:
        if axis not in (*_DATA, "sequence", *_MODEL):
            known = ", ".join((*_DATA, "sequence", *_MODEL))
            raise ValueError(f"initialize(): axis {axis!r} of {_axes(mesh)} is not one of {known}")


def _text(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items()) or "no mesh"


def _axes(mesh: ProcessMesh) -> str:
    return " x ".join(f"{axis}={size}" for axis, size in zip(mesh.axes, mesh.shape, strict=True))
