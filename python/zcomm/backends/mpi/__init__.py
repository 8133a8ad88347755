"""Backend "mpi": the job of an mpirun, over the network of its MPI."""
