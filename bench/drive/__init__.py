"""Parts of `bench/swap.py`: the swap file, fio, DeepSpeed, the device's counters, the swapped step."""

from __future__ import annotations
