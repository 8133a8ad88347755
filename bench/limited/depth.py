"""Peaks of models of one width and context, deeper and deeper, within one limit.

  bench/limit.py depth --dir /mnt/nvme                                  (100M, 1B, 3B: 50 GB of the drive)
  bench/limit.py depth --dir /mnt/nvme --sizes 100M,300M --ranks 2

Each model is a run of its own: construction, steps, save, load, export. The limit is the smallest that the deepest one
can have, as the error of a smaller one names it. At 75 % of it construction fails. MiB are VmHWM of the rank that has
most, anew in each phase. "kept": the largest of all phases / the limit. "grown": of the last step / of step 2. The
spread is that of the largest steps over the models. What a layer adds to them is printed beside what it adds in plain
torch: its modules, its graph and what that saves, with the weights of all layers in one place. From the first step on
the kernel refuses private memory beyond the limit, less the slots, which are shared memory (RLIMIT_DATA).

A checkpoint takes 12 bytes per parameter beside the 16 of the run: models above --save-up-to have none.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import launch
from harness.goal import judge
from harness.program import add_run_arguments, make_parser
from harness.record import JsonLines, command_line, machine
from limited.ranks import Failed
from limited.training import Found, Training, layers_for, run

_TABLE = "Peak memory by depth, within one limit"
_LEEWAY_MIB = 8  # libraries take some MiB more or less from run to run
_SCALE = {"M": 1e6, "B": 1e9}


def add_model_arguments(parser: argparse.ArgumentParser, sizes: str) -> None:
    """Add the flags of both cases."""
    add = parser.add_argument
    add("--dir", type=Path, default=Path("."), help="directory on the drive (here)")
    add("--sizes", default=sizes, help=f"of models, parameters by commas ({sizes})")
    add("--width", type=int, default=1024, help="of the models; heads are of 64 (1024)")
    add("--context", type=int, default=32, help="tokens of a sequence (32)")
    add("--ranks", type=int, default=1, help="of a run (1)")
    add("--steps", type=int, default=3, help="of a run (3)")
    add_run_arguments(parser, 1800.0)


def check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Refuse impossible runs, and set ``arguments.numels`` to the sizes. SIGTERM ends the ranks, too."""
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        arguments.numels = [parse_count(text) for text in arguments.sizes.split(",")]
    except ValueError as error:
        parser.error(f"--sizes: {error}")
    if not arguments.dir.is_dir():
        parser.error(f"--dir {arguments.dir}: no such directory")
    if arguments.width % 64 or arguments.width < 64:
        parser.error(f"--width {arguments.width}: not a multiple of 64")
    if arguments.steps < 2:
        parser.error(f"--steps {arguments.steps}: memory is compared from step 2 on")


def parse_count(text: str) -> float:
    """Parse a number of parameters: '3B', '100M' or '5e6'. Raises: ValueError."""
    scale = _SCALE.get(text[-1:].upper())
    try:
        count = float(text[:-1]) * scale if scale else float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number of parameters; write for example 100M, 3B") from None
    if count < 1:
        raise ValueError(f"{text!r}: no parameters")
    return count


def training_of(arguments: argparse.Namespace, numel: float) -> Training:
    """Return a run without a limit."""
    return Training(
        layers_for(numel, arguments.width),
        arguments.width,
        arguments.context,
        str(arguments.dir),
        arguments.ranks,
        arguments.steps,
    )


def refused(training: Training, limit_mib: int, timeout_s: float) -> tuple[int, str]:
    """Return the smallest limit that works, in MiB, and the error that names it. Raises: Failed if there is none."""
    try:
        run(replace(training, limit=f"{limit_mib}MiB"), timeout_s)
    except Failed as failed:
        lines = [line for line in str(failed).splitlines() if "is too small for this model" in line]
        if not lines:
            raise
        return int(lines[-1].rpartition("memory='")[2].partition("MiB'")[0]), lines[-1].strip()
    raise Failed(f"a limit of {limit_mib} MiB was not refused")


def row_of(found: list[Found], layers: int, limit_mib: int) -> dict[str, Any]:
    """Return the row of a run."""
    peaks = {phase: max(each.peaks[phase] for each in found) for phase in found[0].peaks}
    steps = [peaks[phase] for phase in peaks if phase.startswith("step ")]
    return {
        "table": _TABLE,
        "kind": "depth",
        "params": found[0].numel,
        "layers": layers,
        "ranks": len(found),
        "limit_nbytes": limit_mib << 20,
        "peaks_nbytes": peaks,
        "seconds": found[0].seconds,
        "steps_nbytes": max(steps),
        "kept": max(peaks.values()) / (limit_mib << 20),
        "grown": steps[-1] / steps[1],
        "max_bytes": found[0].max_bytes,
        "wall_nbytes": found[0].wall_nbytes,
        "drive_nbytes": sum(sum(each.memory["nvme"].values()) for each in found),
    }


