"""Samples by difficulty: each global batch comes from the samples that the schedules of all metrics allow at its step.

Words: a cluster has the samples that a step's difficulties have added. A batch takes from each cluster in proportion to
its size. A cluster is read in a shuffled order, and shuffled again at its end.
Invariants: batches depend on the seed, the step and the index files, not on ranks or random numbers of the program. So
all ranks compute the same batch, without messages, and a state of some counters continues it.
Source: Li et al., "DeepSpeed Data Efficiency" (arXiv:2212.03597).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from zcomm.config import load
from zcomm.config.data_keys import CurriculumMetric, DataEfficiency
from zcomm.engine.curriculum import CurriculumScheduler
from zcomm.engine.data_sampling.indexed_dataset import MMapIndexedDataset

_PATH = "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics"
Numbers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass
class _Cluster:
    """Samples that were added together. position: of the next one, in the order of round ``round``."""

    samples: Numbers
    difficulties: dict[str, int]
    position: int = 0
    round: int = 0
    order: Numbers | None = field(default=None, repr=False)


class Metric:
    """One metric: its schedule, and the difficulty of each sample. samples: in the data set.

    Raises: ValueError for a missing key, or an index that does not fit the data set; OSError.
    """

    def __init__(self, name: str, config: CurriculumMetric, samples: int) -> None:
        self.path = f"{_PATH}.{name}"
        values = {key: value for key, value in vars(config.schedule_config).items() if value is not None}
        self.scheduler = CurriculumScheduler(vars(config) | {"schedule_config": values}, self.path)
        self.by_difficulty = config.clustering_type != "single_cluster"
        self._config = config
        self._of = np.full(samples, -1, np.int64)  # the place of each sample in the order of difficulty
        self._values = np.empty(0, np.int64)  # of each place
        if self.by_difficulty:
            self._read(samples)

    def _read(self, samples: int) -> None:
        config = self._config
        by_value = config.difficulty_type == "value"
        for key in ("index_to_sample_path", *(["index_to_metric_path"] if by_value else [])):
            if getattr(config, key) is None:
                raise ValueError(f'"{self.path}.{key}" is missing')
        rows = MMapIndexedDataset(str(config.index_to_sample_path))
        found = np.concatenate([np.empty(0, np.int64), *(rows[row].astype(np.int64) for row in range(len(rows)))])
        if len(found) and (found.min() < 0 or found.max() >= samples):
            raise ValueError(f"{config.index_to_sample_path}: sample {found.max()} of a data set of {samples}")
        if len(np.unique(found)) != len(found):
            raise ValueError(f"{config.index_to_sample_path}: a sample is listed twice")
        self._of[found] = np.arange(len(found))
        if by_value:
            metric = MMapIndexedDataset(str(config.index_to_metric_path))
            if len(metric) != len(rows) or any(len(each) != 1 for each in metric[:]):
                raise ValueError(f"{config.index_to_metric_path}: one value for each of {len(rows)} rows is expected")
            self._values = np.concatenate(
                [np.empty(0, np.int64), *(np.full(len(rows[row]), int(metric[row][0])) for row in range(len(rows)))]
            )

    def allows(self, difficulty: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return for each sample whether it is no more difficult."""
        if not self.by_difficulty:
            return np.ones(len(self._of), np.bool_)
        listed = self._of >= 0
        if self._config.difficulty_type == "value":
            listed[listed] = self._values[self._of[listed]] <= difficulty
            return listed
        count, top = int(listed.sum()), int(self._config.max_difficulty or 0)
        end = count if difficulty >= top else count // top * difficulty
        return listed & (self._of < end)

    def digest(self) -> bytes:
        """Return a hash of the difficulties."""
        return hashlib.blake2b(self._of.tobytes() + self._values.tobytes(), digest_size=16).digest()


