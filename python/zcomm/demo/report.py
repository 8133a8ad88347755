"""Picture of the loss, and the self-contained report page with its curve. Pure: data in, file or text out.

Invariant: every text that comes from outside (sample, paths, options) is escaped; the page loads nothing.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zcomm.demo.options import DemoConfig
    from zcomm.demo.results import Summary

_STYLE = """
:root { color-scheme: light dark; }
:root { --ink: #222; --back: #fff; --line: #ddd; --soft: #f6f6f6; --a: #1f6fb4; --b: #d95f02; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #ddd; --back: #16181c; --line: #3a3d44; --soft: #22252b; --a: #6cb2eb; --b: #f6a15a; }
}
body { font: 16px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 2rem auto; padding: 0 1rem; }
body { color: var(--ink); background: var(--back); } a { color: var(--a); }
table { border-collapse: collapse; margin: 1rem 0; } th { text-align: left; }
td, th { padding: .2rem .8rem; border-bottom: 1px solid var(--line); }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
pre { background: var(--soft); padding: 1rem; overflow-x: auto; white-space: pre-wrap; }
svg { width: 100%; height: auto; } svg text { font-size: 13px; fill: var(--ink); }
polyline { fill: none; stroke-width: 2; } .raw, .training { stroke: var(--a); } .raw { opacity: .3; stroke-width: 1; }
.validation { stroke: var(--b); } .grid { stroke: var(--line); } .entropy { stroke: gray; stroke-dasharray: 6 4; }
"""
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 800, 380, 50, 40, 30, 15  # of the curve, in its own units


def draw_loss(
    file: Path, steps: Sequence[dict[str, Any]], validations: Sequence[dict[str, Any]], entropy: float
) -> bool:
    """Write the picture of the loss; return False where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
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
    return True


def smoothed(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """Return the exponential mean, corrected for its start."""
    out: list[float] = []
    mean, norm = 0.0, 0.0
    for value in values:
        mean, norm = weight * mean + (1 - weight) * value, weight * norm + (1 - weight)
        out.append(mean / norm)
    return out


def page(
    config: DemoConfig,
    summary: Summary,
    conclusion: str,
    memory: Sequence[Sequence[str]],
    swap: Sequence[str],
    steps: Sequence[dict[str, Any]] = (),
    validations: Sequence[dict[str, Any]] = (),
) -> str:
    """Return the report as one HTML page. steps, validations: the records of metrics.jsonl."""
    times = f"<h2>Time of a step</h2>\n{_table(_TIME_HEADINGS, time_rows(steps))}" if steps else ""
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
<p><strong>{escape(conclusion)}</strong></p>
{curve(steps, validations, summary.unigram_entropy)}
{times}
<h2>Memory of rank 0, MiB</h2>
{_table(("tier", "purpose", "measured", "ZeRO's formula", "difference"), memory)}
<p>{"<br>".join(escape(line) for line in swap)}</p>
<h2>Sample</h2>
<pre>{escape(summary.sample)}</pre>
<h2>Run</h2>
{_table((), text)}
{_table(("option", "value"), options)}
<p>All numbers of all steps: <a href="metrics.jsonl">metrics.jsonl</a></p>
</body>
</html>
"""


_TIME_HEADINGS = ("part", "median, ms", "of all steps, s", "share")


def time_rows(steps: Sequence[dict[str, Any]]) -> list[tuple[str, str, str, str]]:
    """Return the seconds of rank 0 by part: the median step, the sum of all steps, and the part's share of it."""
    total = sum(record["step_s"] for record in steps) or 1e-9
    rows = []
    for key, name in (("compute_s", "compute"), ("comm_s", "communication"), ("swap_s", "swap"), ("step_s", "step")):
        values = [record[key] for record in steps]
        share = f"{100 * sum(values) / total:.0f}%"
        rows.append((name, f"{1000 * statistics.median(values):.1f}", f"{sum(values):.1f}", share))
    return rows


def curve(steps: Sequence[dict[str, Any]], validations: Sequence[dict[str, Any]], entropy: float) -> str:
    """Draw the loss over the steps as inline SVG; "" without steps."""
    if not steps:
        return ""
    losses = [record["loss"] for record in steps]
    first: int = steps[0]["step"]
    last: int = max(steps[-1]["step"], first + 1)
    top: float = max(entropy, *losses, *(record["loss"] for record in validations)) * 1.05

    def x(step: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (step - first) / (last - first)

    def y(loss: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * loss / top

    def line(kind: str, points: Sequence[tuple[float, float]]) -> str:
        places = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in points)
        return f'<polyline class="{kind}" points="{places}"/>'

    numbers = [record["step"] for record in steps]
    parts = []
    for tick in range(5):
        height = y(top * tick / 4)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{height:.1f}" y2="{height:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{height + 4:.1f}" text-anchor="end">{top * tick / 4:.2f}</text>')
        step = round(first + (last - first) * tick / 4)
        parts.append(f'<text x="{x(step):.1f}" y="{_HEIGHT - _BOTTOM + 20}" text-anchor="middle">{step}</text>')
    level = f'x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(entropy):.1f}" y2="{y(entropy):.1f}"'
    parts.append(f'<line class="entropy" {level}/>')
    parts.append(line("raw", list(zip(numbers, losses, strict=True))))
    parts.append(line("training", list(zip(numbers, smoothed(losses), strict=True))))
    parts.append(line("validation", [(record["step"], record["loss"]) for record in validations]))
    parts.append(f'<text x="{_LEFT}" y="16">nats per byte: <tspan style="fill: var(--a)">training (smoothed)</tspan>, ')
    parts.append('<tspan style="fill: var(--b)">validation</tspan>, dashed: unigram entropy</text>')
    parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 4}" text-anchor="end">step</text>')
    body = "\n".join(parts)
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="loss over steps">\n{body}\n</svg>'


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "<tr>" + "".join(f"<th>{escape(heading)}</th>" for heading in headings) + "</tr>\n" if headings else ""
    body = "\n".join(
        "<tr>" + "".join(f"<td{_kind(cell)}>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table>\n{head}{body}\n</table>"


def _kind(cell: str) -> str:
    return ' class="number"' if cell[:1].isdigit() or cell[:1] in "+-" else ""
