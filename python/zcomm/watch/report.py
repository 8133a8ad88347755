"""Report of a run: report.html from the records that the ranks have written (``zcomm run --report DIR``).

A killed rank may leave half a line, so lines that are no records are ignored.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zcomm.watch import html
from zcomm.watch.html import Series
from zcomm.watch.page import TIERS, printable
from zcomm.watch.rank import records_name

NAME = "report.html"
_PARTS = (("compute", "a"), ("communication", "b"), ("waiting", "c"), ("swap", "d"))
_SLOW_SHARE = 0.1
_MIB = 2.0**20


@dataclass
class RankRecords:
    """Records of one rank."""

    head: dict[str, Any]
    steps: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    losses: list[tuple[float, float]] = field(default_factory=list)
    end: dict[str, Any] | None = None  # None: the rank was killed

    @property
    def count(self) -> float:
        """Number of steps in the records."""
        return float(sum(record["steps"] for record in self.steps))

    def mean(self, name: str) -> float:
        """Mean of a counter in a step; NaN without steps."""
        return sum(record[name] for record in self.steps) / self.count if self.count else math.nan


def prepare(folder: Path) -> dict[str, str]:
    """Create the folder of a report, and remove an earlier run's. Returns: variables for the ranks. Raises: OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in [*folder.glob(records_name("*")), folder / NAME]:
        old.unlink(missing_ok=True)
    return {"ZCOMM_REPORT": str(folder.absolute())}


def build(folder: Path, exit_code: int) -> Path:
    """Write the report from the records in ``folder`` and return its path. Raises: OSError."""
    found = [_read(path) for path in folder.glob(records_name("*"))]
    ranks = sorted((each for each in found if each is not None), key=lambda each: each.head["rank"])
    path = folder / NAME
    path.write_text(report_page(ranks, exit_code), encoding="utf-8")
    return path


def _read(path: Path) -> RankRecords | None:
    """Return the records of a rank, or None if the file has no head."""
    found: RankRecords | None = None
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):  # half a line of a killed rank
            record = json.loads(line)
            kind = record["kind"]
            if kind == "head":
                found = RankRecords(record)
            elif found is not None:
                found.losses += [(float(step), float(loss)) for step, loss in record.get("losses", ())]
                if kind == "steps" and record["steps"] > 0:
                    found.steps.append(record)
                elif kind == "warning":
                    found.warnings.append(printable(str(record["text"])))
                elif kind == "end":
                    found.end = record
    return found


def report_page(ranks: Sequence[RankRecords], exit_code: int) -> str:
    """Return the report as one page."""
    if not ranks:
        text = "No rank has written a record: the program has not come to zcomm.init()."
        return html.page("zcomm run", [html.heading("zcomm run", 1), _ending(exit_code), html.paragraph(text)])
    first = ranks[0]
    name = printable(str(first.head["name"]))
    return html.page(
        f"{name}: zcomm run",
        [
            html.heading(name, 1),
            html.paragraph(_conclusion(ranks)),
            _ending(exit_code),
            *(html.paragraph(finding, "warning") for finding in _findings(ranks)),
            html.charts([_loss(ranks), _time_chart(first), _rank_bars(ranks), _memory_bars(first), _swap_chart(first)]),
            html.heading("Ranks"),
            html.table(_RANK_HEADINGS, [_rank_row(each) for each in ranks]),
            _time_table(first),
            _memory_table(first),
            _drive_table(ranks),
            _warnings(ranks),
            html.heading("Run"),
            html.table((), _facts(first)),
        ],
    )


def _ending(exit_code: int) -> str:
    if exit_code == 0:
        return html.paragraph("All ranks ended well.")
    return html.paragraph(f"The job failed, exit code {exit_code}.", "warning")


def _conclusion(ranks: Sequence[RankRecords]) -> str:
    first = ranks[0]
    step_s = first.mean("wall_s")
    words = f"{first.head['world_size']} ranks, {first.head['backend']}"
    if not math.isnan(step_s):
        words += f": {last_step(first):.0f} steps, {step_s * 1e3:.1f} ms each"
    if first.losses:
        words += f", last loss {first.losses[-1][1]:.4g}"
    return words


def last_step(rank: RankRecords) -> float:
    """Return the number of the last step that was recorded."""
    return float(rank.steps[-1]["step"]) if rank.steps else 0.0


