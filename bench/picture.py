"""Draw README's picture, docs/assets/bars.svg, from files under bench/results: zcomm and its peers.

    python3 bench/picture.py [--out docs/assets/bars.svg] [--results bench/results]

Every bar is a time, so shorter is better in each panel. The sources and the rows are named in `panels`.
The SVG has no dependency and no script; it has its own background, dark if the reader's system is dark.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

Record = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent
COLLECTIVES = "coll-2026-11-21.jsonl"
STEP = "zero-step-2026-11-22.jsonl"
NVME_STEP = "zero-step-2026-11-23.jsonl"
SWAP = "swap-2026-11-22.jsonl"

WIDTH, MARGIN, GUTTER = 920, 24, 36
HEAD, ROW, BAR, FOOT = 44, 22, 13, 18  # heights of a panel's head, of a row, of its bar, below the panel
LABEL, VALUE = 150, 66  # widths left and right of the bars

STYLE = """
    .card { fill: #ffffff; stroke: #d0d7de }
    text { font: 12px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #24292f }
    .title { font-size: 14px; font-weight: 600 }
    .note { fill: #59636e; font-size: 11px }
    .own { fill: #0969da } .peer { fill: #afb8c1 } .limit { fill: none; stroke: #59636e; stroke-dasharray: 3 2 }
    .strong { font-weight: 600 }
    @media (prefers-color-scheme: dark) {
      .card { fill: #161b22; stroke: #30363d }
      text { fill: #e6edf3 }
      .note { fill: #9198a1 }
      .own { fill: #4493f8 } .peer { fill: #59636e } .limit { stroke: #9198a1 }
    }
"""


@dataclass(frozen=True)
class Bar:
    """One time in milliseconds. kind: "own" (zcomm), "peer", or "limit", a yardstick (no communication, fio)."""

    label: str
    ms: float
    kind: str = "peer"


@dataclass(frozen=True)
class Panel:
    """A title, a note on the workload, and its bars."""

    title: str
    note: str
    bars: Sequence[Bar]


def panels(results: Path) -> list[Panel]:
    """Read the four panels. Raises: LookupError that names the file without a needed row."""
    step = _row(results / STEP, lambda r: r["kind"] == "zero_step" and "fsdp2" in r["step_ms"])["step_ms"]
    nvme = _row(results / NVME_STEP, lambda r: "deepspeed-3-nvme" in r.get("step_ms", {}))["step_ms"]
    return [
        Panel("all_reduce, 64 MiB fp32", "2 ranks, shared memory", _collective(results, "all_reduce")),
        Panel("reduce_scatter, 64 MiB fp32", "2 ranks, shared memory", _collective(results, "reduce_scatter")),
        Panel(
            "Training step, GPT of 33.5M parameters",
            "2 ranks with a core each, fp32, AdamW; NVMe: another run",
            [
                Bar("no communication", step["none"], "limit"),
                Bar("zcomm, ZeRO stage 3", step["zcomm-3"], "own"),
                Bar("DDP (Gloo)", step["ddp-gloo"]),
                Bar("FSDP2 (Gloo)", step["fsdp2"]),
                Bar("DeepSpeed, stage 3", step["deepspeed-3"]),
                Bar("zcomm, on NVMe", nvme["zcomm-3-nvme"], "own"),
                Bar("DeepSpeed, on NVMe", nvme["deepspeed-3-nvme"]),
            ],
        ),
        Panel("Swap file on a virtual drive", "time per GiB: one tensor, or tensors of 1 MiB", _swap(results / SWAP)),
    ]


def _records(path: Path) -> Iterator[Record]:
    for line in path.read_text(encoding="utf-8").splitlines():
        yield json.loads(line)


def _row(path: Path, wanted: Callable[[Record], bool]) -> Record:
    found = next((record for record in _records(path) if wanted(record)), None)
    if found is None:
        raise LookupError(f"{path}: the row that the picture needs is not there")
    return found


def _collective(results: Path, operation: str) -> list[Bar]:
    def wanted(record: Record) -> bool:
        key = (record.get("part"), record["kind"], record.get("op"), record.get("type"), record.get("nbytes"))
        return key == ("bandwidth", "row", operation, "float", 64 << 20)

    ms = {variant: us / 1e3 for variant, us in _row(results / COLLECTIVES, wanted)["time_us"].items()}
    bars = [Bar("zcomm, symmetric", ms["symmetric"], "own"), Bar("zcomm, any tensor", ms["private"], "own")]
    peers = (("deepspeed-shm", "DeepSpeed's shm"), ("openmpi", "Open MPI"), ("gloo", "Gloo"))
    return bars + [Bar(label, ms[name]) for name, label in peers if name in ms]


def _swap(path: Path) -> list[Bar]:
    bars: list[Bar] = []
    for title, what in (("write", "write"), ("read", "read"), ("write, tensors of 1 MiB", "write 1 MiB")):
        gbps = _row(path, lambda r, title=title: r["kind"] == "row" and r["title"] == title)["gbps"]
        names = (("zcomm", "zcomm", "own"), ("fio", "best fio", "limit"), ("deepspeed", "DeepSpeed", "peer"))
        bars += [Bar(f"{what}: {label}", 1073.741824 / gbps[name], kind) for name, label, kind in names]
    return bars


def _panel(panel: Panel, x: float, y: float, width: float) -> Iterator[str]:
    yield f'<text class="title" x="{x:g}" y="{y + 14:g}">{escape(panel.title)}</text>'
    yield f'<text class="note" x="{x:g}" y="{y + 31:g}">{escape(panel.note)}</text>'
    scale = (width - LABEL - VALUE) / max(bar.ms for bar in panel.bars)
    for number, bar in enumerate(panel.bars):
        top = y + HEAD + number * ROW
        base, length, strong = top + BAR - 2, max(bar.ms * scale, 1.5), " strong" if bar.kind == "own" else ""
        value = f"{bar.ms:.1f} ms" if bar.ms < 100 else f"{bar.ms:.0f} ms"
        yield f'<text class="label{strong}" x="{x:g}" y="{base:g}">{escape(bar.label)}</text>'
        yield f'<rect class="{bar.kind}" x="{x + LABEL:g}" y="{top:g}" width="{length:.1f}" height="{BAR}" rx="2"/>'
        yield f'<text class="value{strong}" x="{x + LABEL + length + 6:.1f}" y="{base:g}">{value}</text>'


def picture(drawn: Sequence[Panel]) -> str:
    """Return the SVG: two panels side by side in each row."""
    width = (WIDTH - 2 * MARGIN - GUTTER) / 2
    body: list[str] = []
    y = float(MARGIN)
    for first in range(0, len(drawn), 2):
        pair = drawn[first : first + 2]
        for column, panel in enumerate(pair):
            body += _panel(panel, MARGIN + column * (width + GUTTER), y, width)
        y += HEAD + ROW * max(len(panel.bars) for panel in pair) + FOOT
    note = "Shorter is better. Blue: zcomm. Dashed: a yardstick, not a peer. AMD EPYC, 2 cores of a virtual machine."
    body.append(f'<text class="note" x="{MARGIN}" y="{y + 4:g}">{note}</text>')
    height = y + MARGIN
    title = "; ".join(f"{p.title}: " + ", ".join(f"{b.label} {b.ms:.1f} ms" for b in p.bars) for p in drawn)
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img">',
            f"  <title>{escape(title)}</title>",
            f"  <style>{STYLE}  </style>",
            f'  <rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:g}" rx="8"/>',
            *(f"  {line}" for line in body),
            "</svg>",
            "",
        )
    )


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description="Draw README's picture from files under bench/results.")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "docs/assets/bars.svg", help="the SVG (default: %(default)s)"
    )
    parser.add_argument("--results", type=Path, default=ROOT / "bench/results", help="folder of the results")
    args = parser.parse_args()
    args.out.write_text(picture(panels(args.results)), encoding="utf-8")
    print(args.out)


if __name__ == "__main__":
    main()
