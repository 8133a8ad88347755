"""Measurement of the first GPU: `zcomm doctor --calibrate` times its bus in both directions at once, and its computing.

One GPU counts for all of the same model. On the CPU, which has no bus, the functions run as well: for tests.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zcomm.machine import gpu_speeds
from zcomm.machine.gpu_speeds import GpuSpeeds

if TYPE_CHECKING:
    from torch import nn

_NBYTES = 256 << 20
_ROUNDS = 5
_WIDTH, _BATCH, _TOKENS = 2048, 4, 1024


def calibrate() -> Path | None:
    """Measure the first GPU, and save its speeds. Returns: None without a GPU that torch sees. Raises: OSError,
    RuntimeError."""
    if not torch.cuda.is_available():
        return None
    device = torch.device("cuda", 0)
    return gpu_speeds.save(torch.cuda.get_device_name(device), measure(device))


def measure(device: torch.device, nbytes: int = _NBYTES, width: int = _WIDTH, rounds: int = _ROUNDS) -> GpuSpeeds:
    """Measure a device. nbytes: of a copy. width: of the transformer blocks. The first round does not count."""
    down_s, up_s = _copies(device, nbytes, rounds)
    return GpuSpeeds(_flops(device, width, rounds), nbytes / down_s, nbytes / up_s)


def _copies(device: torch.device, nbytes: int, rounds: int) -> tuple[float, float]:
    """Return the seconds of a copy down and of one up that run at the same time."""
    from zcomm.memory.pinned import pinned_empty

    host = [pinned_empty(nbytes, torch.uint8) for _ in range(2)]
    there = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    pairs = ((host[0], there[0]), (there[1], host[1]))  # to, from
    taken = [_both(device, pairs) for _ in range(rounds + 1)][1:]
    down, up = (statistics.median(column) for column in zip(*taken, strict=True))
    return down, up


def _both(device: torch.device, pairs: Any) -> list[float]:
    """Return the seconds of each copy (to, from), on a stream of its own on a GPU."""
    if device.type != "cuda":
        return [_seconds(partial(to.copy_, source), device) for to, source in pairs]
    torch.cuda.synchronize(device)
    marks = []
    for to, source in pairs:
        with torch.cuda.stream(torch.cuda.Stream(device)):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            to.copy_(source, non_blocking=True)
            end.record()
            marks.append((begin, end))
    torch.cuda.synchronize(device)
    return [begin.elapsed_time(end) / 1e3 for begin, end in marks]


def _flops(device: torch.device, width: int, rounds: int) -> float:
    """Return the FLOP/s of forward and backward of two blocks of a transformer."""
    from zcomm.planning import work_of

    with torch.device("meta"):
        flops = work_of(*_blocks(width)).flops
    with torch.device(device):
        model, x = _blocks(width)

    def work() -> None:
        model.zero_grad(set_to_none=True)
        model(x).sum().backward()

    taken = [_seconds(work, device) for _ in range(rounds + 1)]
    return flops / statistics.median(taken[1:])


def _blocks(width: int) -> tuple[nn.Module, torch.Tensor]:
    from torch import nn

    blocks = [nn.TransformerEncoderLayer(width, 16, 4 * width, 0.0, "gelu", batch_first=True) for _ in range(2)]
    model = nn.Sequential(*blocks).to(torch.bfloat16)
    return model, torch.ones(_BATCH, min(_TOKENS, width), width, dtype=torch.bfloat16)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    begin = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin
