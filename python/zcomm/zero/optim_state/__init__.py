"""Optimizer state of this rank: in RAM, on NVMe, on a device, or in several of them."""
