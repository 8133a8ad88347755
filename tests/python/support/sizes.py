"""Sizes of tiles, spans and windows that tests make smaller, to have several of each.

They are constants of modules: in a test's own process each test that follows has them, too. A rank's process ends.
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
    """Give back, at the end, the sizes of before."""
    before = current()
    try:
        yield
    finally:
        for (module, name), value in zip(SIZES, before, strict=True):
            setattr(module, name, value)
