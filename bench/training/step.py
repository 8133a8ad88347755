"""A training step by ZeRO stage: zcomm beside no communication at all, DDP, FSDP2 and DeepSpeed.

  bench/zero.py step                                            (33.4M parameters, 2 ranks, 64 bytes per rank and step)
  bench/zero.py step --variants none,zcomm-1,zcomm-3,fsdp2      (some)
  bench/zero.py step --variants zcomm-3-nvme,deepspeed-3-nvme --nvme-path /mnt/nvme
  bench/zero.py step --width 64 --layers 2 --rounds 7           (a small one)
  bench/zero.py step --apart 5 --rounds 31                      (as programs run: one variant in a process)

Every variant trains its own replica of one GPT on the same data in the same processes. They take turns, a step each
in an order drawn for each round, one thread per rank. "none" is the plain model with torch's fused AdamW: every rank
trains for itself, which is the roof. #wrong counts variants by their mean loss over the ranks after all steps. A wrong
one leaves that of ddp-gloo (or of the first that communicates) by more than 1e-4 of it.
With --apart each variant runs in processes of its own, N times in turn; its time is the median of the runs' medians.
quiet: the ratio of first quartiles, of the rounds in which nothing else took a core.
overhead: the step's time over that of "none": what communication adds that backward does not hide.
faults: pages that the system gave a rank during a step, in thousands. A program that frees all its gradients at once
may give them back to the system each time. Ten thousand pages cost some 15 ms here. With --keep-heap no program does.

Variants: none; zcomm-STAGE[-cpu|-nvme]; ddp-gloo, ddp-zcomm; fsdp2; deepspeed-STAGE[-cpu|-nvme].
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import launch
from harness.goal import Verdict, judge
from harness.program import add_run_arguments, make_parser
from harness.record import JsonLines, command_line, machine
from harness.timing import Timing, interleaved
from training import gpt

DEFAULT = "none,zcomm-1,zcomm-2,zcomm-3,ddp-gloo,ddp-zcomm,fsdp2,deepspeed-1,deepspeed-2,deepspeed-3"
TOLERANCE = 1e-4
KEEP_HEAP = f"glibc.malloc.trim_threshold={1 << 36}:glibc.malloc.mmap_threshold={1 << 25}"


def parse_arguments(words: Sequence[str], case: str, variants: str, context: int) -> argparse.Namespace:
    parser = make_parser(f"bench/zero.py {case}", __doc__)
    add = parser.add_argument
    add("-np", dest="world_size", type=int, default=2, help="ranks (2)")
    add("--variants", default=variants, help=f"by commas ({variants})")
    add("--rounds", type=int, default=9, help="timed steps of each variant, at least 7 (9)")
    add("--warmup", type=int, default=3, help="steps before (3)")
    gpt.add_arguments(parser, context)
    add("--bucket-mb", type=float, default=25.0, help="of DDP and zcomm (25)")
    add("--copy-gradients", action="store_true", help="DDP copies gradients into buckets and back (its default)")
    add("--keep-heap", action="store_true", help="no variant gives memory back to the system (glibc's thresholds)")
    add("--apart", metavar="N", type=int, default=0, help="each variant in processes of its own, N times in turn")
    add("--nvme-path", metavar="DIR", help="where the nvme variants swap")
    add_run_arguments(parser, 1800.0)
    arguments = parser.parse_args(words)
    arguments.variants = arguments.variants.split(",")
    if arguments.apart < 0:
        parser.error(f"--apart {arguments.apart}: expected a number of turns, or 0")
    if any(name.endswith("nvme") for name in arguments.variants) and not arguments.nvme_path:
        parser.error("the nvme variants need --nvme-path, a directory on the drive")
    return arguments


def run_alone(name: str, folder: Path, says_skipped: bool) -> dict[str, Any] | None:
    """Run one variant in separate processes; None if this machine lacks it. Exits if they fail."""
    path = folder / "run.jsonl"
    program = [sys.executable, *sys.argv, "--apart", "0", "--variants", name, "--json", str(path)]
    done = subprocess.run(program, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    if says_skipped:
        print(*(line for line in done.stdout.splitlines(keepends=True) if ": skipped" in line), sep="", end="")
    record: dict[str, Any] = json.loads(path.read_text().splitlines()[-1])
    return record if name in record["step_ms"] else None


def run_apart(arguments: argparse.Namespace) -> int:
    runs: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(arguments.apart):
            for name in arguments.variants:
                record = run_alone(name, Path(folder), says_skipped=turn == 0)
                if record is not None:
                    runs.setdefault(name, []).append(record)

    def middle(name: str, key: str) -> float:
        return statistics.median(run[key][name] for run in runs[name])

    timings = {
        name: Timing(middle(name, "step_ms") / 1e3, (), middle(name, "quiet_ms") / 1e3, middle(name, "faults"))
        for name in runs
    }
    numel = max((found[0]["numel"] for found in runs.values()), default=0)
    report(arguments, timings, {name: middle(name, "mean_loss") for name in runs}, numel)
    return 0


def make_variants(arguments: argparse.Namespace, rank: int, say: Any) -> dict[str, Any]:
    """Build the variants that this machine supports."""
    from harness.peers import Absent
    from training.variants import make_step

    steps = {}
    for name in arguments.variants:
        try:
            steps[name] = make_step(name, arguments, rank)
        except Absent as absent:
            say(f"# {name}: skipped, {absent}")
        except (KeyError, ValueError) as error:
            sys.exit(f"bench/zero.py: {name}: {error}")
    return steps


def run_rank(arguments: argparse.Namespace) -> int:
    import torch
    import torch.distributed as dist

    import zcomm
    from harness.peers import default_group

    torch.set_num_threads(1)
    rank, arguments.world_size = launch.place()
    default_group(rank, arguments.world_size)
    zcomm.init()
    steps = make_variants(arguments, rank, print if rank == 0 else (lambda *_values: None))
    losses: dict[str, float] = {}

    def remembered(name: str) -> Any:
        def call() -> None:
            losses[name] = steps[name]()

        return call

    def gather(mine: list[float]) -> list[list[float]]:
        of_ranks: list[Any] = [None] * arguments.world_size
        dist.all_gather_object(of_ranks, mine)
        return of_ranks

    calls = {name: remembered(name) for name in steps}
    timings = interleaved(calls, arguments.rounds, 1, arguments.warmup, dist.barrier, gather)
    columns = zip(*gather(list(losses.values())), strict=True)
    mean = {name: sum(column) / len(column) for name, column in zip(losses, columns, strict=True)}
    if rank == 0:
        report(arguments, timings, mean, sum(p.numel() for p in gpt.make_model(arguments).parameters()))
        print_costs(arguments, steps, timings)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def report(arguments: argparse.Namespace, timings: dict[str, Timing], losses: dict[str, float], numel: int) -> None:
    together = [name for name in losses if name != "none"]
    right = losses["ddp-gloo"] if "ddp-gloo" in losses else losses[together[0]] if together else None
    wrong = {name: int(right is not None and abs(losses[name] - right) > TOLERANCE * right) for name in together}
    print(
        f"# {arguments.world_size} ranks, {numel / 1e6:.1f}M parameters fp32, AdamW, {arguments.batch} x "
        f"{arguments.context} bytes per rank and step; medians of {arguments.rounds} turns, slowest rank"
        f"{f'; processes of its own, median of {arguments.apart}' if arguments.apart else ''}"
    )
    print(
        f"# {'variant':<18} {'step (ms)':>10} {'overhead':>9} {'of none':>8} {'quiet':>7} {'mean loss':>10} "
        f"{'#wrong':>6} {'faults':>7}"
    )
    ratio, quiet, overhead_ms = {}, {}, {}
    for name, timing in timings.items():
        share = f"{'-':>9} {'-':>8} {'-':>7}"
        if "none" in timings:
            ratio[name] = timing.median / timings["none"].median
            quiet[name] = timing.quiet / timings["none"].quiet
            overhead_ms[name] = 1e3 * (timing.median - timings["none"].median)
            share = f"{overhead_ms[name]:>9.1f} {ratio[name]:>7.2f}x {quiet[name]:>6.2f}x"
        last = f"{losses[name]:>10.6f} {wrong.get(name, '-'):>6} {timing.faults / 1e3:>6.1f}k"
        print(f"  {name:<18} {1e3 * timing.median:>10.1f} {share} {last}")
    of_ddp = overhead_ratio(overhead_ms)
    for verdict in verdicts(ratio, of_ddp):
        print(f"# {verdict}")
    lines = JsonLines(arguments.json, arguments.append)
    lines.write({"kind": "machine", "command": command_line(), **machine()})
    lines.write(
        {
            "kind": "zero_step",
            "world_size": arguments.world_size,
            "numel": numel,
            "batch": arguments.batch,
            "context": arguments.context,
            "step_ms": {name: 1e3 * timing.median for name, timing in timings.items()},
            "quiet_ms": {name: 1e3 * timing.quiet for name, timing in timings.items()},
            "apart": arguments.apart,
            "of_none": ratio,
            "of_none_quiet": quiet,
            "faults": {name: timing.faults for name, timing in timings.items()},
            "mean_loss": losses,
            "wrong": wrong,
            "overhead_ms": overhead_ms,
            **({} if of_ddp is None else {"overhead_ratio": of_ddp}),
        }
    )


def overhead_ratio(overhead_ms: Mapping[str, float]) -> float | None:
    """Return the time that communication adds to DDP over zcomm / over Gloo; None without both."""
    if not {"ddp-zcomm", "ddp-gloo"} <= overhead_ms.keys():
        return None
    return overhead_ms["ddp-zcomm"] / overhead_ms["ddp-gloo"]


def verdicts(ratio: Mapping[str, float], of_ddp: float | None) -> Iterator[Verdict]:
    """Yield the verdicts on stages 1 to 3 with state in RAM, and on DDP."""
    for name, value in ratio.items():
        if name in ("zcomm-1", "zcomm-2", "zcomm-3"):
            yield judge(f"{name}, of no communication", "zero.step", [value])
    if of_ddp is not None:
        yield judge("DDP: overhead over zcomm / over gloo", "zero.ddp", [of_ddp])


def print_costs(arguments: argparse.Namespace, steps: dict[str, Any], timings: dict[str, Timing]) -> None:
    """Print the share of a step for detecting edited weights, and for stand-ins of gradients."""
    for name, step in steps.items():
        if hasattr(step, "edits_s"):
            mean_s = step.edits_s() / (arguments.rounds + arguments.warmup)
            share = mean_s / timings[name].median
            stand_ins_s = step.stand_ins_s()
            print(
                f"# {name}: of a step, looking for edited weights takes {1e3 * mean_s:.3f} ms ({share:.3%}), stand-ins "
                f"of gradients {1e3 * stand_ins_s:.3f} ms ({stand_ins_s / timings[name].median:.3%})"
            )


def main(words: Sequence[str]) -> int:
    return run(parse_arguments(words, "step", DEFAULT, 64))


def ddp(words: Sequence[str]) -> int:
    """Run the case `ddp`: the same step with DDP's variants and a longer context."""
    return run(parse_arguments(words, "ddp", "none,ddp-zcomm,ddp-gloo", 128))


def run(arguments: argparse.Namespace) -> int:
    launch.use_project_python()
    if arguments.keep_heap:
        os.environ.setdefault("GLIBC_TUNABLES", KEEP_HEAP)
    if launch.is_rank():
        launch.leave(run_rank(arguments))
    return run_apart(arguments) if arguments.apart else launch.start_ranks(arguments.world_size, arguments.timeout)
