"""Elasticity: batch sizes for many numbers of ranks; the numbers are DeepSpeed 0.19.8's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from zcomm.config import elasticity, load, resolve_batch

BASE = {"max_train_batch_size": 10000, "micro_batch_sizes": [8, 12, 16, 17], "min_gpus": 32, "max_gpus": 1500}


def section(**changes: Any) -> dict[str, Any]:
    return {"elasticity": {"enabled": True, "version": 0.1, **BASE, **changes}}


def compute(config: dict[str, Any], *arguments: Any, **more: Any) -> tuple[Any, ...]:
    return elasticity.compute_elastic_config(config, "0.19.8", *arguments, **more)


def test_the_batch_fits_most_numbers_of_ranks() -> None:
    batch, counts = compute(section())
    assert (batch, len(counts)) == (9792, 23)
    for count in counts:
        assert 32 <= count <= 1500
        assert any(batch // count % micro == 0 and batch % count == 0 for micro in BASE["micro_batch_sizes"])  # type: ignore[attr-defined]
    assert compute(section(), 64)[2] == 17


@pytest.mark.parametrize(
    ("changes", "ranks", "expected"),
    [
        ({"max_train_batch_size": 32, "micro_batch_sizes": [1, 2, 3, 7], "min_gpus": 1}, 4, 3),
        ({"max_train_batch_size": 100, "micro_batch_sizes": [8, 10, 12], "min_gpus": 1, "max_gpus": 12}, 12, 8),
    ],
)
def test_micro_batches(changes: dict[str, Any], ranks: int, expected: int) -> None:
    batch, counts, micro = compute(section(**changes), ranks)
    assert ranks in counts and batch <= section(**changes)["elasticity"]["max_train_batch_size"]
    assert micro == expected
    assert batch % (micro * ranks) == 0


def test_hosts_of_version_2_need_the_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    config = section(version=0.2, num_gpus_per_node=4)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(elasticity.ElasticityConfigError, match="WORLD_SIZE"):
        compute(config)
    monkeypatch.setenv("WORLD_SIZE", "64")
    batch, counts, micro = compute(config, return_microbatch=True)
    assert (batch, counts, micro) == (*compute(config, 64)[:2], micro)
    assert all(count % 4 == 0 for count in counts) and batch % (micro * 64) == 0
    divided = section(version=0.2, num_gpus_per_node=8, model_parallel_size=4)
    batch, counts, micro = compute(divided, return_microbatch=True)  # 16 ranks with different samples
    assert 16 in counts and batch % (micro * 16) == 0
    assert resolve_batch(load(divided), 16).train == batch


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"enabled": False}, 'no section "elasticity"'),
        ({"max_train_batch_size": None}, '"elasticity.max_train_batch_size" is missing'),
        ({"micro_batch_sizes": None}, '"elasticity.micro_batch_sizes" is missing'),
        ({"micro_batch_sizes": [1, 4, -1]}, "must be whole numbers >= 1"),
        ({"micro_batch_sizes": 5}, "must be a list of whole numbers"),
        ({"micro_batch_sizes": ["a", None, 0.5]}, "must be a list of whole numbers"),
        ({"micro_batch_sizes": [20000]}, "a micro-batch of 20000 is above"),
        ({"min_gpus": -1}, '"elasticity.min_gpus" must be >= 1'),
        ({"min_gpus": 9, "max_gpus": 8}, '"elasticity.min_gpus": 9 is above max_gpus: 8'),
        ({"version": "0.3"}, '"elasticity.version" must be'),
        ({"model_parallel_size": 4}, "needs version 0.2"),
        (
            {"model_parallel_size": 16, "num_gpus_per_node": 8, "version": 0.2},
            "not a multiple of model_parallel_size: 16",
        ),
        ({"min_gpus": 5000, "max_gpus": 6000}, "no batch of at most 10000 samples fits"),
    ],
)
def test_wrong_sections_are_named(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(elasticity.ElasticityConfigError, match=text):
        compute(section(**changes), 64)


def test_other_errors() -> None:
    with pytest.raises(elasticity.ElasticityIncompatibleWorldSize, match="128 ranks: the batch of 9792 samples fits"):
        compute(section(), 128)
    with pytest.raises(elasticity.ElasticityError, match=r"version 0\.2 knows no elasticity"):
        elasticity.compute_elastic_config(section(), "0.2")
    assert not elasticity.elasticity_enabled({"elasticity": None})


def test_the_configuration_derives_its_batch_sizes() -> None:
    batch = resolve_batch(load(section(min_gpus=1)), 4)
    expected, _, micro = compute(section(min_gpus=1), 4)
    assert (batch.train, batch.micro, batch.accumulation) == (expected, micro, expected // (4 * micro))
    with pytest.raises(elasticity.ElasticityConfigError, match='"train_batch_size" next to an enabled "elasticity"'):
        resolve_batch(load(section() | {"train_batch_size": 8}), 64)
    ignoring = section(ignore_non_elastic_batch_info=True) | {"train_batch_size": 8}
    assert resolve_batch(load(ignoring), 64).train == 9792
    assert resolve_batch(load({"elasticity": {"enabled": False}, "train_batch_size": 8}), 2).train == 8


def test_the_scheduler_saw_the_same_section(monkeypatch: pytest.MonkeyPatch) -> None:
    elasticity.ensure_immutable_elastic_config(section()["elasticity"])
    monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", json.dumps(section()["elasticity"]))
    elasticity.ensure_immutable_elastic_config(section()["elasticity"])
    with pytest.raises(elasticity.ElasticityConfigError, match=r'max_train_batch_size" is 27, and the scheduler saw'):
        resolve_batch(load(section(max_train_batch_size=27)), 1)
