"""DistributedDataParallel over "zcomm" and over Gloo: a step of `bench/zero.py step` with these variants."""

from __future__ import annotations

from collections.abc import Sequence

from training import step


def main(words: Sequence[str]) -> int:
    return step.run(step.parse_arguments(words, "ddp", "none,ddp-zcomm,ddp-gloo", 128))
