"""Loader: this rank's part of a data set in micro batches; DistributedSampler assigns samples to ranks.

Map-style data sets are shuffled with one seed on all ranks and dealt out, padded so that every rank has as many
samples. An iterable data set is only cut into micro batches: the data set itself must shard its samples.
Position rule: it is counted in samples of all ranks, so that it holds at another world size and batch size.
Needs only torch. Thread rule: one thread at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler


class Loader:
    """Iterable of micro batches; each new iteration is the next epoch, unless ``set_epoch`` names another.

    dataset: map-style (``__getitem__`` and ``__len__``), an IterableDataset, or any iterable of samples.
    micro_batch: samples per batch. seed: the same on all ranks. drop_last: leave out a short last batch.
    Raises: ValueError for an empty data set, sizes below 1, or something that is not a data set.
    """

    def __init__(
        self,
        dataset: Any,
        micro_batch: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        if micro_batch < 1:
            raise ValueError(f"micro_batch must be >= 1, got {micro_batch}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in [0, world_size), got rank {rank} of {world_size}")
        self.dataset = dataset
        self.batch_size = micro_batch
        self.sampler: DistributedSampler[Any] | None = None
        self._world_size = world_size
        self._epoch = 0  # of the next iteration
        self._skip = 0  # samples of all ranks that the next iteration leaves out
        self._now = (0, 0)  # epoch, and samples of it that all ranks have yielded
        map_style = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        if map_style and not isinstance(dataset, IterableDataset):
            if len(dataset) == 0:
                raise ValueError("training_data is empty: 0 samples")
            self.sampler = DistributedSampler(
                dataset, num_replicas=world_size, rank=rank, shuffle=shuffle, seed=seed, drop_last=drop_last
            )
        elif not isinstance(dataset, IterableDataset):
            if not hasattr(dataset, "__iter__"):
                raise ValueError(f"training_data is neither a data set nor iterable: {type(dataset).__name__}")
            dataset = _Wrapped(dataset)
        self._rest = None if self.sampler is None else _Rest(self.sampler)
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=micro_batch,
            sampler=self._rest,
            collate_fn=collate_fn,
            drop_last=drop_last,
            generator=torch.Generator().manual_seed(seed),  # torch's own would change the dropout of a resumed run
        )

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration epoch ``epoch`` (its shuffle follows from seed and epoch)."""
        self._epoch, self._skip = epoch, 0
        self._now = (epoch, 0)

    def state_dict(self) -> dict[str, int]:
        """Return the position: the epoch, and the number of its samples that all ranks have yielded."""
        return {"epoch": self._now[0], "samples": self._now[1]}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume from ``state`` at the next iteration (a map-style data set does not read the skipped samples)."""
        self._epoch, self._skip = int(state["epoch"]), int(state["samples"])
        self._now = (self._epoch, self._skip)

    def __iter__(self) -> Iterator[Any]:
        if self.sampler is not None:
            self.sampler.set_epoch(self._epoch)
        epoch, skip = self._epoch, self._skip
        self._epoch, self._skip = epoch + 1, 0
        self._now = (epoch, skip)
        if self._rest is not None:
            self._rest.skip = skip // self._world_size
            return self._counted(iter(self._loader), epoch, skip)
        batches = iter(self._loader)
        return self._counted(itertools.islice(batches, skip // (self.batch_size * self._world_size), None), epoch, skip)

    def _counted(self, batches: Iterator[Any], epoch: int, given: int) -> Iterator[Any]:
        for batch in batches:
            given += self.batch_size * self._world_size
            self._now = (epoch, given)
            yield batch
        self._now = (epoch + 1, 0)

    def __len__(self) -> int:
        """Return this rank's number of micro batches per epoch. Raises: TypeError if the data set has no length."""
        return len(self._loader)


class _Rest(Sampler[int]):
    """A sampler without its first ``skip`` samples."""

    def __init__(self, whole: DistributedSampler[Any]) -> None:
        self.whole = whole
        self.skip = 0

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(iter(self.whole), self.skip, None)

    def __len__(self) -> int:
        return len(self.whole)


class _Wrapped(IterableDataset[Any]):
    """A plain iterable as an IterableDataset."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)
