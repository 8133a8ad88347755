"""``import zcomm.compat.deepspeed as deepspeed``: the names that programs for DeepSpeed use.

A name is present, or raises on use (table.py), or raises AttributeError; docs/compat.md lists all of them.
Importing loads nothing heavy: modules are loaded when they are first used. ``import deepspeed`` of a program that is
not to be touched finds this by alias.py: ``python -m zcomm.compat.deepspeed script.py``.
"""

from __future__ import annotations

import argparse
import datetime
import os
from typing import TYPE_CHECKING, Any

from zcomm.compat.deepspeed.modules import names_of, path_entry

if TYPE_CHECKING:
    from zcomm.bootstrap.deadlines import Deadlines
    from zcomm.comm.communicator import Communicator
    from zcomm.compat.deepspeed import accelerator, checkpointing, comm, runtime, utils
    from zcomm.compat.deepspeed.alias import install
    from zcomm.compat.deepspeed.runtime import lr_schedules
    from zcomm.engine import Engine as DeepSpeedEngine
    from zcomm.zero import ZeroOptimizer

__all__ = [
    "DeepSpeedEngine",
    "accelerator",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "install",
    "lr_schedules",
    "ops",
    "runtime",
    "set_autotp_mode",
    "tp_model_init",
    "utils",
    "zero",
]
__version__ = "0.19.8"  # the version of DeepSpeed that these names and numbers are of
__version_major__, __version_minor__, __version_patch__ = 0, 19, 8
TORCH_DISTRIBUTED_DEFAULT_PORT = 29500

__path__.append(path_entry(__name__))

# Backends that zcomm's own transports replace; others are passed on by name, and refused where they are not built.
# ZeRO's collectives are in host memory, of a model on a GPU, too: scripts that name "nccl" mean the usual one.
_OWN_TRANSPORT = {None: "auto", "gloo": "auto", "ccl": "auto", "nccl": "auto"}


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: datetime.timedelta | float | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> Communicator:
    """Join the job (``zcomm.init``), and create torch.distributed's default group on backend "zcomm" if it is missing.

    dist_backend: None, "zcomm" (``get_accelerator().communication_backend_name()``), "gloo", "ccl" or "nccl" select
    zcomm's own choice for this machine. For the program's own collectives on CUDA tensors also call
    ``zcomm.init("cuda_ipc")`` or "nccl". Another name selects that backend.
    distributed_port: used if MASTER_ADDR is set and MASTER_PORT is not. timeout: a timedelta, or seconds;
    None: as in zcomm.init (DEEPSPEED_TIMEOUT minutes, else 10 minutes, and 30 while late ranks are alive).
    rank, world_size: -1 = from the environment. dist_init_required False: zcomm or torch.distributed must have joined.
    auto_mpi_discovery, verbose, config have no effect: MPI's variables are always read, and nothing is printed.
    Raises: ValueError, NotImplementedError (backend not built), TimeoutError, ConnectionError.
    """
    from zcomm.bootstrap.deadlines import Deadlines
    from zcomm.comm import job as _job
    from zcomm.engine.build import check_join

    check_join(distributed_port, dist_init_required)
    seconds = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else timeout
    deadlines = Deadlines.of(seconds)
    backend = _OWN_TRANSPORT.get(dist_backend) or str(dist_backend)
    given = (rank if rank >= 0 else None, world_size if world_size > 0 else None)
    comm = _job.init(backend, seconds, rank=given[0], world_size=given[1], init_method=init_method)
    _serve_torch_distributed(comm, *given, init_method, deadlines)
    return comm


