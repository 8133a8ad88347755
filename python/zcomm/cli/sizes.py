"""Bytes as words: read from the command line, and shown."""

from __future__ import annotations

import argparse
import re


def nbytes(text: str) -> int:
    """Parse 5GB, 512MiB or 1000000: decimal units and binary ones, for argparse."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    size = 0.0
    if found:
        power = " KMGT".index(found[2].upper() or " ")
        size = float(found[1]) * (1024 if found[3] else 1000) ** power
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 5GB or 512MiB")
    return int(size)


def shown(size: float) -> str:
    """Return bytes in words."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
