"""Parts of `bench/swap.py`: the swap file, fio and DeepSpeed beside it, the device's counters, the swapped step."""

from __future__ import annotations
