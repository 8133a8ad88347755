"""RowReader without ranks: the ranges that it reads, their order and names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from zcomm.zero.rows.reader import RowReader
from zcomm.zero.rows.weight import RowWeight, Stretch
from zcomm.zero.worker import Call, Worker

WIDTH, ROWS = 3, 2600  # blocks of 1024, 1024 and 552 rows
VALUES = torch.arange(ROWS * WIDTH, dtype=torch.float32)


@dataclass(frozen=True)
class Bucket:
    index: int


FIRST, SECOND = Bucket(4), Bucket(5)
CUT = 1500 * WIDTH + 1  # not between rows


class Source:
    """Gathers from two buckets: the second has the weight from its own element 7 on."""

    def __init__(self) -> None:
        self._comm, self._thread = zcomm.init(), Worker("test")
        self.names: list[str] = []
        self.fails = False

    def allocate(self, nbytes: int) -> Any:
        return self._comm._core.allocate(nbytes)

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Call[Any]:
        return self._thread.submit(function, *arguments)

    def fill_part(self, name: str, bucket: Bucket, part: slice, out: torch.Tensor) -> None:
        self.names.append(name)
        if self.fails:
            raise OSError(name)
        shift = 0 if bucket is FIRST else CUT - 7
        out.copy_(VALUES[part.start + shift : part.stop + shift])

    def maximum(self, name: str, values: torch.Tensor) -> torch.Tensor:
        return values

    def close(self) -> None:
        self._thread.close()
        zcomm.shutdown()


@pytest.fixture
def source() -> Iterator[Source]:
    made = Source()
    yield made
    made.close()


def reader_of(source: Source) -> tuple[RowReader, RowWeight]:
    stretches = [Stretch(FIRST, 0, CUT, 0), Stretch(SECOND, CUT, ROWS * WIDTH, 7 - CUT)]
    weight = RowWeight(nn.Parameter(torch.empty(0)), 0, 1, "head.weight", torch.Size((ROWS, WIDTH)), stretches)
    return RowReader([weight], torch.float32, source), weight


def test_ranges_come_in_order_in_two_slots(source: Source) -> None:
    reader, weight = reader_of(source)
    asked: list[Collection[int]] = []
    ranges = [(0, 1024), (1024, 2048), (2047, 2600), (5, 6)]
    addresses = set()
    for (begin, end), rows in zip(ranges, reader.read(weight, ranges, 0, asked.append), strict=True):
        assert torch.equal(rows, VALUES.view(ROWS, WIDTH)[begin:end])
        addresses.add(rows.data_ptr())
    assert asked == [{4}, {4, 5}, {5}, {4}] and len(addresses) == 2
    assert source.names[0] == "rows 0 to 1024 of head.weight" and not reader.is_waiting()
    reader.close()


def test_a_range_larger_than_a_slot_has_its_own_memory(source: Source) -> None:
    reader, weight = reader_of(source)
    whole = list(reader.read(weight, [(0, ROWS)], 2, lambda buckets: None))
    assert torch.equal(whole[0], VALUES.view(ROWS, WIDTH)) and len(whole) == 1
    assert all(name.endswith("of head.weight after 2 changes of weights by the program") for name in source.names)
    reader.close()


def test_a_read_that_failed_leaves_nothing_in_flight(source: Source) -> None:
    reader, weight = reader_of(source)
    source.fails = True
    with pytest.raises(OSError, match="rows 0 to 10 of"):
        list(reader.read(weight, [(0, 10), (10, 20)], 0, lambda buckets: None))
    source.fails = False
    (rows,) = reader.read(weight, [(10, 20)], 0, lambda buckets: None)
    assert torch.equal(rows, VALUES.view(ROWS, WIDTH)[10:20])
    reader.close()
