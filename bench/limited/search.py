"""The search over depth, and its rows."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import launch
from harness.goal import judge
from harness.program import listed, make_parser, parse_size
from harness.record import JsonLines, command_line, machine
from limited import trial, variants
from limited.trial import Job, Outcome

OURS = ("zcomm", "zcomm-8bit")
VARIANTS = (*OURS, "deepspeed", "fsdp2", "torch-mmap", "torch-mmap-anon")
_USUAL = tuple(name for name in VARIANTS if name != "zcomm-8bit")
_DRIVE = {"zcomm-8bit": 10.1}  # bytes per parameter on the drive, weights, gradients and state, if not 16
_PROCESS_NBYTES = 300 << 20
_BEFORE = {"deepspeed": 800 << 20}  # bytes of a peer's process without layers, if not _PROCESS_NBYTES
_EACH = {"deepspeed": 2.1}  # bytes per parameter for a peer's first guess, if not _SUMS
_SUMS = 20.0  # weight, gradient, m, v, and memory in use
_CLOSE = 0.05
_TABLE = "The largest model within a limit on memory"  # of gpu-check's page
Found = tuple[int, Outcome | None, str]  # layers (0: none), their outcome, why there are not more


def parse_arguments(description: str, words: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("bench/largest", description)
    add = parser.add_argument
    add("--dir", type=Path, default=Path("."), help="directory on the drive (here)")
    add("--limits", default="1G,2G,4G,8G", help="on memory, by commas (1G,2G,4G,8G)")
    add("--variants", default=",".join(_USUAL), help=f"by commas, also zcomm-8bit ({','.join(_USUAL)})")
    add("--width", type=int, default=768, help="of the model; heads are of 64 (768)")
    add("--context", type=int, default=128, help="tokens of the sequence (128)")
    add("--steps", type=int, default=3, help="of a try (3)")
    add("--most", default="1e12", help="parameters that are tried; or for each limit, by commas")
    add("--max-seconds", type=float, default=1800.0, help="of a try (1800)")
    add("--leave", type=parse_size, default="8G", help="bytes of the drive that stay free (8G)")
    add("--check-layers", type=int, default=12, help="of the model of #wrong (12)")
    add("--check-limit", type=parse_size, default="720M", help="its limit (720M)")
    add("--deepspeed-python", metavar="FILE", help="an interpreter that imports deepspeed (ZCOMM_DEEPSPEED_PYTHON)")
    add("--json", metavar="FILE", help="write machine and results as JSON lines")
    add("--append", action="store_true", help="keep the lines that are in FILE")
    arguments = parser.parse_args(words)
    arguments.names = listed(parser, "--variants", arguments.variants, VARIANTS)
    try:
        arguments.limits_nbytes = [parse_size(text) for text in arguments.limits.split(",")]
        arguments.mosts = [float(text) for text in arguments.most.split(",")]
    except ValueError as error:
        parser.error(f"--limits, --most: {error}")
    if len(arguments.mosts) == 1:
        arguments.mosts *= len(arguments.limits_nbytes)
    if len(arguments.mosts) != len(arguments.limits_nbytes):
        parser.error(f"--most {arguments.most}: one number, or one for each of --limits {arguments.limits}")
    if not arguments.dir.is_dir():
        parser.error(f"--dir {arguments.dir}: no such directory")
    arguments.dir = arguments.dir.resolve()  # a rendezvous by file:// needs the whole path
    if arguments.width % 64 or arguments.width < 64:
        parser.error(f"--width {arguments.width}: not a multiple of 64")
    return arguments


def bisect(
    attempt: Callable[[int], Outcome], guess: int, most: int, why_most: str, limit: int = 0, before: int = 0
) -> Found:
    """Search from ``guess`` on, to 5 % or one layer.

    Peaks grow evenly with depth, from ``before`` bytes without layers, so they determine the next depth to try.
    If that fails or gives no depth, the search bisects between depths that worked and depths that did not.
    """
    low, high, layers, best, why = 0, most + 1, max(1, min(guess, most)), None, why_most
    peaks = {0: before}
    while low < most and high - low > max(1, int(_CLOSE * low)):
        outcome = attempt(layers)
        if outcome.why is None:
            low, best = layers, outcome
            peaks[layers] = outcome.peak_nbytes
        elif outcome.why in ("absent", "error") and best is None and layers == 1:
            return 0, outcome, outcome.why
        else:
            high, why = layers, outcome.why
        expected = _depth_at(limit, peaks)
        if low and expected < high:
            layers = min(max(expected, low + max(1, int(_CLOSE * low))), most)
        else:
            layers = (low + high) // 2 if high <= most else min(most, max(low + 1, low * 3 // 2))
    return low, best, why


def _depth_at(limit: int, peaks: dict[int, int]) -> int:
    """Return the layers that reach the limit by the two deepest peaks; sys.maxsize if the peaks give no slope.

    peaks: bytes by layers.
    """
    if len(peaks) < 2 or not limit:
        return sys.maxsize
    (one, held), (other, more) = sorted(peaks.items())[-2:]
    return other + (limit - more) * (other - one) // (more - held) if more > held else sys.maxsize


def downwards(attempt: Callable[[int], Outcome], guess: int, why: str) -> Found:
    """Try the guess, and after a failure less, three times: by 15 %, or by half if it took too long."""
    outcome, layers = None, guess
    for _ in range(3):
        if layers < 1:
            break
        outcome = attempt(layers)
        if outcome.why is None:
            return layers, outcome, why
        why = outcome.why
        layers = layers // 2 if why == "time" else int(0.85 * layers)
    return 0, outcome, why


def planned(job: Job, most: int) -> int:
    """Return the most layers within the limit by the plan. Smaller state needs as much, as it is on the drive."""
    import torch

    from zcomm.planning import estimate
    from zcomm.zero import Offload, Units

    def fits(layers: int) -> bool:
        deep = replace(job, layers=layers)
        memory = estimate(
            variants.meta_model(deep, torch.bfloat16),
            3,
            Offload("nvme", "nvme", gradients="nvme"),
            1,
            "bf16",
            bucket_mb=1.0,
            units=Units(max_bytes=16 << 20),
        ).memory
        held = sum(memory["device"].values()) + sum(memory["cpu"].values())
        assert job.limit_nbytes is not None
        return held + variants.kept_nbytes(deep) + _PROCESS_NBYTES <= 0.97 * job.limit_nbytes

    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


class Search:
    """The tries of a run."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._deepspeed = arguments.deepspeed_python or os.environ.get("ZCOMM_DEEPSPEED_PYTHON") or sys.executable

    def job(self, variant: str, limit: int | None, layers: int = 1) -> Job:
        a = self._arguments
        wall = "anon" if variant.endswith("-anon") else "VmHWM"
        name = variant.removesuffix("-anon")
        return Job(name, layers, a.width, a.width // 64, a.context, a.steps, limit, str(a.dir), wall)

    def attempt(self, job: Job) -> Outcome:
        a = self._arguments
        python = self._deepspeed if job.variant == "deepspeed" else sys.executable
        found = trial.run(job, python, a.max_seconds, a.leave)
        result = found.why or f"{found.step_s[-1]:.1f} s/step"
        print(
            f"#   {job.variant} {job.layers} layers, {self.numel(job.layers) / 1e6:.0f}M: {result}, "
            f"{found.peak_nbytes / 2**20:.0f} MiB {job.wall}, {found.seconds:.0f} s {found.said}",
            flush=True,
        )
        return found

    def numel(self, layers: int) -> int:
        return variants.numel_of(layers, self._arguments.width, self._arguments.width // 64)

    def most(self, variant: str, params: float) -> tuple[int, str, int]:
        """Return the most layers, their bound, and the parameters that the drive has space for.

        params: the most that are tried.
        """
        one, free = self.numel(2) - self.numel(1), shutil.disk_usage(self._arguments.dir).free
        room = max(0, free - self._arguments.leave) / _DRIVE.get(variant, 16)
        bounds = {"drive": room, "--most": params}
        why = min(bounds, key=lambda name: bounds[name])
        return max(0, int((bounds[why] - self.numel(1)) // one + 1)), why, int(room)

    def wrong(self) -> int:
        """Return the number of zcomm's losses that a limit changes. Raises: RuntimeError if a run fails."""
        a = self._arguments
        job = replace(self.job("zcomm", None, a.check_layers), more_losses=1)
        runs = [self.attempt(replace(job, limit_nbytes=limit)) for limit in (a.check_limit, None)]
        for each in runs:
            if each.why:
                raise RuntimeError(f"a run for #wrong failed: {each.why} {each.said}")
        return sum(x != y for x, y in zip(*(each.losses for each in runs), strict=True))

    def row(self, variant: str, limit: int, params: float, wrong: int) -> dict[str, Any]:
        """Search the largest model of a variant, of at most ``params`` parameters."""
        most, why, room = self.most(variant, params)
        job = self.job(variant, limit)

        def attempt(layers: int) -> Outcome:
            return self.attempt(replace(job, layers=layers))

        guess = 0
        if variant in OURS:
            guess = planned(job, most)
            layers, found, why = downwards(attempt, guess, why if guess == most else "memory")
        elif variant == "torch-mmap-anon":
            layers, found, why = downwards(attempt, most, why)
        else:
            one, before = self.numel(2) - self.numel(1), _BEFORE.get(variant, _PROCESS_NBYTES)
            guess = int(max(0, limit - before) / _EACH.get(variant, _SUMS) / one)
            layers, found, why = bisect(attempt, guess, most, why, limit, before)
        trained = found is not None and found.why is None
        row: dict[str, Any] = {
            "table": _TABLE,
            "kind": "largest",
            "variant": variant,
            "limit_nbytes": limit,
            "wall": job.wall,
        }
        row |= {"layers": layers, "planned_layers": guess if variant in OURS else None}
        row |= {"params": self.numel(layers) if layers else 0, "at_least": why not in ("memory", "error", "absent")}
        row |= {"bound": why, "roof_params": room}
        if found is not None and trained:
            row |= {"step_s": found.step_s, "peak_nbytes": found.peak_nbytes, "files_nbytes": found.files_nbytes}
            row |= {"drive_nbytes": found.drive_nbytes, "seconds": found.seconds}
            row["wrong"] = wrong if variant in OURS else variants.wrong(found.losses)
        else:
            row |= {"said": found.said if found else "", "wrong": None}
        return row


def shown(row: dict[str, Any]) -> str:
    """Return a row as a line."""
    params = f"{'>=' if row['at_least'] else ''}{row['params'] / 1e6:.0f}M"
    step = f"{row['step_s'][-1]:.2f}" if "step_s" in row else "-"
    return (
        f"  {row['limit_nbytes'] / 2**30:>5.2f} {row['variant']:<16} {row['wall']:<6} {params:>9} {row['layers']:>6} "
        f"{row['bound']:<7} {row['roof_params'] / 1e6:>7.0f}M {step:>8} {row.get('peak_nbytes', 0) / 2**20:>6.0f} "
        f"{row.get('files_nbytes', 0) / 2**30:>6.2f} {'-' if row['wrong'] is None else row['wrong']:>6}"
    )


def main(description: str, words: Sequence[str]) -> int:
    arguments = parse_arguments(description, words)
    launch.use_project_python()
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))  # so that a try is ended, too
    search, lines = Search(arguments), JsonLines(arguments.json, arguments.append)
    lines.write({"kind": "machine", "command": command_line(), **machine()})
    wrong = search.wrong() if {*OURS} & {*arguments.names} else 0
    print("#   GiB variant          wall      params layers bound       roof   s/step    MiB  files  #wrong")
    worst = wrong
    for limit, params in zip(arguments.limits_nbytes, arguments.mosts, strict=True):
        rows = []
        for variant in arguments.names:
            row = search.row(variant, limit, params, wrong)
            lines.write(row)
            rows.append(row)
            print(shown(row), flush=True)
            worst += row["wrong"] or 0
        peers = [row["params"] for row in rows if row["variant"] not in OURS and row["wall"] == "VmHWM"]
        for row in rows:
            if row["variant"] in OURS:
                if row["params"] and peers and max(peers):
                    what = f"{row['variant']} over the best peer, {limit / 2**30:g} GiB"
                    print(judge(what, "largest.over.peer", [row["params"] / max(peers)]), flush=True)
                worst += not row["params"]
    return 1 if worst else 0
