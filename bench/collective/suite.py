"""The whole table of what the collectives must reach, in one go: about eight minutes on a quiet 2-core machine.

  bench/coll.py suite                          (all parts; make bench-collectives builds the C++ benches first)
  bench/coll.py suite --part latency,guard     (some; parts that the results have already are kept)
  bench/coll.py suite --again --part tcp       (measures anew what the results have)

Writes bench/results/coll-<date>.jsonl, every record with its part and step, and the table beside its goals as
.md. A step that was measured is skipped by the next run of the same day, so that an interrupted run goes on. The exit
code is 1 if a step failed or a number that was measured misses its goal. `--quick`: tiny sizes, to try the script.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collective.judge import verdicts
from collective.show import page_of
from harness import launch, mpi
from harness.program import listed, make_parser
from harness.record import ROOT

PARTS = ("latency", "bandwidth", "oversubscribed", "tcp", "guard", "ddp")
CPP = ROOT / "build/bench/bench/cpp/zcomm_bench"


@dataclass(frozen=True)
class Step:
    part: str
    name: str
    command: list[str]


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("bench/coll.py suite", __doc__)
    add = parser.add_argument
    add("--part", default=",".join(PARTS), help=f"by commas: {', '.join(PARTS)} (all)")
    add("--out", metavar="STEM", help="results go to STEM.jsonl and STEM.md (bench/results/coll-<date>)")
    add("--again", action="store_true", help="measure anew what the results have already")
    add("--quick", action="store_true", help="tiny sizes and few calls: tries the script, measures nothing")
    add("--timeout", type=float, default=240.0, help="seconds for one step (240)")
    arguments = parser.parse_args(words)
    arguments.parts = listed(parser, "--part", arguments.part, PARTS)
    stem = "quick" if arguments.quick else "coll"
    arguments.out = Path(arguments.out or ROOT / f"bench/results/{stem}-{time.strftime('%Y-%m-%d')}")
    return arguments


def steps(quick: bool) -> Iterator[Step]:
    """Yield the steps, part by part. The goals determine sizes and counts."""

    def sweep(part: str, name: str, *flags: str) -> Step:
        return Step(part, name, [sys.executable, str(ROOT / "bench/allreduce_bw"), *flags])

    def cpp(part: str, name: str, ranks: int, *flags: str) -> Step:
        start = mpi.find("openmpi", need_mpi4py=False)
        program = [str(CPP), *flags]
        return Step(
            part, name, [*program, "-np", str(ranks)] if isinstance(start, str) else start.command(ranks, program)
        )

    def few(count: int) -> str:
        return str(min(count, 7) if quick else count)

    large, larger = ("64K", "128K") if quick else ("64M", "256M")
    ladder = ["-b", "8", "-e", "4K", "-f", "8"]
    once = ["-b", large, "-e", large, "-n", few(9), "-w", "2"]

    yield cpp("latency", "c++", 2, "latency", *ladder, "-n", few(4000), "-w", few(500))
    yield sweep("latency", "python", *ladder, "-n", few(2000), "-w", few(100), "--peer", "gloo,openmpi,torch")

    wide = ["-b", large, "-e", larger, "-f", "2", "-n", few(9), "-w", "2"]
    yield sweep("bandwidth", "all_reduce fp32", *wide, "--peer", "gloo,openmpi,deepspeed-shm")
    yield sweep("bandwidth", "all_reduce bf16", *wide, "-d", "bfloat16", "--peer", "gloo,deepspeed-shm")
    others = "reduce_scatter,all_gather,broadcast,all_to_all"
    yield sweep("bandwidth", "other collectives", "--op", others, *once, "--peer", "gloo,openmpi")
    yield sweep("bandwidth", "sendrecv", "--op", "sendrecv", *once, "--peer", "gloo,openmpi")

    for ranks in (4, 8):
        world = ["-np", str(ranks), "--peer", "gloo,openmpi"]
        yield sweep("oversubscribed", f"{ranks} ranks, large", *world, "-b", large, "-e", large, "-n", "7", "-w", "1")
        yield sweep(
            "oversubscribed", f"{ranks} ranks, 1 KiB", *world, "-b", "1K", "-e", "1K", "-n", few(210), "-w", "10"
        )
        flags = ("-b", "1K", "-e", "1K", "-n", few(1000), "-w", few(50))
        yield cpp("oversubscribed", f"{ranks} ranks, c++", ranks, "latency", *flags)

    yield sweep("tcp", "ring", "--backend", "tcp", *once, "--variants", "private", "--peer", "gloo")
    yield Step("guard", "guard", [str(CPP), "guard", "-np", "2", "-n", few(40000)])
    model = ["--width", "64", "--layers", "2", "--rounds", "7"] if quick else ["--rounds", "9"]
    yield Step("ddp", "ddp", [sys.executable, str(ROOT / "bench/zero.py"), "ddp", *model])


class Results:
    """The JSON lines of one day: steps that were measured, and all records."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[dict[str, Any]] = []
        if path.exists():
            self.records = [json.loads(line) for line in path.read_text().splitlines()]

    def has(self, step: Step) -> bool:
        return any(r["kind"] == "done" and (r["part"], r["step"]) == (step.part, step.name) for r in self.records)

    def replace(self, step: Step, records: list[dict[str, Any]]) -> None:
        kept = [r for r in self.records if (r["part"], r["step"]) != (step.part, step.name)]
        self.records = kept + [{"part": step.part, "step": step.name, **record} for record in records]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".draft")
        draft.write_text("".join(json.dumps(record) + "\n" for record in self.records))
        draft.replace(self.path)


def run(step: Step, timeout_s: float) -> list[dict[str, Any]]:
    """Run a step and return its records; the last is `done` or `failed`."""
    print(f"\n== {step.part}: {step.name}", flush=True)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="zcomm-bench-") as folder:
        file = Path(folder) / "rows.jsonl"
        reason = _run([*step.command, "--json", str(file)], timeout_s)
        records = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if reason:
        print(f"== {step.part}: {step.name} failed: {reason}", flush=True)
    end = {"kind": "failed" if reason else "done", "reason": reason, "took_s": round(time.monotonic() - begin, 1)}
    return [*records, end]


def _run(command: list[str], timeout_s: float) -> str:
    """Run a command; return why it failed, or ""."""
    try:
        process = subprocess.Popen(command)
    except OSError as error:
        return str(error)
    try:
        code = process.wait(timeout_s)
        return f"exit code {code}" if code else ""
    except subprocess.TimeoutExpired:
        return f"longer than {timeout_s:g} s"
    finally:
        if process.poll() is None:
            process.terminate()  # it ends its ranks
            process.wait()


def main(words: Sequence[str]) -> int:
    arguments = parse_arguments(words)
    launch.use_project_python()
    if not CPP.exists():
        print(f"# {CPP.relative_to(ROOT)} is not built (make bench-cpp): the C++ parts will fail", flush=True)
    results = Results(arguments.out.with_suffix(".jsonl"))
    for step in steps(arguments.quick):
        if step.part not in arguments.parts:
            continue
        if results.has(step) and not arguments.again:
            print(f"== {step.part}: {step.name}: measured already", flush=True)
            continue
        results.replace(step, run(step, arguments.timeout))
    page = arguments.out.with_suffix(".md")
    page.write_text(page_of(results.records))
    judged = verdicts(results.records)
    print("", *judged, sep="\n")
    print(f"# {results.path}, {page}")
    failed = any(r["kind"] == "failed" for r in results.records)
    return 1 if failed or any(verdict.good is False for verdict in judged) else 0
