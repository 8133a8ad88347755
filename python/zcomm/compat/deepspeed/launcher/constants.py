"""``deepspeed.launcher.constants``: names of launchers."""

from __future__ import annotations

PDSH_LAUNCHER = "pdsh"
OPENMPI_LAUNCHER = "openmpi"
MPICH_LAUNCHER = "mpich"
IMPI_LAUNCHER = "impi"
MVAPICH_LAUNCHER = "mvapich"
SLURM_LAUNCHER = "slurm"
ELASTIC_TRAINING_ID_DEFAULT = "123456789"
