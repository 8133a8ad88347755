"""A step of a layer of experts by zcomm, and by DeepSpeed on Gloo in the same minutes; and the rate of the exchange.

Usage: python bench/experts.py [--deepspeed PYTHON] [--ranks 2] [--rounds 3] [--report FILE]
PYTHON: of an environment with DeepSpeed. Both sides run the same program (``import deepspeed``) by turns, so that other
load of the machine hits both. Prints a JSON line per side: milliseconds per step, the median of all rounds and steps.
The exchange: rows to experts with their counts, compared with the same rows and an all_to_all in memory that exists.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

DIM, EXPERTS, TOKENS, STEPS, WARM = 512, 8, 1024, 12, 3
ROOT = Path(__file__).resolve().parents[1]


def step_ms(stage: int, k: int) -> list[float]:
    """Train a layer of experts on this rank; return milliseconds of each step."""
    import importlib.util

    import torch

    if importlib.util.find_spec("deepspeed") is None:
        from zcomm.compat.deepspeed import install

        install()
    import deepspeed
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    deepspeed.init_distributed()
    torch.manual_seed(torch.distributed.get_rank())
    ranks = torch.distributed.get_world_size()
    expert = torch.nn.Sequential(torch.nn.Linear(DIM, 4 * DIM), torch.nn.GELU(), torch.nn.Linear(4 * DIM, DIM))

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(DIM, DIM)
            self.moe = MoE(DIM, expert, EXPERTS, ep_size=ranks, k=k, capacity_factor=1.0, min_capacity=0)

        def forward(self, x: Any) -> Any:
            out, aux, _ = self.moe(self.first(x))
            return out.float().square().mean() + 0.01 * aux

    model = Model()
    groups: Any = {"params": list(model.parameters()), "name": "all"}
    optimizer = torch.optim.AdamW(split_params_into_different_moe_groups_for_optimizer(groups), lr=1e-4)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": stage > 0},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    x = torch.randn(TOKENS, DIM, dtype=torch.bfloat16 if stage else torch.float32)
    found = []
    for _ in range(STEPS):
        torch.distributed.barrier()
        begin = time.perf_counter()
        engine.backward(engine(x))
        engine.step()
        found.append(1e3 * (time.perf_counter() - begin))
    return found[WARM:]


def exchange_ms() -> dict[str, list[float]]:
    """Return milliseconds of exchanges of rows, and of all_to_alls of the same bytes."""
    import torch

    import zcomm
    from zcomm.parallel.exchange import to_experts

    comm = zcomm.init()
    x, token = torch.randn(TOKENS, DIM), torch.arange(TOKENS).repeat(4)
    rows = torch.empty(len(token), DIM)
    out, counts = (
        torch.empty_like(rows),
        torch.full((comm.world_size, EXPERTS // comm.world_size), len(token) // EXPERTS),
    )
    times = dict[str, list[float]](exchange=[], all_to_all=[])
    for _ in range(60):
        comm.barrier()
        begin = time.perf_counter()
        to_experts(x, token, counts, comm)
        times["exchange"].append(1e3 * (time.perf_counter() - begin))
        comm.barrier()
        begin = time.perf_counter()
        torch.index_select(x, 0, token, out=rows)
        comm.all_to_all(out.view(-1), rows.view(-1))
        times["all_to_all"].append(1e3 * (time.perf_counter() - begin))
    zcomm.shutdown()
    return {name: each[10:] for name, each in times.items()}


def run(python: str, ranks: int, what: str) -> Any:
    """Run this file as ``ranks`` ranks of ``python``; return the value of rank 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
        common |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "LOCAL_WORLD_SIZE": str(ranks)}
        command = [python, __file__, "--rank", what, "--report", f"{folder}/0"]
        started = [
            subprocess.Popen(command, env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(ranks)
        ]
        codes = [process.wait(600) for process in started]
        if any(codes):
            raise SystemExit(f"{python}: a rank of {what} failed")
        return json.loads(Path(f"{folder}/0").read_text())


def main() -> None:
    """Run all sides, or one rank of a side."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deepspeed", help="Python with DeepSpeed")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        name, *numbers = given.rank.split()
        found: Any = exchange_ms() if name == "exchange" else step_ms(*map(int, numbers))
        if os.environ["RANK"] == "0":
            given.report.write_text(json.dumps(found))
        return
    sides = {"zcomm": sys.executable} | ({"deepspeed": given.deepspeed} if given.deepspeed else {})
    lines = []
    for stage, k in ((0, 1), (0, 2), (2, 2)):
        times: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(given.rounds):
            for side, python in sides.items():
                times[side] += run(python, given.ranks, f"step {stage} {k}")
        for side, each in times.items():
            lines.append({"what": "moe step", "side": side, "stage": stage, "k": k, "ms": statistics.median(each)})
    both = run(sys.executable, given.ranks, "exchange")
    medians = {name: statistics.median(each) for name, each in both.items()}
    lines.append({"what": "exchange", **medians, "share": medians["all_to_all"] / medians["exchange"]})
    text = "".join(json.dumps({**line, "ranks": given.ranks}) + "\n" for line in lines)
    print(text, end="")
    if given.report:
        given.report.write_text(text)


if __name__ == "__main__":
    main()
