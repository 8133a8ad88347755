"""The hosts in `zcomm plan --hosts`: which ways to cut stage 3 fit, and which bytes of a step cross hosts."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from zcomm.cli import plan_gpu
from zcomm.cli.plan_table import OFFLOADS, count_in_words, print_table
from zcomm.cli.sizes import shown
from zcomm.launch.errors import UserError
from zcomm.machine import gpus

if TYPE_CHECKING:
    from zcomm.cli.plan_parts import Planned
    from zcomm.planning.meshes import Cluster, Cut, Traffic


CODECS = ("int8", "fp8", "int4")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the option."""
    parser.add_argument(
        "--hosts",
        type=int,
        metavar="H",
        help="compare ways to cut stage 3 over H hosts with --gpus ranks each: bytes between hosts, memory, best mesh",
    )
    parser.add_argument(
        "--compression",
        choices=CODECS,
        help="with --hosts, CPU ranks: gradients between hosts in this codec, as Compression(gradients=)",
    )


@dataclass(frozen=True)
class Choice:
    """A cut with an offload. tiers: bytes of one rank, by tier. lacks: memories that are too small."""

    cut: Cut
    offload: str
    traffic: Traffic
    tiers: Mapping[str, int]
    lacks: tuple[str, ...]

    @property
    def order(self) -> tuple[bool, int, float, int]:
        """The best choice fits, has the least offload, sends the fewest bytes to other hosts, has the most copies."""
        sent = round(self.traffic.across_nbytes)
        return bool(self.lacks), OFFLOADS.index(self.offload), sent, -self.cut.replicate


def check(args: argparse.Namespace) -> None:
    """Check options that do not belong together. Raises: UserError."""
    if args.hosts is None:
        if args.compression is not None:
            raise UserError(f"--compression {args.compression} needs --hosts: it is of sums between hosts")
        return
    if args.hosts < 1 or (args.gpus is not None and args.gpus < 1):
        raise UserError(f"--hosts {args.hosts} --gpus {args.gpus}: give whole numbers above 0")
    if 3 not in args.stage:
        raise UserError(f"--hosts {args.hosts} compares ways to cut stage 3, and --stage leaves it out")
    for name in ("world", "timeline", "measured"):
        if getattr(args, name) is not None:
            raise UserError(f"--hosts {args.hosts} is for --gpus ranks on each host; leave out --{name}")


def show(
    args: argparse.Namespace, planned: Planned, memory: int, free: int, machine: gpus.Machine | None = None
) -> None:
    """Print the recommended mesh and the table. memory, free: bytes of one host and of its drive. Raises: UserError."""
    from zcomm.planning.meshes import Cluster, cuts

    gpu = plan_gpu.host_of(args, gpus.read() if machine is None else machine, memory, free, None)
    if gpu is None and args.gpus is None:
        raise UserError(f"--hosts {args.hosts} needs --gpus, the number of ranks on each host")
    gpu_nbytes, per_host = (None, args.gpus) if gpu is None else (gpu.gpu_nbytes, gpu.count)
    if gpu_nbytes is not None and args.compression is not None:
        raise UserError(
            f"--compression {args.compression}: codecs run on the host, and the model is on GPUs: leave it out"
        )
    cluster = Cluster(args.hosts, per_host, shared=gpu_nbytes is None)
    room = {"host memory": memory, "drive": free, **({} if gpu_nbytes is None else {"GPU": gpu_nbytes})}
    found = [
        _choice(args, planned, cluster, cut, offload, room)
        for offload, cut in itertools.product(args.offload, cuts(cluster))
    ]
    hosts = f"{args.hosts} host{'s' if args.hosts > 1 else ''} x {per_host} rank{'s' if per_host > 1 else ''}"
    print(f"{count_in_words(planned.count)} {args.precision} on {hosts}: {_recommendation(found, room)}")
    print(f"\n{planned.count} trained parameters, {args.precision}, {args.optimizer}, stage 3; of one rank and step")
    print_table([_row(choice) for choice in found])
    _notes(cluster, room, planned, args.compression)


