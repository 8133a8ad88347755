"""Elasticity: one batch size that many numbers of ranks can train with, in whole micro-batches.

Arithmetic only: a job restarts with another number of ranks (torchrun), and its checkpoint loads there. Candidates are
each micro-batch size and their least common multiple, times the largest highly composite number that keeps the limit.
The candidate for most numbers of ranks wins. Source of the numbers: OEIS A002182.
"""

from __future__ import annotations

import bisect
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from zcomm.config.parse import parse
from zcomm.config.training_keys import Elasticity

if TYPE_CHECKING:
    from zcomm.config.schema import Config

HIGHLY_COMPOSITE = (
    *(1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560, 10080, 15120, 20160),
    *(25200, 27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760, 277200, 332640, 498960, 554400, 665280, 720720),
)
SCHEDULER_VARIABLE = "DEEPSPEED_ELASTICITY_CONFIG"
OLDEST_VERSION = (0, 3, 8)
_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


class ElasticityError(ValueError):
    """An elastic job cannot run so."""


class ElasticityConfigError(ElasticityError):
    """The section "elasticity" is missing, off or wrong."""


class ElasticityIncompatibleWorldSize(ElasticityError):
    """The batch size does not fit this number of ranks."""


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    """Return True if the configuration has the section "elasticity", switched on. Raises: ElasticityConfigError."""
    section = ds_config.get("elasticity") or {}
    if not isinstance(section, Mapping):
        raise ElasticityConfigError(f'"elasticity" must be an object, got {section!r}')
    return bool(section.get("enabled", False))


def compute_elastic_config(
    ds_config: Mapping[str, Any],
    target_deepspeed_version: str,
    world_size: int = 0,
    return_microbatch: bool = False,
) -> tuple[Any, ...]:
    """Return (train_batch_size, possible numbers of ranks), and with world_size or return_microbatch the micro-batch.

    ds_config: a whole configuration. world_size: ranks that read different samples; 0: version 0.2 takes WORLD_SIZE.
    Raises: ElasticityConfigError, ElasticityIncompatibleWorldSize, ElasticityError (a version before 0.3.8).
    """
    if not isinstance(ds_config, Mapping):
        raise ElasticityConfigError(f"the configuration is a {type(ds_config).__name__}, not a dict")
    if not elasticity_enabled(ds_config):
        raise ElasticityConfigError('the configuration has no section "elasticity" with "enabled": true')
    if tuple(int(part) for part in target_deepspeed_version.split(".")[:3] if part.isdigit()) < OLDEST_VERSION:
        raise ElasticityError(f"version {target_deepspeed_version} knows no elasticity; the first one is 0.3.8")
    elastic = _checked(ds_config["elasticity"])
    ranks = world_size
    if not ranks and elastic.version == 0.2:
        ranks = int(os.environ.get("WORLD_SIZE", "0"))
        if not ranks:
            raise ElasticityConfigError("elasticity of version 0.2 needs world_size=, or WORLD_SIZE in the environment")
    batch, counts, micro = _chosen(elastic, ranks)
    if world_size:
        return batch, counts, _micro(elastic, batch, counts, world_size)
    return (batch, counts, micro) if return_microbatch else (batch, counts)


def ensure_immutable_elastic_config(runtime_elastic_config_dict: Mapping[str, Any]) -> None:
    """Compare the section with the scheduler's in DEEPSPEED_ELASTICITY_CONFIG. Raises: ElasticityConfigError."""
    if SCHEDULER_VARIABLE not in os.environ:
        return
    theirs, ours = _checked(json.loads(os.environ[SCHEDULER_VARIABLE])), _checked(runtime_elastic_config_dict)
    for name in ("max_train_batch_size", "micro_batch_sizes", "version"):
        if getattr(theirs, name) != getattr(ours, name):
            raise ElasticityConfigError(
                f'"elasticity.{name}" is {getattr(ours, name)}, and the scheduler saw {getattr(theirs, name)} '
                f"({SCHEDULER_VARIABLE})"
            )


def elastic_batch(config: Config, ranks: int, source: str) -> tuple[int, int]:
    """Return (train_batch_size, train_micro_batch_size_per_gpu) of an enabled section for ``ranks`` ranks.

    Raises: ElasticityConfigError, also for batch sizes next to the section; ElasticityIncompatibleWorldSize.
    """
    elastic = _complete(config.elasticity)
    given = [name for name in _BATCH_KEYS if getattr(config, name) is not None]
    if given and not elastic.ignore_non_elastic_batch_info:
        raise ElasticityConfigError(
            f'{source}: "{given[0]}" next to an enabled "elasticity", which derives it: leave it out, or set '
            '"elasticity.ignore_non_elastic_batch_info": true'
        )
    ensure_immutable_elastic_config(vars(elastic))
    batch, counts, _ = _chosen(elastic, ranks * elastic.model_parallel_size)
    return batch, _micro(elastic, batch, counts, ranks)


