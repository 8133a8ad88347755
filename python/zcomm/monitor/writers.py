"""One class for each target of events.

Folders, file names and CSV columns are DeepSpeed's (0.19.6), so that programs that read them still work.
"""

from __future__ import annotations

import csv
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from zcomm.config import Config
from zcomm.config.monitor_keys import Comet, CsvMonitor, TensorBoard, Wandb

Event = tuple[str, float, int]  # name, value, samples of all ranks so far


class Writer(Protocol):
    """A target of events."""

    def write_events(self, events: Sequence[Event]) -> None: ...

    def close(self) -> None: ...


def _package(module: str, section: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f'the section "{section}" of the configuration needs the package {package}, which cannot be imported '
            f"({error}); install it (pip install {package}), or remove the section"
        ) from error


class TensorBoardWriter:
    """Event files in ``output_path/job_name``."""

    def __init__(self, section: TensorBoard) -> None:
        tensorboard = _package("torch.utils.tensorboard", "tensorboard", "tensorboard")
        folder = Path(section.output_path) / section.job_name
        folder.mkdir(parents=True, exist_ok=True)
        self.summary_writer = tensorboard.SummaryWriter(log_dir=str(folder))

    def write_events(self, events: Sequence[Event]) -> None:
        for name, value, samples in events:
            self.summary_writer.add_scalar(name, value, samples)
        self.summary_writer.flush()

    def close(self) -> None:
        self.summary_writer.close()


class WandbWriter:
    """A run of Weights & Biases: the one that the program has begun, or a new one."""

    def __init__(self, section: Wandb) -> None:
        self._wandb = _package("wandb", "wandb", "wandb")
        self._wandb.init(project=section.project, group=section.group, entity=section.team)

    def write_events(self, events: Sequence[Event]) -> None:
        for name, value, samples in events:
            self._wandb.log({name: value}, step=samples)

    def close(self) -> None:
        """Leave the run open: the program may log to it, and wandb ends it with the process."""


class CsvWriter:
    """One file ``output_path/job_name/NAME.csv`` for each name, with "/" and spaces as "_".

    Columns: step (samples so far) and the last part of the name. An existing file is appended to, with a new head.
    """

    def __init__(self, section: CsvMonitor) -> None:
        self.log_dir = Path(section.output_path) / section.job_name
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self._begun: set[str] = set()

    def write_events(self, events: Sequence[Event]) -> None:
        for name, value, samples in events:
            file = name.replace("/", "_").replace(" ", "_") + ".csv"
            with (self.log_dir / file).open("a", newline="", encoding="utf-8") as opened:
                rows = csv.writer(opened)
                if file not in self._begun:
                    self._begun.add(file)
                    rows.writerow(["step", name.rpartition("/")[2]])
                rows.writerow([samples, value])

    def close(self) -> None:
        """Do nothing, because no file is kept open."""


class CometWriter:
    """An experiment of Comet; each name is logged at most once in ``samples_log_interval`` samples."""

    def __init__(self, section: Comet) -> None:
        comet = _package("comet_ml", "comet", "comet_ml")
        self.samples_log_interval = section.samples_log_interval
        self.experiment: Any = comet.start(
            api_key=section.api_key,
            project=section.project,
            workspace=section.workspace,
            experiment_key=section.experiment_key,
            mode=section.mode,
            online=section.online,
        )
        if section.experiment_name is not None:
            self.experiment.set_name(section.experiment_name)
        self._last: dict[str, int] = {}

    def write_events(self, events: Sequence[Event]) -> None:
        for name, value, samples in events:
            last = self._last.get(name)
            if last is None or samples - last >= self.samples_log_interval:
                self._last[name] = samples
                self.experiment.log_metric(name=name, value=value, step=samples)

    def close(self) -> None:
        """Leave the experiment open: Comet ends it with the process."""


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
