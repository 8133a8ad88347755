"""The GPUs in `zcomm plan`: which cases fit, the seconds of a step by lane, and the tokens that hide the longest."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zcomm.cli.plan_table import UNKNOWN, Case, compact, print_recommendations, print_table, seconds
from zcomm.cli.sizes import nbytes, shown
from zcomm.launch.errors import UserError
from zcomm.machine import gpu_speeds, gpus, speeds
from zcomm.machine.gpu_specs import PAYLOAD, pcie_bps, peak_flops

if TYPE_CHECKING:
    from zcomm.planning import Work
    from zcomm.planning.gpu_tiers import GpuCase, GpuHost
    from zcomm.planning.lanes import GpuStep
    from zcomm.zero import Offload

_COLUMNS = {"drive": "swap"}  # of lanes: another column has the bytes of the drive


@dataclass(frozen=True)
class Model:
    """The planned model. activations: bytes of a rank's micro-batch, None if unknown. work: of a rank's micro-batch, if
    it was traced. last_count: parameters of the bucket that completes last. offloaded: bytes of activations by other
    tiers. in_parts: blocks run in parts, and compute forward twice."""

    numel: int
    activations: int | None
    work: Work | None
    last_count: int
    offloaded: Mapping[str, int] = field(default_factory=dict)
    in_parts: bool = False


@dataclass(frozen=True)
class Shown:
    """The table that was printed. cases: by number of ranks. room: available bytes."""

    host: GpuHost
    cases: Mapping[int, list[Case]]
    room: Mapping[str, int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that describe a GPU that this machine lacks, and a step on it."""
    parser.add_argument("--gpu-memory", type=nbytes, metavar="SIZE", help="plan for GPUs of this size, here or not")
    parser.add_argument("--gpu-name", metavar="NAME", help="GPU model, for its peak: H100, ... (default: that found)")
    parser.add_argument("--gpus", type=int, metavar="N", help="number of GPUs (default: those found, or 1)")
    parser.add_argument(
        "--tokens", type=int, metavar="N", help="tokens of a step, of all ranks, if the model is not traced: on GPUs"
    )
    parser.add_argument("--clip", action="store_true", help="with clip_norm, so updates wait for the norm: on GPUs")
    parser.add_argument(
        "--timeline", type=Path, metavar="FILE", help="write the planned step on a GPU for Perfetto; for one case"
    )
    parser.add_argument(
        "--measured",
        type=Path,
        metavar="TRACE",
        help="trace of zcomm.profile or torch.profiler: its seconds next to the planned ones; for one case",
    )


def show(
    args: argparse.Namespace,
    model: Model,
    memory: int,
    free: int,
    drive: tuple[float, float] | None,
    machine: gpus.Machine | None = None,
) -> Shown | None:
    """Print the table of the GPUs, if there are any or the options describe one. Raises: UserError."""
    from zcomm.cli.plan_step import show_step

    asked = [name for name in ("timeline", "measured") if getattr(args, name) is not None]
    found = gpus.read() if machine is None else machine
    host = host_of(args, found, memory, free, drive)
    if host is None:
        if asked:
            raise UserError(f"--{asked[0]} needs a GPU here, or --gpu-memory: {found.absent}")
        return None
    name = args.gpu_name or next((gpu.name for gpu in found.gpus), "GPU")
    cases = {
        (world, stage, offload): case_of(args, model, host, world, stage, offload, args.accum)
        for world, stage, offload in itertools.product(args.world, args.stage, args.offload)
    }
    if asked and len(cases) > 1:
        raise UserError(f"--{asked[0]} is for one case: give one --world, one --stage and one --offload")
    print(f"\non {host.count} x {name}, {shown(host.gpu_nbytes)} each; host memory and drive are of all ranks")
    room = {"GPU": host.count * host.gpu_nbytes, "host memory": memory, "drive": free}
    by_world: dict[int, list[Case]] = {}
    for (world, _, offload), case in cases.items():
        by_world.setdefault(world, []).append(_case(case, offload, host))
    print_recommendations(model.numel, args.precision, by_world, room)
    print_table(compact([_row(case, offload) for (_, _, offload), case in cases.items()]))
    _notes(host, name, model.activations, gpu_speeds.load(name) is None)
    if len(cases) == 1:
        (case,) = cases.values()
        show_step(case.step, host.rates, args.measured, args.timeline)
    return Shown(host, by_world, room)


def case_of(
    args: argparse.Namespace, model: Model, host: GpuHost, world: int, stage: int, offload: str, micro_steps: int
) -> GpuCase:
    """Plan a case. model: with the activations and work of one of so many micro-steps. Raises: UserError."""
    from zcomm.planning.gpu_tiers import gpu_case

    flops, forward = _computing(args, model, micro_steps)
    try:
        return gpu_case(
            model.numel,
            stage,
            _placed(args, offload, stage, world),
            world,
            host,
            precision=args.precision,
            optimizer=args.optimizer,
            accumulation=micro_steps,
            activations_nbytes=model.activations or 0,
            offloaded=model.offloaded,
            clips=args.clip,
            flops=None if flops is None else flops * (world if args.tokens is None else 1),
            forward=forward,
            last_count=model.last_count,
        )
    except ValueError as error:
        raise UserError(str(error)) from error


