"""BucketLayout and Geometry: pure arithmetic, checked exhaustively on small shapes."""

from __future__ import annotations

import itertools

import pytest
import torch

from zcomm.comm.bucket_layout import ALIGN, BucketLayout
from zcomm.zero.layout.flat import Geometry
from zcomm.zero.layout.placement import Axes, ParamGroupPlacement, over_all
from zcomm.zero.layout.sections import Sections
from zcomm.zero.options import Offload

SHAPES = [(3,), (64,), (65, 2), (1,), (0,), (7, 9, 2), (640,), (5,)]


@pytest.mark.parametrize("world_size", range(1, 10))
@pytest.mark.parametrize("bucket_nbytes", [1, 512, 4096, 10**6])
@pytest.mark.parametrize("first_nbytes", [None, 256])
def test_layout_covers_every_element_once(world_size: int, bucket_nbytes: int, first_nbytes: int | None) -> None:
    layout = BucketLayout(SHAPES, world_size, bucket_nbytes, first_nbytes=first_nbytes)
    owned = [torch.zeros(torch.Size(shape).numel(), dtype=torch.int32) for shape in SHAPES]
    for bucket in layout.buckets:
        assert bucket.count % (world_size * ALIGN) == 0
        for rank in range(world_size):
            for tensor, begin, in_shard, count in layout.pieces(bucket.index, rank):
                owned[tensor][begin : begin + count] += 1
                assert in_shard + count <= layout.shard_count(bucket.index)
                assert rank in layout.owner(tensor)
    assert all(bool((pieces == 1).all()) for pieces in owned)
    for slot, shape in zip(layout.slots, SHAPES, strict=True):
        assert slot.offset % ALIGN == 0 and slot.shape == torch.Size(shape)
    for bucket in layout.buckets:
        used = sum(layout.slots[t].count for t in bucket.tensors[:1])
        assert len(bucket.tensors) == 1 or used * 4 <= bucket_nbytes
    assert layout.tensor_count == sum(torch.Size(s).numel() for s in SHAPES) <= layout.count


def test_bad_values_are_named() -> None:
    with pytest.raises(ValueError, match="world_size=0"):
        BucketLayout(SHAPES, 0)
    with pytest.raises(ValueError, match="bucket_nbytes=-1"):
        BucketLayout(SHAPES, 1, bucket_nbytes=-1)
    with pytest.raises(ValueError, match="first_nbytes=0"):
        BucketLayout(SHAPES, 1, first_nbytes=0)


def test_buckets_grow_from_a_small_first_one() -> None:
    layout = BucketLayout([(64,)] * 40, 1, bucket_nbytes=256 * 16, first_nbytes=256 * 2)
    assert [len(bucket.tensors) for bucket in layout.buckets] == [2, 8, 16, 14]
    whole = BucketLayout([(64,)] * 40, 1, bucket_nbytes=256 * 16)
    assert [len(bucket.tensors) for bucket in whole.buckets] == [16, 16, 8]
    small = BucketLayout([(64,)] * 40, 1, bucket_nbytes=256 * 4, first_nbytes=256 * 100)
    assert [len(bucket.tensors) for bucket in small.buckets] == [4] * 10


def test_what_is_reduced_after_backward_is_small() -> None:
    mib = [torch.Size([2**18])]
    geometry = Geometry([mib * 30, mib * 30], [ParamGroupPlacement(Axes(2, 0))] * 2, 25 * 2**20, itemsize=4)
    assert [len(bucket.params) for bucket in geometry.buckets] == [1, 4, 16, 9, 25, 5]


def test_parameters_of_different_placements_have_sections_and_cuts_of_their_own() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Linear(40, 50))
    params = list(model.parameters())
    placements = {**over_all(params[::2], 6, 4), **over_all(params[1::2], 2, 0)}
    sections = Sections(model, params, [], placements, 1, Offload(), True)
    assert [section.params for section in sections.list] == [tuple(params[::2]), tuple(params[1::2])]
    for bucket in sections.geometry(4096, 4).every:
        assert (bucket.parts, bucket.own) == [(6, 4), (2, 0)][bucket.section]
        assert bucket.shard_count * bucket.parts == bucket.count and bucket.shard_count % ALIGN == 0
        assert bucket.part == slice(bucket.own * bucket.shard_count, (bucket.own + 1) * bucket.shard_count)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("bucket_nbytes", [256, 2048, 10**6])
def test_geometry_runs_and_gaps(world_size: int, bucket_nbytes: int) -> None:
    units = [[torch.Size(s) for s in SHAPES[:3]], [], [torch.Size(s) for s in SHAPES[3:]]]
    geometry = Geometry(units, [ParamGroupPlacement(Axes(world_size, world_size - 1))] * 3, bucket_nbytes, itemsize=4)
    group_of = [index % 2 for index in range(len(SHAPES))]
    assert geometry.shard_count * world_size == geometry.count
    for bucket in geometry.buckets:
        assert bucket.part == bucket.shard(world_size - 1)
        covered = torch.full((bucket.count,), -1)
        for index in bucket.params:
            geometry.view(covered, index).fill_(index)
        for gap in geometry.gaps(bucket):
            assert bool((covered[gap] == -1).all())
            covered[gap] = -2
        assert not bool((covered == -1).any())
        for rank in range(world_size):
            part = bucket.shard(rank)
            runs = geometry.runs(bucket, part, group_of)
            assert runs[0][0] == 0 or covered[part][0] == -2 or not runs
            for (_, end, group), (begin, _, other) in itertools.pairwise(runs):
                assert end == begin and group != other
            for begin, end, group in runs:
                inside = covered[part][begin:end]
                assert all(group_of[i] == group for i in inside[inside >= 0].tolist())
            done = sum(end - begin for begin, end, _ in runs)
            assert done >= int((covered[part] >= 0).sum())
