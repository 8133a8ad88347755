#!/usr/bin/env python3
"""Attention in bounded memory next to torch's dense attention: a layout's blocks, and Evoformer's biases.

  bench/attention.py                      (4k and 16k tokens; Evoformer at N = 128, L = 256)
  bench/attention.py --json FILE

A step is forward and backward in fp32, each variant in a process of its own, in turn. Columns: median milliseconds,
peak memory above the memory before the step, and #wrong. That counts elements of output and gradients that differ from
float64 on the same inputs by more than 1e-3 of the largest one.
blocks: block_sparse_attention to BigBird's layout, causal inside of blocks. dense: scaled_dot_product_attention without
a mask, the most that the blocks could cost. masked: the same with the layout as a mask.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from zcomm.attention import block_sparse_attention, evoformer_attention, layouts

HEADS, SIZE, BLOCK = 4, 64, 64
ROWS, LENGTH, EVOFORMER_HEADS, EVOFORMER_SIZE = 128, 256, 4, 32
VARIANTS = {"blocks": (4096, 16384), "dense": (4096, 16384), "masked": (4096,), "chunks": (0,), "naive": (0,)}


def sparse(variant: str, tokens: int) -> tuple[list[torch.Tensor], Callable[..., torch.Tensor]]:
    """Return inputs and the attention of a variant."""
    layout = layouts.BigBirdSparsityConfig(HEADS, BLOCK).make_layout(tokens)
    leaves = [torch.randn(1, HEADS, tokens, SIZE) for _ in range(3)]
    if variant == "blocks":
        return leaves, lambda *qkv: block_sparse_attention(*qkv, layout)
    if variant == "dense":
        return leaves, F.scaled_dot_product_attention
    mask = layout[:1].bool().repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
    return leaves, lambda *qkv: F.scaled_dot_product_attention(*qkv, mask)


def naive(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *biases: torch.Tensor) -> torch.Tensor:
    """Return Evoformer's attention with all scores in memory."""
    q, k, v = (each.transpose(-2, -3) for each in (query, key, value))
    scores = q @ k.transpose(-1, -2) / query.shape[-1] ** 0.5
    for bias in biases:
        scores = scores + bias
    return (scores.softmax(-1) @ v).transpose(-2, -3)


def case(variant: str, tokens: int) -> tuple[list[torch.Tensor], Callable[..., torch.Tensor], Callable[..., Any]]:
    """Return inputs, a variant, and the oracle in any type."""
    torch.manual_seed(1)
    if tokens:
        leaves, step = sparse(variant, tokens)
        return leaves, step, sparse("dense" if variant == "dense" else "masked", tokens)[1]
    shape = (1, ROWS, LENGTH, EVOFORMER_HEADS, EVOFORMER_SIZE)
    leaves = [torch.randn(each) for each in (shape, shape, shape, (1, ROWS, 1, 1, LENGTH))]
    leaves.append(torch.randn(1, 1, EVOFORMER_HEADS, LENGTH, LENGTH))
    return leaves, evoformer_attention if variant == "chunks" else naive, naive


def measure(variant: str, tokens: int, steps: int) -> dict[str, Any]:
    """Return times, peak memory and #wrong of a variant in this process."""
    leaves, step, oracle = case(variant, tokens)
    for leaf in leaves:
        leaf.requires_grad_()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        out = step(*leaves)
        found = torch.autograd.grad(out.sum(), leaves)
        times.append(1000 * (time.perf_counter() - begin))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    wrong = -1
    if tokens <= 4096:
        wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
        exact = oracle(*wide)
        expected = (exact, *torch.autograd.grad(exact.sum(), wide))
        pairs = zip((out, *found), expected, strict=True)
        wrong = sum(int((mine - each).abs().gt(1e-3 * each.abs().max()).sum()) for mine, each in pairs)
    row = {"variant": variant, "tokens": tokens, "ms": statistics.median(times)}
    return row | {"peak_MiB": peak >> 10, "wrong": wrong}


def main() -> int:
    """Run the variants in turn, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", help="write a JSON line for each row")
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.variant:
        print("ROW " + json.dumps(measure(given.variant, given.tokens, given.steps)))
        return 0
    rows = []
    for variant, sizes in VARIANTS.items():
        for tokens in sizes:
            command = [sys.executable, __file__, "--variant", variant, f"--tokens={tokens}", f"--steps={given.steps}"]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            rows.append(json.loads(done.stdout.partition("ROW ")[2]))
    for row in sorted(rows, key=lambda row: int(row["tokens"])):
        case_of = f"{row['tokens']} tokens" if row["tokens"] else f"Evoformer {ROWS} x {LENGTH}"
        wrong = row["wrong"] if row["wrong"] >= 0 else "-"
        print(f"{case_of:20} {row['variant']:>8} {row['ms']:10.1f} ms {row['peak_MiB']:7d} MiB   #wrong {wrong}")
    if given.json:
        with open(given.json, "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return int(any(row["wrong"] > 0 for row in rows))


if __name__ == "__main__":
    sys.exit(main())
