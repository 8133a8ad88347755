"""The job's ranks as DeepSpeed's groups (``utils.groups``, ``utils.bwc``).

Groups belong to the engine that was made last: its mesh, or its mpu. Without these all ranks form one data-parallel
group. Groups of other kinds have one rank. Sizes and ranks are known without a call between ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from zcomm.comm import job

if TYPE_CHECKING:
    from zcomm.comm.communicator import Communicator
    from zcomm.comm.mesh import ProcessMesh
    from zcomm.engine.data_ranks import DataRanks

mpu: Any = None
mesh_device: Any = None  # of "data_parallel" and "sequence_parallel"
tensor_mesh_device: Any = None  # of "data_parallel" and "tensor_model_parallel"
expert_mesh_device: Any = None  # of "expert_data_parallel" and "expert_parallel"
expert_parallel_size_ = 1
_adopted: tuple[Communicator, DataRanks] | None = None  # of the last engine


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Do nothing: ``deepspeed.initialize`` reads the mpu, and the size of groups of experts from the layers."""


def check_mpu(mpu: Any, call: str) -> None:
    """Raise NotImplementedError for an mpu with model-parallel ranks or pipeline stages. None passes."""
    for kind, size in (
        ("model-parallel ranks", bwc_tensor_model_parallel_world_size(mpu)),
        ("pipeline stages", bwc_pipeline_parallel_world_size(mpu)),
    ):
        if size > 1:
            raise NotImplementedError(f"{call}: the mpu has {size} {kind}, which zcomm does not support")


def adopt(comm: Communicator, ranks: DataRanks) -> None:
    """Let the functions here tell of the ranks of an engine. Collective if several ranks share a sample.

    Then torch gets a DeviceMesh of them, unless it has no default group, or an mpu has the groups.
    """
    global mpu, mesh_device, tensor_mesh_device, expert_mesh_device, _adopted
    mpu, mesh_device, tensor_mesh_device, expert_mesh_device, _adopted = ranks.mpu, None, None, None, (comm, ranks)
    mesh = ranks.mesh
    if mesh is None or not dist.is_initialized():
        return
    if _get_max_expert_size() > 1 and ranks.size == _size():
        expert_mesh_device = _device_mesh(mesh, "expert", "expert_data_parallel", "expert_parallel")
    if mpu is not None or (ranks.sequence > 1 and ranks.model_parallel > 1):
        return  # with both, torch's mesh would be of some ranks
    if ranks.sequence > 1:
        mesh_device = _device_mesh(mesh, "sequence", "data_parallel", "sequence_parallel")
    elif "tensor" in mesh.axes and mesh.size("tensor") == ranks.model_parallel > 1:
        tensor_mesh_device = _device_mesh(mesh, "tensor", "data_parallel", "tensor_model_parallel")


def _device_mesh(mesh: ProcessMesh, axis: str, *names: str) -> Any:
    """Return torch's mesh of all other axes together, and of ``axis``. Collective."""
    from torch.distributed.device_mesh import DeviceMesh

    (ranks,) = mesh.groups(*mesh.axes)
    box = torch.tensor(ranks).view(mesh.shape).movedim(mesh.axes.index(axis), -1)
    return DeviceMesh("cpu", box.reshape(-1, mesh.size(axis)), mesh_dim_names=names)


def _data() -> DataRanks | None:
    """Return the ranks of the last engine, unless its job has ended."""
    if _adopted is None or not job.is_initialized() or job.current() is not _adopted[0]:
        return None
    return _adopted[1]


def _size() -> int:
    if job.is_initialized():
        return job.current().world_size
    return dist.get_world_size()


def _rank() -> int:
    return job.current().rank if job.is_initialized() else dist.get_rank()


def _group() -> dist.ProcessGroup:
    """Return torch.distributed's default group. Raises: RuntimeError if there is none."""
    if not dist.is_initialized():
        raise RuntimeError("there is no torch.distributed group: call deepspeed.init_distributed() first")
    group = dist.group.WORLD
    assert group is not None
    return group


def _part(name: str) -> dist.ProcessGroup:
    """Return the group of the mesh or of the mpu. name: data_parallel or sequence_parallel. Raises: RuntimeError."""
    world = _group()
    get = getattr(mpu, f"get_{name}_group", None)
    if get is not None:
        group: dist.ProcessGroup = get()
        return group
    for made in (mesh_device, tensor_mesh_device):
        if made is not None and name in made.mesh_dim_names:
            part: dist.ProcessGroup = made.get_group(name)
            return part
    ranks = _data()
    if name == "data_parallel" and (ranks is None or ranks.size == _size()):
        return world
    raise RuntimeError(f"there is no torch.distributed group of {name}: the mpu lacks get_{name}_group()")


