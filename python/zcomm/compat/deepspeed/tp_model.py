"""``deepspeed.tp_model_init``: models divided over ranks, and the meshes of these models for ``initialize``."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from zcomm.comm.mesh import ProcessMesh

_meshes: weakref.WeakKeyDictionary[nn.Module, ProcessMesh] = weakref.WeakKeyDictionary()


def tp_model_init(model: nn.Module, tp_size: int, dtype: Any = None, config: Any = None, **kwargs: Any) -> nn.Module:
    """Divide the layers of ``model`` over ``tp_size`` adjacent ranks, by the model's plan, and return it. Collective.

    ``initialize`` sets the dtype. dtype, config: ignored. kwargs: tp_group, which must have those ranks. Raises:
    ValueError; as ``zcomm.parallel.tensor``.
    """
    import torch

    from zcomm.comm.job import current
    from zcomm.comm.mesh import ProcessMesh
    from zcomm.compat.deepspeed import TORCH_DISTRIBUTED_DEFAULT_PORT, init_distributed
    from zcomm.compat.deepspeed.module_inject.layers import set_autotp_mode
    from zcomm.parallel.tensors import tensor

    group = kwargs.pop("tp_group", None)
    if kwargs:
        raise TypeError(f"tp_model_init() has no argument {sorted(kwargs)[0]!r}")
    if not torch.distributed.is_initialized():
        init_distributed(distributed_port=TORCH_DISTRIBUTED_DEFAULT_PORT)
    comm = current()
    if tp_size < 1 or comm.world_size % tp_size:
        raise ValueError(f"tp_model_init(): tp_size={tp_size} does not divide the {comm.world_size} ranks")
    mesh = ProcessMesh(comm, data=comm.world_size // tp_size, tensor=tp_size)
    if group is not None and tuple(torch.distributed.get_process_group_ranks(group)) != mesh.ranks("tensor"):
        raise ValueError(
            f"tp_model_init(): tp_group has ranks {torch.distributed.get_process_group_ranks(group)}, but tp_size="
            f"{tp_size} divides the model over ranks {', '.join(map(str, mesh.ranks('tensor')))}"
        )
    set_autotp_mode(training=True)
    if tp_size > 1:
        tensor(model, mesh)
    _meshes[model] = mesh
    return model


def mesh_of(model: Any) -> ProcessMesh | None:
    """Return the mesh of a model that ``tp_model_init`` has divided."""
    return _meshes.get(model) if isinstance(model, nn.Module) else None
