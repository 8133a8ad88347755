"""The printed rows, their verdicts, and the Markdown page of a run."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.goal import MARKS, Verdict, goal, judge, table

_COLUMNS = ("load", "variant", "GB/s", "lowest to highest", "moved/asked", "share of fio", "over DeepSpeed", "#wrong")
_STEP_COLUMNS = ("precision", "parameters", "state MiB", "in RAM MiB", "moved GB", "in RAM ms", "I/O ms", "step ms")


def row_lines(row: Mapping[str, Any]) -> Iterator[str]:
    yield f"# {row['title']}, {row['nbytes'] >> 20} MiB a round; best flags {row['best_flags'] or 'of no peer'}"
    for name, gbps in row["gbps"].items():
        spread = row["rounds_gbps"][name]
        shares = "".join(f"  x {peer} {of[name]:.3f}" for peer, of in row["share_of"].items() if name in of)
        moved = row["moved_over_asked"][name]
        counted = "" if moved is None else f"  moved/asked {moved:.3f}"
        yield f"  {name:<14} {gbps:7.3f} GB/s  ({min(spread):.3f} to {max(spread):.3f}){counted}{shares}"
    yield f"  #wrong {row['wrong']}"


def step_lines(row: Mapping[str, Any]) -> Iterator[str]:
    state, ram = row["state_nbytes"], row["ram_nbytes"]
    yield (
        f"# step, {row['precision']}, {row['numel'] / 1e6:.0f}M parameters: {state >> 20} MiB of state, {ram >> 20} "
        f"MiB of it in RAM ({state / ram:.2f}x), {row['windows']} windows; "
        f"best flags {row['best_flags'] or 'of no peer'}"
    )
    known = row["moved_over_asked"]
    counted = "" if known is None else f", moved/asked {known:.3f}"
    yield (
        f"  swapped {1e3 * row['step_s']:.1f} ms (step() returned after {1e3 * row['returned_s']:.1f}, waited "
        f"{1e3 * row['waited_s']:.1f}), in RAM {1e3 * row['ram_s']:.1f} ms; {row['moved_nbytes'] / 1e9:.3f} GB moved, "
        f"{row['moved_nbytes'] / row['step_s'] / 1e9:.2f} GB/s{counted}; checksums cost "
        f"{100 * row['checksum_cost']:.1f} %"
    )
    if row["share"] is not None:
        low, high = min(row["shares"]), max(row["shares"])
        yield f"  I/O at fio's rate {1e3 * row['io_s']:.1f} ms; share {row['share']:.3f} ({low:.3f} to {high:.3f})"
    yield f"  #wrong {row['wrong']}"


def page_of(records: Sequence[Mapping[str, Any]]) -> str:
    machines = [record for record in records if record["kind"] == "machine"]
    about = machines[-1]
    found = [record for record in records if record["kind"] == "row"]
    rounds = min((len(each) for row in found for each in row["rounds_gbps"].values()), default=0)
    lines = [
        f"# Swap, {about['time'][:10]}",
        "",
        f"{about['cpu']}, {about['cores']} cores, kernel {about['kernel']}, zcomm {about['revision']}. Drive: "
        f"{about['drive']}. Written by `bench/swap.py`. GB/s: median of at least {rounds} interleaved "
        "rounds; share: median of the rounds' ratios. moved/asked: what the block device counted over what was asked "
        "for.",
        "",
        *(f"Skipped: {name}, {why}.\n" for each in machines for name, why in each["skipped"].items()),
        *table(_COLUMNS, (cells for row in found for cells in _cells(row))),
        "",
        *table(("load", "goal", "measured", ""), (verdict.cells for row in found for verdict in verdicts(row))),
    ]
    lines += _steps([record for record in records if record["kind"] == "step"])
    lines += ["", "Best flags of the sweeps:", ""]
    lines += [f"* {row['title']}: {row['best_flags']}" for row in found if row["best_flags"]]
    return "\n".join(lines) + "\n"


def verdicts(row: Mapping[str, Any]) -> Iterator[Verdict]:
    """Yield the verdicts on a row of bandwidth."""
    near_fio = "swap.fio.batch" if row["batch"] else "swap.fio"
    for peer, words, name in (
        ("fio", "share of fio", near_fio),
        ("deepspeed", "over DeepSpeed", "swap.over.deepspeed"),
    ):
        share = row["share_of"].get(peer, {}).get("zcomm")
        if share is not None:
            yield judge(f"{row['title']}: {words}", name, [share], digits=3)
    cost = checksum_cost(row)
    if cost is not None:
        yield judge(f"{row['title']}: checksum", "swap.checksum", [100 * cost], digits=1)


def checksum_cost(row: Mapping[str, Any]) -> float | None:
    """Return the part of the rate that checksums cost: of each round, then the median.

    It is against fio on the same file, where fio ran: two files on one drive may differ by some percent.
    """
    of = row["shares"].get("fio") or row["rounds_gbps"]
    if not {"zcomm", "zcomm no crc"} <= set(of):
        return None
    return 1.0 - statistics.median(a / b for a, b in zip(of["zcomm"], of["zcomm no crc"], strict=True))


def _steps(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    if not rows:
        return []
    wanted = goal("swap.step")
    about = (
        "AdamW step with its state on the drive: share = max(I/O at fio's mixed rate, step in RAM) / step, where the "
        "step ends when the last write is on the drive; `step()` itself returns earlier."
    )
    shares = (f"share, goal {wanted}", "lowest to highest", "")
    columns = (*_STEP_COLUMNS, "returned ms", *shares, "checksums cost", "#wrong")
    return ["", about, "", *table(columns, map(_step_cells, rows))]


def _step_cells(row: Mapping[str, Any]) -> Sequence[object]:
    share = ("-", "-", "-")
    if row["share"] is not None:
        low, high = min(row["shares"]), max(row["shares"])
        share = (f"{row['share']:.3f}", f"{low:.3f} to {high:.3f}", MARKS[goal("swap.step").holds(row["share"])])
    return (
        row["precision"],
        f"{row['numel'] / 1e6:.0f}M",
        row["state_nbytes"] >> 20,
        row["ram_nbytes"] >> 20,
        f"{row['moved_nbytes'] / 1e9:.3f}",
        f"{1e3 * row['ram_s']:.1f}",
        "-" if row["share"] is None else f"{1e3 * row['io_s']:.1f}",
        f"{1e3 * row['step_s']:.1f}",
        f"{1e3 * row['returned_s']:.1f}",
        *share,
        f"{100 * row['checksum_cost']:.1f} %",
        row["wrong"],
    )


def _cells(row: Mapping[str, Any]) -> Iterator[Sequence[object]]:
    for name, gbps in row["gbps"].items():
        spread, moved = row["rounds_gbps"][name], row["moved_over_asked"][name]
        shares = [row["share_of"].get(peer, {}).get(name) for peer in ("fio", "deepspeed")]
        words = ["-" if share is None else f"{share:.3f}" for share in shares]
        wrong = row["wrong"] if name.startswith("zcomm") else "-"
        counted = "-" if moved is None else f"{moved:.3f}"
        yield row["title"], name, f"{gbps:.3f}", f"{min(spread):.3f} to {max(spread):.3f}", counted, *words, wrong
