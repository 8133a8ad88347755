#!/usr/bin/env python3
"""One attention step over parts of a sequence next to DeepSpeed's DistributedAttention on Gloo, in turn.

  bench/sequence.py --deepspeed /path/to/python    (a Python with DeepSpeed; without it: zcomm and the roof)

A step is forward and backward of torch's attention, causal, in fp32: [tokens, batch, heads, size] are divided by tokens
and exchanged for heads. Each variant runs as processes of its own, one after the other, in several rounds.
Figures are medians of the steps of all rounds, and the shortest step, in milliseconds.
roof: the same attention of these heads without an exchange. x: the time over zcomm's. The sums of outputs are compared,
and a difference ends with 1.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

WARM = 5


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    parts = [each.permute(1, 2, 0, 3) for each in (query, key, value)]
    return F.scaled_dot_product_attention(*parts, is_causal=True).permute(2, 0, 1, 3)


def divided(variant: str) -> Callable[..., torch.Tensor]:
    """Join the job; return the attention of parts."""
    if variant == "zcomm":
        import zcomm
        from zcomm.parallel import ulysses

        zcomm.init()
        made: Callable[..., torch.Tensor] = ulysses(
            attention, zcomm.ProcessMesh(sequence=zcomm.world_size()), heads=2, sequence=0
        )
        return made
    import deepspeed
    import torch.distributed as dist
    from deepspeed.sequence.layer import DistributedAttention

    deepspeed.init_distributed(dist_backend="gloo")
    of_deepspeed = DistributedAttention(attention, dist.group.WORLD)
    return lambda query, key, value: of_deepspeed(query, key, value, 1)


def rank_main(given: argparse.Namespace) -> None:
    """Run the steps of one rank, and print their times and the sum of outputs."""
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(3, given.tokens, given.batch, given.heads, given.size, generator=generator)
    part = given.tokens // ranks
    given_parts = whole[:, rank * part : (rank + 1) * part]
    if given.variant == "roof":
        given_parts = whole[:, :, :, : given.heads // ranks]
    step = attention if given.variant == "roof" else divided(given.variant)
    times, out = [], torch.zeros(())
    for _ in range(WARM + given.steps):
        mine = [each.clone().requires_grad_() for each in given_parts]
        begin = time.perf_counter()
        out = step(*mine)
        out.sum().backward()
        times.append(1000 * (time.perf_counter() - begin))
    print("RANK " + json.dumps({"times": times[WARM:], "sum": float(out.detach().sum())}), flush=True)


def run(variant: str, python: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all ranks of a variant; return the record of each."""
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        port = door.getsockname()[1]
    common = {"WORLD_SIZE": str(given.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sizes = [f"--{name}={getattr(given, name)}" for name in ("tokens", "batch", "heads", "size", "steps")]
    processes = []
    for rank in range(given.ranks):
        more = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(given.ranks)}
        env = os.environ | common | more | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        command = [python, __file__, *sizes, "--variant", variant]
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    texts = [process.communicate(timeout=300)[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"{variant}: a rank failed")
    return [json.loads(text.partition("RANK ")[2].splitlines()[0]) for text in texts]


def main() -> int:
    """Run the variants in turn, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {
        "ranks": 2,
        "tokens": 2048,
        "batch": 1,
        "heads": 8,
        "size": 64,
        "steps": 15,
        "rounds": 3,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--deepspeed", metavar="PYTHON", help="a Python with DeepSpeed")
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.variant:
        rank_main(given)
        return 0
    pythons = {"roof": sys.executable, "zcomm": sys.executable}
    if given.deepspeed:
        pythons["DeepSpeed"] = given.deepspeed
    times: dict[str, list[float]] = {variant: [] for variant in pythons}
    sums = {}
    for number in range(given.rounds):
        for variant in list(pythons)[:: 1 if number % 2 else -1]:
            found = run(variant, pythons[variant], given)
            times[variant] += [max(of_ranks) for of_ranks in zip(*(each["times"] for each in found), strict=True)]
            sums[variant] = sum(each["sum"] for each in found)
    medians = {variant: statistics.median(each) for variant, each in times.items()}
    for variant, median in medians.items():
        shortest = min(times[variant])
        print(f"{variant:>10} {median:9.2f} ms, shortest {shortest:9.2f} ms   x {median / medians['zcomm']:.2f}")
    wrong = "DeepSpeed" in sums and abs(sums["DeepSpeed"] - sums["zcomm"]) > 1e-3 * abs(sums["zcomm"])
    if wrong:
        print(f"the sums of outputs differ: {sums}")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
