"""Picture of the loss, and the self-contained report page with its curve. Pure: data in, file or text out.

Invariant: every text from outside (sample, paths, options) is escaped; the page loads nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zcomm.demo.phases import AXIS_HEADINGS, BOUND_HEADINGS
from zcomm.demo.progress import held_by_place
from zcomm.memory.sizes import as_nbytes
from zcomm.watch import html
from zcomm.watch.html import Series
from zcomm.watch.report import TIME_HEADINGS, smoothed, time_rows

if TYPE_CHECKING:
    from zcomm.demo.options import DemoConfig
    from zcomm.demo.results import Summary


def draw_loss(
    file: Path, steps: Sequence[dict[str, Any]], validations: Sequence[dict[str, Any]], entropy: float
) -> bool:
    """Write the picture of the loss; return False if matplotlib is missing."""
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


def page(
    config: DemoConfig,
    summary: Summary,
    conclusion: str,
    memory: Sequence[Sequence[str]],
    swap: Sequence[str],
    nearness: Sequence[Sequence[str]],
    steps: Sequence[dict[str, Any]] = (),
    validations: Sequence[dict[str, Any]] = (),
    axes: Sequence[Sequence[str]] = (),
) -> str:
    """Return the report as one HTML page. nearness: rows of results.bound_rows; steps, validations: the records of
    metrics.jsonl; axes: rows of results.axis_rows."""
    options = [(field.name, str(getattr(config, field.name))) for field in dataclasses.fields(config)]
    text = [
        ("text", summary.source),
        ("training bytes", f"{summary.train_nbytes:,}"),
        ("validation bytes", f"{summary.validation_nbytes:,}"),
        ("parameters", f"{summary.numel:,}"),
        *([] if summary.gpu is None else [("GPU", summary.gpu)]),
    ]
    times = [html.heading("Time of a step"), html.table(TIME_HEADINGS, time_rows(steps, "step_s"))] if steps else []
    body = [
        html.heading(config.name, 1),
        f"<p><strong>{escape(conclusion)}</strong></p>",
        html.charts([curve(steps, validations, summary.unigram_entropy), time_chart(steps)]),
        *times,
        html.heading("Bound of each phase"),
        html.table(BOUND_HEADINGS, nearness),
        *([html.heading("Bytes by axis"), html.table(AXIS_HEADINGS, axes)] if axes else []),
        html.heading("Memory by tier"),
        html.bars("Memory of rank 0", "MiB", tier_bars(summary, config.memory), (("", "a"),)),
        html.heading("Memory of rank 0, MiB"),
        html.table(("tier", "purpose", "measured", "ZeRO's formula", "difference"), memory),
        f"<p>{'<br>'.join(escape(line) for line in swap)}</p>",
        html.heading("Sample"),
        f"<pre>{escape(summary.sample)}</pre>",
        html.heading("Run"),
        html.table((), text),
        html.table(("option", "value"), options),
        '<p>All numbers of all steps: <a href="metrics.jsonl">metrics.jsonl</a></p>',
    ]
    return html.page(f"zcomm demo: {config.name}", body)


def time_chart(steps: Sequence[dict[str, Any]]) -> str:
    """Draw the parts of rank 0's steps as a stacked chart, in ms, or in s for long steps; "" without steps."""
    is_long = max((record["step_s"] for record in steps), default=0.0) >= 10.0
    unit, scale = ("s", 1.0) if is_long else ("ms", 1e3)
    parts = (("compute_s", "compute", "a"), ("comm_s", "communication", "b"), ("swap_s", "swap", "d"))
    series = [Series(name, [(record["step"], scale * record[key]) for record in steps], at) for key, name, at in parts]
    return html.stacked_chart("Time of a step, rank 0", unit, series)


def tier_bars(summary: Summary, memory: str | None) -> list[tuple[str, list[float]]]:
    """Return the rows of the picture of the tiers, MiB: peaks of GPU and process, limit, the optimizer, the drive."""
    gpu_peak_nbytes = summary.gpu_peak_nbytes
    held = held_by_place(summary.memory, gpu_peak_nbytes is not None)
    on_gpu = [] if gpu_peak_nbytes is None else [("GPU peak", gpu_peak_nbytes), ("GPU optimizer", held["GPU"])]
    limit = [] if memory is None else [("limit", as_nbytes(memory))]
    rows = [*on_gpu, ("peak", summary.peak_nbytes), *limit, ("optimizer", held["RAM"]), ("drive", held["drive"])]
    return [(name, [nbytes / 2**20]) for name, nbytes in rows]


def curve(steps: Sequence[dict[str, Any]], validations: Sequence[dict[str, Any]], entropy: float) -> str:
    """Draw the loss over the steps; "" without steps."""
    if not steps:
        return ""
    numbers, losses = [record["step"] for record in steps], [record["loss"] for record in steps]
    ends = (numbers[0], numbers[-1])
    lines = [
        Series("", list(zip(numbers, losses, strict=True)), "a", "raw", "opacity: .3; stroke-width: 1"),
        Series("training (smoothed)", list(zip(numbers, smoothed(losses), strict=True)), "a", "training"),
        Series("validation", [(record["step"], record["loss"]) for record in validations], "b", "validation"),
        Series("unigram entropy", [(step, entropy) for step in ends], "gray", "entropy", "stroke-dasharray: 6 4"),
    ]
    return html.line_chart("Loss", "nats per byte", lines)
