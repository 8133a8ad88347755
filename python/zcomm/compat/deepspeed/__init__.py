"""``import zcomm.compat.deepspeed as deepspeed``: the names that a DeepSpeed training script uses.

Only names that zcomm serves are here; another one raises AttributeError. Importing loads nothing heavy: the engine,
``zero``, ``comm``, ``checkpointing``, ``moe`` (which refuses), ``ops``, ``utils`` and ``accelerator`` are loaded when
they are first used. A script that is not to be touched at all runs by ``python -m zcomm.compat.deepspeed script.py``.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zcomm import schedulers as lr_schedules
    from zcomm import zero
    from zcomm.comm.communicator import Communicator
    from zcomm.compat.deepspeed import accelerator, checkpointing, comm, moe, ops, utils
    from zcomm.engine import Engine as DeepSpeedEngine

__all__ = [
    "DeepSpeedEngine",
    "accelerator",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "lr_schedules",
    "moe",
    "ops",
    "utils",
    "zero",
]
__version__ = "0.19.8"  # the version of DeepSpeed that these names and numbers are of

# Backends that zcomm's own transports replace; others are passed on by name, and refused where they are not built.
# ZeRO's collectives are in host memory, of a model on a GPU, too: scripts that name "nccl" mean the usual one.
_OWN_TRANSPORT = {None: "auto", "gloo": "auto", "ccl": "auto", "nccl": "auto"}


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: datetime.timedelta | float = 60.0,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> Communicator:
    """Join the job (``zcomm.init``), and make torch.distributed's default group on backend "zcomm" where there is none.

    dist_backend: None, "zcomm" (``get_accelerator().communication_backend_name()``), "gloo", "ccl" or "nccl" take
    zcomm's own choice for this machine. For collectives on CUDA tensors of the program's own:
    ``zcomm.init("cuda_ipc")`` or "nccl" beside it. Another name asks for that backend.
    distributed_port: used where MASTER_ADDR is set and MASTER_PORT is not. timeout: a timedelta, or seconds.
    rank, world_size: -1 = from the environment. dist_init_required False: zcomm or torch.distributed must have joined.
    auto_mpi_discovery, verbose, config have no effect: MPI's variables are always read, and nothing is printed.
    Raises: ValueError, NotImplementedError (backend not built), TimeoutError, ConnectionError.
    """
    from zcomm.comm import job as _job
    from zcomm.engine.build import check_join

    check_join(distributed_port, dist_init_required)
    seconds = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else float(timeout)
    backend = _OWN_TRANSPORT.get(dist_backend) or str(dist_backend)
    given = (rank if rank >= 0 else None, world_size if world_size > 0 else None)
    comm = _job.init(backend, seconds, rank=given[0], world_size=given[1], init_method=init_method)
    _serve_torch_distributed(*given, init_method, seconds)
    return comm


def _serve_torch_distributed(rank: int | None, world_size: int | None, init_method: str | None, seconds: float) -> None:
    """Make torch.distributed's default group, which scripts use after init_distributed, unless they have made one."""
    import dataclasses
    import time

    import torch.distributed as dist

    if dist.is_initialized():
        return
    import zcomm.torch_backend  # noqa: F401  (registers "zcomm")
    from zcomm.bootstrap import rendezvous

    job = rendezvous.find_job(rank, world_size, init_method)
    store: dist.Store = dist.HashStore()
    if job.world_size > 1:
        if (job.init_method or "").startswith("file://"):  # a file belongs to one meeting
            job = dataclasses.replace(job, init_method=f"{job.init_method}-torch")
        opened = rendezvous.open_store(job, time.monotonic() + seconds, seconds)
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"zcomm-torch/{restart}", opened)
    dist.init_process_group(
        "zcomm",
        store=store,
        rank=job.rank,
        world_size=job.world_size,
        timeout=datetime.timedelta(seconds=seconds),
    )


def initialize(*args: Any, **kwargs: Any) -> tuple[DeepSpeedEngine, zero.ZeroOptimizer, Any, Any]:
    """Call ``zcomm.initialize`` with these arguments.

    As DeepSpeed's it takes the model to the accelerator's device (the rank's own among CUDA devices); ``device=``
    chooses another one.

    Raises: as ``zcomm.initialize`` and ``get_accelerator``.
    """
    from zcomm.compat.deepspeed.accelerator import training_device
    from zcomm.engine import build

    if kwargs.get("device") is None:
        kwargs["device"] = training_device()
    return build.initialize(*args, **kwargs)


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` (a flag for the script itself) and ``--deepspeed_config FILE`` to ``parser``."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed's arguments, served by zcomm")
    group.add_argument("--deepspeed", action="store_true", help="for the script to read; changes nothing by itself")
    group.add_argument("--deepspeed_config", metavar="FILE", default=None, help="JSON configuration file")
    return parser


def __getattr__(name: str) -> Any:
    if name == "DeepSpeedEngine":
        return importlib.import_module("zcomm.engine").Engine
    if name == "get_accelerator":
        return importlib.import_module("zcomm.compat.deepspeed.accelerator").get_accelerator
    if name == "ops":  # with what is in it, as there
        importlib.import_module("zcomm.compat.deepspeed.ops.adagrad")
        importlib.import_module("zcomm.compat.deepspeed.ops.lion")
    if name in ("accelerator", "checkpointing", "comm", "moe", "ops", "utils"):
        return importlib.import_module(f"zcomm.compat.deepspeed.{name}")
    if name in ("zero", "lr_schedules"):
        return importlib.import_module("zcomm.zero" if name == "zero" else "zcomm.schedulers")
    raise AttributeError(f"zcomm.compat.deepspeed has no {name!r}; it serves: {', '.join(__all__)}")
