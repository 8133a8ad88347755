"""Waiting for a swap file whose operations nobody asks for any more: before their memory goes, or is used anew."""

from __future__ import annotations

from zcomm import _core


def drain(swap: _core.SwapFile) -> None:
    """Returns when nothing is in flight; errors that no ``Work.wait()`` has raised are dropped."""
    while True:
        try:
            swap.wait()
            return
        except OSError:  # one of those errors, which counts as raised from now on
            continue
        except RuntimeError:  # a forked child: the operations are its parent's
            return
