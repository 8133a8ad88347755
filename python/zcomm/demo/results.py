"""Results of a demo run: metrics.jsonl line by line, and at the end the summary on stdout and the report's files."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zcomm.demo import phases, report
from zcomm.demo.options import DemoConfig
from zcomm.demo.phases import DriveRates
from zcomm.demo.progress import bound_words, gib
from zcomm.demo.text import bits_per_byte

Memory = dict[str, dict[str, int]]


class Metrics:
    """metrics.jsonl of a run: one JSON object per line, each with its "kind"; flushed line by line."""

    def __init__(self, directory: Path) -> None:
        self._file = (directory / "metrics.jsonl").open("w", encoding="utf-8")
        self.records: list[dict[str, object]] = []

    def write(self, kind: str, content: dict[str, object]) -> None:
        """Append one line."""
        record = {"kind": kind, **content}
        self.records.append(record)
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def of_kind(self, kind: str) -> list[dict[str, object]]:
        """Return the lines of one kind, in order."""
        return [record for record in self.records if record["kind"] == kind]


@dataclass(frozen=True)
class Summary:
    """The end of a run. Losses in nats per byte; memory, formula and stats are rank 0's.

    peak_nbytes: the most that rank 0's process ever held. rates: of the drive, as DriveRates.
    """

    validation_loss: float
    unigram_entropy: float
    train_s: float
    numel: int
    source: str
    train_nbytes: int
    validation_nbytes: int
    memory: Memory
    formula: Memory
    stats: dict[str, float]
    sample: str
    peak_nbytes: int = 0
    rates: dict[str, float] | None = None


def conclusion(summary: Summary) -> str:
    """Return the loss beside the entropy, as one sentence."""
    below = summary.unigram_entropy - summary.validation_loss
    return (
        f"validation loss {summary.validation_loss:.3f} nats per byte "
        f"({bits_per_byte(summary.validation_loss):.2f} bits), unigram entropy {summary.unigram_entropy:.3f}: "
        f"{abs(below):.3f} {'below' if below >= 0 else 'ABOVE'} it, after {summary.train_s:.0f} s of training"
    )


def memory_rows(summary: Summary) -> list[tuple[str, str, str, str, str]]:
    """Return rows (tier, purpose, measured MiB, formula MiB, difference) where either is not zero, and a total.

    Slots are working space that ZeRO's formula does not contain, so the total leaves them out.
    """
    rows = []
    totals = [0, 0]
    for tier, purposes in summary.memory.items():
        for purpose, measured in purposes.items():
            formula = summary.formula.get(tier, {}).get(purpose, 0)
            if not measured and not formula:
                continue
            if purpose != "slots":
                totals[0] += measured
                totals[1] += formula
            rows.append((tier, purpose, mib(measured), mib(formula), difference(measured, formula)))
    rows.append(("all", "without slots", mib(totals[0]), mib(totals[1]), difference(*totals)))
    return rows


def mib(nbytes: float) -> str:
    """Return bytes as MiB."""
    return f"{nbytes / 2**20:.2f}"


def difference(measured: int, formula: int) -> str:
    """Return the relative difference where the formula has a value (slots are not in it)."""
    return f"{100.0 * (measured - formula) / formula:+.1f}%" if formula else "-"


def swap_lines(stats: dict[str, float]) -> list[str]:
    """Return lines about what rank 0 moved to and from disk, and how fast."""
    lines = []
    for word, nbytes_key, seconds_key in (
        ("read", "swap_read_nbytes", "swap_read_s"),
        ("written", "swap_written_nbytes", "swap_write_s"),
    ):
        nbytes, seconds = stats.get(nbytes_key, 0.0), stats.get(seconds_key, 0.0)
        if nbytes:
            speed = f" at {nbytes / seconds / 1e9:.2f} GB/s" if seconds > 0 else ""
            lines.append(f"swap: {nbytes / 1e9:.2f} GB {word}{speed}")
    return lines


def bound_rows(
    steps: Sequence[dict[str, Any]], world_size: int, rates: dict[str, float] | None
) -> list[tuple[str, ...]]:
    """Return rows (phase, seconds of a step in it, the least possible, what bounds it and how near it is), and a sum.

    The first step is left out where there are others: it allocates and learns the order of units.
    """
    taken_by = [step["phases"] for step in (steps[1:] or steps)]
    found = phases.bounds(taken_by, world_size, None if rates is None else DriveRates(**rates))
    count = max(1, len(taken_by))
    rows = [
        (each.name, f"{each.seconds / count:.3f}", f"{each.least_s / count:.3f}", bound_words(each)) for each in found
    ]
    taken, least = sum(each.seconds for each in found), sum(each.least_s for each in found)
    share = f"{100 * min(1.0, least / taken):.0f}%" if taken else "-"
    return [*rows, ("all", f"{taken / count:.3f}", f"{least / count:.3f}", share)]


BOUND_HEADINGS = ("phase", "seconds of a step", "least", "bound by")


def finish(config: DemoConfig, summary: Summary, metrics: Metrics) -> None:
    """Print the summary and write loss.png and report.html. Rank 0 only."""
    steps, validations = metrics.of_kind("step"), metrics.of_kind("validation")
    _print(config, summary, steps)
    drawn = report.draw_loss(config.directory / "loss.png", steps, validations, summary.unigram_entropy)
    if not drawn:
        print(
            "loss.png left out: matplotlib is not installed (pip install matplotlib); report.html has the curve",
            file=sys.stderr,
        )
    swap = swap_lines(summary.stats)
    nearness = bound_rows(steps, config.world_size, summary.rates)
    page = report.page(config, summary, conclusion(summary), memory_rows(summary), swap, nearness, steps, validations)
    (config.directory / "report.html").write_text(page, encoding="utf-8")
    names = "metrics.jsonl, loss.png, report.html" if drawn else "metrics.jsonl, report.html"
    print(f"\n{config.directory}: {names}", flush=True)


def _print(config: DemoConfig, summary: Summary, steps: Sequence[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 110, highlight=False)
    console.print()
    console.print(Text(conclusion(summary), style="bold"), soft_wrap=True)
    ranks = "1 rank" if config.world_size == 1 else f"{config.world_size} ranks"
    table = Table(title=f"memory of rank 0 in MiB (stage {config.stage}, {ranks})")
    for heading in ("tier", "purpose", "measured", "ZeRO's formula", "difference"):
        table.add_column(heading, justify="left" if heading in ("tier", "purpose") else "right")
    for row in memory_rows(summary):
        table.add_row(*row, style="bold" if row[0] == "all" else None)
    console.print(table)
    bounds = Table(title="what bounds a step of rank 0")
    for heading in BOUND_HEADINGS:
        bounds.add_column(heading, justify="right" if heading in BOUND_HEADINGS[1:3] else "left")
    for phase in bound_rows(steps, config.world_size, summary.rates):
        bounds.add_row(*phase, style="bold" if phase[0] == "all" else None)
    console.print(bounds)
    console.print(f"peak memory of rank 0's process: {gib(summary.peak_nbytes)}")
    for line in swap_lines(summary.stats):
        console.print(line)
    console.print("\nsample:", style="bold")
    console.print(Text(printable(summary.sample)))


def printable(text: str) -> str:
    """Return text without control characters, which a half-trained model may well write to a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
