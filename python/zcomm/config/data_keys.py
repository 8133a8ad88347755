"""Section data_efficiency: samples chosen by difficulty, and layers that see a part of the tokens. See schema.py."""
# ruff: noqa: RUF009  (key() and section() are field specifiers, as dataclasses.field is)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zcomm.config.keys import ALL_AT_LEAST_0, AT_LEAST_1, key, section
from zcomm.config.training_keys import CurriculumSchedule


@dataclass(frozen=True)
class TokenSteps:
    """Section ``random_ltd_schedule.schedule_config``."""

    require_steps: int | None = key(None, "steps to max_value; needed if enabled", AT_LEAST_1)
    seq_per_step: int | None = key(None, "tokens are its multiples; needed if enabled", AT_LEAST_1)


@dataclass(frozen=True)
class TokenSchedule:
    """Section ``random_ltd_schedule``."""

    min_value: int | None = key(None, "tokens of a layer in the first step; needed if enabled", AT_LEAST_1)
    max_value: int | None = key(None, "tokens in the last step; needed if enabled", AT_LEAST_1)
    schedule_type: str = key("fixed_linear", "tokens by step", choices=("fixed_linear",))
    schedule_config: TokenSteps = section(TokenSteps)


@dataclass(frozen=True)
class RandomLtd:
    """Section ``random_ltd`` (engine/token_drop.py)."""

    enabled: bool = key(False, "layers that convert_to_random_ltd() has found see a random part of the tokens")
    total_layer_num: int | None = key(None, "layers of the model; needed if enabled", AT_LEAST_1)
    random_ltd_layer_num: int | None = key(None, "how many drop tokens; needed if enabled", AT_LEAST_1)
    random_ltd_layer_id: tuple[int, ...] | None = key(
        None, "numbers of the layers that drop tokens; needed if enabled", ALL_AT_LEAST_0
    )
    model_mask_name: str | None = key(None, "argument of the layers that has the attention mask", shown="no mask")
    model_type: str = key(
        "decoder", "without a difference: masks are cut to the tokens", choices=("decoder", "encoder")
    )
    hidden_state_order: str = key(
        "batch_seq_dim", "dimensions of the layers' inputs", choices=("batch_seq_dim", "seq_batch_dim")
    )
    random_ltd_schedule: TokenSchedule = section(TokenSchedule)
    layer_token_lr_schedule: dict[str, Any] | None = key(
        None, "a learning rate by tokens: refused if enabled, as in DeepSpeed", shown="off"
    )


@dataclass(frozen=True)
class DataRouting:
    """Section ``data_efficiency.data_routing``."""

    enabled: bool = key(False, "needed by random_ltd")
    random_ltd: RandomLtd = section(RandomLtd)


@dataclass(frozen=True)
class CurriculumMetric:
    """Section ``curriculum_metrics.NAME``."""

    index_to_sample_path: str | None = key(None, "samples by difficulty, a file of DataAnalyzer without its ending")
    index_to_metric_path: str | None = key(None, "difficulty of each of its rows")
    difficulty_type: str = key("value", "of min_difficulty and so on", choices=("value", "percentile"))
    clustering_type: str = key(
        "schedule_based",
        "single_cluster: all samples at once, and data_post_process_func gets the difficulty",
        choices=("schedule_based", "single_cluster"),
    )
    min_difficulty: int | None = key(None, "of the first step")
    max_difficulty: int | None = key(None, "of the last step")
    schedule_type: str | None = key(
        None, "difficulty by step", choices=("fixed_discrete", "fixed_linear", "fixed_root", "custom")
    )
    schedule_config: CurriculumSchedule = section(CurriculumSchedule)


@dataclass(frozen=True)
class SamplingCurriculum:
    """Section ``data_efficiency.data_sampling.curriculum_learning`` (data_sampling/sampler.py)."""

    enabled: bool = key(False, "choose the samples of initialize(training_data=) by difficulty")
    data_cluster_path: str | None = key(
        None, "folder of DeepSpeed's files of clusters: without effect, they are kept in memory", shown="not set"
    )
    curriculum_metrics: dict[str, CurriculumMetric] | None = key(
        None,
        "metric: {index_to_sample_path, index_to_metric_path, difficulty_type: value or percentile, clustering_type: "
        "single_cluster or schedule_based, min_difficulty, max_difficulty, schedule_type, schedule_config}; needed if "
        "enabled",
        shown="(needed)",
    )


@dataclass(frozen=True)
class DataSampling:
    """Section ``data_efficiency.data_sampling``."""

    enabled: bool = key(False, "needed by curriculum_learning")
    num_epochs: int = key(1000, "the samples end after so many times the data set", AT_LEAST_1)
    curriculum_learning: SamplingCurriculum = section(SamplingCurriculum)


@dataclass(frozen=True)
class DataEfficiency:
    """Section ``data_efficiency``."""

    enabled: bool = key(False, "needed by data_sampling and data_routing")
    seed: int = key(1234, "of samples and of dropped tokens")
    data_sampling: DataSampling = section(DataSampling)
    data_routing: DataRouting = section(DataRouting)
