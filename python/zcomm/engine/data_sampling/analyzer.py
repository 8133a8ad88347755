"""DataAnalyzer: metrics of all samples of a data set, as the index files that a curriculum reads.

``run_map`` writes one worker's part, ``run_reduce`` joins the parts. Each metric has a folder:

- NAME_sample_to_metric: a value for each sample
- NAME_index_to_sample, NAME_index_to_metric: samples by value, ascending
- NAME_index_to_sample_percentile_merged: the same samples in about a hundred rows
- NAME_metric_value: a sum, of a metric that is added up

Files are of indexed_dataset.py; their folders are only for their owner.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Subset

from zcomm.engine.data_sampling.indexed_dataset import MMapIndexedDataset, code_of, find_fit_int_dtype, write_arrays
from zcomm.zero.files import durable

_TYPES = ("single_value_per_sample", "accumulate_value_over_samples")


def split_index(start_idx: int, end_idx: int, num_partitions: int) -> list[tuple[int, int]]:
    """Cut numbers from ``start_idx`` to ``end_idx`` into parts, begin and end of each."""
    edges = np.linspace(start_idx, end_idx, num=num_partitions + 1, dtype=int).tolist()
    return list(itertools.pairwise(edges))


class DataAnalyzer:
    """Metrics of ``dataset``, of which worker ``worker_id`` of ``num_workers`` reads its part.

    metric_names: plain names. metric_functions: of a batch; a tensor or array of whole numbers: one for each sample
    ("single_value_per_sample"), or a vector that is added up ("accumulate_value_over_samples"). metric_types: which.
    metric_dtypes: of the results. sample_indices: numbers to store instead of positions. num_threads: parts of a
    worker, read one after another. specific_threads: only these parts. num_threads_reduce: without effect.
    Raises: ValueError; NotImplementedError for functions in place of map and reduce (custom_*).
    """

    def __init__(
        self,
        dataset: Any,
        num_workers: int = 1,
        worker_id: int = 0,
        num_threads: int = 1,
        num_threads_reduce: int = 1,
        specific_threads: Sequence[int] = (),
        batch_size: int = 1,
        metric_names: Sequence[str] = (),
        metric_functions: Sequence[Callable[[Any], Any]] = (),
        metric_types: Sequence[str] = (),
        metric_dtypes: Sequence[Any] = (),
        save_path: str = "./",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        custom_map_init: Any = None,
        custom_map_update: Any = None,
        custom_map_finalize: Any = None,
        custom_reduce: Any = None,
        sample_indices: Sequence[int] | None = None,
    ) -> None:
        if any(each is not None for each in (custom_map_init, custom_map_update, custom_map_finalize, custom_reduce)):
            raise NotImplementedError("DataAnalyzer(custom_*=): write such files by indexed_dataset's builder instead")
        if len({len(metric_names), len(metric_functions), len(metric_types), len(metric_dtypes)}) > 1:
            raise ValueError("DataAnalyzer: give one function, type and dtype for each of metric_names")
        for name, kind, dtype in zip(metric_names, metric_types, metric_dtypes, strict=True):
            if not name.isprintable() or not name or name.startswith(".") or "/" in name:
                raise ValueError(f"DataAnalyzer: metric {name!r} must be a plain name: it is a folder of save_path")
            if kind not in _TYPES:
                raise ValueError(f"DataAnalyzer: metric_types={kind!r}: valid values are {', '.join(_TYPES)}")
            code_of(dtype)
        if not 0 <= worker_id < num_workers or num_threads < 1:
            raise ValueError(f"DataAnalyzer: worker {worker_id} of {num_workers}, num_threads={num_threads}")
        if not len(dataset):
            raise ValueError("DataAnalyzer: the data set has no samples")
        self.dataset, self.save_path, self.batch_size = dataset, Path(save_path), batch_size
        self.num_workers, self.worker_id, self.num_threads = num_workers, worker_id, num_threads
        self.specific_threads = list(specific_threads) or list(range(num_threads))
        self.metrics = list(zip(metric_names, metric_functions, metric_types, metric_dtypes, strict=True))
        self.collate_fn, self.sample_indices = collate_fn, sample_indices

    def run_map(self) -> None:
        """Write this worker's parts."""
        begin, end = split_index(0, len(self.dataset), self.num_workers)[self.worker_id]
        parts = split_index(begin, end, self.num_threads)
        for thread in self.specific_threads:
            self._map(thread, *parts[thread])

    def _map(self, thread: int, begin: int, end: int) -> None:
        loader = DataLoader(Subset(self.dataset, range(begin, end)), self.batch_size, collate_fn=self.collate_fn)
        found: list[list[np.ndarray[Any, Any]]] = [[] for _ in self.metrics]
        numbers: list[np.ndarray[Any, Any]] = []
        at = begin
        for batch in loader if end > begin else ():
            count = min(self.batch_size, end - at)
            numbers.append(self._numbers(batch, at, count))
            for number, (name, function, kind, dtype) in enumerate(self.metrics):
                values = _checked(name, function(batch), dtype)
                if kind == _TYPES[0] and len(values) != count:
                    raise ValueError(f"DataAnalyzer: metric {name} gave {len(values)} values for {count} samples")
                found[number].append(values)
            at += count
        for (name, _, kind, dtype), parts in zip(self.metrics, found, strict=True):
            if kind == _TYPES[0]:
                write_arrays(self._part(name, self.worker_id, thread, "sample_to_metric"), _joined(parts), dtype)
                write_arrays(self._part(name, self.worker_id, thread, "sample_index"), _joined(numbers), np.int64)
            elif parts:
                write_arrays(
                    self._part(name, self.worker_id, thread, "metric_value"),
                    [np.sum(np.stack(parts), axis=0)],
                    np.int64,
                )

    def _numbers(self, batch: Any, at: int, count: int) -> np.ndarray[Any, Any]:
        if isinstance(batch, dict) and "index" in batch:  # Megatron's data sets know the number
            return np.asarray([int(row[0]) for row in batch["index"]], np.int64)
        numbers = np.arange(at, at + count)
        return numbers if self.sample_indices is None else np.asarray(self.sample_indices)[numbers]

    def _folder(self, name: str) -> Path:
        return self.save_path / name

    def _part(self, name: str, worker: int, thread: int, kind: str) -> Path:
        folder = self._folder(name) / f"worker{worker}_thread{thread}"
        durable.make_folders(folder)
        return folder / f"{name}_{kind}"

    def run_reduce(self) -> None:
        """Join the parts of all workers. Raises: ValueError if a worker's part does not fit the data set; OSError."""
        for name, _, kind, _ in self.metrics:
            parts = [(worker, thread) for worker in range(self.num_workers) for thread in range(self.num_threads)]
            if kind == _TYPES[0]:
                values = self._read(name, parts, "sample_to_metric")
                numbers = self._read(name, parts, "sample_index")
                if len(values) != len(self.dataset) or len(numbers) != len(values):
                    raise ValueError(
                        f"DataAnalyzer: the parts of metric {name} have {len(values)} samples of {len(self.dataset)}: "
                        "run run_map() on all workers"
                    )
                self._write_index(name, values, numbers)
            else:
                paths = [self._part(name, *part, "metric_value") for part in parts]
                sums = [MMapIndexedDataset(path)[0] for path in paths if MMapIndexedDataset.exists(path)]
                total = np.sum(np.stack(sums), axis=0)
                dtype = find_fit_int_dtype(int(total.min()), int(total.max()))
                write_arrays(self._folder(name) / f"{name}_metric_value", [total], dtype)

    def _read(self, name: str, parts: Sequence[tuple[int, int]], kind: str) -> np.ndarray[Any, Any]:
        every = [MMapIndexedDataset(self._part(name, *part, kind))[:] for part in parts]
        return np.concatenate([np.empty(0, np.int64), *(each.astype(np.int64) for part in every for each in part)])

    def _write_index(self, name: str, values: np.ndarray[Any, Any], numbers: np.ndarray[Any, Any]) -> None:
        folder = self._folder(name)
        of_value = find_fit_int_dtype(int(values.min()), int(values.max()))
        of_number = find_fit_int_dtype(0, max(len(values) - 1, int(numbers.max())))
        write_arrays(folder / f"{name}_sample_to_metric", list(values[:, None]), of_value)
        order = np.argsort(values, kind="stable")
        unique, first = np.unique(values[order], return_index=True)
        rows = np.split(numbers[order], first[1:])
        write_arrays(folder / f"{name}_index_to_sample", rows, of_number)
        write_arrays(folder / f"{name}_index_to_metric", list(unique[:, None]), of_value)
        step = max(1, len(rows) // 100)
        merged = [np.concatenate(rows[begin : begin + step]) for begin in range(0, len(rows), step)]
        write_arrays(folder / f"{name}_index_to_sample_percentile_merged", merged, of_number)

    def run_map_reduce(self, comm_group: Any = None) -> None:
        """Run both, worker 0 the second one, between two barriers of ``comm_group`` (None: of all ranks, if there are
        several workers)."""
        self.run_map()
        self._wait(comm_group)
        if self.worker_id == 0:
            self.run_reduce()
        self._wait(comm_group)

    def _wait(self, group: Any) -> None:
        if self.num_workers == 1:
            return
        if group is not None:
            torch.distributed.barrier(group=group)
        else:
            from zcomm.comm.job import init

            init().barrier(name="DataAnalyzer")


def _joined(values: list[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
    return [np.concatenate(values)] if values else []


def _checked(name: str, values: Any, dtype: Any) -> np.ndarray[Any, Any]:
    if not isinstance(values, (torch.Tensor, np.ndarray)) or code_of(values.dtype) != code_of(dtype):
        found = getattr(values, "dtype", type(values).__name__)
        raise ValueError(f"DataAnalyzer: metric {name} returned {found}, not a tensor or array of {dtype}")
    array = values.numpy() if isinstance(values, torch.Tensor) else values
    return array.reshape(-1).astype(np.int64) if array.dtype != np.uint64 else array.reshape(-1)