def get_data_parallel_group() -> dist.ProcessGroup:
    """Return the group of ranks that read different samples. Raises: RuntimeError before ``init_distributed``."""
    return _part("data_parallel")


def get_data_parallel_world_size() -> int:
    """Return the number of ranks that read different samples."""
    ranks = _data()
    return _size() if ranks is None else ranks.size


def get_data_parallel_rank() -> int:
    """Return this rank's number among those that read different samples."""
    ranks = _data()
    return _rank() if ranks is None else ranks.rank


def get_model_parallel_world_size() -> int:
    """Return the number of ranks that divide the tensors of one model."""
    ranks = _data()
    return 1 if ranks is None else ranks.model_parallel


def get_model_parallel_rank() -> int:
    """Return this rank's number among these."""
    return _along("tensor", "pipe").index(_rank())


def get_model_parallel_group() -> dist.ProcessGroup:
    """Return their group. Raises: NotImplementedError for other axes than "tensor" without an mpu."""
    return _of_mpu("model_parallel")


def get_tensor_model_parallel_world_size() -> int:
    """Return the number of ranks along the axis "tensor"."""
    return len(_along("tensor"))


def get_tensor_model_parallel_rank() -> int:
    """Return this rank's number along it."""
    return _along("tensor").index(_rank())


def get_tensor_model_parallel_src_rank() -> int:
    """Return the first rank along it, by its number in the job."""
    return _along("tensor")[0]


def get_tensor_model_parallel_group() -> dist.ProcessGroup:
    """Return their group. Raises: as get_model_parallel_group."""
    return _of_mpu("tensor_model_parallel")


def _along(*axes: str) -> Sequence[int]:
    """Return the ranks along those of ``axes`` that the mesh of the last engine has."""
    ranks = _data()
    if ranks is None or ranks.mesh is None:
        return [_rank()]
    return ranks.mesh.ranks(*(axis for axis in ranks.mesh.axes if axis in axes))


def _of_mpu(name: str) -> dist.ProcessGroup:
    get = getattr(mpu, f"get_{name}_group", None)
    if get is None and tensor_mesh_device is not None:
        return _part("tensor_model_parallel")
    if get is None:
        raise NotImplementedError(
            f"groups.get_{name}_group() is not available: no mpu with get_{name}_group() was given"
        )
    group: dist.ProcessGroup = get()
    return group


def _get_sequence_data_parallel_world_size() -> int:
    ranks = _data()
    return _size() if ranks is None else ranks.size * ranks.sequence


def _get_sequence_data_parallel_rank() -> int:
    ranks = _data()
    return _rank() if ranks is None or ranks.mesh is None else ranks.sums_over.index(_rank())


def _get_sequence_data_parallel_group() -> dist.ProcessGroup:
    world = _group()
    if _get_sequence_data_parallel_world_size() == _size():
        return world
    return _part("sequence_data_parallel" if hasattr(mpu, "get_sequence_data_parallel_group") else "data_parallel")


# The names with an underscore are those that DeepSpeed's users call.
_get_data_parallel_group = get_data_parallel_group
_get_data_parallel_world_size = get_data_parallel_world_size
_get_data_parallel_rank = get_data_parallel_rank
_get_model_parallel_world_size = get_model_parallel_world_size
_get_expert_model_parallel_world_size = get_model_parallel_world_size
_clone_world_group = _group


def _get_data_parallel_group_ranks() -> list[int]:
    ranks = _data()
    if ranks is None or ranks.mesh is None:
        return list(range(_size()))
    return list(_along("data", "replicate", "shard", "expert_data", "expert"))


def _get_sequence_parallel_world_size() -> int:
    ranks = _data()
    return 1 if ranks is None else ranks.sequence


def _get_sequence_parallel_rank() -> int:
    ranks = _data()
    if ranks is None or ranks.mesh is None or ranks.sequence == 1:
        return 0
    return ranks.mesh.coordinate[ranks.mesh.axes.index("sequence")]


def _get_sequence_parallel_group() -> dist.ProcessGroup:
    """Return the group of ranks that read the same samples. Raises: NotImplementedError if each rank reads others."""
    if _get_sequence_parallel_world_size() == 1:
        raise NotImplementedError(
            'groups._get_sequence_parallel_group() is not available: "sequence_parallel_size" is 1, so that all ranks '
            "form one data-parallel group"
        )
    return _part("sequence_parallel")


def _get_broadcast_src_rank() -> int:
    return 0


def _get_zero_param_intra_parallel_group() -> None:
    """Return None: there are no second shards of parameters (hpZ)."""


