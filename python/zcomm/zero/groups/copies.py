"""Copies: comparison of the weights that several shard groups keep in common ([Note: groups]).

Copies are equal, because all groups update the same sums by the same options. A fault of one rank (memory, a drive, a
program that edits weights on some ranks) would let them drift apart, unseen by the norm. So every STEPS steps the
ranks compare checksums of the parameters' parts in their shards.
Thread rule: the main thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet

import torch

from zcomm import _core
from zcomm.zero.agree import all_values
from zcomm.zero.format_names import format_names
from zcomm.zero.groups.mesh_comms import MeshComms
from zcomm.zero.layout.flat import FlatBucket, Geometry
from zcomm.zero.poison import broadcast_error, check_error

STEPS = 100
logger = logging.getLogger("zcomm")


def check_copies(
    comms: MeshComms,
    geometry: Geometry,
    names: Sequence[str],
    read: Callable[[FlatBucket], torch.Tensor],
    updates: int,
) -> None:
    """Compare this rank's shards with their copies, each STEPS ``updates``. Collective. Updates do not wait.

    read: returns the weights of this rank's part of a bucket; names: of parameters.
    Raises: RuntimeError on all ranks, naming a parameter and ranks; OSError for a failed read of a drive.
    """
    across, buckets = comms.across, geometry.every
    if comms.hpz:  # each step makes the copies of trained weights equal
        buckets = buckets[len(geometry.buckets) :]
    if across is None or not updates or updates % STEPS or not buckets:
        return
    try:
        found = [each for bucket in buckets for each in _checksums(geometry, bucket, read(bucket))]
    except BaseException as error:
        broadcast_error(comms.world, error)
        raise
    check_error(comms.world, "comparing copies of shards")
    own = torch.tensor([checksum for _, checksum in found])
    every = across.all_gather(own, name="checksums of copies of shards")
    assert isinstance(every, torch.Tensor)
    differs = (every.view(across.world_size, -1) != own).any(0).nonzero().flatten().tolist()
    mine = None if not differs else [names[found[differs[0]][0]], int(own[differs[0]])]
    told = all_values(comms.world, mine, "copies of shards that differ")
    first = next((rank for rank, each in enumerate(told) if each is not None), None)
    if first is None:
        return
    ranks = next(group for group in comms.mesh.groups("replicate") if first in group)
    name = told[first][0]
    values = {rank: told[rank][1] for rank in ranks}
    common = max(values.values(), key=list(values.values()).count)
    others = ", ".join(str(rank) for rank, value in values.items() if value != common)
    most = list(values.values()).count(common) * 2 > len(values)
    raise RuntimeError(
        f"step(): the copies of {name} on ranks {', '.join(map(str, ranks))} are not equal"
        f"{f' (rank {others} differs)' if most else ''}: a program edits weights on some ranks only, or memory or a "
        "drive of one rank is faulty; load a checkpoint (opt.load) on all ranks"
    )


def warn_of_other_copies(
    comms: MeshComms,
    geometry: Geometry,
    names: Sequence[str],
    duplicates: AbstractSet[int],
    read: Callable[[FlatBucket], torch.Tensor],
    updates: int,
) -> None:
    """Compare parameters that are whole on all ranks along "tensor", after the first update and each STEPS. Collective.

    duplicates: their numbers. Each rank updates them by its own gradients, which are equal if these ranks have the same
    samples and random numbers. Logs a warning on rank 0 otherwise: kernels on a device may round in another way, too.
    """
    if not duplicates or not updates or (updates != 1 and updates % STEPS):
        return
    buckets = [bucket for bucket in geometry.buckets if not duplicates.isdisjoint(bucket.params)]
    found = {index: sum_ for bucket in buckets for index, sum_ in _checksums(geometry, bucket, read(bucket))}
    own = {names[index]: found[index] for index in duplicates & found.keys()}
    told = all_values(comms.world, own, "copies of weights")
    for group in comms.mesh.groups("tensor") if comms.world.rank == 0 else ():
        first = told[group[0]]
        for rank in group[1:]:
            differs = sorted(name for name, sum_ in told[rank].items() if first.get(name) != sum_)
            if differs:
                logger.warning(
                    '%s: other values on rank %d than on rank %d, which are along the axis "tensor": give these ranks '
                    "the same samples and the same random numbers (dropout). A module between divided layers needs "
                    'the style "replicated_with_grad_allreduce"',
                    format_names(differs),
                    rank,
                    group[0],
                )
                return


def _checksums(geometry: Geometry, bucket: FlatBucket, weight: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Yield each parameter that has elements in this rank's shard of a bucket, and their checksum."""
    part = bucket.held
    for index in bucket.params:
        low, high = geometry.span_in(bucket, index).within(part)
        if low < high:
            mine = weight[low - part.start : high - part.start]
            yield index, _core.crc32c(mine.data_ptr(), mine.nbytes)
