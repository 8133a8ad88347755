"""Time and bandwidth of a collective beside its roof and its peers, with the flags of nccl-tests.

  bench/allreduce_bw -np 2 -b 1K -e 64M -f 8 -d float -o sum -n 20 -w 5 -c 1 --peer gloo,openmpi
  bench/allreduce_bw --op reduce_scatter -b 8 -e 1G -f 8 --peer gloo --json rows.jsonl --png share.png
  mpirun -n 2 bench/allreduce_bw -b 64M -e 64M            (under a launcher, -np is the launcher's)

Lines: symmetric (tensors from zcomm.empty), private (torch's own memory), then the peers. All are timed in turn with
the roof in one loop. #wrong counts elements, over all ranks, that differ from the exact result.
algbw = size / time. busbw = algbw * f makes algorithms and world sizes comparable (P ranks, as nccl-tests). f is:
  2 (P-1)/P  for all_reduce
  (P-1)/P    for reduce_scatter, all_gather and all_to_all
  1          for broadcast and sendrecv.
With --backend cuda_ipc or nccl tensors are on CUDA devices (ranks of a host may share one), the roof is a copy there.
size is that of the larger buffer of a rank. With Open MPI or MPICH among the peers, mpirun starts the ranks.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from collective import peers
from collective.operations import OPERATIONS, REDUCTIONS, TYPES
from harness import launch, mpi
from harness.program import add_run_arguments, listed, make_parser, parse_size, sizes
from harness.record import JsonLines, command_line, machine

VARIANTS = ("symmetric", "private")


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("bench/allreduce_bw", __doc__)
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
    add("--png", metavar="FILE", help="draw the share of the roof over size (needs matplotlib)")
    add_run_arguments(parser, 1800.0)
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
    for op in arguments.ops:
        least = OPERATIONS[op].least_ranks
        if arguments.world_size < least:
            parser.error(f"--op {op}: at least {'two' if least == 2 else least} ranks (-np {least})")
    return arguments


def start(arguments: argparse.Namespace) -> int:
    """Start one run for each MPI among the peers, or one without."""
    runs: list[mpi.Mpi | None] = []
    for name in (peer for peer in arguments.peers if peer in mpi.NAMES):
        found = mpi.find(name)
        if isinstance(found, str):
            print(f"# peer {name}: skipped, {found}", flush=True)
        else:
            runs.append(found)
    code = 0
    for number, run in enumerate(runs or [None]):
        code |= launch.start_ranks(arguments.world_size, arguments.timeout, run)
        if number == 0 and len(runs) > 1 and arguments.json and "--append" not in sys.argv:
            sys.argv.append("--append")
    return code


def run_rank(arguments: argparse.Namespace) -> int:
    import torch

    import zcomm

    torch.set_num_threads(1)
    comm = zcomm.init(backend=arguments.backend)
    if comm.device.type == "cuda":
        torch.cuda.set_device(comm.device)
        if comm.backend == "nccl":  # no symmetric memory
            arguments.variants = ["private"]
    rank, world = zcomm.rank(), zcomm.world_size()
    lines = JsonLines(arguments.json if rank == 0 else None, arguments.append)
    say = print if rank == 0 else _silent
    peers, skipped = open_peers(arguments, rank, world, say)
    sockets = open_socket_roof(arguments, rank, world, say)
    about = {"command": command_line(), "world_size": world, "skipped": skipped}
    lines.write({"kind": "machine", **about, **machine()})
    model = None
    if arguments.model:
        from collective.calibrate import calibrate

        model = calibrate(arguments, sockets)
        lines.write({"kind": "model", **vars(model)})
        say(f"# model: {model}")
    wrong = sum(sweep(arguments, op, peers, sockets, model, lines, say) for op in arguments.ops)
    say(f"# #wrong in all: {wrong if arguments.check else 'not checked'}", flush=True)
    for peer in peers.values():
        peer.close()
    if sockets:
        sockets.close()
    zcomm.barrier()
    zcomm.shutdown()
    return 1 if wrong else 0


def sweep(
    arguments: argparse.Namespace, op: str, peers: dict[str, Any], sockets: Any, model: Any, lines: JsonLines, say: Any
) -> int:
    """Run all sizes of one operation and return #wrong."""
    from collective.calibrate import predict
    from collective.measure import fits, measure
    from collective.show import draw, header_lines, row_lines

    arguments.op = op
    for line in header_lines(arguments, list(peers)):
        say(line, flush=True)
    rows = []
    for nbytes in sizes(arguments.minbytes, arguments.maxbytes, arguments.stepfactor, arguments.stepbytes):
        if not fits(arguments, nbytes):
            say(f"# size {nbytes}: skipped, the ranks would need more memory than there is")
            continue
        row: dict[str, Any] = measure(arguments, nbytes, peers, sockets)
        if model:
            times = {name: predict(arguments, model, name, row["nbytes"]) for name in arguments.variants}
            row["model_us"] = {name: 1e6 * time for name, time in times.items() if time is not None}
        rows.append(row)
        lines.write(row)
        for line in row_lines(arguments, row, list(peers)):
            say(line, flush=True)
    if arguments.png and say is print:
        picture = Path(arguments.png)
        say(draw(rows, str(picture.with_stem(f"{picture.stem}-{op}") if len(arguments.ops) > 1 else picture)))
    return sum(count or 0 for row in rows for count in row["wrong"].values())


def open_peers(arguments: argparse.Namespace, rank: int, world: int, say: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Open the peers that all ranks have; the others are skipped with a line."""
    from collective.measure import gather
    from collective.peers import open_peer
    from harness.peers import Absent

    opened, skipped = {}, {}
    for name in arguments.peers:
        reason = ""
        try:
            opened[name] = open_peer(name, rank, world)
        except Absent as absent:
            reason = str(absent)
        if min(of_rank[0] for of_rank in gather([float(not reason)])) == 0:
            opened.pop(name, None)
            skipped[name] = reason or "another rank does not have it"
            if name not in mpi.NAMES or os.environ.get(launch.MPI) == name:  # else start() has said it
                say(f"# peer {name}: skipped, {skipped[name]}", flush=True)
    return opened, skipped


def open_socket_roof(arguments: argparse.Namespace, rank: int, world: int, say: Any) -> Any:
    from collective import roof
    from collective.measure import gather
    from harness.library import bench_library

    if arguments.backend != "tcp" or world == 1:
        return None
    library = bench_library()
    if isinstance(library, str):
        say(f"# roof: memory instead of raw sockets, {library}", flush=True)
        return None
    return roof.SocketRoof(
        library, arguments.sockets, rank, world, lambda port: [int(of_rank[0]) for of_rank in gather([float(port)])]
    )


def _silent(*_values: object, **_options: object) -> None:
    pass


def main(words: Sequence[str]) -> int:
    arguments = parse_arguments(words)
    launch.use_project_python()
    if launch.is_rank():
        launch.leave(run_rank(arguments))
    return start(arguments)
