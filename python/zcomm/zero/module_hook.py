"""Hooks of modules that act only in the model that they were made for.

Copies and pickles of a module contain its hooks. A copy of the model, or a loaded one, is an ordinary module: in it a
Hook is a function that does nothing. torch.compile runs hooks as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zcomm.comm.dynamo import skip


def inert(*args: object, **kwargs: object) -> None:
    """Do nothing: a Hook in a copy of its module."""


def _inert_hook() -> Callable[..., None]:
    return inert


class Hook:
    """Calls ``function``; its copies do not."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> Any:  # used by copy and pickle
        return _inert_hook, ()


skip(Hook.__call__.__code__)
