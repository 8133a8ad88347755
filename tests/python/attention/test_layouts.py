"""Layouts of sparse attention: DeepSpeed 0.19.8's (hashes), some by hand, and errors that name values."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch

from zcomm.attention import layouts

# class, arguments, tokens in blocks of 16, begin of SHA-256 of DeepSpeed 0.19.8's layout with random.seed(7)
FACTS: list[tuple[str, dict[str, Any], int, str]] = [
    ("DenseSparsityConfig", {"num_heads": 2}, 64, "72cd6e8422c407fb"),
    ("FixedSparsityConfig", {"num_heads": 2}, 144, "1203cf1c08d92b91"),
    (
        "FixedSparsityConfig",
        {
            "num_heads": 4,
            "different_layout_per_head": True,
            "num_local_blocks": 6,
            "num_global_blocks": 2,
            "attention": "unidirectional",
            "num_different_global_patterns": 3,
        },
        336,
        "aeceefcab131fca4",
    ),
    (
        "FixedSparsityConfig",
        {"num_heads": 2, "num_local_blocks": 3, "horizontal_global_attention": True},
        160,
        "18028e2d2924fb65",
    ),
    (
        "VariableSparsityConfig",
        {
            "num_heads": 3,
            "different_layout_per_head": True,
            "num_random_blocks": 2,
            "local_window_blocks": [1, 2, 3],
            "global_block_indices": [1, 5],
            "global_block_end_indices": [2, 8],
        },
        256,
        "c2faac9d286e339e",
    ),
    (
        "VariableSparsityConfig",
        {"num_heads": 2, "local_window_blocks": [2, 5], "global_block_indices": [0, 3], "attention": "unidirectional"},
        208,
        "422a0e6f6f592933",
    ),
    ("BigBirdSparsityConfig", {"num_heads": 2, "num_random_blocks": 2}, 192, "4c17d382fa60f4bc"),
    (
        "BigBirdSparsityConfig",
        {
            "num_heads": 3,
            "different_layout_per_head": True,
            "num_sliding_window_blocks": 5,
            "num_global_blocks": 2,
            "attention": "unidirectional",
        },
        256,
        "5edc930ae4724fbf",
    ),
    (
        "BSLongformerSparsityConfig",
        {"num_heads": 2, "num_sliding_window_blocks": 5, "global_block_indices": [1, 9]},
        176,
        "c0cfb9229cbfadc7",
    ),
    (
        "BSLongformerSparsityConfig",
        {
            "num_heads": 2,
            "global_block_indices": [1, 5],
            "global_block_end_indices": [2, 8],
            "attention": "unidirectional",
        },
        112,
        "0e0d886b45205f23",
    ),
    ("LocalSlidingWindowSparsityConfig", {"num_heads": 2}, 128, "cea6cac75db21aa8"),
    (
        "LocalSlidingWindowSparsityConfig",
        {"num_heads": 2, "num_sliding_window_blocks": 4, "attention": "bidirectional"},
        128,
        "eaa839db6c957050",
    ),
]


@pytest.mark.parametrize(("name", "arguments", "tokens", "digest"), FACTS)
def test_equals_deepspeeds_layout(name: str, arguments: dict[str, Any], tokens: int, digest: str) -> None:
    config = getattr(layouts, name)(**arguments)
    config.generator.seed(7)
    layout = config.make_layout(tokens)
    assert layout.dtype == torch.int64
    assert hashlib.sha256(layout.to(torch.uint8).numpy().tobytes()).hexdigest()[:16] == digest


def picture(layout: torch.Tensor) -> list[str]:
    return ["".join(".#"[cell] for cell in row) for row in layout.tolist()]


def test_a_fixed_layout() -> None:
    config = layouts.FixedSparsityConfig(num_heads=2, num_local_blocks=2, attention="unidirectional")
    layout = config.make_layout(5 * 16)
    assert picture(layout[0]) == ["#....", "##...", ".##..", ".###.", ".#.##"]
    assert torch.equal(layout[0], layout[1])


def test_a_sliding_window_with_global_blocks() -> None:
    config = layouts.BSLongformerSparsityConfig(num_heads=1, global_block_indices=[4])
    assert picture(config.make_layout(6 * 16)[0]) == ["##..#.", "###.#.", ".####.", "..###.", "######", "....##"]


def test_random_blocks_of_unidirectional_rows_are_past_ones() -> None:
    config = layouts.BigBirdSparsityConfig(num_heads=4, num_random_blocks=3, attention="unidirectional")
    layout = config.make_layout(8 * 16)
    assert torch.equal(layout, layout.tril())
    assert (layout.diagonal(dim1=1, dim2=2) == 1).all()


def test_random_blocks_are_those_of_other_ranks_and_differ_by_layer() -> None:
    mine, theirs = (layouts.BigBirdSparsityConfig(num_heads=1, num_random_blocks=2) for _ in range(2))
    first = mine.make_layout(16 * 16)
    torch.manual_seed(5)
    assert torch.equal(first, theirs.make_layout(16 * 16))
    assert not torch.equal(first, mine.make_layout(16 * 16))


@pytest.mark.parametrize(
    ("name", "arguments", "error", "text"),
    [
        ("DenseSparsityConfig", {"block": 0}, ValueError, "block=0"),
        ("FixedSparsityConfig", {"num_global_blocks": 3}, ValueError, "num_local_blocks=4 is not a multiple of 3"),
        ("FixedSparsityConfig", {"num_different_global_patterns": 2}, ValueError, "different_layout_per_head=True"),
        ("FixedSparsityConfig", {"attention": "both"}, NotImplementedError, "attention='both'"),
        (
            "FixedSparsityConfig",
            {"attention": "unidirectional", "horizontal_global_attention": True},
            ValueError,
            "horizontal_global_attention=True with attention='unidirectional'",
        ),
        ("VariableSparsityConfig", {"local_window_blocks": []}, ValueError, r"local_window_blocks=\[\]"),
        ("VariableSparsityConfig", {"global_block_end_indices": [1, 2]}, ValueError, "1 global_block_indices and 2"),
        ("BSLongformerSparsityConfig", {"global_block_end_indices": [0]}, ValueError, "from 0 to 0"),
    ],
)
def test_wrong_arguments_are_named(name: str, arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        getattr(layouts, name)(num_heads=2, **arguments)


def test_sequences_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match="40 tokens do not fill blocks of 16"):
        layouts.DenseSparsityConfig(num_heads=1).make_layout(40)
    with pytest.raises(ValueError, match="num_sliding_window_blocks=3 of 2 blocks"):
        layouts.BSLongformerSparsityConfig(num_heads=1).make_layout(32)
    with pytest.raises(ValueError, match="num_random_blocks=3 of 2 blocks"):
        layouts.VariableSparsityConfig(num_heads=1, num_random_blocks=3).make_layout(32)
    with pytest.raises(NotImplementedError, match="SparsityConfig has no layout"):
        layouts.SparsityConfig(num_heads=1).make_layout(32)