def seconds(ranks: Sequence[RankRecords]) -> dict[int, tuple[float, float, float, float]]:
    """Return by rank the mean seconds of a step: compute, communication, waiting for other ranks, swap.

    Communication takes all ranks as long as the rank that waits least; the rest is waiting.
    """
    known = [each for each in ranks if each.count]
    least = min((each.mean("comm_s") for each in known), default=0.0)
    found = {}
    for each in known:
        wall, comm, swap = each.mean("wall_s"), each.mean("comm_s"), each.mean("swap_s")
        found[int(each.head["rank"])] = (max(0.0, wall - comm - swap), least, comm - least, swap)
    return found


def _findings(ranks: Sequence[RankRecords]) -> list[str]:
    found = []
    parts = seconds(ranks)
    if len(parts) > 1:
        slow = min(parts, key=lambda rank: parts[rank][2])
        waited_s = statistics.median(each[2] for rank, each in parts.items() if rank != slow)
        if waited_s > max(1e-3, _SLOW_SHARE * sum(parts[slow])):
            found.append(f"Rank {slow} is the slowest: the others wait {waited_s * 1e3:.1f} ms of each step for it.")
    missing = sorted(set(range(int(ranks[0].head["world_size"]))) - {int(each.head["rank"]) for each in ranks})
    if missing:
        found.append(
            f"There are no records of rank {', '.join(map(str, missing[:16]))}{', ...' * (len(missing) > 16)}."
        )
    for each in ranks:
        if each.end is None:
            found.append(f"Rank {each.head['rank']} was killed: it has written no end.")
        elif each.end["state"] == "failed":
            found.append(f"Rank {each.head['rank']} has failed: {printable(str(each.end['message']))}")
    return found


# --- pictures -------------------------------------------------------------------------------------------------------


