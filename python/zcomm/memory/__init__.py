"""Memory tiers: pinned host memory, swap files on NVMe, copy streams of a device."""
