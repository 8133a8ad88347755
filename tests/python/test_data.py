"""Loader: who gets which sample, in which order, in which batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler, IterableDataset, TensorDataset

from zcomm.data import Loader


def samples(loader: Loader) -> list[int]:
    return [int(value) for batch in loader for value in batch]


def test_ranks_share_the_data_set_and_every_sample_is_seen() -> None:
    seen = [samples(Loader(list(range(10)), 2, rank=rank, world_size=3)) for rank in range(3)]
    assert [len(part) for part in seen] == [4, 4, 4]  # padded to 12
    assert sorted({value for part in seen for value in part}) == list(range(10))


def test_order_is_torch_distributed_samplers() -> None:
    data = list(range(11))
    loader = Loader(data, 2, rank=1, world_size=2, seed=7)
    for epoch in (0, 1, 5):
        sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=2, rank=1, seed=7)
        sampler.set_epoch(epoch)
        loader.set_epoch(epoch)
        assert samples(loader) == list(sampler)


def test_each_iteration_is_the_next_epoch() -> None:
    loader = Loader(list(range(50)), 5)
    first, second = samples(loader), samples(loader)
    assert sorted(first) == sorted(second) and first != second
    loader.set_epoch(0)
    assert samples(loader) == first


def test_batches_collate_and_drop_last() -> None:
    data = TensorDataset(torch.arange(10).float().reshape(5, 2), torch.arange(5))
    loader = Loader(data, 2, shuffle=False)
    shapes = [(list(x.shape), list(y.shape)) for x, y in loader]
    assert shapes == [([2, 2], [2]), ([2, 2], [2]), ([1, 2], [1])]
    assert len(loader) == 3
    assert len(Loader(data, 2, drop_last=True)) == 2
    assert list(Loader([1, 2, 3], 2, shuffle=False, collate_fn=sum)) == [3, 3]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


@pytest.mark.parametrize("data", [Stream(), (i for i in range(5)), {0, 1, 2, 3, 4}])
def test_iterables_are_only_cut_into_batches(data: Any) -> None:
    loader = Loader(data, 2, rank=1, world_size=2)
    assert [list(map(int, batch)) for batch in loader] == [[0, 1], [2, 3], [4]]
    with pytest.raises(TypeError):
        len(loader)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 2), "training_data is empty"),
        ((3, 2), "neither a data set nor iterable: int"),
        (([1], 0), "micro_batch must be >= 1, got 0"),
    ],
)
def test_errors(arguments: tuple[Any, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Loader(*arguments)
    with pytest.raises(ValueError, match="got rank 2 of 2"):
        Loader([1], 1, rank=2, world_size=2)
