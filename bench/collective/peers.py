"""Other libraries that are timed with zcomm, in the same processes: torch.distributed, MPI, DeepSpeed's shm."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from harness.launch import MPI as STARTED_BY
from harness.peers import Absent, default_group, require_backend

if TYPE_CHECKING:
    from torch import Tensor

    from collective.operations import Call, Operation

NAMES = ("gloo", "openmpi", "mpich", "deepspeed-shm", "torch", "nccl")
"""nccl: torch.distributed's, on CUDA tensors (--backend cuda_ipc or nccl).
torch: not a peer but torch.distributed's call with backend "zcomm", that is, what a PyTorch program pays."""


class Peer(Protocol):
    """A library with the operations of the bench."""

    def call(self, operation: Operation, redop: str, inp: Tensor, out: Tensor) -> Call | None:
        """Return the operation on these buffers (in == out if it works in place).

        None: the peer has no such operation.
        """

    def close(self) -> None: ...


def open_peer(name: str, rank: int, world: int) -> Peer:
    """Open a peer. Collective. Raises: Absent."""
    if name in ("openmpi", "mpich"):
        return MpiPeer(name, world)
    if name == "deepspeed-shm":
        return DeepSpeedPeer(rank, world)
    return TorchPeer("zcomm" if name == "torch" else name, rank, world)


class TorchPeer:
    """torch.distributed: Gloo, NCCL, or zcomm's own backend."""

    _REDUCE_OPS: ClassVar = {"sum": "SUM", "avg": "AVG", "min": "MIN", "max": "MAX", "prod": "PRODUCT"}

    def __init__(self, backend: str, rank: int, world: int) -> None:
        import torch.distributed as dist

        require_backend(backend)
        default_group(rank, world)
        self._group = dist.new_group(backend=backend)

    def call(self, operation: Operation, redop: str, inp: Tensor, out: Tensor) -> Call | None:
        import torch.distributed as dist

        if operation.torch is None:
            return None
        return operation.torch(dist, self._group, getattr(dist.ReduceOp, self._REDUCE_OPS[redop]), inp, out)

    def close(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group(self._group)


class MpiPeer:
    """Open MPI or MPICH through mpi4py, if that MPI's mpirun started the ranks."""

    _TYPES: ClassVar = {"float32": "FLOAT", "float64": "DOUBLE", "int32": "INT32_T", "int64": "INT64_T"}
    _REDUCE_OPS: ClassVar = {"sum": "SUM", "min": "MIN", "max": "MAX", "prod": "PROD"}

    def __init__(self, name: str, world: int) -> None:
        if os.environ.get(STARTED_BY) != name:
            raise Absent("these ranks were not started by it")
        try:
            import mpi4py

            mpi4py.rc.thread_level = "funneled"  # the fastest level, enough for one calling thread
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise Absent(f"mpi4py: {error}") from None
        if MPI.COMM_WORLD.size != world:
            raise Absent(f"mpi4py sees a world of {MPI.COMM_WORLD.size}: it was built for another MPI")
        self._mpi: Any = MPI
        self.version: str = MPI.Get_library_version().splitlines()[0].strip("\0 ")

    def call(self, operation: Operation, redop: str, inp: Tensor, out: Tensor) -> Call | None:
        type_name = self._TYPES.get(str(out.dtype).removeprefix("torch."))
        if operation.mpi is None or type_name is None or (operation.reduces and redop not in self._REDUCE_OPS):
            return None
        mpi: Any = self._mpi
        kind, op = getattr(mpi, type_name), getattr(mpi, self._REDUCE_OPS.get(redop, "SUM"))
        return operation.mpi(mpi, mpi.COMM_WORLD, op, [inp.numpy(), kind], [out.numpy(), kind])

    def close(self) -> None:
        self._mpi.COMM_WORLD.Barrier()  # finalised at exit


class DeepSpeedPeer:
    """DeepSpeed's shared-memory all_reduce for CPUs, which it compiles on first use."""

    def __init__(self, rank: int, world: int) -> None:
        # It asks these whether all ranks share the host, and for a name for its shared memory.
        os.environ.setdefault("LOCAL_SIZE", str(world))
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(os.getppid()))
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        try:
            from deepspeed.ops.op_builder.cpu.comm import ShareMemCommBuilder
        except ImportError:
            raise Absent("deepspeed is not installed") from None
        try:
            ShareMemCommBuilder().load().initialize(world, rank)
        except Exception as error:
            raise Absent(f"its op does not build here: {error}") from None

    def call(self, operation: Operation, redop: str, inp: Tensor, out: Tensor) -> Call | None:
        import torch

        if operation.deepspeed is None or redop != "sum" or out.dtype not in (torch.float32, torch.bfloat16):
            return None
        return operation.deepspeed(torch, out)

    def close(self) -> None:
        """Do nothing: the shared memory ends with the process."""
