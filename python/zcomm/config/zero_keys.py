"""Sections ``zero_optimization`` and ``aio`` of the configuration: see schema.py."""
# ruff: noqa: RUF009  (key() and section() are field specifiers, as dataclasses.field is)

from __future__ import annotations

from dataclasses import dataclass

from zcomm.config.keys import (
    AT_LEAST_0,
    AT_LEAST_1,
    FRACTION,
    NOT_EMPTY,
    POSITIVE,
    Status,
    key,
    section,
)

_NO_EFFECT = Status.NO_EFFECT
_REFUSED = Status.REFUSED
_SWAP_OWN = "the swap file sizes its own buffers and I/O depth"
_PINNED = "staging slots come from one arena that is page-locked wherever CUDA is there"
_UNITS = "stage 3 gathers and frees whole units (modules), one unit ahead"


@dataclass(frozen=True)
class OffloadOptimizer:
    """Section ``zero_optimization.offload_optimizer``."""

    device: str = key("none", "where optimizer state lives between steps", choices=("none", "cpu", "nvme"))
    nvme_path: str | tuple[str, ...] | None = key(
        None, "swap directory, or a list with one per drive; needed with device nvme, unused otherwise", check=NOT_EMPTY
    )
    ratio: float = key(
        1.0,
        "share of the optimizer state that is offloaded; the rest stays on the device (cpu) or in host memory (nvme)",
        check=FRACTION,
    )
    pin_memory: bool = key(True, "page-locked staging", status=_NO_EFFECT, reason=_PINNED)
    buffer_count: int = key(4, "swap buffers", status=_NO_EFFECT, reason=_SWAP_OWN, check=AT_LEAST_1)
    pipeline_read: bool = key(False, "read ahead", status=_NO_EFFECT, reason="reads always run ahead of the update")
    pipeline_write: bool = key(False, "write behind", status=_NO_EFFECT, reason="writes always run behind the update")
    fast_init: bool = key(False, "quick first write", status=_NO_EFFECT, reason="the swap file is preallocated once")


@dataclass(frozen=True)
class OffloadParam:
    """Section ``zero_optimization.offload_param``."""

    device: str = key("none", "where parameters live while unused (stage 3)", choices=("none", "cpu", "nvme"))
    nvme_path: str | tuple[str, ...] | None = key(
        None, "swap directory, or a list with one per drive; needed with device nvme, unused otherwise", check=NOT_EMPTY
    )
    pin_memory: bool = key(True, "page-locked staging", status=_NO_EFFECT, reason=_PINNED)
    buffer_count: int = key(5, "swap buffers", status=_NO_EFFECT, reason=_SWAP_OWN, check=AT_LEAST_1)
    buffer_size: int = key(100_000_000, "elements per swap buffer", status=_NO_EFFECT, reason=_SWAP_OWN, check=POSITIVE)
    max_in_cpu: int = key(
        1_000_000_000, "elements kept in host memory", status=_NO_EFFECT, reason=_UNITS, check=AT_LEAST_0
    )


