"""Copies between pinned host memory and the GPU, alone and while the CPU's Adam runs.

  bench/offload.py copies                                (1 GiB, down, up, and both at once; 9 rounds, pageable 3)
  bench/offload.py copies --size 256M --rounds 15 --json mine.jsonl

In turn, a copy each:

  peak      one cudaMemcpyAsync from and to memory that CUDA itself allocated (torch's), which is the roof
  zcomm     the same bytes of zcomm.pinned_empty (page-locked by registering)
  pieces    the same in pieces of 8 MiB, as training moves them
  pageable  torch's ordinary memory

Then all of it again while zcomm.optim.CPUAdam steps on other memory: "while Adam" has the same roof, of the time
without it. Adam's own rate stands beside it, alone and while copies run. #wrong: bytes that did not arrive.
"""

from __future__ import annotations

import argparse
import statistics
import threading
from collections.abc import Callable, Sequence
from typing import Any

from harness import launch
from harness.device import (
    PLAYED,
    Rows,
    device_name,
    device_or_absent,
    make_stream,
    on_stream,
    seconds_of,
    synchronize,
    synchronized,
)
from harness.goal import goal
from harness.program import make_parser, parse_size
from harness.timing import MIN_ROUNDS

PIECE_NBYTES = 8 << 20
BLOCK_NBYTES = (16 << 20) + 4099  # random bytes that are repeated; a piece that lands elsewhere shows
PAGEABLE_ROUNDS = 3  # it takes as long as all else together
DIRECTIONS = ("down", "up", "both")
STEP_NBYTES = 26
Taken = dict[tuple[str, str], float]  # median seconds by variant and direction


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("bench/offload.py copies", __doc__)
    add = parser.add_argument
    add("--size", type=parse_size, default="1G", help="bytes of a copy (1G)")
    add("--rounds", type=int, default=9, help=f"at least {MIN_ROUNDS} (9)")
    add("--params", type=int, default=100_000_000, help="that Adam steps on, bf16 (100 million)")
    add("--json", metavar="FILE", help="append rows as JSON lines")
    arguments = parser.parse_args(words)
    arguments.rounds = max(MIN_ROUNDS, arguments.rounds)
    return arguments


class Copies:
    """One kind of host memory and the device's: ``down`` from the GPU, ``up`` to it, on a stream each."""

    def __init__(self, allocate: Callable[[int], Any], size: int, piece: int, device: Any) -> None:
        import torch

        self.piece = piece
        self.host = {name: allocate(size) for name in ("down", "up")}
        self.there = {name: torch.empty(size, dtype=torch.uint8, device=device) for name in ("down", "up")}
        self.streams = {name: make_stream(device) for name in ("down", "up")}

    def run(self, direction: str) -> None:
        names = ("down", "up") if direction == "both" else (direction,)
        size = len(self.host["up"])
        for begin in range(0, size, self.piece):
            for name in names:
                self._copy(name, begin, min(size, begin + self.piece))

    def _copy(self, name: str, begin: int, end: int) -> None:
        host, there = self.host[name][begin:end], self.there[name][begin:end]
        with on_stream(self.streams[name]):
            target, source = (host, there) if name == "down" else (there, host)
            target.copy_(source, non_blocking=True)

    def wrong(self) -> int:
        """Count bytes that differ after a copy of random ones each way."""
        import torch

        found = 0
        self.there["down"].random_(0, 256)
        block = torch.randint(0, 256, (BLOCK_NBYTES,), dtype=torch.uint8)
        for part in self.host["up"].split(BLOCK_NBYTES):
            part.copy_(block[: len(part)])
        self.host["down"].zero_()
        self.there["up"].zero_()
        synchronize()
        self.run("both")
        synchronize()
        for name in ("down", "up"):
            found += int((self.host[name].to(self.there[name].device) != self.there[name]).sum().item())
        return found


