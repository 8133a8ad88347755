"""Tables and seconds of `zcomm plan` as text."""

from __future__ import annotations


def print_table(rows: list[dict[str, str]]) -> None:
    """Columns right-aligned under their names."""
    width = {key: max(len(key), *(len(row[key]) for row in rows)) for key in rows[0]}
    print("  ".join(f"{key:>{width[key]}}" for key in width))
    for row in rows:
        print("  ".join(f"{row[key]:>{width[key]}}" for key in width))


def seconds(value: float | None) -> str:
    """3.2 s, 45 ms; - for what is not known."""
    if value is None:
        return "-"
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"
