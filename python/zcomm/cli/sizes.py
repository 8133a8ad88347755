"""Bytes as words: read from the command line, and shown."""

from __future__ import annotations

import argparse

from zcomm.memory.sizes import as_nbytes


def nbytes(text: str) -> int:
    """Parse 5GB, 512MiB or 1000000: decimal units and binary ones, for argparse."""
    try:
        return as_nbytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def shown(size: float) -> str:
    """Format a number of bytes."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
