"""Cost of a rank's page, by which `zcomm top` sees it, in a training step, without and with a reader.

  bench/zero.py page                                   (33.5M parameters, stages 2 and 3)
  bench/zero.py page --layers 4 --width 64             (a small model: short steps)

The same optimizer takes turns: some steps without a page, as many with one, as many with a reader. The reader looks
every second, as `zcomm top` does. `share` is what the page costs: processor time of a rank's writes over the time of
the turns, of the rank that has most. The ratios are of times with a page and without: the median of rounds, and the
middle half of them. They show that nothing else is slower, with the noise of the machine. The reader takes processor
time of its own, which ranks feel where they have no core to spare.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from harness import launch
from harness.goal import judge
from harness.program import add_run_arguments, make_parser
from harness.record import JsonLines, command_line, machine
from training import gpt

VARIANTS = ("off", "on", "read")
_READER = """
import os, sys, time
from rich.console import Console
from zcomm.cli.top import _drawn, _from_here
console, parent = Console(file=open(os.devnull, 'w'), width=160), os.getppid()
while os.getppid() == parent:
    console.print(_drawn(_from_here(None)))
    print(time.process_time(), flush=True)
    time.sleep(1)
"""


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("bench/zero.py page", __doc__)
    gpt.add_turn_arguments(parser)
    parser.add_argument("--seconds", type=float, default=4.0, help="of a turn, about (4)")
    add_run_arguments(parser, 1200.0)
    return parser.parse_args(words)


class Spent:
    """Processor time of the writes of pages, on both threads that write."""

    def __init__(self) -> None:
        from zcomm.watch.rank import RankPage

        self.seconds, self.writes = 0.0, 0
        for name in ("stepped", "_write_place"):
            setattr(RankPage, name, self._timed(getattr(RankPage, name)))

    def _timed(self, call: Callable[..., None]) -> Callable[..., None]:
        def timed(page: Any, *args: Any) -> None:
            if args and time.perf_counter() < page._next:  # no record is due: 0.1 us, less than to time it
                call(page, *args)
                return
            begin = time.thread_time()
            call(page, *args)
            self.seconds += time.thread_time() - begin
            self.writes += 1

        return timed


class Reader:
    """A process that looks at the pages every second."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", _READER], stdout=subprocess.PIPE, text=True)
        self._first = self._seen()

    def _seen(self) -> float:
        assert self._process.stdout is not None
        return float(self._process.stdout.readline())

    def close(self) -> float:
        """End it. Returns: its processor time for a look."""
        last = self._seen()
        self._process.kill()
        self._process.communicate()
        return last - self._first


def measure(arguments: argparse.Namespace, stage: int, rank: int, spent: Spent) -> dict[str, Any]:
    import torch

    import zcomm
    from zcomm.watch import rank as watch

    comm = zcomm.init()
    model, batch = gpt.make_model(arguments), gpt.make_batch(arguments, rank)
    optimizer = zcomm.ZeroOptimizer(model, stage=stage, share_parameters=stage != 3, bucket_mb=4)

    def turn(count: int) -> float:
        comm.barrier()
        begin = time.perf_counter()
        for _ in range(count):
            model(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        comm.barrier()
        return (time.perf_counter() - begin) / count

    turn(3)
    steps = torch.tensor([max(2, round(arguments.seconds / turn(3) / 8))])
    comm.broadcast(steps)
    count, draw = int(steps), random.Random(1)
    total = 0  # steps

    def turns() -> tuple[float, float]:
        """Take turns of ``count`` steps until the time is over on rank 0. Returns: seconds of a step, and of all."""
        nonlocal total
        over, seconds, taken_steps = torch.zeros(1), 0.0, 0
        while not over:
            seconds += count * turn(count)
            taken_steps += count
            over[0] = seconds >= arguments.seconds
            comm.broadcast(over)
        total += taken_steps
        return seconds / taken_steps, seconds

    taken: dict[str, list[float]] = {name: [] for name in VARIANTS}
    cost: dict[str, list[float]] = {name: [] for name in VARIANTS}
    reader_s = 0.0
    for _ in range(arguments.rounds):
        for name in draw.sample(VARIANTS, len(VARIANTS)):
            watch.close_page()
            if name != "off":
                watch.open_page("bench", rank, comm.world_size, comm.local_rank, comm.backend)
            turn(max(3, count))  # the first records find cold caches
            reader = Reader() if name == "read" and rank == 0 else None
            spent.seconds = 0.0
            step_s, seconds = turns()
            taken[name].append(step_s)
            cost[name].append(spent.seconds / seconds)
            reader_s += reader.close() if reader is not None else 0.0
    optimizer.close()
    shares = torch.tensor([statistics.fmean(cost[name]) for name in VARIANTS[1:]])
    comm.all_reduce(shares, op="max")
    found: dict[str, Any] = {f"{name}_ms": 1e3 * statistics.median(values) for name, values in taken.items()}
    for name, share in zip(VARIANTS[1:], shares.tolist(), strict=True):
        ratios = [on / off for on, off in zip(taken[name], taken["off"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        found |= {f"{name}_share": share, f"{name}_over_off": middle, f"{name}_over_off_half": [low, high]}
    return {**found, "steps": total // len(VARIANTS), "reader_s_per_look": reader_s / arguments.rounds}


def run_rank(arguments: argparse.Namespace) -> int:
    import torch

    import zcomm

    torch.set_num_threads(1)
    rank, _ = launch.place()
    spent = Spent()
    lines = JsonLines(arguments.json if rank == 0 else None, arguments.append)
    if rank == 0:
        lines.write({"kind": "machine", "command": command_line(), **machine()})
        print("# stage    off (ms)       on     read  on/off  read/off  share on, %  read, %")
    for stage in map(int, arguments.stages.split(",")):
        found = measure(arguments, stage, rank, spent)
        if rank == 0:
            print(
                f"  {stage:>5} {found['off_ms']:>11.2f} {found['on_ms']:>8.2f} {found['read_ms']:>8.2f} "
                f"{found['on_over_off']:>7.4f} {found['read_over_off']:>9.4f} "
                f"{1e2 * found['on_share']:>12.4f} {1e2 * found['read_share']:>8.4f}",
                flush=True,
            )
            lines.write({"kind": "page_cost", "stage": stage, "layers": arguments.layers, **found})
            shares = [1e2 * found[f"{name}_share"] for name in VARIANTS[1:]]
            print(judge(f"a page, stage {stage}", "zero.page", shares, digits=4), flush=True)
    zcomm.shutdown()
    return 0


def main(words: Sequence[str]) -> int:
    arguments = parse_arguments(words)
    launch.use_project_python()
    if launch.is_rank():
        launch.leave(run_rank(arguments))
    return launch.start_ranks(arguments.world_size, arguments.timeout)