def _serve_torch_distributed(
    comm: Communicator, rank: int | None, world_size: int | None, init_method: str | None, deadlines: Deadlines
) -> None:
    """Create torch.distributed's default group, which scripts use after init_distributed, unless it exists.

    Ranks known only from the arguments of an earlier ``zcomm.init`` get none, because its group would differ.
    """
    import dataclasses
    import logging
    import time

    import torch.distributed as dist

    if dist.is_initialized():
        return
    import zcomm.torch_backend  # noqa: F401  (registers "zcomm")
    from zcomm.bootstrap import rendezvous

    job = rendezvous.find_job(rank, world_size, init_method)
    if (job.rank, job.world_size) != (comm.rank, comm.world_size):
        logging.getLogger("zcomm").warning(
            "deepspeed: torch.distributed gets no default group, since zcomm.init() was given this rank (%d of %d) by "
            "arguments; give them to deepspeed.init_distributed() instead",
            comm.rank,
            comm.world_size,
        )
        return
    store: dist.Store = dist.HashStore()
    if job.world_size > 1:
        if (job.init_method or "").startswith("file://"):  # a file belongs to one meeting
            job = dataclasses.replace(job, init_method=f"{job.init_method}-torch")
        seconds = deadlines.timeout_s
        opened = rendezvous.open_store(job, time.monotonic() + seconds, seconds)
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"zcomm-torch/{restart}", opened)
    dist.init_process_group(
        "zcomm",
        store=store,
        rank=job.rank,
        world_size=job.world_size,
        timeout=datetime.timedelta(seconds=deadlines.limit_s),
    )


def initialize(*args: Any, **kwargs: Any) -> tuple[DeepSpeedEngine, ZeroOptimizer | None, Any, Any]:
    """Call ``init_distributed``, unless torch.distributed has a default group, and ``zcomm.initialize``.

    dist_init_required False: the job must have been joined, and torch.distributed is not changed.
    As DeepSpeed's it moves the model to the accelerator's device (the rank's own among CUDA devices); ``device=``
    chooses another one.

    Raises: as ``zcomm.initialize`` and ``get_accelerator``.
    """
    import inspect

    import torch

    from zcomm.compat.deepspeed import hugging_face
    from zcomm.compat.deepspeed.accelerator import training_device
    from zcomm.compat.deepspeed.runtime import base_optimizer
    from zcomm.compat.deepspeed.runtime.zero import partition_parameters  # noqa: F401  (gives parameters ds_id, ...)
    from zcomm.compat.deepspeed.tp_model import mesh_of
    from zcomm.compat.deepspeed.utils import groups
    from zcomm.engine import build

    given = inspect.signature(build.initialize).bind(*args, **kwargs).arguments
    if given.get("dist_init_required") is not False and not torch.distributed.is_initialized():
        port = given.get("distributed_port")
        init_distributed(distributed_port=TORCH_DISTRIBUTED_DEFAULT_PORT if port is None else port)
    if torch.distributed.is_initialized():
        hugging_face.check_ranks(torch.distributed.get_world_size())
    base_optimizer.install()
    sources = (given.get("mesh"), given.get("mpu"), given.get("mesh_param"))
    mesh = mesh_of(given.get("model"))
    if mesh is not None and all(each is None for each in sources):
        kwargs["mesh"] = mesh
    if kwargs.get("device") is None:
        kwargs["device"] = training_device()
    engine, *others = build.initialize(*args, **kwargs)
    groups.adopt(engine.comm, engine.ranks)
    if groups.mesh_device is not None or hasattr(engine.mpu, "get_sequence_parallel_group"):
        engine.seq_parallel_group = groups._part("sequence_parallel")
    if groups.mesh_device is not None or groups.tensor_mesh_device is not None:
        engine.data_group = groups._part("data_parallel")
    return engine, *others


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` (a flag for the script itself) and ``--deepspeed_config FILE`` to ``parser``."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed's arguments, served by zcomm")
    group.add_argument("--deepspeed", action="store_true", help="for the script to read; changes nothing by itself")
    group.add_argument("--deepspeed_config", metavar="FILE", default=None, help="JSON configuration file")
    return parser


def tp_model_init(model: Any, tp_size: int, dtype: Any = None, config: Any = None, **kwargs: Any) -> Any:
    """See ``tp_model.tp_model_init``."""
    from zcomm.compat.deepspeed import tp_model

    return tp_model.tp_model_init(model, tp_size, dtype, config, **kwargs)


def set_autotp_mode(training: bool = False) -> None:
    """See ``module_inject.layers.set_autotp_mode``."""
    from zcomm.compat.deepspeed.module_inject import layers

    layers.set_autotp_mode(training)


__getattr__ = names_of(__name__)
