"""Cases of a grid: those that `make test` runs, and those that are left to `make test-slow` or `make test-long`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """Return a case of `pytest.mark.parametrize` that is left to `make test-slow`."""
    return pytest.param(*values, marks=pytest.mark.slow)


def long(*values: Any) -> Any:
    """Return a case that is left to `make test-long`, because it repeats other cases with other tiers or sizes."""
    return pytest.param(*values, marks=pytest.mark.long)


def one_in(count: int, first: int, values: Sequence[Any], others: Callable[..., Any] = slow) -> list[Any]:
    """Return the cases of ``values``: every ``count``-th from the ``first`` in `make test`, the others slow or long.

    A tuple is a case of several parameters.
    """
    rows = [value if isinstance(value, tuple) else (value,) for value in values]
    return [
        value if n % count == first else others(*row) for n, (value, row) in enumerate(zip(values, rows, strict=True))
    ]
