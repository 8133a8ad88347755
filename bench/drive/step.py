"""The optimizer step with its state on NVMe, beside the drive's roof and the same step in RAM.

  bench/swap.py step --dir /mnt/nvme                              (fp32 and bf16: about three minutes, 5 GB of RAM)
  bench/swap.py step --dir /mnt/nvme --precision bf16 --rounds 9
  bench/swap.py step --dir /mnt/nvme --out bench/results/swap --append    (beside what bandwidth wrote there)

AdamW of ZeroOptimizer, one rank. RAM holds a quarter of the state (--ratio 4), windows included. The rest is on the
drive. share = max(I/O time, step in RAM) / step, of each round. I/O time: the bytes that the step moved at the rate of
fio's best mixed flags (half reads, half writes). That rate is measured in the same round on the same file. Each round:
a step in RAM and a swapped one in each direction of the sweep, on the same gradients, then fio. #wrong: weights and
state that are not those of the step in RAM, to the bit.

All three optimizers (in RAM, swapped, swapped without checksums) have the same weights and gradients. fio overwrites
the file: afterwards the state is written again from that in RAM.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from drive import counters, page
from drive.fio import Fio
from harness import launch
from harness.program import listed, make_parser, parse_size
from harness.record import Results, command_line, machine
from harness.timing import MIN_ROUNDS

PRECISIONS = ("fp32", "bf16")
HUGE = "glibc.malloc.hugetlb=1"


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("bench/swap.py step", __doc__)
    add = parser.add_argument
    add("--dir", type=Path, default=Path("."), help="directory on the drive (here)")
    add("--state", type=parse_size, default="1280M", help="bytes of optimizer state (1280M)")
    add("--ratio", type=float, default=4.0, help="state over what of it RAM holds (4)")
    add("--precision", default=",".join(PRECISIONS), help=f"by commas: {', '.join(PRECISIONS)} (all)")
    add("--rounds", type=int, default=MIN_ROUNDS, help=f"at least {MIN_ROUNDS}, two steps each ({MIN_ROUNDS})")
    add("--sweep", choices=("short", "full"), default="short", help="fio's: some flags, or all of them (short)")
    add("--out", metavar="STEM", type=Path, help="write STEM.jsonl and STEM.md")
    add("--append", action="store_true", help="keep the rows that STEM has")
    arguments = parser.parse_args(words)
    arguments.precisions = listed(parser, "--precision", arguments.precision, PRECISIONS)
    if not arguments.dir.is_dir():
        parser.error(f"--dir {arguments.dir}: no such directory")
    arguments.rounds = max(MIN_ROUNDS, arguments.rounds)
    return arguments


def prepare_process() -> None:
    """Start this program again with huge pages for torch's tensors, which a process must be started with."""
    if os.environ.get("GLIBC_TUNABLES") != HUGE:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "GLIBC_TUNABLES": HUGE})


def main(words: Sequence[str]) -> int:
    arguments = parse_arguments(words)
    launch.use_project_python()
    prepare_process()
    from drive import optimizers

    results = Results(arguments.out, arguments.append)
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="zcomm-bench-", dir=arguments.dir) as folder:
        fio, skipped = None, {}
        try:
            fio = Fio(arguments.state, arguments.sweep)
        except OSError as error:
            skipped["fio"] = str(error)
            print(f"# peer fio: skipped, {error}", flush=True)
        about = {"command": command_line(), "skipped": skipped, "drive": counters.describe(Path(folder))}
        results.keep({"kind": "machine", **about, **machine()})
        for precision in arguments.precisions:
            row = optimizers.measure(arguments, Path(folder), precision, fio, results.keep)
            results.keep(row)
            wrong += int(row["wrong"])
            print(*page.step_lines(row), sep="\n", flush=True)
    results.write_page(page.page_of)
    return 1 if wrong else 0
