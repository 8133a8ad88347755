#!/usr/bin/env python3
"""Build and check of zcomm on a machine with a GPU, with a record of its measurements (`make gpu-check` calls it).

  python3 tools/gpu_check.py                       (nine minutes at most; the machine's own torch, no .venv)
  python3 tools/gpu_check.py --resume              (remaining parts; finished ones are kept)
  python3 tools/gpu_check.py --part pinned-copy,ranks-2
  python3 tools/gpu_check.py --plan                (budgets, and the parts that fit; needs no GPU)

Results are written after every part: gpu-check.json, gpu-check.md, gpu-check.log and timelines in $OUT. Without $OUT
gpu-DATE.json and .md are in bench/results, the rest is in --work. The budget of a part is 1.5 times the seconds that
it took in the last of bench/results/gpu-*.json and the runs on this machine. Exit status:
  0  all passed or skipped (or no GPU: it prints that)
  1  a part failed or took too long
  2  wrong use
  3  not all were started in the time
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).resolve().parent))
from gpucheck import work
from gpucheck.parts import ROOT, WORK_FOLDER, Place, all_parts, chosen
from gpucheck.runner import Part, Result, plan, run_parts, seconds_of

_SAME = ("gpu", "driver", "torch", "revision")  # equal in a run and the run that it resumes


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--minutes", type=float, default=9.0, help="for all parts of this call (9)")
    add("--part", metavar="NAMES", help="only these, by commas, and what they need")
    add("--resume", nargs="?", const="", metavar="FILE", help="keep finished parts of FILE (of the last run)")
    add("--out", type=Path, help="folder of the results ($OUT, or bench/results)")
    add("--work", type=Path, default=WORK_FOLDER, help=f"folder of builds, outside the tree ({WORK_FOLDER})")
    add("--plan", action="store_true", help="print the parts, their budgets, and which of them fit into --minutes")
    add("--do", choices=sorted(work.WORK), help=argparse.SUPPRESS)
    return parser.parse_args()


def has_gpu() -> bool:
    """Return True if nvidia-smi lists one; without nvidia-smi, if the driver has made a device."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return Path("/dev/nvidia0").exists()
    return any(line.startswith("GPU") for line in listed.splitlines())


def terminated(number: int, _frame: FrameType | None) -> None:
    """Exit by an exception, so that the part that runs is ended, too."""
    sys.exit(128 + number)


def main() -> int:
    arguments = parse_arguments()
    # programs of this Python's environment (cmake, ninja, pytest), even if it was not activated
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.prefix) / "bin"), os.environ.get("PATH", os.defpath)])
    place = Place(arguments.work.absolute())
    if arguments.do:
        return work.WORK[arguments.do](place)
    arguments.out = arguments.out or (Path(os.environ["OUT"]) if os.environ.get("OUT") else None)
    took = seconds_of([*past_results(), place.last])
    try:
        parts = chosen(all_parts(place, took, arguments.out and arguments.out.absolute()), arguments.part)
    except ValueError as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return 2
    if arguments.plan:
        show(parts, took, 60.0 * arguments.minutes)
        return 0
    if not has_gpu():
        print("gpu-check: no GPU on this machine; nothing was checked")
        return 0
    signal.signal(signal.SIGTERM, terminated)
    return check(arguments, place, parts)


def past_results() -> list[Path]:
    return sorted((ROOT / "bench/results").glob("gpu-*.json"))


def show(parts: Sequence[Part], took: Mapping[str, float], seconds: float) -> None:
    """Print a line for each part, and the sum of those that fit."""
    limits, total = plan(parts, seconds)
    for part, limit in zip(parts, limits, strict=True):
        fits = "does not fit" if limit is None else "fits" if limit == part.budget_s else f"fits, cut to {limit:.0f} s"
        source = f"{took[part.name]:.0f} s last time" if part.name in took else "not measured"
        print(f"{part.name:18} {part.budget_s:4.0f} s  {fits:18} {source:17} {part.title}")
    print(f"all that fit: {total:.0f} of {seconds:.0f} s; the others run if these end early, or with --resume")


def check(arguments: argparse.Namespace, place: Place, parts: list[Part]) -> int:
    """Run all parts."""
    deadline = time.monotonic() + 60.0 * arguments.minutes
    about = work.about()
    given = arguments.out
    folder, stem = (given, "gpu-check") if given else (ROOT / "bench/results", f"gpu-{about['time'][:10]}")
    result = Result(folder / f"{stem}.json", about, place.last)
    if arguments.resume is not None:
        earlier = [place.last] if place.last.exists() else past_results()[-1:]  # $OUT may have been removed
        result.adopt(Path(arguments.resume or (earlier or [place.last])[-1]), _SAME, print)
    log = (folder if given else place.work) / "gpu-check.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("", encoding="utf-8")
    place.scratch.mkdir(parents=True, exist_ok=True)
    print(f"gpu-check: {about['gpu']}, driver {about['driver']}, torch {about['torch']}", flush=True)
    status = run_parts(parts, result, log, deadline, lambda text: print(text, flush=True))
    page = result.file.with_suffix(".md")
    print(f"\n{page.read_text(encoding='utf-8')}\nwritten: {result.file} and {page.name}; log: {log}")
    return status


if __name__ == "__main__":
    sys.exit(main())
