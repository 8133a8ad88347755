"""Snapshots for saves while training continues: this rank's shards at the begin of the save.

Arrays on a drive are copied on the drive ([Note: gradual copy] in cache/swap.py), never to RAM; arrays in RAM are
cloned. The background thread assembles tensors from the snapshot by tensors/chunks.py, which needs only these methods
of ParameterStore and OptimState.
"""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from zcomm.comm.communicator import Communicator
from zcomm.zero.agree import ErrorHolder, agree
from zcomm.zero.cache.swap import SwapCopy
from zcomm.zero.layout.flat import FlatBucket
from zcomm.zero.params.shards import SwapSource
from zcomm.zero.parts import Parts


class ShardSnapshot:
    """A snapshot of ``parts``. weights_only: without the optimizer state.

    Raises: OSError of the copy (ENOSPC; EIO for a key if its last write failed).
    """

    def __init__(self, parts: Parts, weights_only: bool = False) -> None:
        self._copy = SwapCopy()
        if not weights_only or any(parts.store.tier_of(bucket) == "nvme" for bucket in parts.geometry.every):
            parts.state.flush()
            self._copy = parts.swap.copied()
        store: Any = _Weights(parts, self._copy)
        state: Any = parts.state if weights_only else parts.state.snapshot(self._copy)
        self._parts = dataclasses.replace(parts, store=store, state=state)

    def parts(self, comm: Communicator) -> Parts:
        """Return parts for tensors/chunks.py, on one thread and a communicator of its own."""
        self._copy.finish()
        return dataclasses.replace(self._parts, comm=comm)

    def close(self) -> None:
        self._copy.close()


class _Weights:
    """The shards of a ParameterStore. From a drive, one key at a time is in RAM."""

    def __init__(self, parts: Parts, copy: SwapCopy) -> None:
        self._dtype = parts.state.form.dtype
        self._copy = copy
        in_ram = [bucket for bucket in parts.geometry.every if parts.store.tier_of(bucket) != "nvme"]
        self._held = {bucket.index: parts.store.read(bucket).clone() for bucket in in_ram}
        self._key = ""  # of the data in ``_memory``
        self._memory = torch.empty(0, dtype=torch.uint8)

    def read(self, bucket: FlatBucket, part: slice) -> torch.Tensor:
        held = self._held.get(bucket.index)
        if held is not None:
            return held[part]
        out = torch.empty(part.stop - part.start, dtype=self._dtype)
        for key, span in SwapSource.spans(bucket, self._dtype):
            low, high = max(part.start, span.start), min(part.stop, span.stop)
            if low < high:
                out[low - part.start : high - part.start] = self._load(key)[low - span.start : high - span.start]
        return out

    def _load(self, key: str) -> torch.Tensor:
        if self._key != key:
            self._key = ""
            self._memory, self._key = self._copy.load(key, self._memory), key
        return self._memory.view(self._dtype)


def freeze(parts: Parts, final: Path, weights_only: bool = False) -> ShardSnapshot:
    """Take a snapshot. Collective: an error of one rank is raised on all. final: path of the save, for errors."""
    kept = ErrorHolder()
    with ExitStack() as undo:
        with kept.errors():
            undo.callback((frozen := ShardSnapshot(parts, weights_only)).close)
        agree(parts.comm, kept.error, f"saving {final}")
        undo.pop_all()
    return frozen
