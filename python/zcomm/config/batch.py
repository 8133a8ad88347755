"""The three batch sizes: train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks.

Ranks that read the same samples, parts of their sequences, count once.

Two of them give the third. If only one of the first two is set, there is no accumulation. An enabled section
"elasticity" gives all three. A division with a remainder is an error that names the numbers, and is never rounded.
"""

from __future__ import annotations

from dataclasses import dataclass

from zcomm.config.elasticity import elastic_batch
from zcomm.config.schema import Config


@dataclass(frozen=True)
class BatchSizes:
    """Samples per step over all ranks, samples per rank and micro-step, micro-steps per step."""

    train: int
    micro: int
    accumulation: int


def resolve_batch(config: Config, ranks: int, source: str = "config", name: str = "world_size") -> BatchSizes:
    """Return the batch sizes for ``ranks`` ranks that read different samples. name: of their number, in errors.

    Raises: ValueError if neither batch size is given, a division has a remainder, or the three contradict;
    ElasticityError.
    """
    if config.elasticity.enabled:
        whole, each = elastic_batch(config, ranks, source)
        return BatchSizes(whole, each, whole // (each * ranks))
    train, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    steps = config.gradient_accumulation_steps
    if train is None and micro is None:
        raise ValueError(f'{source}: give "train_batch_size" or "train_micro_batch_size_per_gpu"')
    if train is None:
        assert micro is not None
        steps = steps or 1
        return BatchSizes(micro * steps * ranks, micro, steps)
    if micro is None:
        steps = steps or 1
        micro = _divide(train, steps, "gradient_accumulation_steps", ranks, source, name)
    elif steps is None:
        steps = _divide(train, micro, "train_micro_batch_size_per_gpu", ranks, source, name)
    if train != micro * steps * ranks:
        raise ValueError(
            f'{source}: "train_batch_size": {train} is not "train_micro_batch_size_per_gpu" x '
            f'"gradient_accumulation_steps" x {name} = {micro} x {steps} x {ranks} = '
            f"{micro * steps * ranks}; leave one of the three out to have it derived"
        )
    return BatchSizes(train, micro, steps)


def _divide(train: int, divisor: int, key: str, ranks: int, source: str, name: str) -> int:
    quotient, rest = divmod(train, divisor * ranks)
    if rest or quotient == 0:
        raise ValueError(
            f'{source}: "train_batch_size": {train} cannot be divided by "{key}" x {name} = '
            f"{divisor} x {ranks} = {divisor * ranks}"
        )
    return quotient
