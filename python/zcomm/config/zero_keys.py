"""Sections ``zero_optimization`` and ``aio`` of the configuration: see schema.py."""
# ruff: noqa: RUF009  (key() and section() are field specifiers, as dataclasses.field is)

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

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
_PINNED = "what crosses to a CUDA device is page-locked always, and nothing else"
_UNITS = "stage 3 gathers and frees whole units (modules)"
_GATHERED = "parameters are gathered by all_gather, or shared in memory by a host's CPU ranks"


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
    super_offload: bool = key(
        False, "update beside backward", status=_NO_EFFECT, reason="the update begins when the norm is known"
    )
    cpuadam_cores_perc: float = key(
        0.8,
        "share of the cores for super_offload",
        status=_NO_EFFECT,
        reason="the core's threads share all",
        check=FRACTION,
    )


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

    stage: int = key(0, "0 replicated, 1 and 2 optimizer and gradients, 3 + parameters sharded", choices=(0, 1, 2, 3))
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
        reason=_GATHERED,
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
    stage3_prefetch_bucket_size: int | None = key(
        None,
        "elements that stage 3 gathers ahead, in whole units",
        shown_default="one unit (DeepSpeed: 5e7)",
        check=AT_LEAST_0,
        auto="the default (Hugging Face: 0.9 hidden_size squared)",
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
    zero_quantized_nontrainable_weights: bool = key(
        False, "gather frozen weights in 8 bits", status=_REFUSED, reason="weights travel as they are"
    )
    zenflow: dict[str, Any] | None = key(
        None,
        "late updates of small gradients",
        status=_REFUSED,
        reason="every step updates everything",
        shown_default="off",
        switch=None,
    )
    mics_shard_size: int = key(
        -1, "ranks that shard together", status=_REFUSED, reason="parameters are sharded over all ranks"
    )
    mics_hierarchical_params_gather: bool = key(
        False, "gather in two steps", status=_NO_EFFECT, reason="gathers follow the hosts by themselves"
    )
    leaf_module: dict[str, Any] | None = key(
        None,
        "modules that are gathered whole",
        status=_NO_EFFECT,
        reason="units are always gathered whole (ZeroOptimizer(units=) names them)",
        shown_default="its own",
        switch=None,
    )
    cpu_offload_use_pin_memory: bool | None = key(
        None, "an old word for pin_memory", status=_NO_EFFECT, reason=_PINNED, shown_default="not set"
    )
    use_multi_rank_bucket_allreduce: bool = key(
        True,
        "one all_reduce for the gradients of several ranks",
        status=_NO_EFFECT,
        reason="a bucket is one reduce_scatter",
    )
    compute_grad_norm: bool = key(
        True,
        "find the norm without clipping, too",
        status=_NO_EFFECT,
        reason="it always is; it also finds what is not finite",
    )
    stage3_model_persistence_threshold: int = key(
        sys.maxsize, "most elements that stay whole", status=_NO_EFFECT, reason=_UNITS, check=AT_LEAST_0
    )
    stage3_module_granularity_threshold: int = key(
        0, "elements below which modules are gathered whole", status=_NO_EFFECT, reason=_UNITS, check=AT_LEAST_0
    )
    stage3_use_all_reduce_for_fetch_params: bool = key(
        False, "gather by all_reduce", status=_NO_EFFECT, reason=_GATHERED
    )
    stage3_allgather_sequential: bool = key(
        False, "gather one parameter at a time", status=_NO_EFFECT, reason=_GATHERED
    )
    stage3_gather_fp16_weights_on_model_save: bool = key(
        False,
        "the old word for stage3_gather_16bit_weights_on_model_save",
        status=_NO_EFFECT,
        reason="save_16bit_model and checkpoints always hold whole weights",
    )
    legacy_stage1: bool = key(
        False, "an older stage 1", status=_NO_EFFECT, reason="there is one, with the same numbers"
    )
    parameter_alignment: bool = key(
        False, "align parameters", status=_NO_EFFECT, reason="each begins at a multiple of 64 elements"
    )
    memory_efficient_linear: bool = key(
        True, "a Linear of its own", status=_NO_EFFECT, reason="modules are left as they are"
    )
    pipeline_loading_checkpoint: bool = key(
        False, "load while reading", status=_NO_EFFECT, reason="each rank reads what it keeps, tensor by tensor"
    )
    override_module_apply: bool = key(
        True, "gather in module.apply", status=_NO_EFFECT, reason="use zero.GatheredParameters around it"
    )
    log_trace_cache_warnings: bool = key(
        False, "log when the order of modules changes", status=_NO_EFFECT, reason="it is learned anew in the next step"
    )
    enable_sanity_checks: bool = key(
        False, "compare the ranks", status=_NO_EFFECT, reason="ranks always compare what they do"
    )
    save_muon_momentum_buffer_in_memory: bool = key(False, "of Muon", status=_NO_EFFECT, reason="there is no Muon")
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
    use_gds: bool = key(False, "GPU direct storage", status=_NO_EFFECT, reason="the drive is read into host memory")
