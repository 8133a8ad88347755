"""``deepspeed.runtime.sequence_parallel.parallel_state_sp``: groups of torch.distributed for parts of sequences.

This module is an mpu for ``deepspeed.initialize``. With it each rank has the loss of the whole sequence
(torch.distributed.nn's all_gather), so gradients are averaged over the ranks of a sequence, too.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

_groups: dict[str, Any] = {}  # by kind; of the default group "world"


def initialize_sequence_parallel(sequence_parallel_size: int) -> None:
    """Create the groups: neighbouring ranks share a sequence. Collective over all ranks.

    Raises: RuntimeError if the size does not divide the ranks, or other groups exist; ValueError for a size below 2.
    """
    every = dist.get_world_size()
    if sequence_parallel_size <= 1:
        raise ValueError(f"sequence_parallel_size must be greater than 1, got {sequence_parallel_size}")
    if every % sequence_parallel_size:
        raise RuntimeError(f"sequence_parallel_size={sequence_parallel_size} does not divide the {every} ranks")
    if _groups.get("world") is dist.group.WORLD:
        made = dist.get_world_size(_groups["sequence_parallel"])
        if made != sequence_parallel_size:
            raise RuntimeError(f"groups of sequence_parallel_size={made} exist, not of {sequence_parallel_size}")
        return
    _groups.clear()
    sequences = [
        list(range(first, first + sequence_parallel_size)) for first in range(0, every, sequence_parallel_size)
    ]
    lists = {
        "sequence_parallel": sequences,
        "data_parallel": [list(ranks) for ranks in zip(*sequences, strict=True)],
        "sequence_data_parallel": [list(range(every))],
    }
    for kind, of_ranks in lists.items():
        made_groups = [dist.new_group(ranks) for ranks in of_ranks]
        _groups[kind] = next(
            group for group, ranks in zip(made_groups, of_ranks, strict=True) if dist.get_rank() in ranks
        )
    _groups["world"] = dist.group.WORLD


def _group(kind: str) -> Any:
    if _groups.get("world") is not dist.group.WORLD or not _groups:
        raise AssertionError(f"the {kind} group is not initialized: call initialize_sequence_parallel(size)")
    return _groups[kind]


def get_sequence_parallel_group() -> Any:
    """Return the group of ranks that share a sequence. Raises: AssertionError before it is initialized."""
    return _group("sequence_parallel")


def get_sequence_parallel_world_size() -> int:
    """Return the number of these ranks."""
    return dist.get_world_size(get_sequence_parallel_group())


def get_sequence_parallel_rank() -> int:
    """Return this rank's number among them."""
    return dist.get_rank(get_sequence_parallel_group())


def get_data_parallel_group() -> Any:
    """Return the group of ranks with the same part of other sequences."""
    return _group("data_parallel")


def get_sequence_data_parallel_group() -> Any:
    """Return the group of all ranks, among which gradients and state are divided."""
    return _group("sequence_data_parallel")


def get_sequence_data_parallel_world_size() -> int:
    """Return the number of all ranks."""
    return dist.get_world_size(get_sequence_data_parallel_group())


def get_sequence_data_parallel_rank() -> int:
    """Return this rank's number among all ranks."""
    return dist.get_rank(get_sequence_data_parallel_group())


# DeepSpeed's other names of the first three; its engine does not take them for model-parallel ranks.
get_model_parallel_group = get_sequence_parallel_group
get_model_parallel_world_size = get_sequence_parallel_world_size
get_model_parallel_rank = get_sequence_parallel_rank
