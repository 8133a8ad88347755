"""Parts of `bench/offload.py`: training on one GPU with state elsewhere, its peers, and copies of pinned memory."""

from __future__ import annotations
