"""Open MPI or MPICH through mpi4py, where the ranks were started by that MPI's mpirun."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from collective.peers import Absent
from harness.launch import MPI as STARTED_BY

if TYPE_CHECKING:
    from torch import Tensor

    from collective.operations import Operation

_TYPES = {"float32": "FLOAT", "float64": "DOUBLE", "int32": "INT32_T", "int64": "INT64_T"}
_REDUCE_OPS = {"sum": "SUM", "min": "MIN", "max": "MAX", "prod": "PROD"}


class MpiPeer:
    def __init__(self, name: str, world: int) -> None:
        if os.environ.get(STARTED_BY) != name:
            raise Absent("these ranks were not started by it")
        try:
            import mpi4py

            mpi4py.rc.thread_level = "funneled"  # what one calling thread needs: the fastest
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise Absent(f"mpi4py: {error}") from None
        if MPI.COMM_WORLD.size != world:
            raise Absent(f"mpi4py sees a world of {MPI.COMM_WORLD.size}: it was built for another MPI")
        self._mpi = MPI
        self.version: str = MPI.Get_library_version().splitlines()[0].strip("\0 ")

    def call(self, operation: Operation, redop: str, inp: Tensor, out: Tensor) -> Callable[[], object] | None:
        mpi, comm = self._mpi, self._mpi.COMM_WORLD
        type_name = _TYPES.get(str(out.dtype).removeprefix("torch."))
        if type_name is None or (operation.reduces and redop not in _REDUCE_OPS):
            return None
        kind: Any = getattr(mpi, type_name)
        source, target = [inp.numpy(), kind], [out.numpy(), kind]
        op = getattr(mpi, _REDUCE_OPS.get(redop, "SUM"))
        after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        return {
            "all_reduce": lambda: comm.Allreduce(mpi.IN_PLACE, target, op),
            "reduce_scatter": lambda: comm.Reduce_scatter_block(source, target, op),
            "all_gather": lambda: comm.Allgather(source, target),
            "broadcast": lambda: comm.Bcast(target, 0),
            "all_to_all": lambda: comm.Alltoall(source, target),
            "sendrecv": lambda: comm.Sendrecv(source, after, recvbuf=target, source=before),
        }[operation.name]

    def close(self) -> None:
        self._mpi.COMM_WORLD.Barrier()  # finalised at exit
