"""zcomm: collectives, memory tiers and ZeRO for PyTorch programs that do not fit their memory.

Importing this package touches no device, no network and starts nothing; names load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from zcomm import optim, parallel, zero
    from zcomm._core import CollectiveMismatch, CudaError, PeerLost
    from zcomm.comm.bucket_layout import BucketLayout
    from zcomm.comm.codec import Codec, Compression
    from zcomm.comm.communicator import Communicator
    from zcomm.comm.functions import (
        all_gather,
        all_reduce,
        all_to_all,
        barrier,
        broadcast,
        empty,
        gather,
        local_rank,
        rank,
        recv,
        reduce,
        reduce_scatter,
        scatter,
        send,
        world_size,
    )
    from zcomm.comm.job import init, is_initialized, shutdown
    from zcomm.comm.mesh import ProcessMesh
    from zcomm.comm.work import Work
    from zcomm.engine import Engine, initialize
    from zcomm.memory.activations import offload_activations
    from zcomm.memory.linear_cross_entropy import linear_cross_entropy
    from zcomm.memory.split_batch import split_batch
    from zcomm.memory.swap_file import SwapFile, pinned_empty
    from zcomm.profiling import profile, torch_profiler
    from zcomm.watch.rank import log
    from zcomm.zero import Offload, Precision, ZeroOptimizer

_NAMES = {
    "zcomm._core": "CollectiveMismatch CudaError PeerLost",
    "zcomm.comm.functions": "all_gather all_reduce all_to_all barrier broadcast empty gather local_rank rank recv "
    "reduce reduce_scatter scatter send world_size",
    "zcomm.comm.job": "init is_initialized shutdown",
    "zcomm.comm.work": "Work",
    "zcomm.comm.communicator": "Communicator",
    "zcomm.comm.codec": "Codec Compression",
    "zcomm.comm.mesh": "ProcessMesh",
    "zcomm.comm.bucket_layout": "BucketLayout",
    "zcomm.memory.activations": "offload_activations",
    "zcomm.memory.linear_cross_entropy": "linear_cross_entropy",
    "zcomm.memory.split_batch": "split_batch",
    "zcomm.offload": "SwapFile pinned_empty",
    "zcomm.engine": "Engine initialize",
    "zcomm.zero": "Offload Precision ZeroOptimizer",
    "zcomm.profiling": "profile torch_profiler",
    "zcomm.watch.rank": "log",
}
# name -> module that defines it; None: the name is a module itself
_HOME: dict[str, str | None] = {name: home for home, names in _NAMES.items() for name in names.split()}
_HOME |= {"optim": None, "parallel": None, "zero": None}

__all__ = [
    "__version__",
    "init",
    "shutdown",
    "is_initialized",
    "rank",
    "world_size",
    "local_rank",
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "gather",
    "scatter",
    "all_to_all",
    "send",
    "recv",
    "barrier",
    "empty",
    "BucketLayout",
    "Codec",
    "Communicator",
    "Compression",
    "ProcessMesh",
    "Work",
    "CollectiveMismatch",
    "PeerLost",
    "CudaError",
    "pinned_empty",
    "SwapFile",
    "offload_activations",
    "linear_cross_entropy",
    "split_batch",
    "optim",
    "parallel",
    "zero",
    "Offload",
    "Precision",
    "ZeroOptimizer",
    "Engine",
    "initialize",
    "profile",
    "torch_profiler",
    "log",
]  # the keys of _HOME, spelled out for type checkers


if not TYPE_CHECKING:  # a type checker would take any name for one of the package

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'zcomm' has no attribute {name!r}")
        home = _HOME[name]
        value = (
            importlib.import_module(f"zcomm.{name}") if home is None else getattr(importlib.import_module(home), name)
        )
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
