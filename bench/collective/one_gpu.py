"""Collectives of several ranks that share one GPU, beside the device copy and NCCL.

  bench/coll.py one-gpu -np 2                        (all_reduce, reduce_scatter, all_gather; 64 MiB to 1 GiB)
  bench/coll.py one-gpu -np 4 --sizes 64M,256M --variants zcomm

The roof: every rank copies on the GPU, all at once, as many bytes as the operation cannot avoid. For all_reduce of N
bytes that is N read and N written per rank, for the others N + N/P of mixed traffic. zcomm: backend cuda_ipc on
symmetric tensors, in place. zcomm-private: on tensors of torch's own, by staging slots, a round of all ranks each.
nccl: torch.distributed with NCCL_MULTI_RANK_GPU_ENABLE=1, which NCCL knows from 2.30 on; older ones refuse two ranks on
a device, and a row has the reason. Each variant has ranks of its own, beside the roof in the same rounds: compare
shares. #wrong: elements that are not the exact sum.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from harness import launch
from harness.device import (
    PLAYED,
    SKIPPED,
    Rows,
    device_name,
    device_or_absent,
    release,
    synchronize,
    synchronized,
)
from harness.goal import goal
from harness.peers import default_group
from harness.program import listed, make_parser, parse_size
from harness.timing import MIN_ROUNDS, interleaved

OPS = ("all_reduce", "reduce_scatter", "all_gather")
ONE = "ZCOMM_BENCH_ONE_VARIANT"  # which of them a run of ranks measures
VARIANTS = ("zcomm", "nccl", "zcomm-private")


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("bench/coll.py one-gpu", __doc__)
    add = parser.add_argument
    add("-np", dest="world_size", type=int, default=2, help="ranks (2)")
    add("--sizes", default="64M,256M,1G", help="bytes of a rank's larger buffer, by commas (64M,256M,1G)")
    add("--ops", default=",".join(OPS), help="by commas (all)")
    add("--variants", default="zcomm,nccl", help="by commas (zcomm,nccl; zcomm-private)")
    add("--rounds", type=int, default=9, help=f"at least {MIN_ROUNDS} (9)")
    add("--json", metavar="FILE", help="append rows as JSON lines")
    add("--timeout", type=float, default=40.0, help="seconds for the ranks of a variant (40)")
    arguments = parser.parse_args(words)
    arguments.ops = listed(parser, "--ops", arguments.ops, OPS)
    arguments.variants = listed(parser, "--variants", arguments.variants, VARIANTS)
    arguments.rounds = max(MIN_ROUNDS, arguments.rounds)
    return arguments


class GlooHost:
    """Barrier and sums of small CPU tensors by torch's Gloo, named as a communicator's. Collective."""

    def __init__(self, rank: int, world: int) -> None:
        default_group(rank, world)

    def barrier(self) -> None:
        import torch.distributed as dist

        dist.barrier()

    def all_reduce(self, tensor: Any) -> None:
        import torch.distributed as dist

        dist.all_reduce(tensor)


class Buffers:
    """`whole` of N bytes and `part` of N / P, fp32, with the exact result of an operation."""

    def __init__(self, whole: Any, part: Any, rank: int, world: int) -> None:
        self.whole, self.part, self.rank, self.world = whole, part, rank, world

    def fill(self, op: str) -> None:
        """Fill with small integers: every sum is exact."""
        import torch

        if op == "all_gather":
            self.part.fill_(self.rank + 1)
            self.whole.zero_()
        else:
            pattern = torch.arange(self.whole.numel(), device=self.whole.device) % 7
            self.whole.copy_(pattern + self.rank)
            self.part.zero_()

    def wrong(self, op: str) -> int:
        import torch

        count, world = self.whole.numel(), self.world
        if op == "all_gather":
            right = torch.arange(count, device=self.whole.device) // (count // world) + 1
            return int((self.whole != right).sum().item())
        sums = (torch.arange(count, device=self.whole.device) % 7) * world + world * (world - 1) // 2
        if op == "all_reduce":
            return int((self.whole != sums).sum().item())
        share = count // world
        return int((self.part != sums[self.rank * share : (self.rank + 1) * share]).sum().item())


def zcomm_calls(
    rank: int, world: int, count: int, device: Any, private: bool = False
) -> tuple[Buffers, dict[str, Callable[[], object]]]:
    """Return calls on symmetric tensors of the communicator on this device, or torch's own."""
    import torch

    import zcomm

    empty = torch.empty if private else zcomm.empty
    whole, part = (empty(n, dtype=torch.float32, device=device) for n in (count, count // world))
    buffers = Buffers(whole, part, rank, world)
    return buffers, {
        "all_reduce": lambda: zcomm.all_reduce(buffers.whole),
        "reduce_scatter": lambda: zcomm.reduce_scatter(buffers.whole, out=buffers.part),
        "all_gather": lambda: zcomm.all_gather(buffers.part, out=buffers.whole),
    }


def nccl_calls(rank: int, world: int, count: int, device: Any) -> tuple[Buffers, dict[str, Callable[[], object]]]:
    import torch
    import torch.distributed as dist

    whole = torch.empty(count, device=device)
    part = torch.empty(count // world, device=device)
    return Buffers(whole, part, rank, world), {
        "all_reduce": lambda: dist.all_reduce(whole),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
    }


def roof(count: int, world: int, op: str, device: Any) -> Callable[[], object]:
    """Return a copy of this rank's part of the bytes that cannot be avoided, by the copy engine."""
    import torch

    moved = count if op == "all_reduce" else (count + count // world) // 2
    source, target = torch.zeros(moved, device=device), torch.empty(moved, device=device)
    return lambda: target.copy_(source)


def run_rank(arguments: argparse.Namespace) -> int:
    import torch
    import torch.distributed as dist

    import zcomm

    variant = os.environ[ONE]
    rank, world = launch.place()
    device = device_or_absent()
    if variant.startswith("zcomm"):
        zcomm.init(backend="auto" if PLAYED else "cuda_ipc", device=device, timeout=30.0)
        host: Any = GlooHost(rank, world)
    else:
        host = zcomm.init(timeout=30.0)  # NCCL carries what is measured
        store = f"file://{os.environ[launch.FOLDER]}/nccl"
        dist.init_process_group("nccl", rank=rank, world_size=world, init_method=store)
        dist.all_reduce(torch.ones(1, device=device))
        synchronize()

    def gather(mine: list[float]) -> list[list[float]]:
        every = torch.zeros(world, len(mine), dtype=torch.float64)
        every[rank] = torch.tensor(mine, dtype=torch.float64)
        host.all_reduce(every)
        return [list(map(float, row)) for row in every]

    rows = Rows(arguments.json if rank == 0 else None, f"Ranks that share a GPU ({world})")
    for size in map(parse_size, arguments.sizes.split(",")):
        count = size // 4 // world * world
        for op in arguments.ops:
            where = (rank, world, count, device)
            ours = variant.startswith("zcomm")
            buffers, calls = zcomm_calls(*where, variant == "zcomm-private") if ours else nccl_calls(*where)
            buffers.fill(op)
            synchronize()
            host.barrier()
            calls[op]()
            synchronize()
            bad = torch.tensor([buffers.wrong(op)], dtype=torch.int64)
            host.all_reduce(bad)
            buffers.whole.zero_()
            both = {variant: synchronized(calls[op]), "copy": synchronized(roof(count, world, op, device))}
            found = interleaved(both, arguments.rounds, 1, 2, host.barrier, gather)
            if rank == 0:
                mine, copy = found[variant].median, found["copy"].median
                columns = {"op": op, "ranks": world, "variant": variant, "MiB": size >> 20}
                columns |= {"us": 1e6 * mine, "copy us": 1e6 * copy, "share": copy / mine}
                if variant == "zcomm":
                    columns["goal"] = goal("coll.one_gpu").bound
                rows.add(**columns, **{"#wrong": int(bad.item())})
            del buffers, calls
            release()
    if variant == "nccl":
        dist.destroy_process_group()
    zcomm.shutdown()
    return 1 if rows.wrong else 0


def main(words: Sequence[str]) -> int:
    arguments = parse_arguments(words)
    launch.use_project_python()
    if launch.is_rank():
        launch.leave(run_rank(arguments))
    if ONE in os.environ:
        return launch.start_ranks(arguments.world_size, arguments.timeout)
    device = device_or_absent()
    print(f"# {arguments.world_size} ranks on {device_name(device)}, medians of {arguments.rounds} rounds")
    return start_variants(arguments)


def start_variants(arguments: argparse.Namespace) -> int:
    """Start each variant in ranks of its own, so that a failure or hang leaves the others alone.

    A peer that fails is a row.
    """
    worst = 0
    for variant in arguments.variants:
        env = {**os.environ, ONE: variant, "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_DEBUG": "WARN"}
        program = [sys.executable, *sys.argv]
        done = subprocess.run(
            program, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        if done.returncode in (0, SKIPPED) or variant.startswith("zcomm"):
            print(done.stdout, end="", flush=True)
            worst = max(worst, int(done.returncode not in (0, SKIPPED)))
            continue
        errors = re.findall(r"^(?:\S*Error|\S*Exception): .*|.*NCCL WARN.*", done.stdout, re.M)
        rows = Rows(arguments.json, "Peers that did not run")
        rows.add(peer=variant, ranks=arguments.world_size, why=(errors or ["it failed or took too long"])[0][:300])
    return worst
