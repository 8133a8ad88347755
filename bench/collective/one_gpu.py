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
from collections.abc import Sequence
from functools import partial
from typing import Any

from collective import check
from collective.operations import OPERATIONS, Call
from collective.roof import device_roof
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
        host = zcomm.init(timeout=30.0)  # NCCL carries the measured operations
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
            operation = OPERATIONS[op]
            empty = zcomm.empty if variant == "zcomm" else torch.empty
            inp, out = operation.buffers(count, world, partial(empty, dtype=torch.float32, device=device))
            if variant.startswith("zcomm"):
                call = operation.zcomm(zcomm, "sum", inp, out)
            else:
                assert operation.torch is not None
                call = operation.torch(dist, dist.group.WORLD, dist.ReduceOp.SUM, inp, out)

            def checked(call: Call = call) -> None:
                synchronize()
                host.barrier()
                call()
                synchronize()

            bad = torch.tensor([check.wrong(operation, "sum", inp, out, checked, rank, world)], dtype=torch.int64)
            host.all_reduce(bad)
            inp.zero_()
            out.zero_()
            roofs = device_roof(operation, 4 * count, world, device)
            both = {variant: synchronized(call), "copy": synchronized(roofs["device_copy"])}
            found = interleaved(both, arguments.rounds, 1, 2, host.barrier, gather)
            if rank == 0:
                mine, copy = found[variant].median, found["copy"].median
                columns = {"op": op, "ranks": world, "variant": variant, "MiB": size >> 20}
                columns |= {"us": 1e6 * mine, "copy us": 1e6 * copy, "share": copy / mine}
                if variant == "zcomm":
                    columns["goal"] = goal("coll.one_gpu").bound
                rows.add(**columns, **{"#wrong": int(bad.item())})
            del inp, out, call, checked, roofs, both
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
    """Start each variant in separate ranks, so that a failure or hang does not affect the others.

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
