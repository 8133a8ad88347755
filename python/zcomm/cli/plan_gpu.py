"""The GPUs in `zcomm plan`: which cases fit, the time of PCIe, host memory and drive, and the tokens that hide it."""

from __future__ import annotations

import argparse
import itertools
from typing import TYPE_CHECKING

from zcomm.cli.plan_table import Case, compact, print_recommendations, print_table, seconds
from zcomm.cli.sizes import nbytes, shown
from zcomm.machine import gpus
from zcomm.machine.gpu_specs import pcie_bps, peak_flops

if TYPE_CHECKING:
    from zcomm.planning.gpu_tiers import GpuCase, GpuHost


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that describe a GPU that this machine lacks."""
    parser.add_argument("--gpu-memory", type=nbytes, metavar="SIZE", help="plan for GPUs of this size, here or not")
    parser.add_argument("--gpu-name", metavar="NAME", help="GPU model, for its peak: H100, ... (default: that found)")
    parser.add_argument("--gpus", type=int, metavar="N", help="number of GPUs (default: those found, or 1)")


def show(
    args: argparse.Namespace,
    numel: int,
    activations: int | None,
    memory: int,
    free: int,
    drive: tuple[float, float] | None,
    machine: gpus.Machine | None = None,
) -> None:
    """Print the table of the GPUs, if there are any or the options describe one."""
    from zcomm.planning.gpu_tiers import gpu_case

    found = gpus.read() if machine is None else machine
    host = host_of(args, found, memory, free, drive)
    if host is None:
        return
    name = args.gpu_name or next((gpu.name for gpu in found.gpus), "GPU")
    cases = [
        gpu_case(
            numel,
            stage,
            offload,
            world,
            host,
            precision=args.precision,
            optimizer=args.optimizer,
            accumulation=args.accum,
            activations_nbytes=activations or 0,
        )
        for world, stage, offload in itertools.product(args.world, args.stage, args.offload)
    ]
    print(f"\non {host.count} x {name}, {shown(host.gpu_nbytes)} each; host memory and drive are of all ranks")
    room = {"GPU": host.count * host.gpu_nbytes, "host memory": memory, "drive": free}
    by_world = {world: [_case(case, host) for case in cases if case.world_size == world] for world in args.world}
    print_recommendations(numel, args.precision, by_world, room)
    print_table(compact([_row(case) for case in cases]))
    _notes(host, name, activations)


def host_of(
    args: argparse.Namespace, found: gpus.Machine, memory: int, free: int, drive: tuple[float, float] | None
) -> GpuHost | None:
    """Return the host to plan for, None without a GPU. If GPUs differ, the lowest value counts."""
    from zcomm.machine import speeds
    from zcomm.planning.gpu_tiers import GpuHost

    usable = [gpu for gpu in found.gpus if gpu.memory_nbytes and not gpu.lost]
    if args.gpu_memory is None and not usable:
        return None
    measured = speeds.load(1)
    lines = [pcie_bps(gpu.pcie.max_generation or gpu.pcie.generation, gpu.pcie.width) for gpu in usable]
    name = args.gpu_name or (usable[0].name if usable else "")
    return GpuHost(
        count=max(1, args.gpus or len(usable)),
        gpu_nbytes=args.gpu_memory or min(gpu.memory_nbytes or 0 for gpu in usable),
        host_nbytes=memory,
        drive_nbytes=free,
        flops=peak_flops(name),
        pcie_bps=min((line for line in lines if line is not None), default=None),
        memory_bps=None if measured is None else measured.far_bps * measured.world_size,
        drive_bps=drive,
        reach=found.reach,
    )


def _case(case: GpuCase, host: GpuHost) -> Case:
    gpus_in_use = min(host.count, case.world_size)
    needs = {"GPU": case.gpu_nbytes * gpus_in_use, "host memory": case.host_nbytes, "drive": case.drive_nbytes}
    return Case(case.stage, case.offload, needs, not case.lacks)


def _row(case: GpuCase) -> dict[str, str]:
    tokens = "-" if case.hiding_tokens is None else f"{case.hiding_tokens:.0f}"
    return {
        "world": str(case.world_size),
        "stage": str(case.stage),
        "offload": case.offload,
        "GPU": shown(case.gpu_nbytes),
        "host": shown(case.host_nbytes),
        "drive": shown(case.drive_nbytes),
        "PCIe": seconds(case.pcie_s) if case.pcie_s != 0 else "-",
        "CPU step": seconds(case.update_s) if case.update_s != 0 else "-",
        "sums": seconds(case.sums_s) if case.sums_s != 0 else "-",
        "swap": seconds(case.swap_s) if case.swap_s != 0 else "-",
        "hidden from tokens": tokens if case.hiding_tokens != 0 else "-",
        "fits": f"no: {', '.join(case.lacks)}" if case.lacks else "yes",
    }


def _notes(host: GpuHost, name: str, activations: int | None) -> None:
    from zcomm.planning.gpu_tiers import CONTEXT_NBYTES, MFU

    print("ZeRO's formula: slots and staging, some hundred MiB, come on top")
    if host.count > 1 and host.reach:
        print("offload none, several ranks: the GPUs are taken to read each other's memory (zcomm doctor: gpu links)")
    print(f"GPU includes {shown(CONTEXT_NBYTES)} of torch and driver per rank", end="")
    print("; without activations" if activations is None else f" and {shown(activations)} of activations")
    if host.flops is None:
        print(
            f"the peak of {name} is not in the table (--gpu-name), so the tokens that hide the CPU's step are not known"
        )
    else:
        print(
            f"hidden from: tokens per step (all ranks) that take as long as PCIe, CPU step and sums, or swap, at "
            f"{MFU:.0%} of {host.flops / 1e12:.0f} TFLOP/s: bytes per parameter x FLOP/s / (6 x bytes/s)"
        )
    if host.pcie_bps is None:
        print("the PCIe link is not told here (usual in virtual machines): bench/offload.py copies measures it")
    if host.memory_bps is None:
        print("the host memory's rate is not known here: zcomm doctor --calibrate measures it")
