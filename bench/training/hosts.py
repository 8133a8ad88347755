"""A training step on two hosts with a slow link between them: stage 3 over all ranks, HSDP, and FSDP2's HSDP over Gloo.

  bench/zero.py hosts                                (33.4M parameters, 2 x 2 ranks, 1 Gbit/s; needs root)
  bench/zero.py hosts --accum 4                      (4 micro-steps in a step)
  bench/zero.py hosts --gbit 10 --per-host 1
  bench/zero.py hosts --width 64 --layers 2          (a small one)
  bench/zero.py hosts --context 8 --variants zcomm-all,zcomm-all-int8,zcomm-all-int4,zcomm-all-w8g4,zcomm-hsdp,\
    zcomm-hsdp-int8,zcomm-hsdp-int4                  (with codecs; few samples, so that the link bounds the step)

The hosts are two network namespaces of this machine with a cable of the given rate (harness/link.py). Their ranks share
its cores, so computing is slower than on two machines. The variants take turns in the same processes, a step each in an
order drawn for each round; a round's time is the slowest rank's.
sent: bytes that a rank sends to the other host in a step, by the counter of the host's interface. The larger value of
both hosts counts. formula: zcomm.planning.meshes.traffic with the gathers of a trace, without headers of packets.
#wrong: of zcomm with one micro-step, weights with other bits than in the first variant, after all steps, on any rank.
Else, and of FSDP2: 1 if the mean loss leaves the first variant's by more than 1e-4 of it. (HSDP adds the gradients of
several micro-steps in another order.) With a codec: by more than 0.05, as errors arrive a step later.

Variants: zcomm-all; zcomm-hsdp, with a shard group on each host; zcomm-hpz, with state over all ranks; fsdp2-hsdp,
fully_shard on a 2-D mesh over Gloo. FSDP2
keeps the gradients of micro-steps before the last one in the host.
With codecs, only if named: -int8 and -int4 encode gradients. -w8g4 encodes weights in int8 and gradients in int4. -d4g4
is SDP4Bit: differences of weights and rotated gradients in int4. Weights that the ranks of a host share do not travel.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from harness import launch
from harness.link import link, sent_nbytes, why_not
from harness.program import add_run_arguments, listed, make_parser
from harness.record import JsonLines, command_line, machine
from harness.timing import Timing, interleaved
from training import gpt

VARIANTS = ("zcomm-all", "zcomm-hsdp", "zcomm-hpz", "fsdp2-hsdp")
CODED: dict[str, dict[str, Any]] = {  # suffix of a variant: its zcomm.Compression
    "int8": {"gradients": "int8"},
    "int4": {"gradients": "int4"},
    "w8g4": {"weights": "int8", "gradients": "int4"},
    "d4g4": {"weights": "int4", "differences": True, "gradients": "int4", "rotate": 32},
}
CODED_VARIANTS = (*(f"zcomm-all-{name}" for name in CODED), "zcomm-hsdp-int8", "zcomm-hsdp-int4")
HOSTS = 2
COUNTED_STEPS = 3
TOLERANCE, CODED_TOLERANCE = 1e-4, 0.05


@dataclass(frozen=True)
class Variant:
    """A trainer. step: takes one step and returns this rank's mean loss. formula: bytes to other hosts, of a rank.

    weights: returns all weights, whole; None if their bits are not compared. Collective. coded: its loss is nearby."""

    step: Callable[[], float]
    formula: float
    weights: Callable[[], Any] | None
    coded: bool = False


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("bench/zero.py hosts", __doc__)
    add = parser.add_argument
    add("--per-host", type=int, default=2, help="ranks on each host (2)")
    add("--gbit", type=float, default=1.0, help="rate of the link each way (1)")
    add("--precision", choices=("fp32", "bf16"), default="fp32", help="of zcomm; with bf16 FSDP2 is left out (fp32)")
    add("--accum", type=int, default=1, help="micro-steps in a step (1)")
    add("--variants", default=",".join(VARIANTS), help=f"by commas; also {', '.join(CODED_VARIANTS)}")
    add("--rounds", type=int, default=7, help="timed steps of each variant, at least 7 (7)")
    add("--warmup", type=int, default=2, help="steps before (2)")
    add("--bucket-mb", type=float, default=25.0, help="of zcomm (25)")
    gpt.add_arguments(parser, 64)
    add_run_arguments(parser, 1800.0)
    arguments = parser.parse_args(words)
    arguments.variants = listed(parser, "--variants", arguments.variants, (*VARIANTS, *CODED_VARIANTS))
    if arguments.precision != "fp32":  # its state would be bf16, too
        arguments.variants = [name for name in arguments.variants if name != "fsdp2-hsdp"]
    return arguments


def make_variant(name: str, arguments: argparse.Namespace, comm: Any) -> Variant:
    """Build a variant. Collective."""
    import zcomm
    from zcomm.planning import gathered_count
    from zcomm.planning.meshes import Cluster, Cut, traffic

    form, _, codecs = name.removeprefix("zcomm-").partition("-")
    cluster = Cluster(HOSTS, arguments.per_host, shared=True)
    cut = Cut(HOSTS, arguments.per_host, hpz=form == "hpz")
    if form == "all":
        cut = Cut(1, cluster.world_size)
    model = gpt.make_model(arguments)
    batches = [gpt.make_batch(arguments, comm.rank + comm.world_size * number) for number in range(arguments.accum)]
    numel = sum(param.numel() for param in model.parameters())
    item, precision = {"fp32": 4, "bf16": 2}[arguments.precision], arguments.precision
    gathered = gathered_count(model, gpt.make_batch(arguments, 0), cut.shard, precision, accumulation=arguments.accum)
    coded = CODED.get(codecs, {})
    if coded.get("differences"):
        gathered = numel  # once in a step
    weight_nbytes, sum_nbytes = _nbytes(coded.get("weights"), item), _nbytes(coded.get("gradients"), 4)
    formula = traffic(
        cut, cluster, numel, weight_nbytes, item, arguments.accum, gathered, sum_nbytes=sum_nbytes
    ).across_nbytes
    if name == "fsdp2-hsdp":
        return Variant(_fsdp2(model, batches, arguments.per_host), formula, None)
    options: dict[str, Any] = {}
    if form != "all":
        mesh = zcomm.ProcessMesh(replicate=HOSTS, shard=arguments.per_host)
        options = {"mesh": mesh, "hpz": form == "hpz"}
    if coded:
        options["compression"] = zcomm.Compression(**coded)
    return _zcomm(model, batches, arguments, options, formula)


def _nbytes(codec: str | None, exact: int) -> float:
    """Return the bytes of an element that travels, which has ``exact`` bytes without a codec."""
    import zcomm

    blocks = 1024
    return exact if codec is None else zcomm.Codec(codec).encoded_nbytes(256 * blocks) / (256 * blocks)


def _zcomm(
    model: Any, batches: list[Any], arguments: argparse.Namespace, options: dict[str, Any], formula: float
) -> Variant:
    import zcomm
    from training.variants import LEARNING_RATE, WEIGHT_DECAY

    optimizer = zcomm.ZeroOptimizer(
        model,
        "adamw",
        lr=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        stage=3,
        precision=arguments.precision,
        grad_accum=len(batches),
        bucket_mb=arguments.bucket_mb,
        **options,
    )

    def step() -> float:
        total = 0.0
        for batch in batches:
            loss = model(*batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += float(loss.detach()) / len(batches)
        return total

    def weights() -> Any:
        import torch

        whole = optimizer.full_state_dict()
        return torch.cat([whole[name].flatten() for name in sorted(whole)]) if whole else None

    coded = "compression" in options
    return Variant(step, formula, None if coded else weights, coded)


def _fsdp2(model: Any, batches: list[Any], per_host: int) -> Callable[[], float]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from training.variants import LEARNING_RATE, WEIGHT_DECAY

    mesh = init_device_mesh("cpu", (HOSTS, per_host), mesh_dim_names=("replicate", "shard"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)

    def step() -> float:
        total = 0.0
        for number, batch in enumerate(batches):
            model.set_requires_all_reduce(number == len(batches) - 1)
            loss = model(*batch) / len(batches)
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


def run_rank(arguments: argparse.Namespace) -> int:
    import torch
    import torch.distributed as dist

    import zcomm
    from harness.peers import default_group

    torch.set_num_threads(1)
    rank, world_size = launch.place()
    default_group(rank, world_size)
    comm = zcomm.init()
    variants = {name: make_variant(name, arguments, comm) for name in arguments.variants}
    losses: dict[str, list[float]] = {name: [] for name in variants}

    def gather(mine: Any) -> list[Any]:
        of_ranks: list[Any] = [None] * world_size
        dist.all_gather_object(of_ranks, mine)
        return of_ranks

    def call(name: str) -> Callable[[], None]:
        return lambda: losses[name].append(variants[name].step())

    calls = {name: call(name) for name in variants}
    timings = interleaved(calls, arguments.rounds, 1, arguments.warmup, dist.barrier, gather)
    sent: dict[str, float] = {}
    for name, step in calls.items():
        dist.barrier()
        before = sent_nbytes()
        for _ in range(COUNTED_STEPS):
            step()
        dist.barrier()
        sent[name] = max(gather((sent_nbytes() - before) / COUNTED_STEPS / arguments.per_host))
    last = {name: statistics.fmean(gather(mine[-1])) for name, mine in losses.items()}
    wrong = _wrong(variants, last, comm, bits=arguments.accum == 1)
    if rank == 0:
        numel = sum(param.numel() for param in gpt.make_model(arguments).parameters())
        report(
            arguments, comm.describe(), numel, timings, {n: v.formula for n, v in variants.items()}, sent, last, wrong
        )
    dist.barrier()
    dist.destroy_process_group()
    return int(any(wrong.values()))


def _wrong(variants: dict[str, Variant], losses: dict[str, float], comm: Any, bits: bool) -> dict[str, int]:
    """Count the wrong results of each variant. Collective."""
    import torch

    wrong: dict[str, int] = {}
    right: Any = None
    for name, variant in variants.items():
        if variant.weights is None or not bits:
            reference = next(iter(losses.values()))
            most = CODED_TOLERANCE if variant.coded else TOLERANCE * abs(reference)
            wrong[name] = int(not abs(losses[name] - reference) <= most)
            continue
        found = variant.weights()
        count = torch.zeros(1, dtype=torch.int64)
        if found is not None:
            right = found if right is None else right
            count += int((found.view(torch.int16) != right.view(torch.int16)).sum())
        comm.all_reduce(count, op="max")
        wrong[name] = int(count)
    return wrong


def report(
    arguments: argparse.Namespace,
    ranks: str,
    numel: int,
    timings: dict[str, Timing],
    formula: dict[str, float],
    sent: dict[str, float],
    losses: dict[str, float],
    wrong: dict[str, int],
) -> None:
    print(f"# {ranks}; link of {arguments.gbit:g} Gbit/s each way")
    print(
        f"# {numel / 1e6:.1f}M parameters {arguments.precision}, AdamW, stage 3, {arguments.accum} x {arguments.batch} "
        f"x {arguments.context} bytes per rank and step; medians of {arguments.rounds} turns, slowest rank"
    )
    print(
        f"# {'variant':<15} {'step (ms)':>10} {'quiet':>10} {'sent (MB)':>10} {'formula':>10} {'of it':>7} "
        f"{'mean loss':>10} {'#wrong':>6}"
    )
    for name, timing in timings.items():
        share = f"{sent[name] / formula[name]:.4f}" if formula[name] else "-"
        print(
            f"  {name:<15} {1e3 * timing.median:>10.1f} {1e3 * timing.quiet:>10.1f} {sent[name] / 1e6:>10.3f} "
            f"{formula[name] / 1e6:>10.3f} {share:>7} {losses[name]:>10.6f} {wrong[name]:>6}"
        )
    lines = JsonLines(arguments.json, arguments.append)
    lines.write({"kind": "machine", "command": command_line(), **machine()})
    lines.write(
        {
            "kind": "zero_hosts",
            "hosts": HOSTS,
            "per_host": arguments.per_host,
            "gbit": arguments.gbit,
            "precision": arguments.precision,
            "accum": arguments.accum,
            "numel": numel,
            "batch": arguments.batch,
            "context": arguments.context,
            "rounds": arguments.rounds,
            "step_ms": {name: 1e3 * timing.median for name, timing in timings.items()},
            "quiet_ms": {name: 1e3 * timing.quiet for name, timing in timings.items()},
            "sent_nbytes": sent,
            "formula_nbytes": formula,
            "mean_loss": losses,
            "wrong": wrong,
        }
    )


def main(words: Sequence[str]) -> int:
    arguments = parse_arguments(words)
    launch.use_project_python()
    if launch.is_rank():
        launch.leave(run_rank(arguments))
    reason = why_not()
    if reason:
        sys.exit(f"bench/zero.py hosts: {reason}")
    with link(arguments.gbit, arguments.per_host) as cable:
        return launch.start_ranks(HOSTS * arguments.per_host, arguments.timeout, link=cable)
