"""The picture of the loss and the self-contained report page. Pure: data in, file or text out.

Invariant: every text that comes from outside (sample, paths, options) is escaped; the page loads nothing.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zcomm.demo.options import DemoConfig
    from zcomm.demo.results import Summary

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 1rem 0; } td, th { padding: .2rem .8rem; border-bottom: 1px solid #ddd; }
td.number { text-align: right; font-variant-numeric: tabular-nums; } th { text-align: left; }
pre { background: #f6f6f6; padding: 1rem; overflow-x: auto; white-space: pre-wrap; } img { max-width: 100%; }
"""


def draw_loss(
    file: Path, steps: Sequence[dict[str, Any]], validations: Sequence[dict[str, Any]], entropy: float
) -> bytes | None:
    """Write the picture of the loss and return its bytes; None where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(8, 4.5), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    numbers, losses = [r["step"] for r in steps], [r["loss"] for r in steps]
    axes.plot(numbers, losses, color="C0", alpha=0.3, linewidth=1)
    axes.plot(numbers, smoothed(losses), color="C0", label="training (smoothed)")
    axes.plot([r["step"] for r in validations], [r["loss"] for r in validations], "o-", color="C1", label="validation")
    axes.axhline(entropy, color="gray", linestyle="--", label="unigram entropy")
    axes.set_xlabel("step")
    axes.set_ylabel("nats per byte")
    axes.set_ylim(bottom=0, top=max(entropy + 0.5, *losses[-1:]) + 0.2)
    axes.legend()
    axes.grid(alpha=0.2)
    figure.savefig(file)
    return file.read_bytes()


def smoothed(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """Exponential mean, corrected for its start."""
    out: list[float] = []
    mean, norm = 0.0, 0.0
    for value in values:
        mean, norm = weight * mean + (1 - weight) * value, weight * norm + (1 - weight)
        out.append(mean / norm)
    return out


def page(
    config: DemoConfig,
    summary: Summary,
    verdict: str,
    memory: Sequence[Sequence[str]],
    swap: Sequence[str],
    picture: bytes | None,
) -> str:
    """The report as one HTML page."""
    image = ""
    if picture is not None:
        image = f'<img alt="loss over steps" src="data:image/png;base64,{base64.b64encode(picture).decode()}">'
    options = [(field.name, str(getattr(config, field.name))) for field in dataclasses.fields(config)]
    text = [
        ("text", summary.source),
        ("training bytes", f"{summary.train_nbytes:,}"),
        ("validation bytes", f"{summary.validation_nbytes:,}"),
        ("parameters", f"{summary.numel:,}"),
    ]
    return f"""<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>zcomm demo: {escape(config.name)}</title><style>{_STYLE}</style></head>
<body>
<h1>{escape(config.name)}</h1>
<p><strong>{escape(verdict)}</strong></p>
{image}
<h2>Memory of rank 0, MiB</h2>
{_table(("tier", "purpose", "measured", "ZeRO's formula", "difference"), memory)}
<p>{"<br>".join(escape(line) for line in swap)}</p>
<h2>Sample</h2>
<pre>{escape(summary.sample)}</pre>
<h2>Run</h2>
{_table(("", ""), text)}
{_table(("option", "value"), options)}
</body>
</html>
"""


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "\n".join(
        "<tr>" + "".join(f"<td{_kind(cell)}>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table>\n<tr>{head}</tr>\n{body}\n</table>"


def _kind(cell: str) -> str:
    return ' class="number"' if cell[:1].isdigit() or cell[:1] in "+-" else ""
