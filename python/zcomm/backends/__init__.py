"""Engines that other projects have built, behind zcomm's own calls: MPI (decision D9)."""
