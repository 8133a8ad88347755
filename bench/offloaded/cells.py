"""Offloaded training of a Llama in cells: place x micro-batches x clipping, next to two roofs from the same process.

  bench/offload.py cells --model 1b                           (4 cells in each of 2 places, and 3 of other updates)
  bench/offload.py cells --model 7b --accums 1 --timelines timelines.zip

First place: weights on the GPU, state on the host (stage 2). There one micro-batch also runs with updates in backward
(12 bytes of host memory per parameter), and several with sums of gradients on the GPU. Second place: all on the host
(stage 3), with the loss in blocks, within --limit-gib of the GPU's memory. A step has --tokens tokens in each cell.
Roofs, for each number of micro-batches: *compute* is forward and backward only, *none* is training with everything on
the GPU, if that fits.

An optimizer is built once per place and way to update; cells change grad_accum and clip_norm between steps. A cell: a
warm step, --rounds timed ones in a row, and one in a timeline. Times are taken when step() has returned and the GPU is
idle. Updates that run later thus count in the next step. share: none / step, or compute / step if *none* does not fit.
#wrong: 1 if the loss leaves the loss of the roof by more than 2 %. Rows are written after every cell; a cell that fails
is a row.
"""

from __future__ import annotations

import argparse
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import launch
from harness.device import (
    PLAYED,
    Rows,
    available_nbytes,
    device_name,
    device_nbytes,
    device_or_absent,
    release,
    synchronize,
)
from harness.goal import goal
from harness.program import make_parser
from offloaded.fits import LAST_PASS, lacking
from offloaded.train import TOLERANCE

CLIP_NORM = 1.0
WAYS = {"auto": "zcomm-cpu", "backward": "zcomm-cpu-backward", "sums": "zcomm-cpu-sums"}  # variants
UPDATES = {"zcomm-cpu": "auto", "zcomm-cpu-backward": "backward", "zcomm-cpu-sums": "sums on the GPU"}  # by variant
_ROUNDS = {"1b": 4, "7b": 2}


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("bench/offload.py cells", __doc__)
    add = parser.add_argument
    add("--model", choices=("tiny", "1b", "3b", "7b"), default="1b")
    add("--accums", default="1,2", help="micro-batches of a step, by commas (1,2)")
    add("--tokens", type=int, default=32768, help="of a step (32768)")
    add("--context", type=int, default=2048, help="tokens of a sequence (2048)")
    add("--limit-gib", type=float, default=24.0, help="GPU memory of the second place (24)")
    add("--rounds", type=int, help="timed steps of a cell (1b: 4, 7b: 2, else 3)")
    add("--updates", default="auto,backward,sums", help="ways to update, by commas (auto,backward,sums)")
    add("--timelines", type=Path, metavar="FILE.zip", help="write a timeline of one step of each cell")
    add("--json", metavar="FILE", help="append rows as JSON lines")
    parser.set_defaults(layers=None, fraction=1.0, nvme_path=None, stage=2, in_blocks=False, accum=1, clip=None)
    arguments = parser.parse_args(words)
    arguments.accums = [int(text) for text in arguments.accums.split(",")]
    arguments.updates = arguments.updates.split(",")
    if unknown := set(arguments.updates).difference(WAYS):
        parser.error(f"--updates {', '.join(sorted(unknown))}: there are {', '.join(WAYS)}")
    arguments.rounds = arguments.rounds or _ROUNDS.get(arguments.model, 3)
    arguments.batch = arguments.tokens // arguments.context
    return arguments


def main(words: Sequence[str]) -> int:
    arguments = parse_arguments(words)
    launch.use_project_python()
    device = device_or_absent()
    import zcomm
    from offloaded.variants import make_job

    if arguments.timelines is not None:
        arguments.timelines.unlink(missing_ok=True)
    zcomm.init()
    bench = Bench(make_job(arguments, device))
    print(f"# {arguments.model} on {device_name(device)}, {arguments.tokens} tokens a step", flush=True)
    without = [(accum, None) for accum in arguments.accums]
    bench.run("compute", without)
    if 16 * bench.numel + (8 << 30) < device_nbytes(device):
        bench.run("none", without)
    cells = [(accum, clip) for accum in arguments.accums for clip in (None, CLIP_NORM)]
    legal = {"auto": cells, "backward": [cell for cell in cells if cell == (1, None)]}
    legal["sums"] = [cell for cell in cells if cell[0] > 1]
    for way in arguments.updates:
        bench.run(WAYS[way], legal[way])
    if "auto" not in arguments.updates:
        zcomm.shutdown()
        return bench.status
    arguments.stage, arguments.in_blocks = 3, True
    if not PLAYED:
        import torch

        fraction = min(1.0, arguments.limit_gib * 2**30 / device_nbytes(device))
        torch.cuda.set_per_process_memory_fraction(fraction, device)
    bench.run("zcomm-cpu", cells)
    zcomm.shutdown()
    return bench.status