class Adam:
    """Steps of CPUAdam on another thread between ``start`` and ``stop``."""

    def __init__(self, numel: int) -> None:
        import torch

        import zcomm

        weight = zcomm.pinned_empty(numel, torch.bfloat16).zero_().requires_grad_()
        weight.grad = torch.full_like(weight, 1e-3)
        self.optimizer = zcomm.optim.CPUAdam([weight], lr=1e-4)
        self.nbytes = STEP_NBYTES * numel
        self.taken: list[float] = []
        for _ in range(2):
            self.optimizer.step()

    def gbps(self, steps: int = 7) -> float:
        return self.nbytes / statistics.median(seconds_of(self.optimizer.step) for _ in range(steps)) / 1e9

    def start(self) -> None:
        self.taken.clear()
        self._going = True
        self._thread = threading.Thread(target=self._steps)
        self._thread.start()

    def _steps(self) -> None:
        while self._going:
            self.taken.append(seconds_of(self.optimizer.step))

    def stop(self) -> float:
        """Stop, and return the GB/s since start."""
        self._going = False
        self._thread.join()
        return self.nbytes / statistics.median(self.taken) / 1e9


def rounds_of(variants: dict[str, Copies], rounds: int) -> Taken:
    """Time all copies by turns. pageable: at most PAGEABLE_ROUNDS."""
    taken: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds + 1):  # the first warms up
        for direction in DIRECTIONS:
            for name, copies in variants.items():
                if name == "pageable" and number > PAGEABLE_ROUNDS:
                    continue
                seconds = seconds_of(synchronized(lambda c=copies, d=direction: c.run(d)))
                if number:
                    taken.setdefault((name, direction), []).append(seconds)
    return {key: statistics.median(values) for key, values in taken.items()}


def main(words: Sequence[str]) -> int:
    arguments = parse_arguments(words)
    launch.use_project_python()
    device = device_or_absent()
    import torch

    import zcomm

    size = arguments.size
    kinds: dict[str, tuple[Callable[[int], Any], int]] = {
        "peak": (lambda n: torch.empty(n, dtype=torch.uint8, pin_memory=not PLAYED), size),
        "zcomm": (lambda n: zcomm.pinned_empty(n, torch.uint8), size),
        "pieces": (lambda n: zcomm.pinned_empty(n, torch.uint8), PIECE_NBYTES),
        "pageable": (lambda n: torch.empty(n, dtype=torch.uint8), size),
    }
    variants = {name: Copies(allocate, size, piece, device) for name, (allocate, piece) in kinds.items()}
    wrong = {name: copies.wrong() for name, copies in variants.items()}
    print(f"# {device_name(device)}, {size >> 20} MiB, medians of {arguments.rounds} rounds")
    rows = Rows(arguments.json, "Pinned copies")
    adam = Adam(arguments.params)
    alone_gbps = adam.gbps()
    alone = rounds_of(variants, arguments.rounds)
    write(rows, size, False, alone, alone, wrong)
    adam.start()
    try:
        beside = rounds_of(variants, arguments.rounds)
    finally:
        beside_gbps = adam.stop()
    write(rows, size, True, beside, alone, wrong)
    adams = Rows(arguments.json, "CPU Adam beside copies")
    adams.add(params=arguments.params, **{"alone GB/s": alone_gbps, "beside copies GB/s": beside_gbps})
    return 1 if rows.wrong else 0


def write(rows: Rows, size: int, while_adam: bool, found: Taken, alone: Taken, wrong: dict[str, int]) -> None:
    """Write the rows of one half, so that a run that ends in the other half has them."""
    for (name, direction), seconds in found.items():
        case = "while_adam" if while_adam else "both" if direction == "both" else "one_way"
        both = 2 if direction == "both" else 1
        columns = {"direction": direction, "while Adam": while_adam, "variant": name, "MiB": size >> 20}
        columns |= {"GB/s": both * size / seconds / 1e9, "share": alone["peak", direction] / seconds}
        if name in ("zcomm", "pieces"):
            columns["goal"] = goal(f"offload.copy.{case}").bound
        rows.add(**columns, **{"#wrong": wrong[name]})
