"""Experts of a model in initialize(): the mesh of their ranks, and "expert_parallel" of the configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from zcomm.engine.data_ranks import DataRanks

if TYPE_CHECKING:
    from zcomm.comm.communicator import Communicator
    from zcomm.comm.mesh import ProcessMesh
    from zcomm.config import Config


def with_experts(model: nn.Module, settings: Config, comm: Communicator, ranks: DataRanks) -> DataRanks:
    """Connect the model's layers of experts with their ranks, and divide Hugging Face's, if the configuration asks.

    Returns: ``ranks``, with the axis "expert" if experts are divided. Collective then. Raises: ValueError,
    NotImplementedError for layers of different sizes.
    """
    from zcomm.parallel.expert_blocks import divide_experts
    from zcomm.parallel.experts import ranks_of

    section = settings.expert_parallel
    layers = ranks_of(model)
    sizes = {layer.size for layer in layers} | ({section.autoep_size} if section.enabled else set())
    several = sorted(sizes - {1})
    if len(several) > 1:
        raise NotImplementedError(
            f"initialize(): experts are divided among {' and '.join(map(str, several))} ranks: give all layers one size"
        )
    if not several:
        return ranks
    connected = next((layer.mesh for layer in layers if layer.mesh is not None and layer.size > 1), None)
    mesh = _mesh(ranks.mesh or connected, several[0], comm)
    for layer in layers:
        if layer.size > 1 and layer.mesh is None:
            layer.connect(mesh)
    if section.enabled and section.autoep_size > 1:
        divide_experts(model, mesh, section.preset_model)
    return replace(ranks, mesh=mesh)


def _mesh(mesh: ProcessMesh | None, size: int, comm: Communicator) -> ProcessMesh:
    """Return a mesh with ``size`` ranks along "expert": adjacent ranks, as DeepSpeed's. Raises: ValueError."""
    from zcomm.comm.mesh import ProcessMesh
    from zcomm.parallel.experts import mesh_size

    found = mesh or ProcessMesh(comm, data=comm.world_size)
    if mesh_size(found) == 1 and "data" in found.axes:
        data = found.size("data")
        if data % size:
            raise ValueError(f"initialize(): {size} ranks with different experts do not divide the {data} data ranks")
        found = found.factor("data", expert_data=data // size, expert=size)
    if mesh_size(found) != size:
        raise ValueError(
            f"initialize(): the ranks are {found.describe()}, but layers of experts are divided among {size} ranks: "
            f"give expert={size}"
        )
    return found
