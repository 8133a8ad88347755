"""Checkpoints of one pipeline stage: the ranks with the same tensors save and load as if they were the whole job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from zcomm.zero.parts import Parts


@contextmanager
def as_whole_job(parts: Parts) -> Iterator[None]:
    """Let the block save or load among the ranks that have this rank's tensors. All ranks of the job enter it.

    Not for saves in the background, which would outlive the block.
    """
    comm, comms = parts.comm, parts.comms
    parts.comm, parts.comms = comms.data, replace(comms, world=comms.data)
    try:
        yield
    finally:
        parts.comm, parts.comms = comm, comms