def _shown(row: dict[str, Any]) -> str:
    peaks = row["peaks_nbytes"]
    cells = [f"{peaks[phase] >> 20:>6}" if phase in peaks else "     -" for phase in ("construction",)]
    cells += [f"{row['steps_nbytes'] >> 20:>6}"]
    cells += [f"{peaks[phase] >> 20:>6}" if phase in peaks else "     -" for phase in ("save", "load", "export")]
    step_s = max(seconds for phase, seconds in row["seconds"].items() if phase.startswith("step "))
    return (
        f"  {row['params'] / 1e6:>6.0f}M {row['layers']:>6} {' '.join(cells)} {row['kept']:>6.3f} {row['grown']:>6.3f} "
        f"{row['drive_nbytes'] / 1e9:>6.1f} {step_s:>7.1f}"
    )


def layer_row(rows: Sequence[dict[str, Any]], plain: Sequence[Found]) -> dict[str, Any]:
    """Return the bytes that a layer adds to the peak of the steps, over ``rows``, and in plain torch."""
    first, last = rows[0], rows[-1]
    count = last["layers"] - first["layers"]
    least, most = (max(peak for phase, peak in each.peaks.items() if phase.startswith("step ")) for each in plain)
    grown = last["steps_nbytes"] - first["steps_nbytes"]
    return {
        "table": _TABLE,
        "kind": "layer",
        "layers": [first["layers"], last["layers"]],
        "layer_nbytes": grown / count,
        "plain_layer_nbytes": (most - least) / count,
        "zcomm_share": (grown - (most - least)) / first["steps_nbytes"],
    }


def main(words: Sequence[str]) -> int:
    parser = make_parser("bench/limit.py depth", __doc__)
    add_model_arguments(parser, "100M,1B,3B")
    parser.add_argument("--limit-mib", type=int, help="the limit (the smallest that works for the deepest)")
    parser.add_argument("--save-up-to", default="1B", help="parameters of models that are saved (1B)")
    parser.add_argument("--rule", default="adamw", help="optimizer (adamw)")
    arguments = parser.parse_args(words)
    check(parser, arguments)
    launch.use_project_python()
    lines = JsonLines(arguments.json, arguments.append)
    lines.write({"kind": "machine", "command": command_line(), **machine()})
    try:
        rows = measure(arguments, lines)
    except Failed as failed:
        print(failed, file=sys.stderr)
        return 1
    if len(rows) > 1 and rows[-1]["layers"] > rows[0]["layers"]:
        limit = f"{rows[-1]['limit_nbytes']}B"
        plain = [
            run(
                Training(
                    row["layers"], arguments.width, arguments.context, str(arguments.dir), limit=limit, plain=True
                ),
                arguments.timeout,
            )[0]
            for row in (rows[0], rows[-1])
        ]
        layer = layer_row(rows, plain)
        lines.write(layer)
        print(
            f"# a layer adds {layer['layer_nbytes'] / 2**20:.2f} MiB, in plain torch "
            f"{layer['plain_layer_nbytes'] / 2**20:.2f}: zcomm's part is {layer['zcomm_share']:.1%} of the peak"
        )
    spread = max(row["steps_nbytes"] for row in rows) / min(row["steps_nbytes"] for row in rows) - 1
    verdicts = [
        judge("largest peak / limit", "limit.kept", [row["kept"] for row in rows], 3),
        judge("last step / step 2", "limit.grown", [row["grown"] for row in rows], 3),
        judge("spread over depths", "limit.spread", [spread], 3),
    ]
    print(*verdicts, sep="\n")
    return 0 if all(verdict.good for verdict in verdicts) else 1


def measure(arguments: argparse.Namespace, lines: JsonLines) -> list[dict[str, Any]]:
    """Run all models; return their rows. Raises: Failed."""
    limit_mib = arguments.limit_mib
    if limit_mib is None:
        deepest = replace(training_of(arguments, max(arguments.numels)), rule=arguments.rule)
        least, _ = refused(deepest, 1, arguments.timeout)
        begin = time.perf_counter()
        _, said = refused(deepest, least * 3 // 4, arguments.timeout)
        seconds = time.perf_counter() - begin
        print(f"# {deepest.layers} layers at 75 % of the least limit, after {seconds:.0f} s: {said}")
        lines.write({"kind": "refused", "limit_nbytes": (least * 3 // 4) << 20, "seconds": seconds, "said": said})
        limit_mib = least + _LEEWAY_MIB
    print(f"# memory='{limit_mib}MiB' for each of {arguments.ranks} ranks")
    print("#  params layers  const  steps   save   load export   kept  grown     GB  s/step")
    rows = []
    for numel in arguments.numels:
        training = replace(training_of(arguments, numel), rule=arguments.rule, limit=f"{limit_mib}MiB")
        training = replace(training, checkpoint=numel <= parse_count(arguments.save_up_to))
        row = row_of(run(training, arguments.timeout), training.layers, limit_mib)
        lines.write(row)
        print(_shown(row), flush=True)
        rows.append(row)
    return rows
