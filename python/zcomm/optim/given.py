"""given: the options that a constructor was called with, as an optimizer's defaults."""

from __future__ import annotations

from typing import Any


def given(arguments: dict[str, Any], *without: str) -> dict[str, Any]:
    """Return the options of ``arguments``, the ``locals()`` of a constructor's first line. without: none of these."""
    hidden = ("self", "params", "__class__", *without)
    return {name: value for name, value in arguments.items() if name not in hidden}
