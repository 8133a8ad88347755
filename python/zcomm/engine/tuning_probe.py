"""The part of a probe that runs in the program: facts about model and ranks, times of some steps, and the end.

The section "autotuning" has a metric_path only in the configuration of a probe (zcomm.tuning). Without one training is
as usual. Rank 0 writes, for the owner only. All ranks end the program by SystemExit in the same ``step()``.
Thread rule: as Engine.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zcomm.config import Config

if TYPE_CHECKING:
    from zcomm.comm.communicator import Communicator


def is_probe(config: Config) -> bool:
    """Return True if this program is a probe of a tuning."""
    return config.autotuning.enabled and config.autotuning.metric_path is not None


def write_info(config: Config, model: nn.Module, comm: Communicator, device: Any) -> None:
    """Write model_info.json next to the metrics, before memory is allocated."""
    if comm.rank != 0:
        return
    import psutil

    kinds = {param.device.type for param in model.parameters()} | ({torch.device(device).type} if device else set())
    memory = psutil.virtual_memory().available // comm.local_world_size
    if "cuda" in kinds:
        memory = torch.cuda.mem_get_info()[0]
    counts = {
        "num_params": sum(param.numel() for param in model.parameters()),
        "trainable_num_params": sum(param.numel() for param in model.parameters() if param.requires_grad),
        "world_size": comm.world_size,
        "device": "cuda" if "cuda" in kinds else "cpu",
        "memory_nbytes": int(memory),
    }
    _write(Path(str(config.autotuning.metric_path)).with_name("model_info.json"), counts)


class TuningProbe:
    """Times of the steps between ``start_profile_step`` and ``end_profile_step``."""

    def __init__(self, config: Config, rank: int, device: torch.device) -> None:
        self._settings, self._rank, self._device = config.autotuning, rank, device
        self._begin_s = 0.0

    def stepped(self, steps: int, samples: int, flops: int) -> None:
        """Note an optimizer step. steps: so far. samples: of a step, all ranks. flops: of a rank's step, or 0.

        Raises: SystemExit after the last one.
        """
        if steps == self._settings.start_profile_step:
            self._begin_s = self._now()
        if steps < self._settings.end_profile_step:
            return
        latency_s = (self._now() - self._begin_s) / (steps - self._settings.start_profile_step)
        if self._rank == 0:
            metrics = {"latency": latency_s, "throughput": samples / latency_s}
            if flops:
                metrics["FLOPS_per_gpu"] = flops / latency_s
            _write(Path(str(self._settings.metric_path)), metrics)
        raise SystemExit(0)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _write(path: Path, values: dict[str, Any]) -> None:
    from zcomm.zero.files import durable

    durable.replace_file(path, json.dumps(values).encode())
