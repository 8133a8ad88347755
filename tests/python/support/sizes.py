"""Sizes of tiles, spans and windows that tests reduce, so that small models have several of each.

They are constants of modules, so a change in a test's own process would last for later tests. A rank's process ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zcomm.zero.layout import tiles
from zcomm.zero.optim_state import nvme
from zcomm.zero.params import shards

SIZES = ((tiles, "TILE_COUNT"), (nvme, "SPAN_TILES"), (nvme, "WINDOWS"), (shards, "WINDOWS"))


def current() -> list[int]:
    return [getattr(module, name) for module, name in SIZES]


@contextmanager
def restored() -> Iterator[None]:
    """Restore the present sizes at the end."""
    before = current()
    try:
        yield
    finally:
        for (module, name), value in zip(SIZES, before, strict=True):
            setattr(module, name, value)
