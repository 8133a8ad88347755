"""The Markdown page and the verdicts of a run of `bench/adam.py step`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.goal import Verdict, judge, table

Row = Mapping[str, Any]


def verdicts(rows: Sequence[Row]) -> Iterator[Verdict]:
    """Yield the verdicts on all rows."""
    for row in rows:
        times, place = row["time_ms"], f"{row['kind']}, {row['count'] / 1e6:g}M"
        ours = times["zcomm"]
        if row["kind"] in ("fp32, 1 tensor", "fp32, 100 tensors") and row["count"] <= 1_000_000:
            yield judge(f"{place}: step / torch fused", "adam.small.of.torch", [ours / times["torch_fused"]])
        elif row["kind"] == "fp32, 1 tensor":
            if row["roof_ms"]:
                yield judge(f"{place}: share of the stream roof", "adam.stream", [row["roof_ms"] / ours])
            yield judge(f"{place}: over torch fused", "adam.over.torch", [times["torch_fused"] / ours])
            if "deepspeed" in times:
                yield judge(f"{place}: over DeepSpeedCPUAdam", "adam.over.deepspeed", [times["deepspeed"] / ours])
        elif row["kind"] == "bf16 weight and gradient":
            peer = "deepspeed" if "deepspeed" in times else "torch_fused"
            yield judge(f"{place}: over {peer}'s cast + step + cast", "adam.bf16", [times[peer] / ours])
        elif row["kind"] == "fp32 weight, small state":
            for name in ("bf16_state", "8bit_state"):
                if f"zcomm_{name}" in times:
                    faster = ours / times[f"zcomm_{name}"]
                    yield judge(f"{place}: zcomm_{name} over own fp32", f"adam.{name}", [faster])


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
        f"{about['revision']}; {about['threads']} threads, pages: {about['pages']}. Written by `bench/adam.py`: "
        f"medians of {about['rounds']} interleaved rounds. The stream roof reads p, g, m, v and writes p, m, v; GB/s "
        "counts the bytes that a step cannot avoid.",
        "",
        *table(("what", "goal", "measured", ""), (verdict.cells for verdict in verdicts(rows))),
        "",
        *(f"Skipped: {name}, {why}.\n" for name, why in skipped.items()),
        *table(("row", "elements", "variant", "ms", "GB/s", "share of the roof", "#wrong"), cells(rows)),
        "",
    ]
    return "\n".join(lines)
