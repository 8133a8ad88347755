"""Sections of an engine's reports: monitors, ``comms_logger`` and ``flops_profiler``. See schema.py."""

from __future__ import annotations

from dataclasses import dataclass

from zcomm.config.keys import AT_LEAST_0, AT_LEAST_1, key

_PATH = "folder of the logs; relative to the working directory"
_JOB = "name of the job: a folder in output_path"


@dataclass(frozen=True)
class TensorBoard:
    """Section ``tensorboard``."""

    enabled: bool = key(False, "rank 0 writes TensorBoard event files (needs the package tensorboard)")
    output_path: str = key("", _PATH)
    job_name: str = key("DeepSpeedJobName", _JOB)


@dataclass(frozen=True)
class Wandb:
    """Section ``wandb``."""

    enabled: bool = key(False, "rank 0 logs to Weights & Biases (needs the package wandb)")
    group: str | None = key(None, "group of runs", shown="none")
    team: str | None = key(None, "entity that owns the project", shown="wandb's own")
    project: str = key("deepspeed", "name of the project")


@dataclass(frozen=True)
class CsvMonitor:
    """Section ``csv_monitor``."""

    enabled: bool = key(False, "rank 0 writes one CSV file for each quantity: step, value")
    output_path: str = key("", _PATH)
    job_name: str = key("DeepSpeedJobName", _JOB)


@dataclass(frozen=True)
class Comet:
    """Section ``comet``: arguments of ``comet_ml.start``; None leaves them to its own configuration."""

    enabled: bool = key(False, "rank 0 logs to Comet (needs the package comet_ml)")
    samples_log_interval: int = key(100, "samples between two values of one quantity", AT_LEAST_1)
    project: str | None = key(None, "name of the project", shown="Comet's own")
    workspace: str | None = key(None, "name of the workspace", shown="Comet's own")
    api_key: str | None = key(None, "the key", shown="Comet's own")
    experiment_name: str | None = key(None, "name of the experiment", shown="Comet's own")
    experiment_key: str | None = key(None, "key of the experiment", shown="Comet's own")
    online: bool | None = key(None, "false: store the experiment on the disk", shown="Comet's own")
    mode: str | None = key(
        None, "go on with an experiment, or begin one", choices=("get", "create", "get_or_create"), shown="Comet's own"
    )


@dataclass(frozen=True)
class CommsLogger:
    """Section ``comms_logger``."""

    enabled: bool = key(
        False,
        "count and time the engine's collectives; `zcomm.profiling.comms.log_summary()` prints them "
        "(gradients then take the way that can be timed)",
    )
    prof_all: bool = key(True, "false: only those in prof_ops")
    prof_ops: str | tuple[str, ...] = key((), "operations to time, such as all_gather or reduce_scatter")
    verbose: bool = key(False, "log each operation on rank 0")
    debug: bool = key(False, "keep operations of one kind apart by their names, such as the bucket")


@dataclass(frozen=True)
class FlopsProfiler:
    """Section ``flops_profiler``."""

    enabled: bool = key(
        False, "rank 0 prints parameters, floating point operations and times of one step (torch's FlopCounterMode)"
    )
    profile_step: int = key(1, "the step to profile: so many were taken before", AT_LEAST_0)
    module_depth: int = key(-1, "deepest level of modules in the table; -1: all")
    top_modules: int = key(1, "modules of each level in the short table", AT_LEAST_1)
    detailed: bool = key(True, "also print the table of modules")
    output_file: str | None = key(None, "file for the report", shown="printed")
