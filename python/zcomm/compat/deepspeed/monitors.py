"""``deepspeed.monitor.monitor``: writers of zcomm.monitor under DeepSpeed's names. Rank 0 writes; others do nothing.

Thread rule: as zcomm.monitor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from zcomm.comm import job
from zcomm.monitor import CometWriter, CsvWriter, Event, TensorBoardWriter, WandbWriter, Writer

__all__ = ["CometMonitor", "Monitor", "MonitorMaster", "TensorBoardMonitor", "WandbMonitor", "csvMonitor"]


class Monitor:
    """A target of events. The section's keys are attributes.

    Raises: ImportError that names a missing package, if the section is enabled.
    """

    zcomm_writer: ClassVar[Any] = None

    def __init__(self, monitor_config: Any) -> None:
        self.monitor_config = monitor_config
        writes = monitor_config.enabled and self.zcomm_writer is not None and _rank() == 0
        self._writer: Writer | None = self.zcomm_writer(monitor_config) if writes else None

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and name != "monitor_config":
            for place in (self.monitor_config, self._writer):
                if hasattr(place, name):
                    return getattr(place, name)
        raise AttributeError(f"{type(self).__name__} has no {name!r} here")

    def write_events(self, event_list: Sequence[Event], flush: bool = True) -> None:
        """Write events: name, value, samples so far. They are flushed either way."""
        if self._writer is not None:
            self._writer.write_events(event_list)


class TensorBoardMonitor(Monitor):
    """Event files of TensorBoard."""

    zcomm_writer = TensorBoardWriter


class WandbMonitor(Monitor):
    """A run of Weights & Biases."""

    zcomm_writer = WandbWriter


class csvMonitor(Monitor):
    """CSV files."""

    zcomm_writer = CsvWriter


class CometMonitor(Monitor):
    """An experiment of Comet."""

    zcomm_writer = CometWriter


class MonitorMaster:
    """All monitors of a configuration (``get_monitor_config``). ``enabled``: whether there is one."""

    def __init__(self, monitor_config: Any) -> None:
        self.monitor_config = monitor_config
        self.tb_monitor = TensorBoardMonitor(monitor_config.tensorboard)
        self.wandb_monitor = WandbMonitor(monitor_config.wandb)
        self.csv_monitor = csvMonitor(monitor_config.csv_monitor)
        self.comet_monitor = CometMonitor(monitor_config.comet)
        self._all: tuple[Monitor, ...] = (self.tb_monitor, self.wandb_monitor, self.csv_monitor, self.comet_monitor)
        self.enabled = any(monitor.enabled for monitor in self._all)

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Write events with each monitor that is enabled."""
        for monitor in self._all:
            monitor.write_events(event_list)


def _rank() -> int:
    """Return this rank, by torch.distributed if zcomm has not joined."""
    import torch.distributed as dist

    if job.is_initialized():
        return job.current().rank
    return dist.get_rank() if dist.is_initialized() else 0
