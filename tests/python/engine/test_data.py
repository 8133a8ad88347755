"""Loader: samples of each rank, their order and their batches."""

from __future__ import annotations

import itertools
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


@pytest.mark.parametrize(("worlds", "micros"), [((1, 1), (2, 2)), ((2, 1), (2, 2)), ((1, 2), (4, 2)), ((2, 3), (3, 2))])
def test_a_position_holds_at_another_world_and_batch_size(worlds: tuple[int, int], micros: tuple[int, int]) -> None:
    data = list(range(48))
    whole = samples(Loader(data, 1))
    seen: list[int] = []
    state = {}
    for rank in range(worlds[0]):
        loader = Loader(data, micros[0], rank=rank, world_size=worlds[0])
        taken = list(itertools.islice(iter(loader), 12 // (worlds[0] * micros[0])))
        seen += [int(value) for batch in taken for value in batch]
        state = loader.state_dict()
    assert state == {"epoch": 0, "samples": 12} and sorted(seen) == sorted(whole[:12])
    rest, following = [], []
    for rank in range(worlds[1]):
        loader = Loader(data, micros[1], rank=rank, world_size=worlds[1])
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        rest += samples(loader)
        assert loader.state_dict() == {"epoch": 1, "samples": 0}
        following += samples(loader)
    assert sorted(rest) == sorted(whole[12:]), "no sample twice, none left out"
    assert sorted(following) == data


def test_the_position_is_that_of_what_was_given() -> None:
    asked: list[int] = []

    class Asked(list[int]):
        def __getitem__(self, index: Any) -> Any:
            asked.append(index)
            return super().__getitem__(index)

    data = Asked(range(10))
    first = Loader(data, 3)
    batches = list(first)
    assert [len(batch) for batch in batches] == [3, 3, 3, 1]
    again = Loader(data, 3)
    again.load_state_dict({"epoch": 0, "samples": 6})
    asked.clear()
    assert [batch.tolist() for batch in again] == [batch.tolist() for batch in batches[2:]]
    assert len(asked) == 4, "what came before is not read"
    stream = Loader((value for value in range(10)), 2, rank=1, world_size=2)
    stream.load_state_dict({"epoch": 0, "samples": 8})
    assert samples(stream) == [4, 5, 6, 7, 8, 9]


def test_iterating_leaves_torchs_random_numbers_alone() -> None:
    before = torch.get_rng_state()
    samples(Loader(list(range(8)), 2))
    assert torch.equal(torch.get_rng_state(), before), "a resumed run has one iteration more"
