#!/usr/bin/env python3
"""Build and check of zcomm on a machine with a GPU, with a record of its measurements (`make gpu-check` calls it).

  python3 tools/gpu_check.py                       (nine minutes at most; the machine's own torch, no .venv)
  python3 tools/gpu_check.py --resume              (what is left; finished parts are kept)
  python3 tools/gpu_check.py --part pinned-copy,ranks-2
  python3 tools/gpu_check.py --list

Writes gpu-check.json, gpu-check.md, gpu-check.log and timelines into $OUT, or without it gpu-DATE.json and .md into
bench/results. Exit status:
  0  all passed or skipped (or no GPU: it prints that)
  1  a part failed or took too long
  2  wrong use
  3  not all were started in the time
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).resolve().parent))
from gpucheck import page, work
from gpucheck.parts import ROOT, Place, all_parts, chosen
from gpucheck.runner import Part, Result, run_parts

_SAME = ("gpu", "driver", "torch", "revision")  # equal in a run and the run that it resumes


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--minutes", type=float, default=9.0, help="for all parts of this call (9)")
    add("--part", metavar="NAMES", help="only these, by commas, and what they need")
    add("--resume", nargs="?", const="", metavar="FILE", help="keep finished parts of FILE (of the last run)")
    add("--out", type=Path, help="folder of the results ($OUT, or bench/results)")
    add("--list", action="store_true", help="the parts and their budgets")
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
    place = Place()
    if arguments.do:
        return work.WORK[arguments.do](place)
    parts = all_parts(place)
    if arguments.list:
        for part in parts:
            print(f"{part.name:18} {part.budget_s:4.0f} s  {part.title}")
        return 0
    try:
        parts = chosen(parts, arguments.part)
    except ValueError as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return 2
    if not has_gpu():
        print("gpu-check: no GPU on this machine; nothing was checked")
        return 0
    signal.signal(signal.SIGTERM, terminated)
    return check(arguments, place, parts)


def check(arguments: argparse.Namespace, place: Place, parts: list[Part]) -> int:
    """Run all parts and write the three files."""
    deadline = time.monotonic() + 60.0 * arguments.minutes
    about = work.about()
    given = arguments.out or (Path(os.environ["OUT"]) if os.environ.get("OUT") else None)
    folder, stem = (given, "gpu-check") if given else (ROOT / "bench/results", f"gpu-{about['time'][:10]}")
    last = place.site.parent / "last.json"  # of this machine, even if $OUT is removed
    result = Result(folder / f"{stem}.json", about)
    if arguments.resume is not None:
        result.adopt(Path(arguments.resume) if arguments.resume else last, _SAME, print)
    log = (folder if given else place.site.parent) / "gpu-check.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("", encoding="utf-8")
    place.scratch.mkdir(parents=True, exist_ok=True)
    print(f"gpu-check: {about['gpu']}, driver {about['driver']}, torch {about['torch']}", flush=True)
    try:
        status = run_parts(parts, result, log, deadline, lambda text: print(text, flush=True))
    finally:
        result.write()
        last.parent.mkdir(parents=True, exist_ok=True)
        last.write_text(result.file.read_text(encoding="utf-8"), encoding="utf-8")
        text = page.page_of(result.about, result.parts)
        result.file.with_suffix(".md").write_text(text, encoding="utf-8")
        for timeline in place.site.parent.glob("profile-*.json") if given else ():
            shutil.copy(timeline, folder)
    print(f"\n{text}\nwritten: {result.file} and .md; log: {log}")
    return status


if __name__ == "__main__":
    sys.exit(main())
