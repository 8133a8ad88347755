"""CPUAdam beside the memory's stream, torch.optim.AdamW(fused=True) and DeepSpeedCPUAdam, one step at a time.

  bench/adam.py step                                     (1M, 50M and 200M parameters: about 3 minutes, 10 GB)
  bench/adam.py step --count 50000000 --rows fp32,bf16   (one size)
  bench/adam.py step --json adam.jsonl --page adam.md    (keeps the result)

All variants run in one process with the same number of threads and take turns, a step each (A B C A B C ...). Every
variant's first steps are compared with float64: #wrong counts elements. --pages huge (the default) asks for huge pages
for all tensors of all variants alike; --pages default leaves torch's as they are.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import launch
from harness.goal import Verdict, judge, table
from harness.program import listed, make_parser
from harness.record import JsonLines, command_line, machine
from harness.timing import MIN_ROUNDS

Row = Mapping[str, Any]
ROWS = ("fp32", "many", "bf16", "states")
HUGE = "glibc.malloc.hugetlb=1"


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("bench/adam.py step", __doc__)
    add = parser.add_argument
    add("--count", default="1000000,50000000,200000000", help="parameters, comma-separated (1M, 50M, 200M)")
    add("--rows", default=",".join(ROWS), help=f"of {', '.join(ROWS)} (all)")
    add("--rounds", type=int, default=9, help="timed turns of each variant, at least 7 (9)")
    add("--threads", type=int, default=0, help="threads of every variant (0: the CPUs of this process)")
    add("--pages", choices=("huge", "default"), default="huge")
    add("--json", metavar="FILE", help="write machine and rows as JSON lines")
    add("--page", metavar="FILE", help="write a Markdown page")
    arguments = parser.parse_args(words)
    arguments.rows = listed(parser, "--rows", arguments.rows, ROWS)
    arguments.counts = [int(float(word)) for word in arguments.count.split(",")]
    arguments.rounds = max(MIN_ROUNDS, arguments.rounds)
    arguments.threads = arguments.threads or len(os.sched_getaffinity(0))
    return arguments


def prepare_process(arguments: argparse.Namespace) -> None:
    """Start this program again with its threads and pages, which are settings that a process starts with."""
    wanted = {"OMP_NUM_THREADS": str(arguments.threads), "ZCOMM_THREADS": str(arguments.threads)}
    if arguments.pages == "huge":
        wanted["GLIBC_TUNABLES"] = HUGE
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **wanted})


class Bench:
    """The rows of a run: each with its variants checked first, then timed in turn."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        from harness.library import bench_library

        self.arguments = arguments
        self.rows: list[dict[str, Any]] = []
        self.skipped: dict[str, str] = {}
        library = bench_library()
        self.library = None if isinstance(library, str) else library
        if isinstance(library, str):
            self.skip("stream roof", library)

    def skip(self, name: str, why: str) -> None:
        if self.skipped.setdefault(name, why) is why:
            print(f"# {name}: skipped, {why}", flush=True)

    def run(self) -> None:
        import torch

        f32, bf16, counts = torch.float32, torch.bfloat16, self.arguments.counts
        middle = sorted(counts)[len(counts) // 2]
        for count in counts if "fp32" in self.arguments.rows else ():
            self.row("fp32, 1 tensor", count, f32, 1, {"zcomm": f32})
        if "many" in self.arguments.rows:
            self.row("fp32, 100 tensors", min(counts), f32, 100, {"zcomm": f32})
        if "bf16" in self.arguments.rows:
            self.row("bf16 weight and gradient", middle, bf16, 1, {"zcomm": f32, "zcomm_bf16_state": bf16})
        if "states" in self.arguments.rows:
            states = {"zcomm": f32, "zcomm_bf16_state": bf16, "zcomm_8bit_state": torch.uint8}
            self.row("fp32 weight, small state", middle, f32, 1, states, peers=False)

    def row(self, kind: str, count: int, dtype: Any, tensors: int, states: dict[str, Any], peers: bool = True) -> None:
        import psutil
        import torch

        need = count * (8 + 4 + 8 * (len(states) + 3 * peers))
        if need > psutil.virtual_memory().available * 0.9:
            self.skip(f"{kind}, {count}", f"it needs {need / 1e9:.1f} GB of memory")
            return
        torch.manual_seed(count)
        start, grad = torch.randn(count).to(dtype), torch.randn(count).mul_(0.1).to(dtype)
        weight, current = start.clone(), grad.clone()
        split = [count // tensors] * (tensors - 1) + [count - count // tensors * (tensors - 1)]
        parts = (list(weight.split(split)), list(current.split(split)))
        variants, wrong = self.variants(parts, states, peers), {}
        for name, variant in variants.items():
            wrong[name] = self.check(variant, start, grad, weight, current)
        current.copy_(grad)
        calls: dict[str, Callable[[], float]] = {name: timed(variant.step) for name, variant in variants.items()}
        if self.library and dtype == torch.float32:
            from optim.variants import Stream

            stream = Stream(self.library, weight, current, self.arguments.threads)
            calls |= {name: lambda name=name: stream.seconds(name) for name in stream.variants}
        self.report(kind, count, calls, wrong, {name: bytes_of(name, dtype, states) for name in calls})

    def variants(self, parts: Any, states: dict[str, Any], peers: bool) -> dict[str, Any]:
        from harness.peers import Absent
        from optim import variants
        from optim.reference import CODED, AdamW

        slack, adam, result = {1: CODED, 2: 0.02, 4: 0.0}, AdamW(), {}
        for name, state in states.items():
            try:
                result[name] = variants.ours(*parts, adam, state, slack[state.itemsize])
            except ValueError as error:
                self.skip(name, str(error))
        for name in ("torch_fused", "deepspeed") if peers else ():
            try:
                result[name] = getattr(variants, name)(*parts, adam)
            except Absent as absent:
                self.skip(name, str(absent))
        return result

    def check(self, variant: Any, start: Any, grad: Any, weight: Any, current: Any) -> int:
        from optim.reference import GRADS, AdamW, count_wrong

        weight.copy_(start)
        for factor in GRADS:
            current.copy_(grad).mul_(factor)
            variant.step()
        return count_wrong(variant.master(), start, grad, AdamW(), variant.slack)

    def report(self, kind: str, count: int, calls: Any, wrong: dict[str, int], nbytes: dict[str, float | None]) -> None:
        inner = max(1, min(50, 20_000_000 // count))
        rounds: dict[str, list[float]] = {name: [] for name in calls}
        for call in calls.values():
            call()
        for _ in range(self.arguments.rounds):
            for name, call in calls.items():
                time.sleep(0.005)  # other variants' threads stop spinning
                call()  # absorbs the last variant's effect on the caches
                rounds[name].append(statistics.median(call() for _ in range(inner)))
        ms = {name: 1e3 * statistics.median(values) for name, values in rounds.items()}
        roof = min((ms[name] for name in ms if name.startswith("stream")), default=None)
        gbps = {name: nbytes[name] * count / ms[name] / 1e6 for name in ms if nbytes[name]}
        row = {"kind": kind, "count": count, "time_ms": ms, "roof_ms": roof, "wrong": wrong}
        self.rows.append(row | {"bytes_per_element": nbytes, "gbps": gbps, "rounds_ms": rounds_ms(rounds)})
        for name, value in ms.items():
            share = "" if roof is None else f"{roof / value:6.2f} of the roof"
            begin = f"  {kind:<26} {count:>11} {name:<18} {value:>10.3f} ms"
            print(f"{begin} {wrong.get(name, 0):>4} wrong {share}", flush=True)


def rounds_ms(rounds: dict[str, list[float]]) -> dict[str, list[float]]:
    return {name: [round(1e3 * value, 4) for value in values] for name, values in rounds.items()}


def bytes_of(name: str, dtype: Any, states: dict[str, Any]) -> float | None:
    """Return the bytes per element that a step of zcomm (or the roof) must read and write.

    8: fp32, or bf16 and remainder.
    """
    if name.startswith("stream"):
        return 28.0
    if name not in states:
        return None
    return float(8 + dtype.itemsize + 4 * states[name].itemsize)


def timed(step: Callable[[], object]) -> Callable[[], float]:
    def call() -> float:
        begin = time.perf_counter()
        step()
        return time.perf_counter() - begin

    return call


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


def main(words: Sequence[str]) -> int:
    arguments = parse_arguments(words)
    launch.use_project_python()
    prepare_process(arguments)
    import torch

    torch.set_num_threads(arguments.threads)
    about = {**machine(), "threads": arguments.threads, "pages": arguments.pages, "rounds": arguments.rounds}
    bench = Bench(arguments)
    bench.run()
    for verdict in verdicts(bench.rows):
        print(f"# {verdict}")
    lines = JsonLines(arguments.json)
    lines.write({"kind": "machine", "command": command_line(), **about, "skipped": bench.skipped})
    for row in bench.rows:
        lines.write(row)
    if arguments.page:
        Path(arguments.page).write_text(page_of(about, bench.rows, bench.skipped), encoding="utf-8")
    return 1 if any(any(row["wrong"].values()) for row in bench.rows) else 0
