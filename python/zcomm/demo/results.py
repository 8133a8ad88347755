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
from zcomm.demo.phases import AXIS_HEADINGS, BOUND_HEADINGS, DriveRates
from zcomm.demo.progress import bound_words, gib
from zcomm.demo.text import bits_per_byte
from zcomm.memory.sizes import as_nbytes

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

    peak_nbytes: largest resident memory of rank 0's process. rates: of the drive, as DriveRates. planned: bytes that
    rank 0 reads and writes on the drive in a step, None on a GPU. gpu: its name; gpu_peak_nbytes: torch's most memory
    there. Both are None on the CPU. axes: of a mesh, the bytes of a step by axes.
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
    planned: dict[str, int] | None = None
    gpu: str | None = None
    gpu_peak_nbytes: int | None = None
    axes: list[dict[str, Any]] | None = None


def conclusion(summary: Summary) -> str:
    """Return the loss and the entropy, as one sentence."""
    below = summary.unigram_entropy - summary.validation_loss
    return (
        f"validation loss {summary.validation_loss:.3f} nats per byte "
        f"({bits_per_byte(summary.validation_loss):.2f} bits), unigram entropy {summary.unigram_entropy:.3f}: "
        f"{abs(below):.3f} {'below' if below >= 0 else 'ABOVE'} it, after {summary.train_s:.0f} s of training"
    )


def memory_rows(summary: Summary) -> list[tuple[str, str, str, str, str]]:
    """Return rows (tier, purpose, measured MiB, formula MiB, difference) with a value other than zero, and a total.

    Slots are working space that ZeRO's formula does not contain, so the total omits them. A purpose that a limit on
    memory has moved to other tiers than the formula's is one row.
    """
    rows = []
    totals = [0, 0]
    memory, formula = _by_purpose(summary.memory), _by_purpose(summary.formula)
    tiers = list(summary.memory)
    for purpose, held in memory.items():
        wanted = formula.get(purpose, {})
        if purpose != "slots":
            totals[0] += sum(held.values())
            totals[1] += sum(wanted.values())
        if purpose == "slots" or held.keys() == wanted.keys() or not (held and wanted):
            together = [[tier] for tier in tiers if tier in held or tier in wanted]
        else:
            together = [[tier for tier in tiers if tier in held]]
            wanted = {together[0][0]: sum(wanted.values())}
        for among in together:
            sums = [sum(by_tier.get(tier, 0) for tier in among) for by_tier in (held, wanted)]
            words = " + ".join(mib(held.get(tier, 0)) for tier in among)
            rows.append((", ".join(among), purpose, words, mib(sums[1]), difference(*sums)))
    rows.sort(key=lambda row: tiers.index(row[0].split(",")[0]))
    rows.append(("all", "without slots", mib(totals[0]), mib(totals[1]), difference(*totals)))
    return rows


def _by_purpose(memory: Memory) -> dict[str, dict[str, int]]:
    """Return bytes by purpose and tier, without zeros."""
    found: dict[str, dict[str, int]] = {}
    for tier, purposes in memory.items():
        for purpose, nbytes in purposes.items():
            of_purpose = found.setdefault(purpose, {})
            if nbytes:
                of_purpose[tier] = nbytes
    return found


def mib(nbytes: float) -> str:
    """Return bytes as MiB."""
    return f"{nbytes / 2**20:.2f}"


def decimal(nbytes: float) -> str:
    """Return bytes as GB, or as MB if they are less than 0.1 GB."""
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.2f} MB"


def difference(measured: float, formula: float) -> str:
    """Return the relative difference; "-" if the formula has no value (as for slots)."""
    return f"{100.0 * (measured - formula) / formula:+.1f}%" if formula else "-"


def swap_lines(stats: dict[str, float]) -> list[str]:
    """Return lines with the bytes that rank 0 moved to and from disk, and the speeds."""
    lines = []
    for word, nbytes_key, seconds_key in (
        ("read", "swap_read_nbytes", "swap_read_s"),
        ("written", "swap_written_nbytes", "swap_write_s"),
    ):
        nbytes, seconds = stats.get(nbytes_key, 0.0), stats.get(seconds_key, 0.0)
        if nbytes:
            speed = f" at {nbytes / seconds / 1e9:.2f} GB/s" if seconds > 0 else ""
            lines.append(f"swap: {decimal(nbytes)} {word}{speed}")
    return lines


def settled(steps: Sequence[dict[str, Any]], update: str = "step") -> list[dict[str, Any]]:
    """Return the phases of steps, without the first steps if there are later ones. update: when updates run.

    The first step allocates and learns the order of units. Updates in backward begin with the third step, which also
    runs the second step's updates in its forward.
    """
    first = 3 if update == "backward" else 1
    return [step["phases"] for step in (steps[first:] or steps[-1:])]


