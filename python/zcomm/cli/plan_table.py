"""Tables, recommendations and seconds of `zcomm plan` as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zcomm.cli.sizes import shown

UNKNOWN = "-"
OFFLOADS = ("none", "cpu", "nvme")


@dataclass(frozen=True)
class Case:
    """One row of the table, for the recommendation. needs: bytes of all ranks, by the name of the memory."""

    stage: int
    offload: str
    needs: dict[str, int]
    fits: bool


def print_recommendations(
    numel: int, precision: str, cases: Mapping[int, Sequence[Case]], room: dict[str, int]
) -> None:
    """Print the recommended case per world size. cases: by world size; room: available bytes, keys as ``needs``."""
    for world, of_world in cases.items():
        what = f"{count_in_words(numel)} {precision} on {world} rank{'s' if world > 1 else ''}"
        print(f"{what}: {_recommendation(of_world, room)}")


def recommended(cases: Sequence[Case]) -> Case:
    """Return the first case that fits, which has the least offload, or else the smallest."""
    return min(
        cases,
        key=lambda case: (not case.fits, *((OFFLOADS.index(case.offload),) if case.fits else case.needs.values())),
    )


def _recommendation(cases: Sequence[Case], room: dict[str, int]) -> str:
    best = recommended(cases)
    needs = " and ".join(f"{shown(nbytes)} of {name}" for name, nbytes in best.needs.items() if nbytes)
    how = f"stage {best.stage}, offload {best.offload}"
    if best.fits:
        return f"fits with {how}, which needs {needs} in all"
    lacks = " and ".join(f"{shown(nbytes)} of {name}" for name, nbytes in room.items())
    return f"nothing fits {lacks}; the smallest is {how}, which needs {needs} in all"


def count_in_words(count: int) -> str:
    """Return 7B for 7e9, 350M for 3.5e8."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)


def compact(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Join rows that differ only in their stage; leave out columns without a known value."""
    joined: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        same = joined.setdefault(tuple(value for key, value in row.items() if key != "stage"), dict(row))
        if same["stage"] != row["stage"]:
            same["stage"] += f",{row['stage']}"
    return without_unknown(list(joined.values()))


def without_unknown(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Leave out columns without a known value."""
    known = [key for key in rows[0] if any(row[key] != UNKNOWN for row in rows)]
    return [{key: row[key] for key in known} for row in rows]


def print_table(rows: list[dict[str, str]]) -> None:
    """Print columns right-aligned under their names."""
    width = {key: max(len(key), *(len(row[key]) for row in rows)) for key in rows[0]}
    print("  ".join(f"{key:>{width[key]}}" for key in width))
    for row in rows:
        print("  ".join(f"{row[key]:>{width[key]}}" for key in width))


def seconds(value: float | None) -> str:
    """Return 3.2 s, 45 ms; - for an unknown time."""
    if value is None:
        return UNKNOWN
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"