def host_of(
    args: argparse.Namespace, found: gpus.Machine, memory: int, free: int, drive: tuple[float, float] | None
) -> GpuHost | None:
    """Return the host to plan for, None without a GPU. If GPUs differ, the lowest value counts.

    Rates are those that were measured on this machine, for a GPU of that name, else the tables' and the link's.
    """
    from zcomm.planning.gpu_tiers import MFU, GpuHost
    from zcomm.planning.lanes import Rates

    usable = [gpu for gpu in found.gpus if gpu.memory_nbytes and not gpu.lost]
    if args.gpu_memory is None and not usable:
        return None
    host = speeds.load(1)
    lines = [pcie_bps(gpu.pcie.max_generation or gpu.pcie.generation, gpu.pcie.width) for gpu in usable]
    line = min((line for line in lines if line is not None), default=None)
    name = args.gpu_name or (usable[0].name if usable else "")
    peak, measured = peak_flops(name), gpu_speeds.load(name)
    flops = None if peak is None else MFU * peak
    down = up = None if line is None else PAYLOAD * line
    if measured is not None:
        flops, down, up = measured.flops, measured.down_bps, measured.up_bps
    try:
        rates = Rates(flops, down, up, None if host is None else host.far_bps * host.world_size, drive)
    except ValueError as error:
        raise UserError(str(error)) from error
    return GpuHost(
        count=max(1, args.gpus or len(usable)),
        gpu_nbytes=args.gpu_memory or min(gpu.memory_nbytes or 0 for gpu in usable),
        host_nbytes=memory,
        drive_nbytes=free,
        rates=rates,
        reach=found.reach,
    )


def _placed(args: argparse.Namespace, offload: str, stage: int, world: int) -> Offload:
    """Return the offload of a case on GPUs, with the policy of its updates and the tier of sums that are legal."""
    from zcomm.zero import Offload
    from zcomm.zero.options import as_offload

    where = as_offload(offload, stage)
    if offload == "none":
        return where
    swaps = offload == "nvme" and (args.gradients == "nvme" or (stage == 3 and args.update == "backward"))
    used_up = stage < 3 and world == 1 and not swaps
    later = {"forward": stage == 3 or not swaps, "backward": used_up or (stage == 3 and offload == "nvme")}
    update: Any = args.update if later.get(args.update, True) else "step"
    sums: Any = "nvme" if swaps else "device" if args.gradients == "device" and world == 1 else None
    return Offload(where.optimizer, where.params, gradients=sums, update=update)


def _computing(args: argparse.Namespace, model: Model, micro_steps: int) -> tuple[float | None, float]:
    """Return the FLOP of a step, of all ranks with --tokens and else of a rank, and the share of forward in it."""
    from zcomm.planning.lanes import FORWARD

    if args.tokens is not None and args.tokens < 1:
        raise UserError(f"--tokens {args.tokens} is not above 0")
    if args.tokens is not None:
        again = 1 + FORWARD * model.in_parts
        return 6.0 * model.numel * args.tokens * again, FORWARD / again
    if model.work is None or not model.work.flops:
        return None, FORWARD
    return float(micro_steps * model.work.flops), model.work.forward_flops / model.work.flops


def _case(case: GpuCase, offload: str, host: GpuHost) -> Case:
    gpus_in_use = min(host.count, case.world_size)
    needs = {"GPU": case.gpu_nbytes * gpus_in_use, "host memory": case.host_nbytes, "drive": case.drive_nbytes}
    return Case(case.stage, offload, needs, not case.lacks)


def _row(case: GpuCase, offload: str) -> dict[str, str]:
    step, tokens = case.step, UNKNOWN if not case.hiding_tokens else f"{case.hiding_tokens:.0f}"
    times = None if step.missing else step.times()
    return {
        "world": str(case.world_size),
        "stage": str(case.stage),
        "offload": offload,
        "GPU": shown(case.gpu_nbytes),
        "host": shown(case.host_nbytes),
        "drive": shown(case.drive_nbytes),
        **lane_columns(step),
        "bound": seconds(times.bound_s if times else None),
        "step": seconds(times.step_s if times else None),
        "limit": times.limit if times else UNKNOWN,
        "hidden from tokens": tokens,
        "fits": f"no: {', '.join(case.lacks)}" if case.lacks else "yes",
    }


def lane_columns(step: GpuStep) -> dict[str, str]:
    """Return the seconds of the lanes, by column."""
    return {_COLUMNS.get(lane, lane): seconds(value) if value != 0 else UNKNOWN for lane, value in step.lanes.items()}


def _notes(host: GpuHost, name: str, activations: int | None, planned: bool) -> None:
    """planned: some seconds are of the peak in the table, and not measured."""
    from zcomm.planning.gpu_tiers import CONTEXT_NBYTES, MFU
    from zcomm.planning.lanes import REMEDIES

    print("ZeRO's formula: slots and staging, some hundred MiB, come on top")
    if host.count > 1 and host.reach:
        print("offload none, several ranks: the GPUs are taken to read each other's memory (zcomm doctor: gpu links)")
    print(f"GPU includes {shown(CONTEXT_NBYTES)} of torch and driver per rank", end="")
    print("; without activations" if activations is None else f" and {shown(activations)} of activations")
    flops = host.rates.flops
    if flops is None:
        print(
            f"the peak of {name} is not in the table (--gpu-name), so the tokens that hide the CPU's step are not known"
        )
    else:
        rate = (
            f"{MFU:.0%} of {flops / MFU / 1e12:.0f} TFLOP/s" if planned else f"the measured {flops / 1e12:.0f} TFLOP/s"
        )
        print(
            f"hidden from: tokens per step (all ranks) that compute for as long as the longest other lane, at {rate}: "
            "bytes per parameter x FLOP/s / (6 x bytes/s)"
        )
    if host.rates.down_bps is None:
        print(f"the rates of the bus are not known here: {REMEDIES['down']}")
    if host.rates.host_bps is None:
        print(f"the host memory's rate is not known here: {REMEDIES['memory bus']}")
