"""Tensor parallelism in initialize(): the mesh of its ranks, and the division of the model by "tensor_parallel".

Parameters of an optimizer and of ``model_parameters`` follow the model: torch replaces the parameters that it divides.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zcomm.engine.data_ranks import DataRanks, size_of

if TYPE_CHECKING:
    from zcomm.comm.communicator import Communicator
    from zcomm.config import Config


def with_parts(
    model: nn.Module,
    settings: Config,
    comm: Communicator,
    ranks: DataRanks,
    optimizer: Any,
    parameters: list[Any] | None,
) -> DataRanks:
    """Divide ``model`` over ranks if ``tensor_parallel.autotp_size`` asks for it, and change its parameters in
    ``optimizer`` and ``parameters``, in place.

    Returns: ``ranks``, with the axis "tensor" then. Collective. Raises: ValueError; as ``zcomm.parallel.tensor``.
    """
    size = settings.tensor_parallel.autotp_size
    if size <= 1:
        return ranks
    from zcomm.comm.mesh import ProcessMesh
    from zcomm.parallel.tensors import tensor

    mesh = ranks.mesh
    if mesh is None:
        if comm.world_size % size:
            raise ValueError(
                f'initialize(): "tensor_parallel": {{"autotp_size": {size}}} does not divide the {comm.world_size} '
                "ranks"
            )
        mesh = ProcessMesh(comm, data=comm.world_size // size, tensor=size)
        places = mesh.ranks("data")
        ranks = replace(ranks, rank=places.index(comm.rank), size=len(places), mesh=mesh)
    elif size_of(mesh, "tensor") != size:
        raise ValueError(
            f'initialize(): the ranks are {mesh.describe()}, but "tensor_parallel": {{"autotp_size": {size}}} asks for '
            f"tensor={size}"
        )
    if any(hasattr(param, "placements") for param in model.parameters()):
        return ranks  # divided by zcomm.parallel.tensor or deepspeed.tp_model_init
    names = {id(param): name for name, param in model.named_parameters(remove_duplicate=False)}
    tensor(model, mesh)
    now = dict(model.named_parameters(remove_duplicate=False))

    def follow(params: list[Any]) -> None:
        for number, param in enumerate(params):
            if isinstance(param, dict):
                param["params"] = list(param["params"])
                follow(param["params"])
            elif id(param) in names:
                params[number] = now[names[id(param)]]

    if parameters is not None:
        follow(parameters)
    if isinstance(optimizer, torch.optim.Optimizer):
        if optimizer.state:
            raise ValueError(
                f"initialize(): {type(optimizer).__name__} has taken steps with the whole model: divide the model first"
            )
        follow(optimizer.param_groups)
    return ranks
