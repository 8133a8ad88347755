"""``deepspeed.comm``: torch.distributed under DeepSpeed's name, on the group that init_distributed made.

Names that torch.distributed has are its own; another one is an AttributeError. Thread rule: as torch.distributed.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from zcomm.comm import job
from zcomm.compat.deepspeed import hugging_face, init_distributed
from zcomm.compat.deepspeed.accelerator import get_accelerator
from zcomm.compat.deepspeed.modules import path_entry

__all__ = [
    "all_gather_coalesced",
    "allgather_fn",
    "configure",
    "destroy_process_group",
    "get_all_ranks_from_group",
    "get_comm_operation_count",
    "get_local_rank",
    "get_logged_comm_ops",
    "get_world_group",
    "has_all_gather_into_tensor",
    "has_all_reduce_coalesced",
    "has_coalescing_manager",
    "has_comm_data",
    "has_reduce_scatter_tensor",
    "in_aml",
    "in_aws_sm",
    "in_dlts",
    "inference_all_reduce",
    "init_deepspeed_backend",
    "init_distributed",
    "initialize_mesh_device",
    "is_available",
    "is_initialized",
    "log_summary",
    "reduce_scatter_fn",
    "reset_log",
    "set_backend",
    "timed_op",
]

__path__.append(path_entry(__name__))
Function = TypeVar("Function", bound=Callable[..., Any])


def is_available() -> bool:
    """Return True: the group is zcomm's own."""
    return True


def is_initialized() -> bool:
    """Return True if torch.distributed has a default group."""
    hugging_face.name_backend()
    return dist.is_initialized()


def get_local_rank() -> int:
    """Return this rank's number on its host. Raises: RuntimeError before init_distributed."""
    return job.current().local_rank


def destroy_process_group(group: Any = None) -> None:
    """End ``group``, or the job's group together with ``zcomm.shutdown()``."""
    if dist.is_initialized():
        dist.destroy_process_group(group)
    if group is None:
        job.shutdown()


# --- groups -----------------------------------------------------------------------------------------------------------


def get_world_group() -> Any:
    """Return the group of all ranks. Raises: ValueError before init_distributed."""
    return dist.group.WORLD if dist.is_initialized() else dist.distributed_c10d._get_default_group()


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """Return the job's numbers of the ranks of ``group`` (None: all)."""
    return list(dist.get_process_group_ranks(get_world_group() if group is None else group))


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> Any:
    """Create torch's DeviceMesh of the accelerator's kind. Collective."""
    kind = get_accelerator().device_name()
    return dist.init_device_mesh(kind, tuple(mesh_shape), mesh_dim_names=tuple(mesh_dim_names))


# --- collectives with names of their own ------------------------------------------------------------------------------


def inference_all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> Any:
    """Call all_reduce."""
    return dist.all_reduce(tensor, op=op, group=group)


def allgather_fn(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: Any = None,
    async_op: bool = False,
    debug: Any = None,
) -> Any:
    """Call all_gather_into_tensor."""
    return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


def reduce_scatter_fn(
    output_tensor: torch.Tensor,
    tensor: torch.Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    debug: Any = None,
) -> Any:
    """Call reduce_scatter_tensor."""
    return dist.reduce_scatter_tensor(output_tensor, tensor, op=op, group=group, async_op=async_op)


def all_gather_coalesced(
    output_tensors: Sequence[torch.Tensor],
    input_tensors: Sequence[torch.Tensor],
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Gather each input into its output, one after the other. Returns: a handle if ``async_op`` is True."""
    if len(output_tensors) != len(input_tensors):
        raise ValueError(f"all_gather_coalesced: {len(output_tensors)} outputs for {len(input_tensors)} inputs")
    pairs = zip(output_tensors, input_tensors, strict=True)
    works = [dist.all_gather_into_tensor(out, given, group=group, async_op=async_op) for out, given in pairs]
    return _Works(works) if async_op else None


class _Works:
    """Handle of several operations."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait for all. Raises: the error of one."""
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def has_all_gather_into_tensor() -> bool:
    """Return True: the backend has it."""
    return True


has_reduce_scatter_tensor = has_all_reduce_coalesced = has_all_gather_into_tensor


def has_coalescing_manager() -> bool:
    """Return False: torch's coalescing manager needs a backend that joins operations."""
    return False


# --- the log of collectives -------------------------------------------------------------------------------------------


def _log() -> Any:
    try:
        return importlib.import_module("zcomm.profiling.comms")
    except ModuleNotFoundError as error:
        raise NotImplementedError("deepspeed.comm: this zcomm keeps no log of collectives") from error


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: list[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Set which collectives of engines are logged; None: the setting is not changed.

    deepspeed_config has no effect, because ``initialize`` reads its section ``comms_logger``.
    Raises: NotImplementedError if zcomm keeps no log, and for ``enabled=True``, as engines decide when constructed.
    """
    if enabled:
        raise NotImplementedError(
            'comm.configure(enabled=True) is not available: give initialize() a configuration with "comms_logger": '
            '{"enabled": true}; collectives of the program itself are not logged'
        )
    asked = {"enabled": enabled, "prof_all": prof_all, "prof_ops": prof_ops, "verbose": verbose, "debug": debug}
    asked = {name: value for name, value in asked.items() if value is not None}
    if asked:
        logger = _log().logger
        for name, value in asked.items():
            setattr(logger, name, value)


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> Any:
    """Print the table of logged collectives on rank 0. Raises: NotImplementedError if zcomm keeps no log."""
    return _log().log_summary(show_straggler, return_dict)


def reset_log() -> None:
    """Clear the log."""
    _log().logger.reset_data()


def has_comm_data() -> bool:
    """Return True if a collective was logged."""
    return bool(_log().logger.has_data())


def get_comm_operation_count() -> int:
    """Return how many collectives were logged."""
    return int(_log().logger.get_total_operations())


def get_logged_comm_ops() -> list[str]:
    """Return the names of the operations that were logged."""
    return list(_log().logger.get_operation_names())


def timed_op(func: Function) -> Function:
    """Return ``func``, because engines time their collectives themselves."""
    return func


# --- DeepSpeed's own set-up -------------------------------------------------------------------------------------------


def set_backend() -> None:
    """Do nothing: the backend is the default group's."""


def init_deepspeed_backend(ds_backend: str, timeout: Any = None, init_method: str | None = None) -> None:
    """Do nothing if there is a backend. Raises: RuntimeError before init_distributed."""
    if not dist.is_initialized():
        raise RuntimeError(f"init_deepspeed_backend({ds_backend!r}): call deepspeed.init_distributed() instead")


def in_aml() -> bool:
    """Return True on Azure Machine Learning, by its variable."""
    return "AZUREML_EXPERIMENT_ID" in os.environ


def in_aws_sm() -> bool:
    """Return True on AWS SageMaker, by its variable."""
    return "SM_TRAINING_ENV" in os.environ


def in_dlts() -> bool:
    """Return True on a DLTS cluster, by its variable."""
    return "DLTS_JOB_ID" in os.environ


def __getattr__(name: str) -> Any:
    if name == "comm":
        return importlib.import_module(f"{__name__}.comm")
    if name.startswith("__") or not hasattr(dist, name):
        raise AttributeError(f"zcomm.compat.deepspeed.comm has no {name!r}, and torch.distributed has none either")
    return getattr(dist, name)
