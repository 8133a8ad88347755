"""Sizes as people write them, and the ladder of sizes of a sweep."""

from __future__ import annotations

from collections.abc import Iterator


def parse_size(text: str) -> int:
    """Parse a size: '8', '64K', '256M', '1G' -> bytes (powers of 1024, as nccl-tests reads them)."""
    scale = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    unit = text[-1:].upper()
    try:
        nbytes = int(float(text[:-1]) * scale[unit]) if unit in scale else int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a size; write for example 8, 64K, 256M, 1G") from None
    if nbytes <= 0:
        raise ValueError(f"size {text!r} is not positive")
    return nbytes


def sizes(begin: int, end: int, factor: float, step: int | None = None) -> Iterator[int]:
    """Yield begin, begin * factor (or + step), ... <= end."""
    size = begin
    while size <= end:
        yield size
        size = size + step if step else max(size + 1, int(size * factor))
