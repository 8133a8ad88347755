"""Collectives and messages of the ranks of a job on torch tensors. ``Communicator`` is loaded at its first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zcomm.comm.communicator import Communicator

__all__ = ["Communicator"]


def __getattr__(name: str) -> Any:
    if name != "Communicator":
        raise AttributeError(f"module 'zcomm.comm' has no attribute {name!r}")
    from zcomm.comm import communicator

    return communicator.Communicator
