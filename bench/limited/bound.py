"""Seconds of a step within a limit beside their bound: in each phase the larger of computing and what the drive needs.

  bench/limit.py bound --dir /mnt/nvme                                (300M parameters, AdamW: 5 GB of the drive)
  bench/limit.py bound --dir /mnt/nvme --sizes 3B --ranks-of 1 --steps 4                                  (49 GB)

After each step the ranks wait, and fio runs with each phase's mix of reads and writes, on as many files as there are
ranks. A drive in a virtual machine changes from minute to minute. Two times bound a phase, and the larger counts. One
is the drive's for the bytes of all ranks, at the better of the rates before and after the step. The other is computing:
the seconds without waiting of the slowest rank. A step ends when all that it has written is on the drive. x: the median
over steps of seconds / bound, and the middle half of them. "read", "written": of a step and rank, over what the plan
has. #wrong: losses that differ from those of the first place of updates.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness import launch
from harness.goal import judge
from harness.program import listed, make_parser
from harness.record import JsonLines, command_line, machine
from limited import decoder, ranks
from limited.depth import add_model_arguments, check
from limited.ranks import Failed
from limited.training import layers_for

_TABLE = "Seconds of a step beside its bound"
_UPDATES = ("step", "forward", "backward")
_WATCHED = 4  # steps before the first that counts: two decide where updates run, and the third has the second's in it
_FIO_S = 1.0
_FIO_NBYTES = 1 << 30
_SMALL_NBYTES = 100e6  # of a phase that no drive bounds
_LITTLE = 0.01  # a share of a phase's bytes that makes no mix


@dataclass(frozen=True)
class Job:
    """A run of ``steps`` steps that count. clip: norm of gradients. fio: the program."""

    layers: int
    width: int
    context: int
    steps: int
    limit: str
    update: str
    clip: float | None
    fio: str
    folder: str


def bound_of(step: Sequence[dict[str, Any]], rates: Sequence[dict[str, float]]) -> float:
    """Return the least seconds of a step. step: its phases by name, of each rank. rates: bytes per second by phase,
    before and after it."""
    total = 0.0
    for name in step[0]:
        phases = [of_rank[name] for of_rank in step]
        nbytes = sum(phase["read_nbytes"] + phase["written_nbytes"] for phase in phases)
        known = [each[name] for each in rates if each.get(name)]
        compute_s = max(phase["seconds"] - phase["waited_s"] for phase in phases)
        total += max(compute_s, nbytes / max(known) if known else 0.0)
    return total


def row_of(every: Sequence[dict[str, Any]], job: Job, first: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a run. every: of each rank. first: rank 0 of the run that has the losses of all."""
    found = every[0]
    steps, rates = found["steps"], found["rates"]
    seconds = [sum(phase["seconds"] for phase in step.values()) for step in steps]
    each_rank = zip(*(of_rank["steps"] for of_rank in every), strict=True)
    bounds = [bound_of(step, rates[number : number + 2]) for number, step in enumerate(each_rank)]
    ratios = [taken / least for taken, least in zip(seconds, bounds, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    moved = {
        what: statistics.mean(sum(phase[f"{what}_nbytes"] for phase in step.values()) for step in steps)
        for what in ("read", "written")
    }
    phases = {
        name: {
            "seconds": statistics.median(step[name]["seconds"] for step in steps),
            "compute_s": statistics.median(step[name]["seconds"] - step[name]["waited_s"] for step in steps),
            "drive_gbps": statistics.median(each.get(name, 0.0) for each in rates) / 1e9,
            "gb": statistics.median(step[name]["read_nbytes"] + step[name]["written_nbytes"] for step in steps) / 1e9,
        }
        for name in steps[0]
    }
    return {
        "table": _TABLE,
        "kind": "bound",
        "params": found["numel"],
        "layers": job.layers,
        "context": job.context,
        "limit": job.limit,
        "update": job.update,
        "clip": job.clip,
        "ranks": len(every),
        "steps": len(steps),
        "step_s": statistics.median(seconds),
        "bound_s": statistics.median(bounds),
        "ratio": statistics.median(ratios),
        "ratio_quarters": [low, high],
        "phases": phases,
        "read_over_plan": moved["read"] / found["planned"][0],
        "written_over_plan": moved["written"] / found["planned"][1],
        "peak_nbytes": found["peak_nbytes"],
        "wrong": sum(one != other for one, other in zip(found["losses"], first["losses"], strict=True)),
    }


def _shown(row: dict[str, Any]) -> str:
    low, high = row["ratio_quarters"]
    return (
        f"  {row['params'] / 1e6:>6.0f}M {row['update']:<9} {row['ranks']:>5} {row['step_s']:>7.2f} "
        f"{row['bound_s']:>7.2f} {row['ratio']:>5.2f}  {low:.2f} to {high:.2f} {row['read_over_plan']:>6.3f} "
        f"{row['written_over_plan']:>8.3f} {row['peak_nbytes'] >> 20:>5} {row['wrong']:>7}"
    )


def main(words: Sequence[str]) -> int:
    parser = make_parser("bench/limit.py bound", __doc__)
    add_model_arguments(parser, "300M")
    parser.set_defaults(width=2048, context=256, steps=9)
    add = parser.add_argument
    add("--ranks-of", default="1,2", help="numbers of ranks, by commas (1,2)")
    add("--updates", default="step,backward", help=f"by commas: {', '.join(_UPDATES)} (step,backward)")
    add("--limit", default="1GiB", help="memory of a rank (1GiB)")
    add("--clip", type=float, help="norm of gradients, with updates in step() and in forward (none)")
    arguments = parser.parse_args(words)
    check(parser, arguments)
    updates = listed(parser, "--updates", arguments.updates, _UPDATES)
    try:
        world_sizes = [int(text) for text in arguments.ranks_of.split(",")]
    except ValueError:
        world_sizes = [0]
    if min(world_sizes) < 1:
        parser.error(f"--ranks-of {arguments.ranks_of}: not numbers of ranks by commas")
    fio = shutil.which("fio")
    if fio is None:
        parser.error("no fio (Debian: fio)")
    launch.use_project_python()
    lines = JsonLines(arguments.json, arguments.append)
    lines.write({"kind": "machine", "command": command_line(), **machine()})
    print("#  params updates   ranks  s/step   bound     x   middle half   read  written  peak  #wrong")
    rows = []
    for numel in arguments.numels:
        for world_size in world_sizes:
            first = None
            for update in updates:
                layers, clip = layers_for(numel, arguments.width), None if update == "backward" else arguments.clip
                size = (layers, arguments.width, arguments.context, arguments.steps, arguments.limit)
                with tempfile.TemporaryDirectory(prefix="zcomm-limit-", dir=arguments.dir.resolve()) as folder:
                    job = Job(*size, update, clip, fio, folder)
                    try:
                        threads = max(1, (os.cpu_count() or 1) // world_size)
                        every = ranks.run(__file__, asdict(job), world_size, arguments.timeout, threads)
                    except Failed as failed:
                        print(failed, file=sys.stderr)
                        return 1
                first = first or every[0]
                rows.append(row_of(every, job, first))
                lines.write(rows[-1])
                print(_shown(rows[-1]), flush=True)
    verdicts = [
        judge("step / bound", "limit.bound", [row["ratio"] for row in rows]),
        judge("bytes read and written / plan", "limit.planned", [
            abs(row[f"{what}_over_plan"] - 1) for row in rows for what in ("read", "written")
        ], 3),
    ]  # fmt: skip
    print(*verdicts, sep="\n")
    return 0 if all(verdict.good for verdict in verdicts) and not any(row["wrong"] for row in rows) else 1


# --- the rank -------------------------------------------------------------------------------------------------------


def _provide(file: Path) -> None:
    """Write ``file`` once, so that the file system has allocated its blocks before the runs."""
    if not file.exists():
        with file.open("wb") as out:
            for _ in range(_FIO_NBYTES >> 24):
                out.write(os.urandom(1 << 16) * 256)


def _fio_rate(job: Job, read_nbytes: float, written_nbytes: float, files: Sequence[Path]) -> float:
    """Measure the drive's bytes per second at a mix of reads and writes, one process for each of ``files``."""
    total = read_nbytes + written_nbytes
    share = 0.0 if total == 0 else read_nbytes / total
    kind = ["--rw=read"] if share > 1 - _LITTLE else ["--rw=write"] if share < _LITTLE else ["--rw=rw"]
    if kind == ["--rw=rw"]:
        kind.append(f"--rwmixread={round(100 * share)}")
    common = [f"--size={_FIO_NBYTES}", "--direct=1", "--bs=4M", "--iodepth=8", "--ioengine=io_uring", *kind]
    common += ["--time_based", f"--runtime={_FIO_S}", "--output-format=json", "--randrepeat=0", "--end_fsync=0"]
    command = [job.fio, *common]
    for number, file in enumerate(files):
        command += [f"--name=rank{number}", f"--filename={file}"]
    env = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}  # memory as good as the swap file's
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        raise RuntimeError(f"fio failed: {done.stderr.strip() or done.stdout.strip()[-400:]}")
    jobs = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    moved = sum(each[what]["io_bytes"] for each in jobs for what in ("read", "write"))
    return float(moved / max(each["job_runtime"] / 1e3 for each in jobs))


def _planned(job: Job, optimizer: Any, world_size: int) -> Any:
    """Return the plan of a rank, with the options that the limit has chosen."""
    import torch

    from zcomm.planning import estimate

    with torch.device("meta"):
        model = decoder.model(job.layers, job.width).to(torch.bfloat16)
        tokens = torch.zeros(1, job.context, dtype=torch.int64)
    return estimate(
        model,
        3,
        optimizer.offload,
        world_size,
        "bf16",
        bucket_mb=optimizer.bucket_mb,
        prefetch=optimizer.prefetch,
        units=optimizer.units,
        inputs=(tokens, tokens),
    )


def _train(job: Job) -> dict[str, Any]:
    import torch

    import zcomm
    from zcomm.demo.phases import Clock

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.manual_seed(1)
    comm = zcomm.init(timeout=600)
    made = decoder.make(job.layers, job.width, job.folder, "adamw", job.limit, job.clip, update=job.update)
    model, optimizer = made
    files = [Path(job.folder, f"fio.{rank}") for rank in range(comm.world_size)]
    steps: list[dict[str, Any]] = []
    rates: list[dict[str, float]] = []
    losses: list[str] = []

    def step(number: int) -> dict[str, Any]:
        comm.barrier()
        clock, tokens = Clock(optimizer.stats), decoder.tokens(job.context, number, comm.rank)
        with clock.phase("forward"):
            loss = model(*tokens)
        with clock.phase("backward"):
            optimizer.backward(loss)
        with clock.phase("step"):
            optimizer.step()
            optimizer.zero_grad()
            optimizer._parts.swap.wait()  # a step's last writes are its own, and not behind fio
        losses.append(loss.item().hex())
        comm.barrier()
        return {name: asdict(phase) for name, phase in clock.phases.items()}

    def measure(phases: dict[str, Any]) -> dict[str, float]:
        found = {}
        if comm.rank == 0:
            for name, phase in phases.items():
                if phase["read_nbytes"] + phase["written_nbytes"] > _SMALL_NBYTES:
                    for file in files:
                        _provide(file)
                    found[name] = _fio_rate(job, phase["read_nbytes"], phase["written_nbytes"], files)
        comm.barrier()
        return found

    for number in range(_WATCHED):
        last = step(number)
    rates.append(measure(last))
    for number in range(_WATCHED, _WATCHED + job.steps):
        steps.append(step(number))
        rates.append(measure(steps[-1]))
    planned = _planned(job, optimizer, comm.world_size)
    numel = sum(weight.numel() for weight in model.parameters())
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    optimizer.close()
    zcomm.shutdown()
    return {
        "rank": comm.rank,
        "numel": numel,
        "steps": steps,
        "rates": rates,
        "losses": losses,
        "planned": [planned.swap_read_nbytes, planned.swap_written_nbytes],
        "peak_nbytes": 1024 * int(status.split("VmHWM:")[1].split()[0]),
    }


if __name__ == "__main__":
    ranks.say(_train(Job(**json.loads(sys.argv[1]))))