class Bench:
    """Cells of one job. roofs: seconds and loss by variant and micro-batches. failed: cells of zcomm that did not run.

    ``job.arguments`` are those of the cell that runs.
    """

    def __init__(self, job: Any) -> None:
        self.job, self.arguments, self.numel = job, job.arguments, job.config.numel()
        self.sequences = self.arguments.batch
        self.rows = Rows(self.arguments.json, "Cells of offloaded training")
        self.roofs: dict[tuple[str, int], tuple[float, float]] = {}
        self.failed = 0
        self.updates = ""  # of the variant; "": a roof

    @property
    def status(self) -> int:
        return 1 if self.failed or self.rows.wrong else 0

    def run(self, name: str, cells: Sequence[tuple[int, float | None]]) -> None:
        """Run the cells of one variant, which is built once, and again after a cell that failed."""
        from offloaded.variants import make_variant

        variant, number = None, 0
        for accum, clip in cells:
            self.arguments.accum, self.arguments.clip = accum, clip
            self.arguments.batch = self.sequences // accum
            try:
                if variant is None:
                    release()
                    self.updates = UPDATES.get(name, "")
                    last = LAST_PASS if name == "zcomm-cpu" and accum > 1 and clip is None else 0
                    why = lacking(name, self.numel, 1.0, available_nbytes(), last) if self.updates else None
                    if why is not None:
                        raise MemoryError(why)
                    begin = time.monotonic()
                    variant = make_variant(name, self.job)
                    variant.step(number)  # zcomm learns the order of gradients in its first steps
                    number += 1
                    print(f"# {name}: built and warm in {time.monotonic() - begin:.1f} s", flush=True)
                elif variant.optimizer is not None:
                    variant.optimizer.grad_accum, variant.optimizer.clip_norm = accum, clip
                seconds, loss = self.timed(variant, number)
                if not self.updates:
                    self.roofs[name, accum] = seconds, loss
                    print(f"# {name}, {accum} micro-batches: {seconds:.3f} s", flush=True)
                else:
                    self.rows.add(**self.columns(variant, seconds, loss))
                    self.profile(variant, number)
                number += self.arguments.rounds + 2
            except Exception as error:  # out of memory, above all
                self.failed += bool(self.updates)
                why = (str(error) or type(error).__name__).splitlines()[0][:300]
                cell = {"variant": name, "model": self.arguments.model, **self.cell()}
                Rows(self.arguments.json, "Cells that did not run").add(**cell, why=f"{type(error).__name__}: {why}")
                close(variant)
                variant = None
        close(variant)

    def cell(self) -> dict[str, Any]:
        limited = self.arguments.stage == 3
        place = f"host, {self.arguments.limit_gib:g} GiB of the GPU" if limited else "GPU"
        clips = self.arguments.clip is not None
        return {"weights": place, "micro-batches": self.arguments.accum, "clip": clips, "updates": self.updates}

    def timed(self, variant: Any, number: int) -> tuple[float, float]:
        """Return the seconds of one of the rounds, and the loss of the last."""
        import torch

        if not PLAYED:
            torch.cuda.reset_peak_memory_stats(self.job.device)
        variant.step(number)
        synchronize()
        begin = time.perf_counter()
        for step in range(self.arguments.rounds):
            loss = variant.step(number + 1 + step)
        synchronize()
        return (time.perf_counter() - begin) / self.arguments.rounds, float(loss)

    def columns(self, variant: Any, seconds: float, loss: float) -> dict[str, Any]:
        import psutil
        import torch

        accum, limited = self.arguments.accum, self.arguments.stage == 3
        compute, none = (self.roofs.get((roof, accum)) for roof in ("compute", "none"))
        roof = none or compute or (seconds, loss)
        host = sum(variant.optimizer.memory()["cpu"].values())
        columns: dict[str, Any] = {"model": self.arguments.model, **self.cell(), "s/step": seconds}
        columns |= {"compute s": compute and compute[0], "none s": none and none[0], "share": roof[0] / seconds}
        if accum == 1 and not limited:
            columns["goal"] = goal("offload.cell.clip" if self.arguments.clip else "offload.cell").bound
        elif accum == 1 and self.arguments.model == "7b":
            columns["goal"] = goal("offload.cell.7b.limit").bound
        columns["GPU GiB"] = 0.0 if PLAYED else torch.cuda.max_memory_allocated(self.job.device) / 2**30
        columns |= {"host B/param": host / self.numel, "host GiB": psutil.Process().memory_info().rss / 2**30}
        return {**columns, "loss": loss, "#wrong": int(not abs(loss - roof[1]) <= TOLERANCE * roof[1])}

    def profile(self, variant: Any, number: int) -> None:
        """Take one more step, add its timeline to the archive, and write a row of its seconds by purpose."""
        import zcomm

        archive = self.arguments.timelines
        if archive is None:
            return
        clip = "-clip" if self.arguments.clip else ""
        how = "" if self.updates == "auto" else f"-{self.updates.replace(' ', '-')}"
        stem = f"{self.arguments.model}-stage{self.arguments.stage}-accum{self.arguments.accum}{clip}{how}"
        file = archive.with_name(f"{stem}.json")
        with zcomm.profile(file, [variant.optimizer]) as seen:
            variant.step(number + self.arguments.rounds + 1)
            variant.settle()
            synchronize()
        with zipfile.ZipFile(archive, "a", zipfile.ZIP_DEFLATED) as opened:
            opened.write(file, file.name)
        file.unlink()
        spent = {f"{purpose} s": seconds for purpose, seconds in seen.seconds().items()}
        timed = Rows(self.arguments.json, "Seconds of a step that was profiled")
        timed.add(model=self.arguments.model, **self.cell(), **{"s/step": seen.wall_s, **spent})


def close(variant: Any) -> None:
    """Free a variant, also one in the middle of a step."""
    try:
        if variant is not None:
            variant.close()
    except Exception as error:
        print(f"# close: {type(error).__name__}: {error}", flush=True)
