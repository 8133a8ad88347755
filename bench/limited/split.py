"""The case of bench/split_batch.py: a process for each variant, which takes the steps that it is asked for."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness import launch
from harness.goal import judge
from harness.program import listed, make_parser, parse_size
from harness.record import JsonLines, command_line, machine
from limited import decoder, ranks
from limited.depth import add_model_arguments, check
from limited.ranks import Failed
from limited.training import layers_for

_TABLE = "A batch in parts next to micro-steps"
_VARIANTS = ("micro-steps", "split_batch", "backward")
_WARM = 1  # steps before the first round: updates of a step run in the next one
_WARM_BACKWARD = 3  # two decide where updates run, and the third has the second's in it
_LOSS_OFF, _WEIGHTS_OFF = 1e-3, 0.25
_PROJECTED = 1 << 16  # elements for each of which a projection is compared
_DRIVE_NBYTES = 256 << 20
_HEAD = "#  params tokens variant     rounds s/step tokens/s     x      range     read written   roof   of  peak #wrong"


@dataclass(frozen=True)
class Job:
    """Training by ``variant``. limit: of memory, in bytes. folder: on the drive."""

    variant: str
    layers: int
    width: int
    parts: int
    limit: int | None
    folder: str


@dataclass(frozen=True)
class Round:
    """A step of each variant, by name: seconds, loss, peak_nbytes and phases. rates: of the drive, before the steps."""

    context: int
    steps: dict[str, dict[str, Any]]
    rates: dict[str, float]


def main(description: str, words: Sequence[str]) -> int:
    parser = make_parser("bench/split_batch.py", description)
    add_model_arguments(parser, "1.1B")
    parser.set_defaults(width=2048, context=0, steps=2)
    add = parser.add_argument
    add("--contexts", default="16,64", help="tokens of a part, by commas (16,64)")
    add("--parts", type=int, default=8, help="of a batch (8)")
    add("--limit", default="2G", help="on the memory of a process, or none (2G)")
    add("--variants", default=",".join(_VARIANTS[:2]), help=f"of {','.join(_VARIANTS)} (the first two)")
    add("--rounds", type=int, default=3, help="for each of --contexts (3)")
    add("--seconds", type=float, default=1e9, help="start no round after so long")
    arguments = parser.parse_args(words)
    check(parser, arguments)
    variants = listed(parser, "--variants", arguments.variants, _VARIANTS)
    contexts = [int(text) for text in arguments.contexts.split(",")]
    if variants[0] != "micro-steps":
        parser.error("--variants: micro-steps come first")
    if arguments.parts < 2 or arguments.parts in contexts:
        parser.error(f"--parts {arguments.parts}: at least 2, and not one of --contexts")  # dim 0 would be ambiguous
    limit = None if arguments.limit == "none" else parse_size(arguments.limit)
    launch.use_project_python()
    lines = JsonLines(arguments.json, arguments.append)
    lines.write({"kind": "machine", "command": command_line(), **machine()})
    layers = layers_for(arguments.numels[0], arguments.width)
    with tempfile.TemporaryDirectory(prefix="zcomm-split-", dir=arguments.dir.resolve()) as folder:
        jobs = [Job(name, layers, arguments.width, arguments.parts, limit, folder) for name in variants]
        try:
            rounds, ends = measure(jobs, contexts, arguments, lines)
        except Failed as failed:
            print(failed, file=sys.stderr)
            return 1
    print(_HEAD)
    rows = []
    for context in contexts:
        rows += rows_of([it for it in rounds if it.context == context], ends, jobs)
    for row in rows:
        lines.write(row)
        print(_shown(row))
    for row in rows[1 : len(jobs)]:  # of the first context
        print(judge(f"{row['variant']} over micro-steps", "split_batch.over.micro_steps", [row["ratio"]]))
    return 1 if any(row["wrong"] for row in rows) else 0


def measure(
    jobs: Sequence[Job], contexts: Sequence[int], arguments: Any, lines: JsonLines
) -> tuple[list[Round], dict[str, dict[str, Any]]]:
    """Run the rounds; write each. Returns: them, and the end of each variant, by name. Raises: Failed."""
    from zcomm.demo.phases import measure_drive

    begin, draw, rounds = time.monotonic(), random.Random(1), []
    with contextlib.ExitStack() as stack:
        running = {job.variant: stack.enter_context(_running(job, arguments.timeout)) for job in jobs}
        for process in running.values():
            _answer(process)  # its weights are there
        for number in range(-_WARM_BACKWARD if "backward" in running else -_WARM, arguments.rounds):
            if number > 0 and time.monotonic() - begin > arguments.seconds:
                break
            for at, context in enumerate(contexts if number >= 0 else contexts[:1]):
                rates = asdict(measure_drive([jobs[0].folder], _DRIVE_NBYTES))
                names = [*running]
                draw.shuffle(names)
                batch = number * len(contexts) + at
                steps = {}
                for name in names:
                    _ask(running[name], context=context, number=batch)
                    steps[name] = _answer(running[name])
                taken = ", ".join(f"{name} {step['seconds']:.1f} s" for name, step in sorted(steps.items()))
                print(f"# {'round' if number >= 0 else 'warm-up'}, {context} tokens: {taken}", flush=True)
                if number >= 0:
                    rounds.append(Round(context, steps, rates))
                    lines.write({"kind": "round", **asdict(rounds[-1])})
        for process in running.values():
            _ask(process, context=0, number=0)
        return rounds, {name: _answer(process) for name, process in running.items()}


def rows_of(rounds: Sequence[Round], ends: dict[str, dict[str, Any]], jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Return a row for each variant. rounds: of one context. ends: of each variant, by name."""
    from zcomm.demo.phases import DriveRates, bounds

    first, rows = jobs[0].variant, []
    for job in jobs:
        steps = [it.steps[job.variant] for it in rounds]
        pairs = [(it.steps[first], it.steps[job.variant]) for it in rounds]
        ratios = [other["seconds"] / one["seconds"] for other, one in pairs]
        least = [bounds([it.steps[job.variant]["phases"]], 1, DriveRates(**it.rates)) for it in rounds]
        least_s = statistics.median(sum(phase.least_s for phase in each) for each in least)
        losses_off = [abs(one["loss"] / other["loss"] - 1) for other, one in pairs]
        weights_off = distance(ends[job.variant], ends[first])
        peak = max(step["peak_nbytes"] for step in steps)
        wrong = sum(not off <= _LOSS_OFF for off in losses_off) + (not weights_off <= _WEIGHTS_OFF)
        wrong += job.limit is not None and peak > job.limit
        context, step_s = rounds[0].context, statistics.median(step["seconds"] for step in steps)
        tokens = job.parts * context
        row: dict[str, Any] = {"table": _TABLE, "kind": "split_batch", "variant": job.variant, "layers": job.layers}
        row |= {"params": ends[first]["numel"], "parts": job.parts, "context": context, "limit_nbytes": job.limit}
        row |= {"rounds": len(rounds), "step_s": step_s, "tokens_per_s": tokens / step_s}
        row |= {"ratio": statistics.median(ratios), "ratio_range": [min(ratios), max(ratios)]}
        for what in ("read", "written"):
            row[f"{what}_nbytes"] = statistics.median(_moved(step, what) for step in steps)
            row[f"drive_{what}_bps"] = statistics.median(it.rates[what] for it in rounds)
        row |= {"roof_tokens_per_s": tokens / least_s, "phases": _phases(steps), "peak_nbytes": peak}
        row |= {"loss_off": max(losses_off), "weights_off": weights_off, "wrong": wrong}
        rows.append(row | {"chosen": ends[job.variant]["chosen"]})
    return rows


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the distance of the weights of ``one`` from those of ``other``, over the way that these have gone.

    Both are estimates from the projections. Infinity if the weights were different at first.
    """
    if one["before"] != other["before"]:
        return math.inf
    apart = math.dist(one["after"], other["after"])
    return apart / math.dist(other["after"], other["before"]) if apart else 0.0


def _moved(step: dict[str, Any], what: str) -> float:
    return float(sum(phase[f"{what}_nbytes"] for phase in step["phases"].values()))


def _phases(steps: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the medians of each phase."""
    return {
        name: {key: statistics.median(step["phases"][name][key] for step in steps) for key in steps[0]["phases"][name]}
        for name in steps[0]["phases"]
    }