def drive_lines(taken_by: Sequence[dict[str, Any]], planned: dict[str, int] | None) -> list[str]:
    """Return a line with the measured and the planned bytes of a step on rank 0.

    taken_by: from ``settled``. planned: None: no plan.
    """
    words = []
    for what in ("read", "written"):
        nbytes = sum(phase[f"{what}_nbytes"] for phases in taken_by for phase in phases.values()) / max(
            1, len(taken_by)
        )
        plan = (planned or {}).get(what, 0)
        if nbytes or plan:
            compared = f" (planned {decimal(plan)}, {difference(nbytes, plan)})" if planned else ""
            words.append(f"{decimal(nbytes)} {what}{compared}")
    return [f"drive, in a step: {', '.join(words)}"] if words else []


def axis_rows(summary: Summary) -> list[tuple[str, ...]]:
    """Return rows of AXIS_HEADINGS."""
    return [
        (each["axes"], str(each["ranks"]), str(each["calls"]), f"{each['nbytes']:,.0f}", f"{each['planned']:,.0f}")
        for each in summary.axes or ()
    ]


def bubble_line(steps: Sequence[dict[str, Any]]) -> str:
    """Return the mean bubble of the steps after the first, next to the formula; "" without a pipeline."""
    bubbles = [step["bubble"] for step in (steps[1:] or steps) if step.get("bubble")]
    if not bubbles:
        return ""
    measured = sum(each["measured"] for each in bubbles) / len(bubbles)
    return f"bubble: {measured:.3f} of a pass (formula {bubbles[-1]['formula']:.3f})"


def bound_rows(
    taken_by: Sequence[dict[str, Any]], world_size: int, rates: dict[str, float] | None
) -> list[tuple[str, ...]]:
    """Return rows of BOUND_HEADINGS, and a sum. taken_by: from ``settled``."""
    found = phases.bounds(taken_by, world_size, None if rates is None else DriveRates(**rates))
    count = max(1, len(taken_by))
    nbytes = [
        [sum(phases[each.name][key] for phases in taken_by if each.name in phases) for key in _BYTES] for each in found
    ]
    rows = [
        (
            each.name,
            f"{each.seconds / count:.3f}",
            f"{each.least_s / count:.3f}",
            bound_words(each),
            *(_gb(moved / count) for moved in of_phase),
        )
        for each, of_phase in zip(found, nbytes, strict=True)
    ]
    taken, least = sum(each.seconds for each in found), sum(each.least_s for each in found)
    share = f"{100 * min(1.0, least / taken):.0f}%" if taken else "-"
    sums = (_gb(sum(column) / count) for column in zip(*nbytes, strict=True))
    return [*rows, ("all", f"{taken / count:.3f}", f"{least / count:.3f}", share, *sums)]


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f}" if nbytes >= 1e8 or not nbytes else f"{nbytes / 1e9:.2g}"


_BYTES = ("read_nbytes", "written_nbytes")


def finish(config: DemoConfig, summary: Summary, metrics: Metrics) -> None:
    """Print the summary and write loss.png and report.html. Rank 0 only."""
    steps, validations = metrics.of_kind("step"), metrics.of_kind("validation")
    taken_by = settled(steps, config.update)
    swap = [*filter(None, [bubble_line(steps)]), *drive_lines(taken_by, summary.planned), *swap_lines(summary.stats)]
    nearness = bound_rows(taken_by, config.world_size, summary.rates)
    _print(config, summary, nearness, swap)
    drawn = report.draw_loss(config.directory / "loss.png", steps, validations, summary.unigram_entropy)
    if not drawn:
        print(
            "loss.png left out: matplotlib is not installed (pip install matplotlib); report.html has the curve",
            file=sys.stderr,
        )
    page = report.page(
        config,
        summary,
        conclusion(summary),
        memory_rows(summary),
        swap,
        nearness,
        steps,
        validations,
        axis_rows(summary),
    )
    (config.directory / "report.html").write_text(page, encoding="utf-8")
    names = "metrics.jsonl, loss.png, report.html" if drawn else "metrics.jsonl, report.html"
    print(f"\n{config.directory}: {names}", flush=True)


def _print(config: DemoConfig, summary: Summary, nearness: Sequence[tuple[str, ...]], swap: Sequence[str]) -> None:
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
    bounds = Table(title="bound of each phase of a step, rank 0")
    for heading in BOUND_HEADINGS:
        bounds.add_column(heading, justify="left" if heading in ("phase", "bound by") else "right")
    for phase in nearness:
        bounds.add_row(*phase, style="bold" if phase[0] == "all" else None)
    console.print(bounds)
    if summary.axes:
        axes = Table(title="bytes that a rank sends in a step, by axes of the mesh (of the rank that sends most)")
        for heading in AXIS_HEADINGS:
            axes.add_column(heading, justify="left" if heading == "axes" else "right")
        for of_axes in axis_rows(summary):
            axes.add_row(*of_axes)
        console.print(axes)
    limit = "" if config.memory is None else f" of {gib(as_nbytes(config.memory))} allowed"
    console.print(f"peak memory of rank 0's process: {gib(summary.peak_nbytes)}{limit}")
    if summary.gpu_peak_nbytes is not None:
        console.print(f"peak memory of torch on {summary.gpu}: {gib(summary.gpu_peak_nbytes)}")
    for line in swap:
        console.print(line)
    console.print("\nsample:", style="bold")
    console.print(Text(printable(summary.sample)))


def printable(text: str) -> str:
    """Return text without control characters, which a half-trained model may emit."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