def smoothed(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """Return the exponential mean, corrected for its start."""
    out: list[float] = []
    mean, norm = 0.0, 0.0
    for value in values:
        mean, norm = weight * mean + (1 - weight) * value, weight * norm + (1 - weight)
        out.append(mean / norm)
    return out


def _loss(ranks: Sequence[RankRecords]) -> str:
    """Draw the loss of the first rank that has logged one."""
    points = next((each.losses for each in ranks if each.losses), [])
    finite = [(step, loss) for step, loss in points if math.isfinite(loss)]
    if not finite:
        return ""
    mean = smoothed([loss for _, loss in finite])
    lines = [
        Series("", finite, "a", style="opacity: .3; stroke-width: 1"),
        Series("smoothed", [(step, loss) for (step, _), loss in zip(finite, mean, strict=True)], "a"),
    ]
    return html.line_chart("Loss", "as logged", lines)


def _time_chart(rank: RankRecords) -> str:
    def of(record: dict[str, Any]) -> tuple[float, float, float]:
        wall, comm, swap = (1e3 * record[name] / record["steps"] for name in ("wall_s", "comm_s", "swap_s"))
        return max(0.0, wall - comm - swap), comm, swap

    values = [(float(record["step"]), of(record)) for record in rank.steps]
    names = (("compute", "a"), ("communication and waiting", "b"), ("swap", "d"))
    series = [
        Series(name, [(step, parts[number]) for step, parts in values], color)
        for number, (name, color) in enumerate(names)
    ]
    return html.stacked_chart(f"Time of a step, rank {rank.head['rank']}", "ms", series)


def _rank_bars(ranks: Sequence[RankRecords]) -> str:
    rows = [(f"rank {rank}", [1e3 * part for part in parts]) for rank, parts in seconds(ranks).items()]
    return html.bars("Time of a step by rank", "ms", rows, _PARTS)


def _memory_bars(rank: RankRecords) -> str:
    if not rank.steps:
        return ""
    last = rank.steps[-1]
    rows = []
    for tier, held, slots, plan in zip(TIERS, last["memory"], last["slots"], last["plan"], strict=True):
        if held or slots or plan:
            rows.append((tier, (held / _MIB, slots / _MIB, 0.0)))
            if plan:
                rows.append(("plan", (0.0, 0.0, plan / _MIB)))
    names = (("held", "a"), ("slots", "c"), ("ZeRO's formula", "b"))
    return html.bars(f"Memory by tier, rank {rank.head['rank']}", "MiB", rows, names)


def _swap_chart(rank: RankRecords) -> str:
    def rates(nbytes: str, busy: str) -> list[tuple[float, float]]:
        found = []
        for record in rank.steps:
            taken = max((drive[busy] for drive in record["drives"]), default=0.0)
            if taken > 0:
                found.append((float(record["step"]), sum(drive[nbytes] for drive in record["drives"]) / taken / 1e9))
        return found

    lines = [
        Series("read", rates("read_nbytes", "read_s"), "a"),
        Series("written", rates("written_nbytes", "write_s"), "b"),
    ]
    return html.line_chart(f"Swap, rank {rank.head['rank']}", "GB/s while requests are in flight", lines)


# --- tables ---------------------------------------------------------------------------------------------------------

_RANK_HEADINGS = ("rank", "host", "pid", "end", "steps", "a step, ms", "compute", "comm., waiting", "swap")


def _rank_row(rank: RankRecords) -> tuple[str, ...]:
    head = rank.head
    state = "killed" if rank.end is None else str(rank.end["state"])
    facts = (
        str(head["rank"]),
        printable(str(head["host"])),
        str(head["pid"]),
        printable(state),
        f"{last_step(rank):.0f}",
    )
    if not rank.count:
        return (*facts, "-", "-", "-", "-")
    wall, comm, swap = (1e3 * rank.mean(name) for name in ("wall_s", "comm_s", "swap_s"))
    return (*facts, *(f"{ms:.1f}" for ms in (wall, max(0.0, wall - comm - swap), comm, swap)))


def _time_table(rank: RankRecords) -> str:
    if not rank.steps:
        return ""
    rows = time_rows([{**each, "compute_s": each["wall_s"] - each["comm_s"] - each["swap_s"]} for each in rank.steps])
    return html.heading(f"Time of a step, rank {rank.head['rank']}") + html.table(TIME_HEADINGS, rows)


TIME_HEADINGS = ("part", "median, ms", "of all steps, s", "share")


def time_rows(steps: Sequence[dict[str, Any]], whole: str = "wall_s") -> list[tuple[str, str, str, str]]:
    """Return the seconds by part: of the median step, of all steps, and the part's share.

    steps: records with "compute_s", "comm_s", "swap_s", ``whole``, and their number of "steps" (1 by default).
    """
    total = sum(record[whole] for record in steps) or 1e-9
    rows = []
    for key, name in (("compute_s", "compute"), ("comm_s", "communication"), ("swap_s", "swap"), (whole, "step")):
        each = [max(0.0, record[key]) / record.get("steps", 1) for record in steps]
        spent = sum(max(0.0, record[key]) for record in steps)
        share = f"{100 * spent / total:.0f}%"
        rows.append((name, f"{1000 * statistics.median(each):.1f}", f"{spent:.1f}", share))
    return rows


def _memory_table(rank: RankRecords) -> str:
    if not rank.steps:
        return ""
    rows = []
    for number, tier in enumerate(TIERS):
        held = max(record["memory"][number] for record in rank.steps)
        slots = max(record["slots"][number] for record in rank.steps)
        plan = rank.steps[-1]["plan"][number]
        if held or slots or plan:
            far = "-" if not plan else f"{100 * (held - plan) / plan:+.1f}%"
            rows.append((tier, *(f"{nbytes / _MIB:.2f}" for nbytes in (held, slots)), _mib(plan), far))
    title = html.heading(f"Memory of rank {rank.head['rank']}, MiB")
    return title + html.table(("tier", "held at most", "more in slots", "ZeRO's formula", "difference"), rows)


def _mib(nbytes: float | None) -> str:
    return "-" if nbytes is None else f"{nbytes / _MIB:.2f}"


def _drive_table(ranks: Sequence[RankRecords]) -> str:
    names = ("read_nbytes", "read_s", "written_nbytes", "write_s")
    sums: dict[tuple[int, str], list[float]] = {}
    for rank in ranks:
        for record in rank.steps:
            for drive in record["drives"]:
                total = sums.setdefault((rank.head["rank"], printable(str(drive["path"]))), [0.0] * len(names))
                for number, name in enumerate(names):
                    total[number] += drive[name]
    if not sums:
        return ""
    rows = [
        (str(rank), path, _gb(total[0]), _rate(total[0], total[1]), _gb(total[2]), _rate(total[2], total[3]))
        for (rank, path), total in sums.items()
    ]
    headings = ("rank", "drive", "read, GB", "GB/s", "written, GB", "GB/s")
    return html.heading("Swap") + html.table(headings, rows)


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f}"


def _rate(nbytes: float, taken_s: float) -> str:
    return f"{nbytes / taken_s / 1e9:.2f}" if taken_s > 0 else "-"


def _warnings(ranks: Sequence[RankRecords]) -> str:
    rows = [(str(rank.head["rank"]), text) for rank in ranks for text in rank.warnings]
    return html.heading("Warnings") + html.table(("rank", "text"), rows) if rows else ""


def _facts(rank: RankRecords) -> list[tuple[str, str]]:
    names = ("command", "job", "host", "backend", "world_size")
    return [(name.replace("_", " "), printable(str(rank.head[name]))) for name in names]