def _choice(
    args: argparse.Namespace, planned: Planned, cluster: Cluster, cut: Cut, offload: str, room: Mapping[str, int]
) -> Choice:
    from zcomm.planning.gpu_tiers import CONTEXT_NBYTES
    from zcomm.planning.meshes import errors_nbytes, traffic
    from zcomm.zero.options import as_precision

    kind, steps = as_precision(args.precision), planned.way.micro_steps
    shared = cluster.shared and cut.shard <= cluster.per_host
    needed = planned.estimate(
        planned.way, cut.shard, 3, offload, traffic=False, shared=shared, copies=(cut.replicate, cut.groups)
    )
    tiers = {tier: needed.tier(tier) for tier in ("device", "cpu", "nvme")}
    tiers["device"] += 0 if args.compression is None else errors_nbytes(cut, cluster, planned.count)
    on_gpu = "GPU" in room
    needs = {
        "host memory": (tiers["cpu"] + (0 if on_gpu else tiers["device"])) * cluster.per_host,
        "drive": tiers["nvme"] * cluster.per_host,
        "GPU": tiers["device"] + CONTEXT_NBYTES,
    }
    lacks = tuple(name for name, nbytes in room.items() if needs[name] > nbytes)
    gathered = planned.gathered(planned.way, cut.shard)
    sizes = kind.param_nbytes, kind.communication_dtype.itemsize
    sent = traffic(cut, cluster, planned.count, *sizes, steps, gathered, _sum_nbytes(args.compression))
    return Choice(cut, offload, sent, tiers, lacks)


def _sum_nbytes(codec: Literal["int8", "fp8", "int4"] | None) -> float:
    """Return the bytes of an element of a sum between hosts."""
    from zcomm.comm.codec import Codec

    many = 1 << 20
    return 4.0 if codec is None else Codec(codec).encoded_nbytes(many) / many


def _recommendation(found: list[Choice], room: Mapping[str, int]) -> str:
    best = min(found, key=lambda choice: choice.order)
    if best.lacks:
        limits = ", ".join(f"{shown(nbytes)} of {name}" for name, nbytes in room.items())
        least = min(found, key=lambda choice: choice.tiers["device"] + choice.tiers["cpu"])
        return f"nothing fits {limits}; the smallest is stage 3 {least.cut}, offload {least.offload}"
    how = f"{best.cut}, offload {best.offload}"
    return f"take stage 3 {how}: {shown(best.traffic.across_nbytes)} to other hosts per rank and step"


def _row(choice: Choice) -> dict[str, str]:
    return {
        "stage 3": str(choice.cut),
        "offload": choice.offload,
        "to other hosts": shown(choice.traffic.across_nbytes),
        "inside": shown(choice.traffic.inside_nbytes),
        **{tier: shown(nbytes) for tier, nbytes in choice.tiers.items()},
        "fits": f"no: {', '.join(choice.lacks)}" if choice.lacks else "yes",
    }


def _notes(cluster: Cluster, room: Mapping[str, int], planned: Planned, codec: str | None) -> None:
    steps = planned.way.micro_steps
    step = f"a step of {steps} micro-step{'s' if steps > 1 else ''}"
    sums = f"sums between hosts are {codec or 'fp32'}"
    print(f"bytes that a rank sends in {step}; {sums}; replicate=R, shard=S: docs/clusters.md")
    if isinstance(planned.model, int):
        print("ZeRO's formula: without padding, slots and windows (--model counts them)")
    limits = " and ".join(f"{shown(nbytes)} of {name}" for name, nbytes in room.items() if name != "GPU")
    each = f" and a GPU of {shown(room['GPU'])} for each rank" if "GPU" in room else ""
    print(f"fits: the {cluster.per_host} ranks of a host in {limits}{each}")
