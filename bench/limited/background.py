"""Seconds for which training stands still for a save, in the foreground and in the background, and the peaks.

  bench/limit.py background --dir /mnt/nvme              (300M parameters, AdamW: 14 GB of the drive)

One rank trains, all on the drive, within one limit. In each round it takes some steps and saves in the foreground.
Then it takes steps, saves in the background (`save(wait=False)`), and takes steps until that save has ended. Medians
of rounds.
"stands still": the call of save(). "slower": what the steps beside the save take longer than as many steps without.
"all": both together, what the save costs training. "until saved": from the call to the end of the save. MiB: VmHWM from
the call to the end of the save, and that of steps alone.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from harness import launch
from harness.program import make_parser, parse_size
from harness.record import JsonLines, command_line, machine
from limited import decoder, ranks
from limited.depth import add_model_arguments, check
from limited.ranks import Failed
from limited.training import layers_for

_TABLE = "Seconds of a save, in the foreground and in the background"
_KEYS = ("stands_s", "slower_s", "all_s", "until_saved_s", "peak_nbytes")


@dataclass(frozen=True)
class Job:
    """A run. seconds: start no round after so long."""

    layers: int
    width: int
    context: int
    steps: int
    limit_nbytes: int
    rounds: int
    seconds: float
    folder: str


def rows_of(found: dict[str, Any], job: Job) -> list[dict[str, Any]]:
    """Return a row for each way to save."""
    rows = []
    for way, rounds in found["rounds"].items():
        row: dict[str, Any] = {"table": _TABLE, "kind": "background", "params": found["numel"], "layers": job.layers}
        row |= {"way": way, "rounds": len(rounds), "limit_nbytes": job.limit_nbytes, "step_s": found["step_s"]}
        row |= {"steps_nbytes": found["steps_nbytes"]}
        row |= {key: statistics.median(each[key] for each in rounds) for key in _KEYS if key != "peak_nbytes"}
        row["peak_nbytes"] = max(each["peak_nbytes"] for each in rounds)
        rows.append(row | {"kept": row["peak_nbytes"] <= job.limit_nbytes})
    return rows


def main(words: Sequence[str]) -> int:
    parser = make_parser("bench/limit.py background", __doc__)
    add_model_arguments(parser, "300M")
    parser.add_argument("--limit", type=parse_size, default="1G", help="on memory (1G)")
    parser.add_argument("--rounds", type=int, default=5, help="of both ways (5)")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no round after so long")
    arguments = parser.parse_args(words)
    check(parser, arguments)
    launch.use_project_python()
    lines = JsonLines(arguments.json, arguments.append)
    lines.write({"kind": "machine", "command": command_line(), **machine()})
    print("#  params save        rounds  stands still  slower    all  until saved    MiB  of steps  s/step")
    bad = 0
    for numel in arguments.numels:
        a, layers = arguments, layers_for(numel, arguments.width)
        job = Job(layers, a.width, a.context, a.steps, a.limit, a.rounds, a.seconds, "")
        with tempfile.TemporaryDirectory(prefix="zcomm-limit-", dir=a.dir.resolve()) as folder:
            try:
                found = ranks.run(__file__, asdict(job) | {"folder": folder}, 1, a.timeout)[0]
            except Failed as failed:
                print(failed, file=sys.stderr)
                return 1
        for row in rows_of(found, job):
            lines.write(row)
            print(
                f"  {row['params'] / 1e6:>6.0f}M {row['way']:<11} {row['rounds']:>6} {row['stands_s']:>13.2f} "
                f"{row['slower_s']:>7.2f} {row['all_s']:>6.2f} {row['until_saved_s']:>12.2f} "
                f"{row['peak_nbytes'] >> 20:>6} {row['steps_nbytes'] >> 20:>9} {row['step_s']:>7.2f}"
                f"{'' if row['kept'] else '  above the limit'}",
                flush=True,
            )
            bad += not row["kept"]
    return 1 if bad else 0


# --- the rank -------------------------------------------------------------------------------------------------------


def _train(job: Job) -> dict[str, Any]:
    import torch

    import zcomm

    torch.set_num_threads(1)
    torch.manual_seed(1)
    comm, phase, begin = zcomm.init(), ranks.Phases(), time.monotonic()
    model, optimizer = decoder.make(job.layers, job.width, job.folder, "adamw", job.limit_nbytes)
    count = 0

    def step() -> float:
        nonlocal count
        count += 1
        started = time.perf_counter()
        decoder.step(model, optimizer, job.context, count, comm.rank)
        return time.perf_counter() - started

    for _ in range(3):
        step()
    alone: list[float] = []
    rounds: dict[str, list[dict[str, float]]] = {"foreground": [], "background": []}
    peak = 0
    for number in range(job.rounds):
        if number and time.monotonic() - begin > job.seconds:
            break
        usual: list[float] = []
        for way in rounds:
            with phase("steps"):
                usual += [step() for _ in range(job.steps)]
            peak = max(peak, phase.found[-1].peak_nbytes)
            beside: list[float] = []
            with phase(way):
                started = time.perf_counter()
                task = optimizer.save(f"{job.folder}/saved", wait=way == "foreground")
                stands = time.perf_counter() - started
                while not task.done():
                    beside.append(step())
                task.wait()
            slower = sum(beside) - len(beside) * statistics.median(usual)
            each = {"stands_s": stands, "slower_s": slower, "all_s": stands + slower}
            each |= {"until_saved_s": phase.found[-1].seconds, "peak_nbytes": phase.found[-1].peak_nbytes}
            rounds[way].append(each)
        alone += usual
    numel = sum(weight.numel() for weight in model.parameters())
    optimizer.close()
    zcomm.shutdown()
    found = {"rank": comm.rank, "numel": numel, "rounds": rounds, "step_s": statistics.median(alone)}
    return found | {"steps_nbytes": peak}


if __name__ == "__main__":
    ranks.say(_train(Job(**json.loads(sys.argv[1]))))
