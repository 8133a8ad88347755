"""Cost of zcomm.profile() in a training step while it is open, and after it has been closed.

  bench/zero.py profile                                   (33.5M parameters, stages 2 and 3)
  bench/zero.py profile --layers 4 --width 64             (a small model: many spans for little work)

The same optimizer takes turns: a few steps without a profile, as many inside of one. "off" are steps after a profile
has been closed, so taps that were left behind would show against "before", which ran before the first one.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from harness import launch
from harness.program import add_run_arguments, make_parser
from harness.record import JsonLines, command_line, machine
from training import gpt

STEPS = 3  # in a turn


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("bench/zero.py profile", __doc__)
    gpt.add_turn_arguments(parser)
    add_run_arguments(parser, 600.0)
    return parser.parse_args(words)


def measure(arguments: argparse.Namespace, stage: int, rank: int) -> dict[str, Any]:
    import zcomm

    comm = zcomm.init()
    model, batch = gpt.make_model(arguments), gpt.make_batch(arguments, rank)
    optimizer = zcomm.ZeroOptimizer(model, stage=stage, share_parameters=stage != 3, bucket_mb=4)
    spans = 0

    def turn() -> float:
        comm.barrier()
        begin = time.perf_counter()
        for _ in range(STEPS):
            model(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        return (time.perf_counter() - begin) / STEPS

    turn()
    before = [turn() for _ in range(arguments.rounds)]
    taken: dict[str, list[float]] = {"off": [], "on": []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(arguments.rounds):
            with zcomm.profile(f"{folder}/trace.json") as seen:
                taken["on"].append(turn())
            spans = len(seen._trace.spans) // STEPS
            taken["off"].append(turn())
    optimizer.close()
    found = {f"{name}_ms": 1e3 * statistics.median(values) for name, values in {"before": before, **taken}.items()}
    cost = statistics.median(on / off for on, off in zip(taken["on"], taken["off"], strict=True))
    return {**found, "on_over_off": cost, "spans_per_step": spans}


def run_rank(arguments: argparse.Namespace) -> int:
    import torch

    import zcomm

    torch.set_num_threads(1)
    rank, _ = launch.place()
    lines = JsonLines(arguments.json if rank == 0 else None, arguments.append)
    if rank == 0:
        lines.write({"kind": "machine", "command": command_line(), **machine()})
        print("# stage  before (ms)     off      on  on/off  spans per step")
    for stage in map(int, arguments.stages.split(",")):
        found = measure(arguments, stage, rank)
        if rank == 0:
            print(
                f"  {stage:>5} {found['before_ms']:>12.2f} {found['off_ms']:>7.2f} {found['on_ms']:>7.2f} "
                f"{found['on_over_off']:>7.3f} {found['spans_per_step']:>15}",
                flush=True,
            )
            lines.write({"kind": "profile_cost", "stage": stage, "layers": arguments.layers, **found})
    zcomm.shutdown()
    return 0


def main(words: Sequence[str]) -> int:
    arguments = parse_arguments(words)
    launch.use_project_python()
    if launch.is_rank():
        launch.leave(run_rank(arguments))
    return launch.start_ranks(arguments.world_size, arguments.timeout)
