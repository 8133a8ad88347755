"""The flags of a sweep: those of nccl-tests, and what it has not."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from collective import peers
from collective.operations import OPERATIONS, REDUCTIONS
from harness.flags import listed, make_parser, parse_size

TYPES = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "bfloat16": "bfloat16",
    "int8": "int8",
    "uint8": "uint8",
    "int32": "int32",
    "int64": "int64",
}
VARIANTS = ("symmetric", "private")


def parse_arguments(description: str | None, words: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("bench/allreduce_bw", description)
    add = parser.add_argument
    add("-b", "--minbytes", type=parse_size, default="8", help="smallest size (8)")
    add("-e", "--maxbytes", type=parse_size, default="64M", help="largest size (64M)")
    add("-f", "--stepfactor", type=float, default=2.0, help="factor between sizes (2)")
    add("-i", "--stepbytes", type=parse_size, help="increment between sizes, instead of -f")
    add("-d", "--datatype", choices=TYPES, default="float")
    add("-o", dest="redop", choices=REDUCTIONS, default="sum")
    add("-n", "--iters", type=int, default=20, help="timed calls per size, at least 7 (20)")
    add("-w", "--warmup_iters", type=int, default=5)
    add("-c", "--check", type=int, choices=(0, 1), default=1, help="1: verify every element (1)")
    add("-np", dest="world_size", type=int, default=2, help="ranks (2)")
    add("--op", default="all_reduce", help=f"by commas: {', '.join(OPERATIONS)}; or a reduction, as nccl-tests' --op")
    add(
        "--backend",
        default="auto",
        help="zcomm's transport; tcp: the roof is raw sockets; cuda_ipc, nccl: CUDA tensors",
    )
    sockets = int(os.environ.get("ZCOMM_TCP_SOCKETS", "4"))
    add("--sockets", type=int, default=sockets, help=f"raw sockets per neighbour in the roof of tcp ({sockets})")
    add("--variants", default=",".join(VARIANTS), help="zcomm's memory: symmetric (in place), private")
    add(
        "--peer", default="", help=f"also time, by commas: {', '.join(peers.NAMES)} (torch: torch.distributed on zcomm)"
    )
    add("--model", action="store_true", help="also print the alpha-beta model's times (docs/internals/algorithms.md)")
    add("--json", metavar="FILE", help="write the machine and the rows as JSON lines")
    add("--append", action="store_true", help="keep the lines that are in FILE")
    add("--png", metavar="FILE", help="draw the share of the roof over size (needs matplotlib)")
    add("--timeout", type=float, default=1800.0, help="seconds until the run is given up (1800)")
    arguments = parser.parse_args(words)
    if arguments.op in REDUCTIONS:
        arguments.redop, arguments.op = arguments.op, "all_reduce"
    arguments.ops = listed(parser, "--op", arguments.op, (*OPERATIONS,))
    arguments.peers = listed(parser, "--peer", arguments.peer, peers.NAMES)
    arguments.variants = listed(parser, "--variants", arguments.variants, VARIANTS)
    if not arguments.variants:
        parser.error("--variants: name at least one")
    if arguments.stepfactor <= 1 and not arguments.stepbytes:
        parser.error(f"-f {arguments.stepfactor}: the factor must be above 1")
    if arguments.world_size < 1:
        parser.error(f"-np {arguments.world_size}: at least one rank")
    if "sendrecv" in arguments.ops and arguments.world_size < 2:
        parser.error("--op sendrecv: at least two ranks (-np 2)")
    return arguments
