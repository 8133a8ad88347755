"""The Markdown page of a run of `bench/coll.py suite`: the goals first, then every row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from collective import judge
from collective.judge import Record
from harness.goal import table

_PYTHON = ("op", "ranks", "backend", "type", "bytes", "variant", "time us", "p50 us", "p99 us", "roof share", "#wrong")
_CORE = ("op", "ranks", "bytes", "variant", "p50 ns", "p99 ns", "cache-line round trip ns", "futex switch ns")


def page_of(records: Sequence[Record]) -> str:
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
