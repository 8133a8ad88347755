"""A row of `bench/swap.py step`: one optimizer in RAM, two on the drive, with and without checksums, and fio."""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import zcomm
from drive import counters
from drive.fio import Fio
from drive.swap_file import openable
from zcomm import _core
from zcomm.zero.layout.tiles import cut
from zcomm.zero.optim_state.nvme import SPAN_TILES, WINDOWS

_STATE_NBYTES = {"fp32": 8, "bf16": 10}  # m and v; and the other half of the master
_TENSOR_COUNT = 6 << 20
_DIRECTIONS = 2


def measure(
    arguments: argparse.Namespace,
    folder: Path,
    precision: str,
    fio: Fio | None,
    keep: Callable[[dict[str, object]], None],
) -> dict[str, Any]:
    pair = Pair(arguments, folder, precision)
    try:
        best = fio.tune("mixed", pair.path, keep) if fio else None
        pair.write_again()
        pair.steps()  # the first ones allocate
        rounds = []
        for _ in range(arguments.rounds):
            rounds += pair.steps()
            if not fio:
                continue
            seconds = [fio.seconds("mixed", pair.nvme_nbytes, 0, path) for path in (pair.path, pair.plain_path)]
            pair.write_again()
            for each in rounds[-_DIRECTIONS:]:
                each["io_s"] = each["moved_nbytes"] * seconds[0] / pair.nvme_nbytes
                each["no_crc_s"] *= seconds[0] / seconds[1]  # two files on one drive may differ by some percent
        wrong = pair.wrong()
    finally:
        pair.close()
    roofs = [max(each["io_s"], each["ram_s"]) if fio else None for each in rounds]
    shares = [roof / each["step_s"] for roof, each in zip(roofs, rounds, strict=True) if roof]
    return {
        "kind": "step",
        "precision": precision,
        "numel": pair.numel,
        "state_nbytes": pair.nvme_nbytes + pair.resident_nbytes,
        "nvme_nbytes": pair.nvme_nbytes,
        "ram_nbytes": pair.resident_nbytes + pair.window_nbytes,
        "windows": WINDOWS,
        "best_flags": best,
        "rounds": rounds,
        **{name: _median([each[name] for each in rounds]) for name in rounds[0]},
        "share": _median(shares),
        "shares": shares,
        "checksum_cost": 1.0 - statistics.median(each["no_crc_s"] / each["step_s"] for each in rounds),
        "wrong": wrong,
    }


def _median(values: list[Any]) -> Any:
    return statistics.median(values) if values and values[0] is not None else None


