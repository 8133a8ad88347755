"""Monitors: all writers that a configuration enables."""

from __future__ import annotations

from collections.abc import Sequence

from zcomm.config import Config
from zcomm.monitor.writers import CometWriter, CsvWriter, Event, TensorBoardWriter, WandbWriter, Writer


class Monitors:
    """The writers of one engine. Ranks other than 0 have none, and do not import their packages.

    Attributes: enabled (on every rank: whether the configuration has a monitor), writers.
    Raises: ImportError that names the section and the package; OSError from a folder that cannot be made.
    """

    def __init__(self, config: Config, rank: int) -> None:
        sections = (config.tensorboard, config.wandb, config.csv_monitor, config.comet)
        self.enabled = any(section.enabled for section in sections)
        self.writers: list[Writer] = []
        if rank != 0:
            return
        if config.tensorboard.enabled:
            self.writers.append(TensorBoardWriter(config.tensorboard))
        if config.wandb.enabled:
            self.writers.append(WandbWriter(config.wandb))
        if config.csv_monitor.enabled:
            self.writers.append(CsvWriter(config.csv_monitor))
        if config.comet.enabled:
            self.writers.append(CometWriter(config.comet))

    def write_events(self, events: Sequence[Event]) -> None:
        """Write ``events`` with every writer; does nothing on other ranks than 0."""
        for writer in self.writers:
            writer.write_events(events)

    def close(self) -> None:
        """Flush and close. Idempotent. A run of wandb or Comet remains open, as it may be the program's own."""
        writers, self.writers = self.writers, []
        for writer in writers:
            writer.close()