@dataclass(frozen=True)
class ZeroOptimization:
    """Section ``zero_optimization``."""

    stage: int = key(0, "0 replicated, 1 optimizer, 2 + gradients, 3 + parameters sharded", choices=(0, 1, 2, 3))
    offload_optimizer: OffloadOptimizer = section(OffloadOptimizer, "tier of the optimizer state")
    offload_param: OffloadParam = section(OffloadParam, "tier of the parameters")
    overlap_comm: bool | None = key(
        None,
        "reduce gradients while backward runs (same bits either way)",
        shown_default="true (any stage)",
        auto="the default",
    )
    reduce_bucket_size: int | None = key(
        None,
        "elements per gradient bucket",
        check=POSITIVE,
        shown_default="as many as 25 MiB hold (DeepSpeed: 5e8)",
        auto="the default (Hugging Face: hidden_size squared)",
    )
    allgather_partitions: bool = key(
        True,
        "gather parameters by all_gather instead of broadcasts",
        status=_NO_EFFECT,
        reason="parameters are always gathered by all_gather, or shared in memory by a host's CPU ranks",
    )
    allgather_bucket_size: int = key(
        500_000_000,
        "elements per all_gather",
        status=_NO_EFFECT,
        reason="parameters are gathered by the same buckets and units that reduce them",
        check=POSITIVE,
    )
    reduce_scatter: bool = key(
        True,
        "average gradients by reduce_scatter instead of all_reduce",
        status=_NO_EFFECT,
        reason="sharded gradients are always reduce-scattered; the bits are the same",
    )
    contiguous_gradients: bool = key(
        True,
        "copy gradients into one buffer",
        status=_NO_EFFECT,
        reason="gradients always go to contiguous bucket slots",
    )
    stage3_prefetch_bucket_size: int = key(
        50_000_000, "elements gathered ahead", status=_NO_EFFECT, reason=_UNITS, check=AT_LEAST_0
    )
    stage3_param_persistence_threshold: int = key(
        100_000, "parameters below this size stay whole", status=_NO_EFFECT, reason=_UNITS, check=AT_LEAST_0
    )
    stage3_max_live_parameters: int = key(
        1_000_000_000, "most elements gathered at once", status=_NO_EFFECT, reason=_UNITS, check=AT_LEAST_0
    )
    stage3_max_reuse_distance: int = key(
        1_000_000_000, "keep what is used again this soon", status=_NO_EFFECT, reason=_UNITS, check=AT_LEAST_0
    )
    sub_group_size: int = key(
        1_000_000_000,
        "elements per optimizer pass",
        status=_NO_EFFECT,
        reason="the fused optimizer works tile by tile",
        check=POSITIVE,
    )
    cpu_offload: bool = key(
        False,
        "the old word for offload_optimizer",
        status=_REFUSED,
        reason='use "zero_optimization.offload_optimizer": {"device": "cpu"}',
    )
    cpu_offload_param: bool = key(
        False,
        "the old word for offload_param",
        status=_REFUSED,
        reason='use "zero_optimization.offload_param": {"device": "cpu"}',
    )
    elastic_checkpoint: bool = key(
        False,
        "checkpoints for other world sizes",
        status=_NO_EFFECT,
        reason="every checkpoint loads at any world size",
    )
    load_from_fp32_weights: bool = key(
        True, "load the exact master", status=_NO_EFFECT, reason="it always is, where the checkpoint has it"
    )
    ignore_unused_parameters: bool = key(
        True,
        "parameters without gradients are no error",
        status=_NO_EFFECT,
        reason="they never are; they count as zero",
    )
    stage3_gather_16bit_weights_on_model_save: bool = key(
        False,
        "save whole weights in stage 3",
        status=_NO_EFFECT,
        reason="save_16bit_model and checkpoints always hold whole weights",
    )
    zero_hpz_partition_size: int = key(
        1,
        "ranks of a second set of parameter shards",
        status=_REFUSED,
        reason="parameters are sharded over all ranks, and shared by a host's CPU ranks",
        check=AT_LEAST_1,
    )
    zero_quantized_weights: bool = key(
        False, "gather weights in 8 bits", status=_REFUSED, reason="weights travel as they are"
    )
    zero_quantized_gradients: bool = key(
        False, "reduce gradients in 4 bits", status=_REFUSED, reason="gradients travel as they are"
    )
    round_robin_gradients: bool = key(
        False, "spread gradient copies", status=_NO_EFFECT, reason="each rank copies only its own shard"
    )


@dataclass(frozen=True)
class Aio:
    """Section ``aio``."""

    block_size: int = key(1_048_576, "bytes per request", status=_NO_EFFECT, reason=_SWAP_OWN, check=AT_LEAST_1)
    queue_depth: int = key(8, "requests in flight", status=_NO_EFFECT, reason=_SWAP_OWN, check=AT_LEAST_1)
    thread_count: int = key(1, "I/O threads", status=_NO_EFFECT, reason=_SWAP_OWN, check=AT_LEAST_1)
    intra_op_parallelism: int = key(1, "I/O threads", status=_NO_EFFECT, reason=_SWAP_OWN, check=AT_LEAST_1)
    single_submit: bool = key(False, "submit one by one", status=_NO_EFFECT, reason=_SWAP_OWN)
    overlap_events: bool = key(True, "overlap submit and wait", status=_NO_EFFECT, reason=_SWAP_OWN)
