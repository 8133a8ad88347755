"""Rows as they are shown: nccl-tests' table, a picture of the share of the roof over size, the suite's page."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from collective import judge
from collective.judge import Record
from harness.goal import table
from harness.record import machine

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_PYTHON = ("op", "ranks", "backend", "type", "bytes", "variant", "time us", "p50 us", "p99 us", "roof share", "#wrong")
_CORE = ("op", "ranks", "bytes", "variant", "p50 ns", "p99 ns", "cache-line round trip ns", "futex switch ns")


def header_lines(arguments: argparse.Namespace, peers: Sequence[str]) -> Iterator[str]:
    """Yield the lines above the table. peers: the available ones."""
    import zcomm

    about, ranks = machine(), zcomm.world_size()
    yield f"# {arguments.op}, {ranks} ranks, backend {arguments.backend}; {about['cpu']}, {about['cores']} cores"
    yield f"# torch {about['torch']}, zcomm {about['revision']}, load average {about['load_average']:.2f}"
    roof = "send and receive over raw sockets" if arguments.backend == "tcp" else "copy"
    yield f"# time: median of >= 7 interleaved rounds, slowest rank; roof: all ranks {roof} as many bytes at once"
    factors = "".join(f" {'x ' + name:>12}" for name in peers if name != "torch")
    model, units = (f" {text:>10}" if arguments.model else "" for text in ("model", "(us)"))
    yield (
        f"# {'size':>12} {'count':>11} {'type':>8} {'redop':>5}  {'variant':<13} {'time':>11} {'algbw':>7} "
        f"{'busbw':>7} {'#wrong':>6} {'roof':>6} | {'p50':>10} {'p95':>10} {'p99':>10} | "
        f"{'roof time':>10}{model} |{factors}"
    )
    yield (
        f"# {'(B)':>12} {'(elements)':>11} {'':>8} {'':>5}  {'':<13} {'(us)':>11} {'(GB/s)':>7} {'(GB/s)':>7} {'':>6} "
        f"{'share':>6} | {'(us)':>10} {'(us)':>10} {'(us)':>10} | {'(us)':>10}{units} |"
    )


def row_lines(arguments: argparse.Namespace, row: Mapping[str, Any], peers: Sequence[str]) -> Iterator[str]:
    for name in (*arguments.variants, *peers):
        begin = f"  {row['nbytes']:>12} {row['count']:>11} {row['type']:>8} {row['redop']:>5}  {name:<13} "
        if name not in row["algbw_gbps"]:
            yield f"{begin}{'-':>11}"
            continue
        wrong, share = row["wrong"][name], row["share_of_roof"][name]
        tail = "".join(f" {row['percentiles_us'][name][p]:>10.2f}" for p in ("p50", "p95", "p99"))
        predicted = row.get("model_us", {}).get(name)
        model = f" {'-' if predicted is None else f'{predicted:.1f}':>10}" if arguments.model else ""
        yield (
            f"{begin}{row['time_us'][name]:>11.2f} {row['algbw_gbps'][name]:>7.2f} {row['busbw_gbps'][name]:>7.2f} "
            f"{'N/A' if wrong is None else wrong:>6} {share:>6.2f} |{tail} | {row['roof_us']:>10.1f}{model} |"
            f"{_factors(peers, row, name)}"
        )


def _factors(peers: Sequence[str], row: Mapping[str, Any], name: str) -> str:
    """Return the peers' time over this line's."""
    text = ""
    for peer in peers:
        if peer != "torch":
            factor = row["time_us"][peer] / row["time_us"][name] if peer in row["time_us"] and peer != name else None
            text += f" {'-' if factor is None else f'{factor:.1f}':>12}"
    return text


def draw(rows: Sequence[Mapping[str, Any]], path: str) -> str:
    """Draw a line per variant and peer into `path`; return the line to print. Needs matplotlib."""
    if not find_spec("matplotlib"):
        return f"# {path}: not drawn, matplotlib is not installed (pip install matplotlib)"
    if not rows:
        return f"# {path}: not drawn, there is no row"
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for name in dict.fromkeys(name for row in rows for name in row["share_of_roof"]):
        points = [(row["nbytes"], row["share_of_roof"][name]) for row in rows if name in row["share_of_roof"]]
        ours = name in ("symmetric", "private")
        axes.plot(
            *zip(*points, strict=True), marker="o", markersize=3, label=name, linewidth=2 if ours else 1, alpha=0.9
        )
    first = rows[0]
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
    axes.set_xscale("log", base=2)
    axes.set_xticks([row["nbytes"] for row in rows], [readable(row["nbytes"]) for row in rows], rotation=45, fontsize=7)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("share of the roof measured beside it")
    axes.set_title(f"{first['op']}, {first['type']}, {first['world_size']} ranks", fontsize=10)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return f"# {path}: share of the roof over size"


def readable(nbytes: int) -> str:
    for scale, unit in _UNITS:
        if nbytes >= scale:
            return f"{nbytes / scale:g} {unit}"
    return f"{nbytes} B"


def page_of(records: Sequence[Record]) -> str:
    """Return the Markdown page of a run of the suite: the goals first, then every row."""
    about = next((r for r in records if r["kind"] == "machine"), {})
    lines = [
        f"# Collectives, {about.get('time', '')[:10]}",
        "",
        f"{about.get('cpu', '?')}, {about.get('cores', '?')} cores, kernel {about.get('kernel', '?')}, "
        f"torch {about.get('torch', '?')}, zcomm {about.get('revision', '?')}. Written by `bench/coll.py suite`. "
        "A time is a median of interleaved rounds, percentiles are over single calls, both of the slowest rank.",
        "",
        *table(("what", "goal", "measured", ""), (verdict.cells for verdict in judge.verdicts(records))),
        "",
        *(f"Failed: {r['part']}, {r['step']} ({r['reason']}).\n" for r in records if r["kind"] == "failed"),
        *_skipped(records),
        "## Python, by operation and size",
        "",
        *table(_PYTHON, _rows(records)),
        "",
        "## C++ API, single blocking calls",
        "",
        *table(_CORE, _core_rows(records)),
        "",
    ]
    return "\n".join(lines)


def _skipped(records: Sequence[Record]) -> Iterator[str]:
    found = {pair for r in records if r["kind"] == "machine" for pair in r.get("skipped", {}).items()}
    for name, why in sorted(found):
        yield f"Skipped: {name}, {why}.\n"


def _rows(records: Sequence[Record]) -> Iterator[Sequence[object]]:
    for r in judge.rows(records):
        about = (r["op"], r["world_size"], r["backend"], r["type"], r["nbytes"])
        for name, share in r["share_of_roof"].items():
            tail = r["percentiles_us"][name]
            times = (f"{us:.1f}" for us in (r["time_us"][name], tail["p50"], tail["p99"]))
            yield *about, name, *times, f"{share:.2f}", r["wrong"][name]


def _core_rows(records: Sequence[Record]) -> Iterator[Sequence[object]]:
    for r in (r for r in records if r["kind"] == "latency"):
        times = (f"{r[key]:.0f}" for key in ("p50_ns", "p99_ns", "line_round_trip_ns", "futex_hop_ns"))
        yield r["op"], r["world_size"], r["nbytes"], r["variant"], *times