class Pair:
    """One optimizer with its state in RAM, one with most of it on NVMe."""

    def __init__(self, arguments: argparse.Namespace, folder: Path, precision: str) -> None:
        self._folder = folder
        tensors = max(1, arguments.state // _STATE_NBYTES[precision] // _TENSOR_COUNT)
        count = min(_TENSOR_COUNT, arguments.state // _STATE_NBYTES[precision])
        self.numel = tensors * count
        generator = torch.Generator().manual_seed(1)
        dtype = torch.float32 if precision == "fp32" else torch.bfloat16
        self._slopes = [torch.randn(count, generator=generator).to(dtype) for _ in range(tensors)]
        self._make = lambda offload: zcomm.ZeroOptimizer(
            [torch.nn.Parameter(slope.float() * 0.1) for slope in self._slopes],
            "adamw",
            stage=1,
            offload=offload,
            nvme_path=folder,
            precision=precision,
            lr=1e-3,
        )
        self._ram = self._make(None)
        offload = zcomm.Offload("nvme", None, self._fraction(arguments.ratio))
        self._swap = self._make(offload)
        with _without_checksums():
            self._plain = self._make(offload)
        memory = self._swap.memory()
        self.nvme_nbytes, self.resident_nbytes = memory["nvme"]["optimizer"], memory["cpu"]["optimizer"]
        self.window_nbytes = memory["cpu"]["slots"]
        self._core = self._swap._live.swap
        self.path = openable(str(self._core.stats()["path"]))
        self.plain_path = openable(str(self._plain._live.swap.stats()["path"]))

    def _fraction(self, ratio: float) -> float:
        """Return the largest part on the drive with which spans in RAM and windows are 1/ratio of the state."""
        state = self._ram._live.state.kinds[0]
        spans = [part.stop - part.start for count in state.counts for part in cut(count, SPAN_TILES)]
        window = min(WINDOWS, len(spans)) * max(map(state.form.nbytes, spans))
        total = state.form.nbytes(self.numel)
        return 1.0 - max(0.0, total / ratio - window) / total

    def steps(self) -> list[dict[str, Any]]:
        """Run two steps of each, so that the sweep runs once in each direction."""
        return [self._step() for _ in range(_DIRECTIONS)]

    def _step(self) -> dict[str, Any]:
        for optimizer in (self._ram, self._swap, self._plain):
            optimizer.zero_grad()
            params = optimizer.param_groups[0]["params"]
            sum((p * slope).sum() for p, slope in zip(params, self._slopes, strict=True)).backward()
            if optimizer is not self._ram:
                optimizer._live.swap.wait()  # for writes of the last step
        begin_s = time.perf_counter()
        self._ram.step()
        ram_s = time.perf_counter() - begin_s
        timed = self._timed(self._swap)
        return {"ram_s": ram_s, **timed, "no_crc_s": self._timed(self._plain)["step_s"], "io_s": None}

    def _timed(self, optimizer: zcomm.ZeroOptimizer) -> dict[str, Any]:
        core: Any = optimizer._live.swap
        before, counted = core.stats(), counters.moved(self._folder)
        waited_s = optimizer.stats()["swap_s"]
        begin_s = time.perf_counter()
        optimizer.step()
        returned_s = time.perf_counter() - begin_s
        core.wait()
        step_s = time.perf_counter() - begin_s
        after, counted_then = core.stats(), counters.moved(self._folder)
        moved = sum(after[key] - before[key] for key in ("read_nbytes", "written_nbytes"))
        device = sum(counted_then) - sum(counted) if counted and counted_then else None
        return {
            "step_s": step_s,
            "returned_s": returned_s,  # the last writes go on behind it
            "waited_s": optimizer.stats()["swap_s"] - waited_s,
            "moved_nbytes": moved,
            "moved_over_asked": device / moved if device is not None else None,
        }

    def write_again(self) -> None:
        """Write the state on the drive from the twin's, by whole spans.

        fio has overwritten the bytes that a part would read first.
        """
        theirs = self._ram._live.state.kinds[0]
        for optimizer in (self._swap, self._plain):
            ours = optimizer._live.state.kinds[0]
            for bucket, count in enumerate(ours.counts):
                for part in cut(count, SPAN_TILES):
                    with ours.tile(bucket, part, load=False, store=True) as to, theirs.tile(bucket, part) as of:
                        to.copy_(of)
            optimizer._live.swap.wait()

    def wrong(self) -> int:
        """Count elements of the weights and bytes of the state that differ from the twin's."""
        return sum(self._differences(optimizer) for optimizer in (self._swap, self._plain))

    def _differences(self, optimizer: zcomm.ZeroOptimizer) -> int:
        wrong = 0
        for mine, other in zip(optimizer.param_groups[0]["params"], self._ram.param_groups[0]["params"], strict=True):
            wrong += 0 if torch.equal(mine, other) else int((mine != other).sum())
        ours, theirs = (each._live.state.kinds[0] for each in (optimizer, self._ram))
        for bucket, count in enumerate(ours.counts):
            for part in cut(count):
                with ours.tile(bucket, part) as one, theirs.tile(bucket, part) as other_one:
                    wrong += 0 if torch.equal(one, other_one) else int((one != other_one).sum())
        return wrong

    def close(self) -> None:
        for optimizer in (self._swap, self._plain, self._ram):
            optimizer.close()
        zcomm.shutdown()


@contextmanager
def _without_checksums() -> Iterator[None]:
    """Disable checksums of swap files in the block, because ZeroOptimizer has no such option."""
    original = _core.SwapFile
    _core.SwapFile = functools.partial(original, checksum=False)  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        _core.SwapFile = original  # type: ignore[misc]
