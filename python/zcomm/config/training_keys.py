"""Sections of a run's course: elasticity, curriculum, layer drop, generation by turns. See schema.py."""
# ruff: noqa: RUF009  (key() and section() are field specifiers, as dataclasses.field is)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zcomm.config.keys import ALL_AT_LEAST_1, AT_LEAST_0, AT_LEAST_1, FRACTION, NOT_EMPTY, POSITIVE, key, section


@dataclass(frozen=True)
class Elasticity:
    """Section ``elasticity``: one batch size for many numbers of ranks (config/elasticity.py)."""

    enabled: bool = key(False, "derive the three batch sizes from this section and the number of ranks")
    max_train_batch_size: int | None = key(None, "largest train_batch_size; needed if enabled", AT_LEAST_1)
    micro_batch_sizes: tuple[int, ...] | None = key(
        None, "train_micro_batch_size_per_gpu is one of them; needed if enabled", ALL_AT_LEAST_1
    )
    min_gpus: int = key(1, "least number of ranks", AT_LEAST_1)
    max_gpus: int = key(10000, "largest number of ranks", AT_LEAST_1)
    num_gpus_per_node: int = key(1, "ranks of a host; version 0.2 adds and removes whole hosts", AT_LEAST_1)
    model_parallel_size: int = key(1, "ranks that divide a model; version 0.2", AT_LEAST_1)
    min_time: int = key(0, "minutes between two changes of the number of ranks, for a scheduler of jobs", AT_LEAST_0)
    version: float = key(0.2, "of the arithmetic: 0.1 or 0.2", choices=(0.1, 0.2))
    prefer_larger_batch: bool = key(True, "of batch sizes for equally many numbers of ranks take the largest")
    ignore_non_elastic_batch_info: bool = key(
        False, "ignore the three batch sizes of the file; false: they are an error next to this section"
    )


@dataclass(frozen=True)
class CurriculumSchedule:
    """Section ``curriculum_learning.schedule_config``."""

    difficulty: tuple[int, ...] | None = key(None, "fixed_discrete: difficulties, in order", ALL_AT_LEAST_1)
    max_step: tuple[int, ...] | None = key(
        None, "fixed_discrete: last step of each difficulty but the last one", ALL_AT_LEAST_1
    )
    total_curriculum_step: int | None = key(None, "fixed_linear, fixed_root: steps to max_difficulty", AT_LEAST_1)
    difficulty_step: int | None = key(None, "fixed_linear, fixed_root: difficulties are its multiples", AT_LEAST_1)
    root_degree: int | None = key(None, "fixed_root: 2 is the square root", AT_LEAST_1)


@dataclass(frozen=True)
class CurriculumLearning:
    """Section ``curriculum_learning``: the forward gets ``curriculum_seqlen`` (engine/curriculum.py)."""

    enabled: bool = key(False, "pass the difficulty of the step to the model")
    curriculum_type: str = key(
        "seqlen", "seqlen: training forwards get it as curriculum_seqlen=, and the model shortens its samples"
    )
    min_difficulty: int | None = key(None, "of the first step; needed if enabled", AT_LEAST_1)
    max_difficulty: int | None = key(None, "of the last step; needed if enabled", AT_LEAST_1)
    schedule_type: str | None = key(
        None,
        "difficulty by step; needed if enabled",
        choices=("fixed_discrete", "fixed_linear", "fixed_root", "custom"),
        shown="(needed)",
    )
    schedule_config: CurriculumSchedule = section(CurriculumSchedule)


@dataclass(frozen=True)
class Eigenvalues:
    """Section ``eigenvalue``: curvature of blocks (engine/eigenvalue.py)."""

    enabled: bool = key(False, "compute engine.block_eigenvalue before the last backward of a step (stages 0 to 2)")
    verbose: bool = key(False, "log each value")
    max_iter: int = key(100, "most products with the Hessian, of a block", AT_LEAST_1)
    tol: float = key(1e-2, "relative change of the value that ends the products", POSITIVE)
    stability: float = key(1e-6, "added to norms before a division", AT_LEAST_0)
    gas_boundary_resolution: int = key(1, "optimizer steps from one computation to the next", AT_LEAST_1)
    layer_name: str = key("bert.encoder.layer", "path of a list of blocks in the model")
    layer_num: int = key(0, "how many of them; needed if enabled", AT_LEAST_0)


@dataclass(frozen=True)
class Autotuning:
    """Section ``autotuning``: of ``zcomm tune`` and ``deepspeed --autotuning`` (zcomm/tuning)."""

    enabled: bool = key(False, "only with these commands; otherwise training is as usual")
    fast: bool = key(True, "try stages and micro batch sizes; false: also overlap_comm and reduce_bucket_size")
    metric: str = key("throughput", "to compare by; flops: per rank", choices=("throughput", "latency", "flops"))
    start_profile_step: int = key(3, "optimizer steps before the first one that is timed", AT_LEAST_1)
    end_profile_step: int = key(5, "last step that is timed; a probe ends with it", AT_LEAST_1)
    min_train_micro_batch_size_per_gpu: int = key(1, "smallest micro batch that is tried", AT_LEAST_1)
    max_train_micro_batch_size_per_gpu: int = key(1024, "largest micro batch that is tried", AT_LEAST_1)
    num_tuning_micro_batch_sizes: int = key(3, "sizes of a stage to compare closely, around its best one", AT_LEAST_1)
    tuner_num_trials: int = key(50, "most runs", AT_LEAST_1)
    max_train_batch_size: int | None = key(
        None, "samples of a step, all ranks: more micro-steps for smaller micro batches", AT_LEAST_1
    )
    mp_size: int = key(1, "ranks that divide a model, and read the same samples", AT_LEAST_1)
    arg_mappings: dict[str, Any] | None = key(
        None, "key: argument of the program that must have its value, such as --per_device_train_batch_size"
    )
    results_dir: str = key("autotuning_results", "folder of the summary and the best configuration", NOT_EMPTY)
    exps_dir: str = key("autotuning_exps", "folder of the probes' files", NOT_EMPTY)
    overwrite: bool = key(True, "replace the files of an earlier tuning; false: reuse its measurements")
    metric_path: str | None = key(None, "of a probe's metrics; the tuning writes the key", NOT_EMPTY)


@dataclass(frozen=True)
class ProgressiveLayerDrop:
    """Section ``progressive_layer_drop``: the forward gets ``pld_theta`` (engine/curriculum.py)."""

    enabled: bool = key(False, "training forwards get progressive_layer_drop=True and pld_theta=, the share to keep")
    theta: float = key(1.0, "share of layers that is kept in the end", FRACTION)
    gamma: float = key(0.001, "how fast: theta(step) = (1 - theta) exp(-gamma step) + theta", POSITIVE)


@dataclass(frozen=True)
class HybridEngine:
    """Section ``hybrid_engine``: ``generate()`` between steps, with whole weights (engine/hybrid.py)."""

    enabled: bool = key(False, "generate() of the engine and its module holds whole weights (docs/inference.md)")
    max_out_tokens: int = key(512, "longest prompt of generate(), in tokens", AT_LEAST_1)
    pin_parameters: bool = key(
        True, "stage 3 gathers all weights once for a generate(); false: unit by unit for each token, in step"
    )
    release_inference_cache: bool = key(False, "free memory that torch's allocator caches after each generate()")