class DeepSpeedDataSampler:
    """Numbers of samples for each micro batch of a rank. Iterate it, or give it to a DataLoader as batch_sampler.

    data_efficiency_config: the section "data_efficiency", as a dict, or as the checked configuration has it.
    one_epoch_total_samples: of the data set. data_parallel_group: without effect. drop_last: leave out a micro batch
    that is not full, which a change of the batch size may leave. Raises: as Metric.
    """

    def __init__(
        self,
        data_efficiency_config: Mapping[str, Any] | DataEfficiency,
        one_epoch_total_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        data_parallel_group: Any,
        gradient_accumulation_steps: int,
        global_rank: int,
        drop_last: bool = True,
    ) -> None:
        config = data_efficiency_config
        if not isinstance(config, DataEfficiency):
            config = load({"data_efficiency": dict(config)}).data_efficiency
        curriculum = config.data_sampling.curriculum_learning
        if not curriculum.enabled or not curriculum.curriculum_metrics:
            raise ValueError(f'"{_PATH}" is missing, or "curriculum_learning.enabled" is not true')
        if one_epoch_total_samples < 1 or not 0 <= data_parallel_rank < data_parallel_size or micro_batch_size < 1:
            raise ValueError(
                f"DeepSpeedDataSampler: {one_epoch_total_samples} samples, micro_batch_size={micro_batch_size}, "
                f"rank {data_parallel_rank} of {data_parallel_size}"
            )
        self.total_samples = one_epoch_total_samples * config.data_sampling.num_epochs
        self.micro_batch_size = micro_batch_size
        self.data_parallel_rank, self.data_parallel_size = data_parallel_rank, data_parallel_size
        self.micro_batch_times_data_parallel_size = micro_batch_size * data_parallel_size
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.drop_last = drop_last
        self._seed = config.seed
        self._metrics = {
            name: Metric(name, each, one_epoch_total_samples) for name, each in curriculum.curriculum_metrics.items()
        }
        self.curriculum_schedulers = {name: metric.scheduler for name, metric in self._metrics.items()}
        self.batch: list[int] = []  # the rest of the global batch
        self.consumed_samples = self.curriculum_step = 0
        self.current_difficulties: dict[str, int] = {}
        self._free = np.ones(one_epoch_total_samples, np.bool_)  # of no cluster yet
        self._clusters: list[_Cluster] = []

    @property
    def global_batch_size(self) -> int:
        """Samples of an optimizer step, all ranks."""
        return self.micro_batch_times_data_parallel_size * self.gradient_accumulation_steps

    def __len__(self) -> int:
        return self.total_samples

    def set_custom_curriculum_learning_schedule(self, schedule_func_dict: Mapping[str, Callable[[int], int]]) -> None:
        """Take difficulties of metrics with schedule_type "custom" from functions of the step, by metric."""
        for name, function in schedule_func_dict.items():
            if name not in self.curriculum_schedulers:
                raise ValueError(f'"{_PATH}" has no metric {name!r}: it has {", ".join(self.curriculum_schedulers)}')
            self.curriculum_schedulers[name].set_custom_get_difficulty(function)

    def get_start_end_idx(self, batch_len: int | None = None) -> tuple[int, int]:
        """Return this rank's part of ``batch_len`` samples (None: of a micro batch of all ranks), begin and end."""
        count = batch_len or self.micro_batch_times_data_parallel_size
        rank, size = self.data_parallel_rank, self.data_parallel_size
        return round(rank * count / size), round((rank + 1) * count / size)

    def get_next_global_batch(self) -> None:
        """Choose the samples of the next step: ``batch``."""
        self.curriculum_step += 1
        now = {name: each.update_difficulty(self.curriculum_step) for name, each in self.curriculum_schedulers.items()}
        if now != self.current_difficulties:
            self.current_difficulties = now
            self._add_cluster(now)
        if not self._clusters:
            raise ValueError(f'"{_PATH}": no sample is as easy as {now}: lower min_difficulty, or look at the index')
        generator = self._generator("batch", self.curriculum_step)
        sizes = torch.tensor([len(cluster.samples) for cluster in self._clusters], dtype=torch.float64)
        drawn = torch.multinomial(sizes, self.global_batch_size, replacement=True, generator=generator)
        counts = torch.bincount(drawn, minlength=len(sizes)).tolist()
        taken = np.concatenate([self._take(number, count) for number, count in enumerate(counts)])
        self.batch = taken[torch.randperm(len(taken), generator=generator).numpy()].tolist()

    def _generator(self, *words: object) -> torch.Generator:
        seed = hashlib.blake2b(repr((self._seed, *words)).encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(seed, "little") >> 1)

    def _add_cluster(self, difficulties: dict[str, int]) -> None:
        new = self._free.copy()
        for name, metric in self._metrics.items():
            new &= metric.allows(difficulties[name])
        samples = np.flatnonzero(new)
        if len(samples):
            self._free[samples] = False
            self._clusters.append(_Cluster(samples.astype(np.int64), dict(difficulties)))

    def _take(self, number: int, count: int) -> Numbers:
        """Return the next ``count`` samples of a cluster."""
        cluster, parts = self._clusters[number], []
        while count:
            if cluster.order is None:
                order = torch.randperm(len(cluster.samples), generator=self._generator(number, cluster.round))
                cluster.order = cluster.samples[order.numpy()]
            part = cluster.order[cluster.position : cluster.position + count]
            parts.append(part)
            count -= len(part)
            cluster.position += len(part)
            if cluster.position == len(cluster.samples):
                cluster.position, cluster.order = 0, None
                cluster.round += 1
        return np.concatenate([np.empty(0, np.int64), *parts])

    def __iter__(self) -> Iterator[list[int]]:
        while self.consumed_samples < self.total_samples:
            if not self.batch:
                self.get_next_global_batch()
            whole = self.micro_batch_times_data_parallel_size
            now, self.batch = self.batch[:whole], self.batch[whole:]
            if len(now) < whole and self.drop_last:
                continue
            self.consumed_samples += len(now)
            begin, end = self.get_start_end_idx(len(now))
            yield now[begin:end]

    def digest(self) -> str:
        """Return a hash of seed and difficulties, which is the same on all ranks."""
        found = hashlib.blake2b(repr((self._seed, len(self._free), list(self._metrics))).encode(), digest_size=16)
        for metric in self._metrics.values():
            found.update(metric.digest())
        return found.hexdigest()

    def state_dict(self) -> dict[str, Any]:
        """Return the position, as JSON has it."""
        return {
            "batch": list(self.batch),
            "consumed_samples": self.consumed_samples,
            "curriculum_step": self.curriculum_step,
            "current_difficulties": dict(self.current_difficulties),
            "clusters": [
                {
                    "difficulties": each.difficulties,
                    "size": len(each.samples),
                    "position": each.position,
                    "round": each.round,
                }
                for each in self._clusters
            ],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a result of ``state_dict``. Raises: ValueError if it is none, or of other index files."""
        try:
            batch = [int(number) for number in state_dict["batch"]]
            counters = [int(state_dict[name]) for name in ("consumed_samples", "curriculum_step")]
            now = {str(name): int(value) for name, value in state_dict["current_difficulties"].items()}
            saved = [
                (
                    {str(name): int(value) for name, value in each["difficulties"].items()},
                    [int(each[name]) for name in ("size", "position", "round")],
                )
                for each in state_dict["clusters"]
            ]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"the state of a curriculum is not complete: {error!r}") from error
        samples = len(self._free)
        if any(not 0 <= number < samples for number in batch) or min(counters) < 0:
            raise ValueError(f"the state of a curriculum is of another data set than this one of {samples} samples")
        for difficulties, _ in saved:
            if set(difficulties) != set(self._metrics):
                raise ValueError(
                    f"the state of a curriculum has the metrics {list(difficulties)}, not {list(self._metrics)}"
                )
        self._free[:], self._clusters = True, []
        for difficulties, (size, position, turn) in saved:
            before = len(self._clusters)
            self._add_cluster(difficulties)
            fits = len(self._clusters) > before and len(self._clusters[-1].samples) == size and 0 <= position < size
            if not fits or turn < 0:
                raise ValueError(f"the state of a curriculum is of other index files: {size} samples at {difficulties}")
            self._clusters[-1].position, self._clusters[-1].round = position, turn
        self.batch, self.current_difficulties = batch, now
        self.consumed_samples, self.curriculum_step = counters
        for name, value in now.items():
            self.curriculum_schedulers[name].set_current_difficulty(value)