def _zero_param_parallel_is_initialized() -> bool:
    return False


# --- groups of experts: of layers with the same ``ep_size``, named "ep_size_" and that number -------------------------


def mesh_of_experts(size: int) -> ProcessMesh:
    """Return the mesh of layers of experts that ``size`` ranks divide: the last engine's, or a new one. Collective."""
    from zcomm.comm.mesh import ProcessMesh

    ranks = _data()
    if ranks is not None and ranks.mesh is not None and _get_max_expert_size() == size:
        return ranks.mesh
    world = job.init()
    if world.world_size % size:
        raise ValueError(f"{size} ranks with different experts do not divide the {world.world_size} ranks of the job")
    return ProcessMesh(world, expert_data=world.world_size // size, expert=size)


def _expert_ranks(group_name: str) -> tuple[Sequence[int], Sequence[int]]:
    """Return the ranks with different experts, and those with the same ones. Raises: AssertionError as DeepSpeed's."""
    if group_name == "ep_size_1":
        return [_rank()], _get_data_parallel_group_ranks()
    if _get_max_expert_size() == 1 or group_name != _get_max_expert_size_name():
        raise AssertionError(f"there is no group {group_name!r} of experts: initialize a model with such layers first")
    data = _along("expert_data", "data", "shard", "replicate")
    return _along("expert"), data


def _get_expert_parallel_group_ranks(group_name: str) -> list[int]:
    return list(_expert_ranks(group_name)[0])


def _get_expert_data_parallel_group_ranks(group_name: str) -> list[int]:
    return list(_expert_ranks(group_name)[1])


def _get_expert_parallel_world_size(group_name: str) -> int:
    return len(_expert_ranks(group_name)[0])


def _get_expert_data_parallel_world_size(group_name: str) -> int:
    return len(_expert_ranks(group_name)[1])


def _get_expert_parallel_rank(group_name: str) -> int:
    return _expert_ranks(group_name)[0].index(_rank())


def _get_expert_data_parallel_rank(group_name: str) -> int:
    return _expert_ranks(group_name)[1].index(_rank())


def _get_expert_parallel_src_rank(group_name: str) -> int:
    return _expert_ranks(group_name)[0][0]


def _get_expert_broadcast_src_rank(group_name: str) -> int:
    return _expert_ranks(group_name)[1][0]


def _get_max_expert_size() -> int:
    return 1 if _data() is None else len(_along("expert"))


def _get_max_expert_size_name() -> str:
    return f"ep_size_{_get_max_expert_size()}"


def _get_max_expert_parallel_group() -> dist.ProcessGroup:
    return _get_expert_parallel_group(_get_max_expert_size_name())


def _get_expert_parallel_group(group_name: str) -> dist.ProcessGroup:
    _expert_ranks(group_name)
    return _get_expert_parallel_group_dict()[group_name]


def _get_expert_data_parallel_group(group_name: str) -> dist.ProcessGroup:
    _expert_ranks(group_name)
    return _get_expert_data_parallel_group_dict()[group_name]


def _get_expert_parallel_group_dict() -> dict[str, dist.ProcessGroup]:
    return _expert_groups("expert_parallel")


def _get_expert_data_parallel_group_dict() -> dict[str, dist.ProcessGroup]:
    return _expert_groups("expert_data_parallel")


def _expert_groups(name: str) -> dict[str, dist.ProcessGroup]:
    if _data() is None or expert_mesh_device is None:
        return {}
    return {_get_max_expert_size_name(): expert_mesh_device.get_group(name)}


# --- utils.bwc: sizes and ranks of groups that an mpu has, and those without one --------------------------------------


def _of(mpu: Any, names: tuple[str, ...], alone: int) -> int:
    for name in names:
        if mpu is not None and hasattr(mpu, name):
            return int(getattr(mpu, name)())
    return alone


def bwc_tensor_model_parallel_rank(mpu: Any = None) -> int:
    """Return the rank among model-parallel ranks; 0 without an mpu."""
    return _of(mpu, ("get_tensor_model_parallel_rank", "get_slice_parallel_rank", "get_model_parallel_rank"), 0)


def bwc_tensor_model_parallel_world_size(mpu: Any = None) -> int:
    """Return the number of model-parallel ranks; 1 without an mpu."""
    names = ("get_tensor_model_parallel_world_size", "get_slice_parallel_world_size", "get_model_parallel_world_size")
    return _of(mpu, names, 1)


def bwc_pipeline_parallel_world_size(mpu: Any = None) -> int:
    """Return the number of pipeline stages; 1 without an mpu."""
    return _of(mpu, ("get_pipeline_model_parallel_world_size", "get_pipe_parallel_world_size"), 1)
