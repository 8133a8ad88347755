"""Bytes as a program or a person writes them: a count, or text such as 5GB."""

from __future__ import annotations

import re


def as_nbytes(size: object) -> int:
    """Return the bytes of a whole number, or of text: 5GB, 64M, 512MiB or 1000000 (decimal units and binary ones).

    Raises: ValueError naming a value that is not a size of at least one byte.
    """
    found = (
        None
        if isinstance(size, bool)
        else re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", str(size).strip(), re.IGNORECASE)
    )
    nbytes = 0.0
    if found and isinstance(size, int | str):
        power = " KMGT".index(found[2].upper() or " ")
        nbytes = float(found[1]) * (1024 if found[3] else 1000) ** power
    if nbytes < 1:
        raise ValueError(f"{size!r} is not a size such as 5GB or 512MiB")
    return int(nbytes)
