"""Fixture of all tests of zcomm.inference."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any, cast

import pytest

import zcomm
from zcomm.zero.registry import open_optimizers

module: Any = importlib.import_module("zcomm.inference.streaming")


@pytest.fixture(autouse=True)
def one_ahead(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Read one unit ahead, as of large blocks. Then close open streams, and leave their world of one rank."""
    monkeypatch.setattr(module, "_AHEAD_NBYTES", 0)
    yield
    for opt in open_optimizers():
        cast(zcomm.ZeroOptimizer, opt).close()
    zcomm.shutdown()
