"""The printed rows and the markdown page of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_GOALS = {False: 0.97, True: 0.90}


def row_lines(row: Mapping[str, Any]) -> Iterator[str]:
    yield f"# {row['title']}, {row['nbytes'] >> 20} MiB a round; best flags {row['best_flags'] or 'of no peer'}"
    for name, gbps in row["gbps"].items():
        spread = row["rounds_gbps"][name]
        shares = "".join(f"  x {peer} {of[name]:.3f}" for peer, of in row["share_of"].items() if name in of)
        moved = row["moved_over_asked"][name]
        counted = "" if moved is None else f"  moved/asked {moved:.3f}"
        yield f"  {name:<14} {gbps:7.3f} GB/s  ({min(spread):.3f} to {max(spread):.3f}){counted}{shares}"
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
        f"{about['drive']}. Written by `bench/swap_bw`. GB/s: median of {rounds} interleaved rounds; share: median "
        "of the rounds' ratios. moved/asked: what the block device counted over what was asked for.",
        "",
        *(f"Skipped: {name}, {why}.\n" for each in machines for name, why in each["skipped"].items()),
        "| load | variant | GB/s | lowest to highest | moved/asked | share of fio | over DeepSpeed | #wrong |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        lines.extend(_cells(row))
    lines += ["", "| load | goal: share of fio | measured (zcomm) | |", "|---|---|---|---|"]
    for row in found:
        share = row["share_of"].get("fio", {}).get("zcomm")
        if share is not None:
            goal = _GOALS[row["batch"]]
            lines.append(
                f"| {row['title']} | >= {goal:.2f} | {share:.3f} | {'holds' if share >= goal else '**misses**'} |"
            )
    lines += ["", "Best flags of the sweeps:", ""]
    lines += [f"* {row['title']}: {row['best_flags']}" for row in found if row["best_flags"]]
    return "\n".join(lines) + "\n"


def _cells(row: Mapping[str, Any]) -> Iterator[str]:
    for name, gbps in row["gbps"].items():
        spread, moved = row["rounds_gbps"][name], row["moved_over_asked"][name]
        shares = [row["share_of"].get(peer, {}).get(name) for peer in ("fio", "deepspeed")]
        words = ["-" if share is None else f"{share:.3f}" for share in shares]
        wrong = row["wrong"] if name.startswith("zcomm") else "-"
        counted = "-" if moved is None else f"{moved:.3f}"
        yield (
            f"| {row['title']} | {name} | {gbps:.3f} | {min(spread):.3f} to {max(spread):.3f} | {counted} | "
            f"{words[0]} | {words[1]} | {wrong} |"
        )
