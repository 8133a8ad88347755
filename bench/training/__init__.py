"""Parts of `bench/zero.py`: a training step by zcomm and by its peers, overlap, the cost of a profile."""

from __future__ import annotations