def _shown(row: dict[str, Any]) -> str:
    low, high = row["ratio_range"]
    share = row["tokens_per_s"] / row["roof_tokens_per_s"]
    return (
        f"  {row['params'] / 1e6:>6.0f}M {row['context']:>6} {row['variant']:<11} {row['rounds']:>6} "
        f"{row['step_s']:>6.2f} {row['tokens_per_s']:>8.2f} {row['ratio']:>5.2f} {low:>5.2f} to {high:<4.2f} "
        f"{row['read_nbytes'] / 1e9:>6.2f} {row['written_nbytes'] / 1e9:>7.2f} {row['roof_tokens_per_s']:>6.2f} "
        f"{share:>4.2f} {row['peak_nbytes'] >> 20:>5} {row['wrong']:>6}"
    )


# --- processes ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _running(job: Job, timeout_s: float) -> Iterator[subprocess.Popen[str]]:
    """Run a variant until the block ends, or for ``timeout_s``."""
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [sys.executable, __file__, json.dumps(asdict(job))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
        text=True,
    )
    timer = threading.Timer(timeout_s, process.kill)
    timer.start()
    try:
        yield process
    finally:
        timer.cancel()
        process.terminate()
        process.wait()


def _ask(process: subprocess.Popen[str], **words: int) -> None:
    """Write a line to the process."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # its answer raises
        process.stdin.write(json.dumps(words) + "\n")
        process.stdin.flush()


def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Return the next answer of the process. Raises: Failed."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(ranks.SAYS):
            found: dict[str, Any] = json.loads(line.removeprefix(ranks.SAYS))
            return found
    raise Failed(f"{process.args!r} ended with {process.wait()}")


def _train(job: Job) -> None:
    """Answer each line of standard input with a step of its batch; the last one, of context 0, with the weights."""
    import torch

    import zcomm
    from zcomm.demo.phases import Clock

    torch.manual_seed(1)
    zcomm.init()
    tiers: dict[str, Any] = {"gradients": None, "update": "auto"}
    if job.variant == "backward":
        tiers = {"gradients": "nvme", "update": "backward"}
    model, optimizer = decoder.make(job.layers, job.width, job.folder, "adamw", job.limit, **tiers)
    model.recompute = False
    micro_steps = job.parts if job.variant == "micro-steps" else 1
    if micro_steps == 1:
        zcomm.split_batch(model.model.layers, parts=job.parts)
    optimizer.grad_accum = micro_steps
    before = _projections(optimizer)
    numel = sum(weight.numel() for weight in model.parameters())
    ranks.say({"rank": 0})
    phases = ranks.Phases()
    for line in sys.stdin:
        asked = json.loads(line)
        if not asked["context"]:
            break
        generator = torch.Generator().manual_seed(1000 + asked["number"])
        batch = torch.randint(256, (2, job.parts, asked["context"]), generator=generator)
        clock, losses = Clock(optimizer.stats), []
        with phases("step"):
            for inputs, targets in batch.chunk(micro_steps, dim=1):
                with clock.phase("forward"):
                    loss = model(inputs, targets)
                with clock.phase("backward"):
                    optimizer.backward(loss)
                losses.append(loss.item())
                with clock.phase("step"):
                    optimizer.step()
                    optimizer.zero_grad()
            with clock.phase("step"):
                begin = time.perf_counter()
                optimizer._parts.swap.wait()
            clock.phases["step"].waited_s += time.perf_counter() - begin
        done = phases.found.pop()
        answer = {"seconds": done.seconds, "peak_nbytes": done.peak_nbytes, "loss": statistics.mean(losses)}
        ranks.say(answer | {"phases": {name: asdict(phase) for name, phase in clock.phases.items()}})
    chosen: dict[str, Any] = {"gradients": optimizer.offload.gradients, "max_bytes": optimizer.units.max_bytes}
    chosen |= {"prefetch": optimizer.prefetch, "bucket_mb": optimizer.bucket_mb}
    ranks.say({"before": before, "after": _projections(optimizer), "numel": numel, "chosen": chosen})
    optimizer.close()
    zcomm.shutdown()


def _projections(optimizer: Any) -> list[float]:
    """Return the fp32 weights' projections on one random direction, one for each _PROJECTED elements."""
    import torch

    direction = torch.randn(_PROJECTED, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return [
        float(torch.dot(part.double(), direction[: len(part)]))
        for piece in optimizer.iter_state("master")
        for part in piece.values["master"].split(_PROJECTED)
    ]


if __name__ == "__main__":
    _train(Job(**json.loads(sys.argv[1])))
