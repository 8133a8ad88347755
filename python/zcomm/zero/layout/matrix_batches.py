"""Batches of buckets that are updated together, if updates need whole matrices. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from zcomm.zero.layout.flat import FlatBucket


def matrix_batches(
    buckets: Iterable[FlatBucket], matrices: Collection[int], world_size: int
) -> Iterator[list[FlatBucket]]:
    """Cut ``buckets`` into batches with a matrix for each rank. matrices: their parameters."""
    batch: list[FlatBucket] = []
    count = 0
    for bucket in buckets:
        batch.append(bucket)
        count += sum(index in matrices for index in bucket.params)
        if count >= world_size:
            yield batch
            batch, count = [], 0
    if batch:
        yield batch
