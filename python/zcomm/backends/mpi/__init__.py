"""Backend "mpi": the job of an mpirun, over whatever network its MPI was built for."""

from __future__ import annotations
