"""Cases of a grid: those that `make test` runs, and those that are left to `make test-slow`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """Return a case of `pytest.mark.parametrize` that is left to `make test-slow`."""
    return pytest.param(*values, marks=pytest.mark.slow)


def one_in(count: int, first: int, values: Sequence[Any]) -> list[Any]:
    """Return the cases of ``values``: every ``count``-th from the ``first`` in `make test`, the others slow."""
    return [value if number % count == first else slow(value) for number, value in enumerate(values)]
