"""The Markdown page and the verdicts of a run of bench/adam."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
_MARKS = {True: "holds", False: "**misses**"}


def verdicts(rows: Sequence[Row]) -> Iterator[tuple[str, str, str, str]]:
    """Yield what was judged, its goal, the measured value and the mark."""
    for row in rows:
        times, place = row["time_ms"], f"{row['kind']}, {row['count'] / 1e6:g}M"
        ours = times["zcomm"]

        def judge(what: str, goal: float, measured: float, at_most: bool = False, place: str = place) -> Any:
            good = measured <= goal if at_most else measured >= goal
            return f"{place}: {what}", f"{'<=' if at_most else '>='} {goal}", f"{measured:.2f}", _MARKS[good]

        if row["kind"] in ("fp32, 1 tensor", "fp32, 100 tensors") and row["count"] <= 1_000_000:
            yield judge("step / torch fused", 1.2, ours / times["torch_fused"], True)
        elif row["kind"] == "fp32, 1 tensor":
            if row["roof_ms"]:
                yield judge("share of the stream roof", 0.93, row["roof_ms"] / ours)
            yield judge("over torch fused", 1.0, times["torch_fused"] / ours)
            if "deepspeed" in times:
                yield judge("over DeepSpeedCPUAdam", 1.15, times["deepspeed"] / ours)
        elif row["kind"] == "bf16 weight and gradient":
            peer = "deepspeed" if "deepspeed" in times else "torch_fused"
            yield judge(f"over {peer}'s cast + step + cast", 1.6, times[peer] / ours)
        elif row["kind"] == "fp32 weight, small state":
            for name, goal in (("zcomm_bf16_state", 1.35), ("zcomm_8bit_state", 1.6)):
                if name in times:
                    yield judge(f"{name} over own fp32", goal, ours / times[name])


def table(titles: Sequence[str], cells: Iterator[Sequence[object]]) -> Iterator[str]:
    yield f"| {' | '.join(titles)} |"
    yield "|" + "---|" * len(titles)
    for row in cells:
        yield f"| {' | '.join(map(str, row))} |"


def cells(rows: Sequence[Row]) -> Iterator[Sequence[object]]:
    for row in rows:
        for name, ms in row["time_ms"].items():
            share = f"{row['roof_ms'] / ms:.2f}" if row["roof_ms"] and row["kind"].startswith("fp32, ") else ""
            wrong = row["wrong"].get(name)
            gbps = "" if row["bytes_per_element"].get(name) is None else f"{row['gbps'][name]:.1f}"
            yield row["kind"], row["count"], name, f"{ms:.3f}", gbps, share, "" if wrong is None else wrong


def page_of(about: Row, rows: Sequence[Row], skipped: Mapping[str, str]) -> str:
    lines = [
        f"# CPU Adam, {about['time'][:10]}",
        "",
        f"{about['cpu']}, {about['cores']} cores, kernel {about['kernel']}, torch {about['torch']}, zcomm "
        f"{about['revision']}; {about['threads']} threads, pages: {about['pages']}. Written by `bench/adam`: medians "
        f"of {about['rounds']} interleaved rounds. The stream roof reads p, g, m, v and writes p, m, v; GB/s counts "
        "the bytes that a step cannot avoid.",
        "",
        *table(("what", "goal", "measured", ""), verdicts(rows)),
        "",
        *(f"Skipped: {name}, {why}.\n" for name, why in skipped.items()),
        *table(("row", "elements", "variant", "ms", "GB/s", "share of the roof", "#wrong"), cells(rows)),
        "",
    ]
    return "\n".join(lines)
