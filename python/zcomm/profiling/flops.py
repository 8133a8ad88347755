"""FlopsReport: floating point operations and times of one optimizer step, counted by torch's FlopCounterMode.

Operations are counted in forward only, as in DeepSpeed. FlopCounterMode knows
matrix products, convolutions and attention; elementwise operations are not counted.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn


class FlopsReport:
    """The forward passes of one step of ``model``, and the seconds of each phase.

    depth: deepest level of modules in the table; -1: all. top: modules of each level in the short table.
    """

    def __init__(self, model: nn.Module, depth: int = -1, top: int = 1, detailed: bool = True) -> None:
        self._model, self._depth, self._top, self._detailed = model, depth, top, detailed
        self.flops = 0
        self.passes = 0
        self.seconds: dict[str, float] = {}
        self._by_module: dict[str, dict[Any, int]] = {}

    @contextmanager
    def forward(self, device: torch.device) -> Iterator[None]:
        """Count the operations of one forward, and time it."""
        from torch.utils.flop_counter import FlopCounterMode

        with FlopCounterMode(display=False) as counter, self.phase("forward", device):
            yield
        self.passes += 1
        self.flops += counter.get_total_flops()
        for name, by_operation in counter.get_flop_counts().items():
            totals = self._by_module.setdefault(name, {})
            for operation, count in by_operation.items():
                totals[operation] = totals.get(operation, 0) + count

    @contextmanager
    def phase(self, name: str, device: torch.device) -> Iterator[None]:
        """Time a phase, including its work on a CUDA device."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

    def text(self, step: int, ranks: int, samples: int) -> str:
        """Return the report. samples: of all ranks, in this step; 0: there is no step."""
        params = sum(whole_numel(param) for param in self._model.parameters())
        forward, all_s = self.seconds.get("forward", 0.0), sum(self.seconds.values())
        lines = [
            f"flops profiler: step {step}, rank 0 of {ranks}",
            f"parameters                     {_si(params)}",
            *([f"samples of the step, all ranks {samples}"] if samples else []),
            f"forward passes                 {self.passes}",
            f"forward FLOPs                  {_si(self.flops)}FLOPs",
            *(f"{name + ' latency':30} {seconds * 1e3:.3f} ms" for name, seconds in self.seconds.items()),
            f"forward FLOPS                  {_si(self.flops / forward if forward else 0.0)}FLOPS",
            *([f"samples/second                 {samples / all_s if all_s else 0.0:.2f}"] if samples else []),
        ]
        levels = self._levels()
        for level, rows in enumerate(levels):
            if self._depth < 0 or level <= self._depth:
                shown = ", ".join(f"{name} {_si(count)}FLOPs" for name, count in rows[: self._top])
                lines.append(f"depth {level}: {shown}")
        if self._detailed:
            lines.append("module, FLOPs, share of forward")
            for level, rows in enumerate(levels):
                if self._depth < 0 or level <= self._depth:
                    for name, count in rows:
                        share = 100 * count / self.flops if self.flops else 0.0
                        lines.append(f"{'  ' * level}{name}: {_si(count)}FLOPs, {share:.1f} %")
        return "\n".join(lines)

    def shown(self, depth: int, top: int, detailed: bool) -> FlopsReport:
        """Return this report with other tables."""
        report = copy.copy(self)
        report._depth, report._top, report._detailed = depth, top, detailed
        return report

    def write(self, text: str, path: str | None) -> None:
        """Write the report into a file, or print it. Raises: OSError."""
        if path is None:
            print(text, flush=True)
            return
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n", encoding="utf-8")

    def _levels(self) -> list[list[tuple[str, int]]]:
        """Return by depth the modules with operations, the largest first."""
        found: dict[int, list[tuple[str, int]]] = {}
        for name, by_operation in self._by_module.items():
            if name != "Global":
                found.setdefault(name.count("."), []).append((name, sum(by_operation.values())))
        levels = [found.get(level, []) for level in range(max(found, default=-1) + 1)]
        return [sorted(rows, key=lambda row: -row[1]) for rows in levels]


def whole_numel(param: torch.Tensor) -> int:
    """Return the elements of a parameter, of one that is sharded, too."""
    shape = getattr(param, "ds_shape", None)
    return param.numel() if shape is None else int(torch.Size(shape).numel())


def _si(number: float) -> str:
    for factor, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K")):
        if number >= factor:
            return f"{number / factor:.3g} {name}"
    return f"{number:g} "
