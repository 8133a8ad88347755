"""The three batch sizes: train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x world_size.

Two of them give the third; if only one of the first two is set, there is no accumulation. A division with a remainder
is an error that names the numbers, and is never rounded.
"""

from __future__ import annotations

from dataclasses import dataclass

from zcomm.config.schema import Config


@dataclass(frozen=True)
class BatchSizes:
    """Samples per step over all ranks, samples per rank and micro-step, micro-steps per step."""

    train: int
    micro: int
    accumulation: int


def resolve_batch(config: Config, world_size: int, source: str = "config") -> BatchSizes:
    """Return the batch sizes for ``world_size`` ranks.

    Raises: ValueError if neither batch size is given, a division has a remainder, or the three contradict.
    """
    train, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    steps = config.gradient_accumulation_steps
    if train is None and micro is None:
        raise ValueError(f'{source}: give "train_batch_size" or "train_micro_batch_size_per_gpu"')
    if train is None:
        assert micro is not None
        steps = steps or 1
        return BatchSizes(micro * steps * world_size, micro, steps)
    if micro is None:
        steps = steps or 1
        micro = _divide(train, steps, "gradient_accumulation_steps", world_size, source)
    elif steps is None:
        steps = _divide(train, micro, "train_micro_batch_size_per_gpu", world_size, source)
    if train != micro * steps * world_size:
        raise ValueError(
            f'{source}: "train_batch_size": {train} is not "train_micro_batch_size_per_gpu" x '
            f'"gradient_accumulation_steps" x world_size = {micro} x {steps} x {world_size} = '
            f"{micro * steps * world_size}; leave one of the three out to have it derived"
        )
    return BatchSizes(train, micro, steps)


def _divide(train: int, divisor: int, name: str, world_size: int, source: str) -> int:
    quotient, rest = divmod(train, divisor * world_size)
    if rest or quotient == 0:
        raise ValueError(
            f'{source}: "train_batch_size": {train} cannot be divided by "{name}" x world_size = '
            f"{divisor} x {world_size} = {divisor * world_size}"
        )
    return quotient
