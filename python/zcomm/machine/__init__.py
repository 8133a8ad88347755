"""The machine: its GPUs, and speeds and sizes that were measured once."""
