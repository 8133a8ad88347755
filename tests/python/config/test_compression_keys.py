"""The section "compression_training": faults that the keys have together, and sections that are off."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from zcomm.config import compression_settings, load

ROWS = {"params": {"dense_ratio": 0.5}, "modules": ["fc"]}


def section(method: str, group: dict[str, Any] | None = None, /, **shared: Any) -> dict[str, Any]:
    groups = {} if group is None else {"g": group}
    return {method: {"shared_parameters": {"enabled": True, **shared}, "different_groups": groups}}


def bits(start: int, target: int, **shared: Any) -> dict[str, Any]:
    return section("weight_quantization", {"params": {"start_bits": start, "target_bits": target}}, **shared)


FAULTS = [
    (section("row_pruning"), "row_pruning.different_groups"),
    (section("row_pruning", ROWS, method="l2"), 'must be one of l1, topk, got "l2"'),
    (section("row_pruning", {**ROWS, "params": {}}), 'groups.g.params.dense_ratio" is missing'),
    (section("row_pruning", {**ROWS, "params": {"dense_ratio": 1.5}}), "must be > 0 and <= 1, got 1.5"),
    (section("row_pruning", {**ROWS, "related_modules": ["out"]}), "a list of lists of strings"),
    (section("row_pruning", {**ROWS, "related_modules": [["a"], ["b"]]}), "has 2 lists, and modules has 1 patterns"),
    (section("row_pruning", {**ROWS, "modules": []}), "none of them empty"),
    (section("sparse_pruning", {**ROWS, "related_modules": [["out"]]}), "changes no shapes"),
    (section("head_pruning", ROWS), 'num_heads" is missing'),
    (bits(4, 8), 'start_bits": 4 is below target_bits: 8'),
    (bits(8, 17), "must be between 1 and 16, got 17"),
    (bits(8, 1, quantization_type="asymmetric"), 'target_bits": 1 is binary'),
    (bits(8, 2, rounding="stochastic"), 'target_bits": 2 is ternary'),
    (section("activation_quantization", {"params": {"bits": 2}}), "must be between 3 and 16, got 2"),
    ({"row_prunning": {}}, 'did you mean "compression_training.row_pruning"'),
    ({"row_pruning": {"different_groups": {"g": 1}}}, 'different_groups.g" must be an object'),
    ({"row_pruning": {"different_groups": []}}, 'different_groups" must be an object'),
    ({"layer_reduction": {"enabled": True, "teacher_layer": [1]}}, 'module_name_prefix" is missing'),
    (
        {"layer_reduction": {"enabled": True, "module_name_prefix": "a", "teacher_layer": [1], "keep_number_layer": 2}},
        'keep_number_layer": 2, but teacher_layer names 1',
    ),
]


@pytest.mark.parametrize(("given", "message"), FAULTS, ids=range(len(FAULTS)))
def test_a_fault_names_its_key_and_value(given: dict[str, Any], message: str) -> None:
    for read in (load, compression_settings):
        with pytest.raises(ValueError, match='"compression_training') as caught:
            read({"compression_training": given})
        assert message in str(caught.value)


def test_snip_momentum_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"sparse_pruning.shared_parameters.method.*use l1 or topk"):
        load({"compression_training": section("sparse_pruning", ROWS, method="snip_momentum")})


def test_a_method_that_is_off_needs_nothing_and_other_sections_are_not_read() -> None:
    off = {
        "weight_quantization": {"shared_parameters": {"enabled": False, "fp16_mixed_quantize": {"enabled": True}}},
        "head_pruning": {"different_groups": {"g": {"modules": ["a"]}}},
        "layer_reduction": {"enabled": False, "keep_number_layer": 5},
        "row_pruning": None,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not load({"compression_training": off}).compression_training.enabled()
        assert not compression_settings({"compression_training": off, "unknown": 1, "amp": {"enabled": True}}).enabled()
        assert not compression_settings({}).enabled()
