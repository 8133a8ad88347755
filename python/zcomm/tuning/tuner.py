"""Tuning of a program's DeepSpeed configuration: probes, the choice, and the files with the results.

The configuration is the file that the program's arguments name (--deepspeed_config or --deepspeed). A probe gets a copy
with other values, and writes its metrics when the last measured step has ended (engine/tuning_probe.py). The first
probe tells parameters, ranks and memory; then stages with more state than memory are left out.
"""

from __future__ import annotations

import argparse
import copy
import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zcomm.config import load
from zcomm.config.source import read_source
from zcomm.tuning import probes
from zcomm.tuning.search import Candidate, Found, Limits, Outcome, search

_FLAGS = ("--deepspeed_config", "--deepspeed")
_BATCH = "train_micro_batch_size_per_gpu"
_OPTIMIZERS = {"adam": "adam", "adamw": "adamw", "lion": "lion", "adagrad": "adagrad", "sgd": "sgd"}


class Tuning:
    """A search over stages and micro batch sizes of one program.

    launch: the command up to the program's arguments. arguments: of the program. limit_s: seconds of a probe. ranks: of
    the job; None: as the first probe tells.
    Raises: ValueError without a configuration, or for a wrong section "autotuning".
    """

    def __init__(
        self, launch: Sequence[str], arguments: Sequence[str], limit_s: float = 600.0, ranks: int | None = None
    ) -> None:
        self._launch, self._arguments, self._limit_s = list(launch), list(arguments), limit_s
        self._at, self._equals = _place(self._arguments)
        word = self._arguments[self._at]
        self.user_config: dict[str, Any] = dict(read_source(word.split("=", 1)[1] if self._equals else word)[0])
        section = dict(self.user_config.pop("autotuning", None) or {})
        if section.get("enabled") is False:
            raise ValueError('"autotuning.enabled": false, but the command line asks for it')
        self.settings = load({"autotuning": section}).autotuning
        self.results_dir, self.exps_dir = Path(self.settings.results_dir), Path(self.settings.exps_dir)
        self.info: dict[str, Any] = {} if ranks is None else {"world_size": ranks}
        self.found: Found | None = None

    # --- the space --------------------------------------------------------------------------------------------

    @property
    def stages(self) -> list[int]:
        """The stages to try, from the configuration: a number, a list or "all"."""
        zero = self.user_config.get("zero_optimization") or {}
        stage = zero if isinstance(zero, str) else zero.get("stage", 0)
        stages = [0, 1, 2, 3] if stage == "all" else stage if isinstance(stage, list) else [stage]
        if not stages or any(each not in (0, 1, 2, 3) for each in stages):
            raise ValueError(f'"zero_optimization.stage": {stage!r} must be 0 to 3, a list of them, or "all"')
        return sorted(set(stages))

    @property
    def limits(self) -> Limits:
        """The space. Its smallest micro batch is the configuration's, the mapped argument's, or the section's."""
        given = self.user_config.get(_BATCH)
        if not isinstance(given, int):
            given = _value_of(self._arguments, (self.settings.arg_mappings or {}).get(_BATCH))
        low = max(int(given or 1), self.settings.min_train_micro_batch_size_per_gpu)
        high = self.settings.max_train_micro_batch_size_per_gpu
        if low > high:
            raise ValueError(f'"autotuning.max_train_micro_batch_size_per_gpu": {high} is below {low}')
        settings = self.settings
        closely = (settings.num_tuning_micro_batch_sizes, settings.fast, settings.tuner_num_trials)
        return Limits(self.stages, low, high, *closely)

    def config_of(self, candidate: Candidate, metric_path: Path | None = None) -> dict[str, Any]:
        """Return the configuration of a candidate. metric_path: of a probe; None: to train with."""
        config = copy.deepcopy(self.user_config)
        zero = config.get("zero_optimization")
        config["zero_optimization"] = {**(zero if isinstance(zero, dict) else {}), "stage": candidate.stage}
        config["zero_optimization"] |= dict(candidate.keys)
        config.pop("train_batch_size", None)
        config[_BATCH] = candidate.micro
        ranks = self._data_ranks
        if self.settings.max_train_batch_size is not None and ranks is not None:
            config["gradient_accumulation_steps"] = max(
                1, self.settings.max_train_batch_size // (candidate.micro * ranks)
            )
        elif config.get("gradient_accumulation_steps") is None:  # "auto" stays: of Hugging Face's arguments
            config["gradient_accumulation_steps"] = 1
        if metric_path is not None:
            steps = {
                name: getattr(self.settings, name) for name in ("start_profile_step", "end_profile_step", "metric")
            }
            config["autotuning"] = {"enabled": True, "metric_path": str(metric_path), **steps}
        return config

    @property
    def _data_ranks(self) -> int | None:
        world = self.info.get("world_size")
        return max(1, int(world) // self.settings.mp_size) if world else None

    def command_of(self, config: Path, values: Mapping[str, Any]) -> list[str]:
        """Return the command that trains with the configuration in a file. values: its keys, for ``arg_mappings``."""
        arguments = list(self._arguments)
        word = str(config.absolute())
        arguments[self._at] = f"{arguments[self._at].split('=', 1)[0]}={word}" if self._equals else word
        for key, flag in (self.settings.arg_mappings or {}).items():
            if isinstance(values.get(key.strip()), int):
                arguments = _with_value(arguments, str(flag).strip(), str(values[key.strip()]))
        return [*self._launch, *arguments]

    def fits(self, stage: int) -> str:
        """Return why the state of a stage does not fit into a rank's memory, or ""."""
        if not self.info.get("num_params") or not self.info.get("memory_nbytes"):
            return ""  # no probe has come so far
        from zcomm.planning import estimate
        from zcomm.zero import Offload

        offload = (self._zero("offload_optimizer") or {}).get("device", "none")
        params = (self._zero("offload_param") or {}).get("device", "none") if stage == 3 else "none"
        words: list[Any] = [None if each == "none" else each for each in (offload, params)]
        tiers = Offload(words[0], words[1])
        kind = str((self.user_config.get("optimizer") or {}).get("type", "adamw")).lower()
        halves = [name for name in ("bf16", "fp16") if (self.user_config.get(name) or {}).get("enabled") is True]
        need = estimate(
            int(self.info["num_params"]),
            stage,
            tiers,
            int(self.info["world_size"]),
            halves[0] if halves else "fp32",
            _OPTIMIZERS.get(kind, "adamw"),
        )
        nbytes = need.tier("device") if self.info.get("device") == "cuda" else need.host_nbytes
        if nbytes <= self.info["memory_nbytes"]:
            return ""
        return f"needs {nbytes / 2**30:.1f} GiB, a rank has {self.info['memory_nbytes'] / 2**30:.1f} GiB"

    def _zero(self, name: str) -> Any:
        zero = self.user_config.get("zero_optimization")
        return zero.get(name) if isinstance(zero, dict) else None

    # --- running ----------------------------------------------------------------------------------------------

    def tune(self) -> Found:
        """Run the probes, and write the results. Raises: ValueError if nothing ran, naming each reason; OSError."""
        limits = self.limits
        for folder in (self.exps_dir, self.results_dir):
            probes.own_folder(folder, self.settings.overwrite)
        self.found = search(limits, self._measure, self.fits)
        self._write_summary(self.found)
        if self.found.best is None:
            raise ValueError(f"autotuning: no configuration ran:\n{self.table()}")
        self.write_optimal_config()
        return self.found

    def _measure(self, candidate: Candidate) -> Outcome:
        folder = self.exps_dir / candidate.name
        folder.mkdir(mode=0o700, exist_ok=True)
        config = self.config_of(candidate, (folder / "metrics.json").absolute())
        path = folder / "ds_config.json"
        metrics: dict[str, Any] = {}
        if probes.read_json(path) == json.loads(json.dumps(config)):  # of an earlier tuning, with "overwrite": false
            metrics = probes.read_json(folder / "metrics.json")
        if not metrics:
            (folder / "metrics.json").unlink(missing_ok=True)
            probes.write(path, json.dumps(config, indent=1))
            command = self.command_of(path, config)
            probes.write(folder / "cmd.txt", shlex.join(command) + "\n")
            print(f"autotuning: {candidate.name}", file=sys.stderr, flush=True)
            ended = probes.run(command, folder, self._limit_s)
            self.info = ended.info or self.info
            if ended.reason:
                return Outcome(None, ended.reason)
            metrics = ended.metrics
        self.info = self.info or probes.read_json(folder / "model_info.json")
        value = metrics.get({"flops": "FLOPS_per_gpu"}.get(self.settings.metric, self.settings.metric))
        if not isinstance(value, (int, float)):
            return Outcome(None, f"its metrics have no {self.settings.metric}")
        return Outcome(-value if self.settings.metric == "latency" else value, "", metrics)

    # --- results ----------------------------------------------------------------------------------------------

    def table(self) -> str:
        """Return a table of all trials."""
        assert self.found is not None
        rows = [("configuration", self.settings.metric, "s per step", "samples/s", "result")]
        for candidate, outcome in self.found.outcomes.items():
            numbers = [outcome.metrics.get(key) for key in ("latency", "throughput")]
            score = "-" if outcome.score is None else f"{abs(outcome.score):.4g}"
            best = "best" if candidate == self.found.best else ""
            shown = ["-" if number is None else f"{number:.4g}" for number in numbers]
            rows.append((candidate.name, score, *shown, outcome.reason or best))  # type: ignore[arg-type]
        rows += [(f"z{stage}", "-", "-", "-", f"left out: {reason}") for stage, reason in self.found.left_out.items()]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        return "\n".join(
            "  ".join([*(cell.ljust(width) for cell, width in zip(row[:4], widths, strict=True)), row[4]]).rstrip()
            for row in rows
        )

    def _write_summary(self, found: Found) -> None:
        experiments = [
            {"name": each.name, "stage": each.stage, _BATCH: each.micro, "reason": outcome.reason, **outcome.metrics}
            for each, outcome in found.outcomes.items()
        ]
        whole = {
            "metric": self.settings.metric,
            "best": None if found.best is None else found.best.name,
            "experiments": experiments,
            "left_out": {str(stage): reason for stage, reason in found.left_out.items()},
        }
        probes.write(self.results_dir / "summary.json", json.dumps(whole, indent=1) + "\n")
        probes.write(self.results_dir / "summary.txt", self.table() + "\n")

    @property
    def optimal(self) -> tuple[dict[str, Any], list[str]]:
        """The best configuration, and the command that trains with it."""
        assert self.found is not None and self.found.best is not None
        config = self.config_of(self.found.best)
        return config, self.command_of(self.results_dir / "ds_config_optimal.json", config)

    def write_optimal_config(self) -> None:
        """Write ds_config_optimal.json and cmd_optimal.txt."""
        config, command = self.optimal
        probes.write(self.results_dir / "ds_config_optimal.json", json.dumps(config, indent=1) + "\n")
        probes.write(self.results_dir / "cmd_optimal.txt", shlex.join(command) + "\n")

    def print_tuning_results(self) -> None:
        """Print the table, and the place of the results."""
        print(self.table())
        print(f"{self.results_dir / 'ds_config_optimal.json'} has the best configuration, cmd_optimal.txt its command")

    def run_after_tuning(self) -> int:
        """Train with the best configuration. Returns: the exit code."""
        return subprocess.run(self.optimal[1], check=False).returncode


class Autotuner(Tuning):
    """DeepSpeed's name of ``Tuning``. args: of the command ``deepspeed``. active_resources: slots by host."""

    def __init__(self, args: argparse.Namespace, active_resources: Mapping[str, Sequence[int]]) -> None:
        words = list(getattr(args, "launcher_words", ()))
        launcher = [sys.executable, "-m", "zcomm.compat.deepspeed.launcher.runner", *words, args.user_script]
        super().__init__(launcher, args.user_args, ranks=sum(map(len, active_resources.values())) or None)
        self.args = args
        self.exp_num_nodes = len(active_resources)
        self.exp_num_gpus = min(map(len, active_resources.values()), default=1)


def _place(arguments: Sequence[str]) -> tuple[int, bool]:
    """Return the index of the configuration among arguments, and whether it is FLAG=VALUE. Raises: ValueError."""
    for flag in _FLAGS:
        for at, word in enumerate(arguments):
            if word.startswith(f"{flag}="):
                return at, True
            if word == flag and at + 1 < len(arguments) and not arguments[at + 1].startswith("-"):
                return at + 1, False
    raise ValueError(f"autotuning: the program's arguments name no configuration: {' or '.join(_FLAGS)} FILE")


def _value_of(arguments: Sequence[str], flag: Any) -> int | None:
    """Return the whole number behind ``flag``; None without one."""
    for at, word in enumerate(arguments):
        value = arguments[at + 1] if word == flag and at + 1 < len(arguments) else None
        value = word.split("=", 1)[1] if flag and word.startswith(f"{flag}=") else value
        if value is not None and value.isdecimal():
            return int(value)
    return None


def _with_value(arguments: Sequence[str], flag: str, value: str) -> list[str]:
    """Return arguments in which ``flag`` has a value."""
    found = list(arguments)
    for at, word in enumerate(found):
        if word.startswith(f"{flag}="):
            found[at] = f"{flag}={value}"
            return found
        if word == flag and at + 1 < len(found):
            found[at + 1] = value
            return found
    return [*found, flag, value]
