"""The picture: share of the roof over size, a line per variant and peer. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def draw(rows: Sequence[Mapping[str, Any]], path: str) -> str:
    """Write `path` and return the line to print."""
    if not find_spec("matplotlib"):
        return f"# {path}: not drawn, matplotlib is not installed (pip install matplotlib)"
    if not rows:
        return f"# {path}: not drawn, there is no row"
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for name in dict.fromkeys(name for row in rows for name in row["share_of_roof"]):
        points = [(row["nbytes"], row["share_of_roof"][name]) for row in rows if name in row["share_of_roof"]]
        ours = name in ("symmetric", "private")
        axes.plot(
            *zip(*points, strict=True), marker="o", markersize=3, label=name, linewidth=2 if ours else 1, alpha=0.9
        )
    first = rows[0]
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
    axes.set_xscale("log", base=2)
    axes.set_xticks([row["nbytes"] for row in rows], [readable(row["nbytes"]) for row in rows], rotation=45, fontsize=7)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("share of the roof measured beside it")
    axes.set_title(f"{first['op']}, {first['type']}, {first['world_size']} ranks", fontsize=10)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return f"# {path}: share of the roof over size"


def readable(nbytes: int) -> str:
    for scale, unit in _UNITS:
        if nbytes >= scale:
            return f"{nbytes / scale:g} {unit}"
    return f"{nbytes} B"
