"""``import zcomm.compat.deepspeed as deepspeed``: the names that a DeepSpeed training script uses.

Only names that zcomm serves are here; another one is an AttributeError that says so. Importing loads nothing heavy:
the engine and ``zero`` come when they are first used.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zcomm import zero
    from zcomm.comm import Communicator
    from zcomm.engine import Engine as DeepSpeedEngine
    from zcomm.engine import initialize

__all__ = ["DeepSpeedEngine", "add_config_arguments", "init_distributed", "initialize", "zero"]

# Backends whose work zcomm's own transports do; others are passed on by name, and refused where they are not built.
_OWN_TRANSPORT = {None: "auto", "gloo": "auto", "ccl": "auto"}


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
    """Join the job (``zcomm.init``).

    dist_backend: None, "gloo" or "ccl" take zcomm's own choice for this machine; another name asks for that backend.
    distributed_port: used where MASTER_ADDR is set and MASTER_PORT is not. timeout: a timedelta, or seconds.
    rank, world_size: -1 = from the environment. dist_init_required False: do not join, it must have happened.
    auto_mpi_discovery, verbose, config have no effect: MPI's variables are always read, and nothing is printed.
    Raises: ValueError, NotImplementedError (backend not built), TimeoutError, ConnectionError.
    """
    from zcomm import _job

    if dist_init_required is False and not _job.is_initialized():
        raise ValueError("dist_init_required=False, but zcomm.init() has not been called")
    if "MASTER_ADDR" in os.environ:
        os.environ.setdefault("MASTER_PORT", str(distributed_port))
    seconds = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else float(timeout)
    backend = _OWN_TRANSPORT.get(dist_backend) or str(dist_backend)
    return _job.init(
        backend,
        seconds,
        rank=rank if rank >= 0 else None,
        world_size=world_size if world_size > 0 else None,
        init_method=init_method,
    )


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` (a flag for the script itself) and ``--deepspeed_config FILE`` to ``parser``."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed's arguments, served by zcomm")
    group.add_argument("--deepspeed", action="store_true", help="for the script to read; changes nothing by itself")
    group.add_argument("--deepspeed_config", metavar="FILE", default=None, help="JSON configuration file")
    return parser


def __getattr__(name: str) -> Any:
    if name == "initialize":
        return importlib.import_module("zcomm.engine").initialize
    if name == "DeepSpeedEngine":
        return importlib.import_module("zcomm.engine").Engine
    if name == "zero":
        return importlib.import_module("zcomm.zero")
    raise AttributeError(f"zcomm.compat.deepspeed has no {name!r}; it serves: {', '.join(__all__)}")