def _checked(section: Mapping[str, Any]) -> Elasticity:
    try:
        config, _ = parse({"elasticity": dict(section)})
    except (TypeError, ValueError) as error:
        raise ElasticityConfigError(str(error)) from None
    return _complete(config.elasticity)


def _complete(elastic: Elasticity) -> Elasticity:
    """Return ``elastic``. Raises: ElasticityConfigError for a missing or contradicting key."""
    for name in ("max_train_batch_size", "micro_batch_sizes"):
        if not getattr(elastic, name):
            raise ElasticityConfigError(f'"elasticity.{name}" is missing')
    if elastic.min_gpus > elastic.max_gpus:
        raise ElasticityConfigError(f'"elasticity.min_gpus": {elastic.min_gpus} is above max_gpus: {elastic.max_gpus}')
    if elastic.model_parallel_size > 1 and elastic.version != 0.2:
        raise ElasticityConfigError(f'"elasticity.model_parallel_size" > 1 needs version 0.2, not {elastic.version}')
    if elastic.num_gpus_per_node % elastic.model_parallel_size:
        raise ElasticityConfigError(
            f'"elasticity.num_gpus_per_node": {elastic.num_gpus_per_node} is not a multiple of model_parallel_size: '
            f"{elastic.model_parallel_size}"
        )
    return elastic


def _sizes(elastic: Elasticity) -> tuple[int, tuple[int, ...]]:
    assert elastic.max_train_batch_size is not None and elastic.micro_batch_sizes is not None
    return elastic.max_train_batch_size, elastic.micro_batch_sizes


def _chosen(elastic: Elasticity, ranks: int) -> tuple[int, list[int], int | None]:
    """Return the batch size, the possible numbers of ranks with different samples, and a micro-batch for ``ranks``.

    ranks: all of them, those that divide a model included; 0: unknown (version 0.1).
    """
    limit, micros = _sizes(elastic)
    if elastic.version == 0.1:
        return *_best(micros, limit, elastic.min_gpus, elastic.max_gpus, elastic.prefer_larger_batch), None
    host = elastic.num_gpus_per_node // elastic.model_parallel_size
    hosts = (elastic.min_gpus // elastic.num_gpus_per_node, elastic.max_gpus // elastic.num_gpus_per_node)
    batch, counts = _best(micros, limit // host, *hosts, elastic.prefer_larger_batch)
    batch, counts = batch * host, [count * host for count in counts]
    if ranks // elastic.model_parallel_size not in counts:  # a batch size of these ranks only
        own = ranks * host // elastic.num_gpus_per_node
        candidates = [limit // (micro * own) * micro * own for micro in micros] if own else []
        batch = (max if elastic.prefer_larger_batch else min)(candidates, default=0)
        if not batch:
            raise ElasticityIncompatibleWorldSize(
                f"{ranks} ranks, {elastic.num_gpus_per_node} per host: no batch of at most {limit} samples fits"
            )
        counts = [own]
    each = batch // (ranks // elastic.model_parallel_size)
    fitting = [micro for micro in micros if each % micro == 0]
    micro = (max(fitting) if elastic.prefer_larger_batch else fitting[0]) if fitting else None
    return batch, counts, micro


def _best(micros: Sequence[int], limit: int, least: int, most: int, larger: bool) -> tuple[int, list[int]]:
    """Return the batch size for most numbers of ranks between least and most, and these numbers."""
    if max(micros) > limit:
        raise ElasticityConfigError(f"a micro-batch of {max(micros)} is above the largest batch of {limit} samples")
    most = most or limit // min(micros)
    candidates = set()
    for base in (*micros, math.lcm(*micros)):
        if base <= limit:
            candidates.add(base * HIGHLY_COMPOSITE[bisect.bisect_right(HIGHLY_COMPOSITE, limit // base) - 1])
    counts = {batch: sorted(set(_counts(batch, micros, max(least, 1), most))) for batch in candidates}
    found = max(counts, key=lambda batch: (len(counts[batch]), batch if larger else -batch))
    if not counts[found]:
        raise ElasticityConfigError(
            f"no batch of at most {limit} samples fits a number of ranks from {least} to {most}"
        )
    return found, counts[found]


def _counts(batch: int, micros: Sequence[int], least: int, most: int) -> Iterator[int]:
    for micro in micros:
        whole, rest = divmod(batch, micro)
        if not rest:
            yield from (count for count in range(least, min(whole, most) + 1) if whole % count == 0)


def _micro(elastic: Elasticity, batch: int, counts: Sequence[int], ranks: int) -> int:
    """Return the largest micro-batch size for ``ranks`` ranks with different samples."""
    if ranks not in counts:
        raise ElasticityIncompatibleWorldSize(f"{ranks} ranks: the batch of {batch} samples fits {list(counts)} ranks")
    fitting = [micro for micro in _sizes(elastic)[1] if batch // ranks % micro == 0]
    if not fitting:
        raise ElasticityIncompatibleWorldSize(
            f"{ranks} ranks: {batch // ranks} samples of each are not a multiple of {list(_sizes(elastic)[1])}"
        )
    return max(fitting)
