"""Cost of `Offload(atomic=True)` in seconds of a step, by the place of the updates.

  bench/limit.py atomic --dir /mnt/nvme                  (100M parameters, AdamW: 14 GB of the drive)
  bench/limit.py atomic --dir /mnt/nvme --updates backward             (5 GB)

One rank trains optimizers of one model in turn, without and with atomic. Updates run in step(), in the next forward,
or in backward. An iteration is forward, backward, step() and zero_grad(). Seconds are medians of rounds; the order
within a round is drawn. x: the median of the rounds' ratios with over without, and the middle half of them. "GB": what
an iteration reads and writes on the drive. #wrong: losses that differ from those of the first optimizer.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from harness import launch
from harness.program import listed, make_parser
from harness.record import JsonLines, command_line, machine
from limited import decoder, ranks
from limited.depth import add_model_arguments, check
from limited.ranks import Failed
from limited.training import layers_for

_TABLE = "Seconds of an iteration, without and with atomic"
_UPDATES = ("step", "forward", "backward")
_WATCHED = 3  # iterations before the first round: the first two decide where updates run


@dataclass(frozen=True)
class Job:
    """A run. seconds: start no round after so long."""

    layers: int
    width: int
    context: int
    rounds: int
    seconds: float
    updates: Sequence[str]
    folder: str


def rows_of(found: dict[str, Any], job: Job) -> list[dict[str, Any]]:
    """Return a row for each place of the updates."""
    rows, all_losses = [], list(found["losses"].values())
    wrong = sum(one != other for losses in all_losses for one, other in zip(losses, all_losses[0], strict=True))
    for update in job.updates:
        pairs = list(zip(found["rounds"][update], found["rounds"][f"{update}, atomic"], strict=True))
        ratios = [one / other for other, one in pairs]
        quarters = statistics.quantiles(ratios, n=4)
        row: dict[str, Any] = {"table": _TABLE, "kind": "atomic", "params": found["numel"], "layers": job.layers}
        row |= {"update": update, "rounds": len(pairs), "context": job.context}
        row |= {"step_s": statistics.median(pair[0] for pair in pairs)}
        row |= {"atomic_step_s": statistics.median(pair[1] for pair in pairs)}
        row |= {"ratio": statistics.median(ratios), "ratio_quarters": [quarters[0], quarters[2]]}
        row |= {"drive_nbytes": found["moved"][update], "atomic_drive_nbytes": found["moved"][f"{update}, atomic"]}
        rows.append(row | {"wrong": wrong})
    return rows


def main(words: Sequence[str]) -> int:
    parser = make_parser("bench/limit.py atomic", __doc__)
    add_model_arguments(parser, "100M")
    parser.set_defaults(context=128)
    parser.add_argument("--rounds", type=int, default=7, help="of all in turn (7)")
    parser.add_argument("--updates", default=",".join(_UPDATES), help=f"by commas ({','.join(_UPDATES)})")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no round after so long")
    arguments = parser.parse_args(words)
    check(parser, arguments)
    updates = listed(parser, "--updates", arguments.updates, _UPDATES)
    launch.use_project_python()
    lines = JsonLines(arguments.json, arguments.append)
    lines.write({"kind": "machine", "command": command_line(), **machine()})
    print("#  params updates   rounds  s/iteration  atomic      x  middle half   GB  atomic  #wrong")
    bad = 0
    for numel in arguments.numels:
        layers = layers_for(numel, arguments.width)
        job = Job(layers, arguments.width, arguments.context, arguments.rounds, arguments.seconds, updates, "")
        with tempfile.TemporaryDirectory(prefix="zcomm-limit-", dir=arguments.dir.resolve()) as folder:
            try:
                found = ranks.run(__file__, asdict(job) | {"folder": folder}, 1, arguments.timeout)[0]
            except Failed as failed:
                print(failed, file=sys.stderr)
                return 1
        for row in rows_of(found, job):
            lines.write(row)
            low, high = row["ratio_quarters"]
            print(
                f"  {row['params'] / 1e6:>6.0f}M {row['update']:<9} {row['rounds']:>6} {row['step_s']:>12.2f} "
                f"{row['atomic_step_s']:>7.2f} {row['ratio']:>6.2f}  {low:.2f} to {high:.2f} "
                f"{row['drive_nbytes'] / 1e9:>4.1f} {row['atomic_drive_nbytes'] / 1e9:>7.1f} {row['wrong']:>7}",
                flush=True,
            )
            bad += row["wrong"]
    return 1 if bad else 0


# --- the rank -------------------------------------------------------------------------------------------------------


def _train(job: Job) -> dict[str, Any]:
    import torch

    import zcomm

    torch.set_num_threads(1)
    comm, phase, begin = zcomm.init(), ranks.Phases(), time.monotonic()
    trained = {}
    for update in job.updates:
        for atomic in (False, True):
            torch.manual_seed(1)
            made = decoder.make(job.layers, job.width, job.folder, "adamw", None, update=update, atomic=atomic)
            trained[f"{update}, atomic" if atomic else update] = made
    losses: dict[str, list[str]] = {name: [] for name in trained}
    rounds: dict[str, list[float]] = {name: [] for name in trained}
    moved: dict[str, int] = {}
    order, draw = list(trained), random.Random(1)
    for number in range(_WATCHED + job.rounds):
        if number > _WATCHED and time.monotonic() - begin > job.seconds:
            break
        draw.shuffle(order)
        for name in order:
            with phase(name):
                losses[name].append(decoder.step(*trained[name], job.context, number, comm.rank))
            if number >= _WATCHED:
                rounds[name].append(phase.found[-1].seconds)
                moved[name] = phase.found[-1].read_nbytes + phase.found[-1].written_nbytes
    numel = sum(weight.numel() for weight in trained[order[0]][0].parameters())
    for _, optimizer in trained.values():
        optimizer.close()
    zcomm.shutdown()
    return {"rank": comm.rank, "numel": numel, "losses": losses, "rounds": rounds, "moved": moved}


if __name__ == "__main__":
    ranks.say(_train(Job(**json.loads(sys.argv[1]))))
