"""`zcomm plan`: a table of stage x offload x world for a model, with "fits"; `--compare` with an earlier run."""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zcomm.cli import plan_forms, plan_gpu, plan_meshes, plan_parts
from zcomm.cli.parser import Commands
from zcomm.cli.plan_compare import compare
from zcomm.cli.plan_table import OFFLOADS, Case, compact, print_recommendations, print_table, seconds
from zcomm.cli.sizes import nbytes, shown
from zcomm.launch.errors import UserError

if TYPE_CHECKING:
    from zcomm.planning import Estimate, StepTime
    from zcomm.zero import Offload
    from zcomm.zero.options import Tier


def add_parser(commands: Commands) -> None:
    """Declare the command's options."""
    parser = commands.add_parser(
        "plan",
        help="memory plan: bytes by tier for each stage, offload and number of ranks",
        description="Bytes of one rank by tier, for each stage, offload and number of ranks, and whether it fits here.",
        allow_abbrev=False,
    )
    model = parser.add_mutually_exclusive_group()
    model.add_argument(
        "--params", type=_count, metavar="N", help="trained parameters: 7B, 350M or 7e9 (by ZeRO's formula)"
    )
    model.add_argument(
        "--model",
        metavar="MODULE:FUNCTION",
        help="a function that returns the model, or (model, inputs of a micro-batch); it runs on the meta device",
    )
    parser.add_argument(
        "--stage", type=_list(int, (0, 1, 2, 3)), default=[0, 1, 2, 3], help="stages to list (default: 0,1,2,3)"
    )
    parser.add_argument(
        "--offload", type=_list(str, OFFLOADS), default=list(OFFLOADS), help="tiers to list (default: none,cpu,nvme)"
    )
    parser.add_argument(
        "--gradients",
        choices=("cpu", "nvme", "device"),
        default="cpu",
        help="tier of the sums of gradients (default: cpu): nvme if the offload is; device for one rank with a GPU",
    )
    parser.add_argument(
        "--update",
        choices=("step", "forward", "backward", "auto"),
        default="auto",
        help="when updates run in stage 3 with offload nvme (default: auto, which is forward), and on a GPU with any "
        "offload (auto: step); in stage 3 backward means --gradients nvme",
    )
    parser.add_argument(
        "--atomic",
        action="store_true",
        help="two versions of weights and state in stage 3 with offload nvme, so that a step can be undone",
    )
    parser.add_argument("--world", type=_list(int), help="numbers of ranks, all on this host (default: 1,2)")
    parser.add_argument(
        "--precision",
        choices=("fp32", "bf16", "fp16"),
        default="fp32",
        help="of parameters and gradients (default: fp32)",
    )
    parser.add_argument(
        "--optimizer",
        choices=("adamw", "adam", "adamw-8bit", "lion", "adagrad", "sgd", "sgd-momentum"),
        default="adamw",
        help="decides the bytes of state per parameter (default: adamw)",
    )
    parser.add_argument(
        "--bucket-mb",
        type=float,
        default=25.0,
        metavar="MB",
        help="MiB of gradients that travel together (default: 25)",
    )
    parser.add_argument(
        "--unit-bytes", type=nbytes, metavar="SIZE", help="largest unit of stage 3: Units(max_bytes=); needs --model"
    )
    parser.add_argument(
        "--rows", action="store_true", help="gather larger weights by rows: Units(rows=True); needs --unit-bytes"
    )
    parser.add_argument("--accum", type=int, default=1, metavar="N", help="micro-steps per step (default: 1)")
    parser.add_argument("--activations", type=nbytes, metavar="SIZE", help="of a rank's micro-batch, if not traced")
    parser.add_argument("--memory", type=nbytes, metavar="SIZE", help="of the host (default: this machine's)")
    parser.add_argument(
        "--nvme-path",
        type=Path,
        default=Path("."),
        metavar="DIR",
        help="directory on the drive: its free space and measured speed count",
    )
    parser.add_argument(
        "--step-s",
        type=_positive,
        metavar="SECONDS",
        help="length of a step, for the drive's wear (default: as planned here; if that is unknown, of the swap)",
    )
    parser.add_argument(
        "--tbw", type=_positive, metavar="TB", help="terabytes that the drive is rated for: the days that they last"
    )
    parser.add_argument(
        "--compare",
        type=Path,
        metavar="METRICS",
        help="metrics.jsonl of a demo run: compare its plan with its measurements",
    )
    plan_parts.add_arguments(parser)
    plan_gpu.add_arguments(parser)
    plan_meshes.add_arguments(parser)
    plan_forms.add_arguments(parser)
    parser.set_defaults(command=command)


def command(args: argparse.Namespace) -> int:
    """Print the table, or the comparison."""
    if args.compare is not None:
        return compare(args.compare)
    if args.params is None and args.model is None:
        raise UserError("--params, --model or --compare is needed")
    if args.unit_bytes is not None and args.model is None:
        raise UserError(f"--unit-bytes {args.unit_bytes} needs --model: a number of parameters has no units")
    if args.gradients == "device" and args.update == "backward":
        raise UserError("--gradients device with --update backward, which keeps no sums: leave one out")
    if args.rows and args.unit_bytes is None:
        raise UserError("--rows needs --unit-bytes: larger weights are gathered by rows")
    plan_meshes.check(args)
    plan_forms.check(args)
    args.world = args.world or [1, 2]
    from zcomm.machine import speeds
    from zcomm.planning import TrueConditions, step_time

    model, inputs = (args.params, None) if args.model is None else _made(args.model, args.precision)
    memory = args.memory or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = _free(args.nvme_path)
    drive = drive_bps(args.nvme_path)
    room = {"memory": memory, "drive": free}
    rows, timed = [], False
    cases: dict[int, list[Case]] = {}
    with TrueConditions() as conditions:
        planned = plan_parts.Planned(args, model, inputs, _placed_by(args), _last_count(model, args))
        if args.hosts is not None:
            plan_meshes.show(args, planned, memory, free)
            return 0
        if args.mesh is not None:
            plan_forms.show(args, planned, memory, free)
            return 0
        work = planned.work(planned.way)
        for world, stage, offload in itertools.product(args.world, args.stage, args.offload):
            found = planned.estimate(planned.way, world, stage, offload)
            known = speeds.load(world)
            time = None if known is None else step_time(found, known, work, args.precision, args.accum, drive)
            timed = timed or known is not None
            needs = {"memory": found.host_nbytes * world, "drive": found.tier("nvme") * world}
            lacks = [name for name, nbytes in needs.items() if nbytes > room[name]]
            rows.append(_row(found, offload, lacks, drive, time, args.step_s, args.tbw))
            cases.setdefault(world, []).append(Case(stage, offload, needs, not lacks))
        print_recommendations(planned.count, args.precision, cases, room)
        print(f"\n{planned.count} trained parameters, {args.precision}, {args.optimizer}; bytes are of one rank")
        print_table(compact(rows))
        activations = planned.activations(planned.way)
        _notes(isinstance(model, int), activations, memory, free, drive, args.nvme_path)
        _time_notes(timed, work is not None)
        plan_parts.show(plan_parts.Host(planned, room, drive), cases)
        gpu = plan_gpu.show(args, planned.on_gpu(planned.way), memory, free, drive)
        if gpu is not None:
            plan_parts.show(plan_parts.Gpus(planned, gpu.room, gpu.host), gpu.cases)
    if conditions.count:
        print(f"{conditions.count} conditions on values of tensors were taken to be true, as of a mask without padding")
    return 0


def _last_count(model: Any, args: argparse.Namespace) -> int:
    """Return the parameters of the bucket that backward completes last, which has the first parameter."""
    from zcomm.zero.layout.flat import FIRST_NBYTES
    from zcomm.zero.options import as_precision

    item, bucket_nbytes = as_precision(args.precision).dtype.itemsize, int(args.bucket_mb * 2**20)
    if isinstance(model, int):
        return bucket_nbytes // item
    first = next((param.numel() for param in model.parameters() if param.requires_grad), 0)
    return max(first, min(FIRST_NBYTES, bucket_nbytes) // item)


def _placed_by(args: argparse.Namespace) -> Callable[[str, int], str | Offload]:
    return lambda offload, stage: _placed(offload, stage, args.gradients, args.update, args.atomic)


def _placed(offload: str, stage: int, gradients: str, update: Any, atomic: bool) -> str | Offload:
    """Return the offload of a case, with the tier of its sums of gradients, the place of its updates, and versions."""
    from zcomm.zero import Offload

    if offload != "nvme":
        return offload
    sums: Tier | None = "nvme" if gradients == "nvme" or (stage == 3 and update == "backward") else None
    if stage < 3:
        return Offload("nvme", gradients=sums)
    return Offload("nvme", "nvme", gradients=sums, update=update, atomic=atomic)


def _row(
    found: Estimate,
    offload: str,
    lacks: list[str],
    drive: tuple[float, float] | None,
    time: StepTime | None,
    step_s: float | None,
    tbw: float | None,
) -> dict[str, str]:
    from zcomm.planning import swap_seconds

    moved = found.swap_read_nbytes + found.swap_written_nbytes
    swap_s = swap_seconds(found.world_size, found.swap_read_nbytes, found.swap_written_nbytes, drive)
    return {
        "world": str(found.world_size),
        "stage": str(found.stage),
        "offload": offload,
        "device": shown(found.tier("device")),
        "cpu": shown(found.tier("cpu")),
        "nvme": shown(found.tier("nvme")),
        "swap per 1000 steps": shown(1000 * moved) if moved else "-",
        "swap per step": f"{swap_s:.3g} s" if swap_s else "-",
        **_wear(found, step_s or (time and time.step_s) or swap_s, tbw),
        "compute": seconds(time.compute_s if time else None),
        "comm": seconds(time.communication_s if time else None),
        "update": seconds(time.update_s if time else None),
        "step": seconds(time.step_s if time else None),
        "fits": f"no: {', '.join(lacks)}" if lacks else "yes",
    }


def _wear(found: Estimate, step_s: float | None, tbw: float | None) -> dict[str, str]:
    """Return the columns of bytes written to the drive: by a rank in a step, by all ranks in a day."""
    written = found.swap_written_nbytes
    a_day = found.world_size * written / step_s * 86400 if step_s else 0.0
    columns = {
        "written per step": shown(written) if written else "-",
        "a day": f"{a_day / 1e12:.3g} TB" if a_day else "-",
    }
    if tbw is not None:
        columns[f"days of {tbw:g} TB"] = f"{tbw * 1e12 / a_day:.3g}" if a_day else "-"
    return columns


def _notes(
    formula: bool, activations: int | None, memory: int, free: int, drive: tuple[float, float] | None, where: Path
) -> None:
    if formula:
        print("ZeRO's formula: without padding, slots and windows (--model counts them)")
    if activations is None:
        print("without activations (--activations, or --model with the inputs of a micro-batch)")
    else:
        print(f"device includes {shown(activations)} of activations of one micro-batch")
    print(f"fits: all ranks in {shown(memory)} of memory and {shown(free)} free in {where}")
    if drive is None:
        print("time of the swap is not known here: zcomm doctor --calibrate --dir DIR measures the drive")
    else:
        print(f"time of the swap at {drive[0] / 1e9:.2f} GB/s read, {drive[1] / 1e9:.2f} written, if nothing hides it")


def _time_notes(calibrated: bool, traced: bool) -> None:
    if not calibrated:
        print("time per step is not known here: zcomm doctor --calibrate measures this machine")
        return
    print("comm: gradients through reduce_scatter; update: the optimizer's pass; at this machine's measured speeds")
    if not traced:
        print("compute and step need --model with the inputs of a micro-batch")
    else:
        print("step: compute + comm, or the swap of parameters; then update, or the swap of the state (docs/fit.md)")


def _made(name: str, precision: str) -> tuple[Any, Any]:
    """Make the model on the meta device; return it, and the inputs of a micro-batch, or None."""
    import torch
    from torch import nn

    from zcomm.zero.options import as_precision

    module, colon, function = name.partition(":")
    if not colon:
        raise UserError(f"--model {name!r} is not MODULE:FUNCTION")
    if module.endswith(".py"):
        meant = module.removesuffix(".py").strip("./").replace("/", ".")
        raise UserError(f"--model {name}: give a module, not a file: --model {meant}:{function}")
    sys.path.insert(0, os.getcwd())
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise UserError(f"--model {name}: {error}") from error
    with torch.device("meta"):
        made = make()
    model, inputs = made if isinstance(made, tuple) else (made, None)
    if not isinstance(model, nn.Module):
        raise UserError(f"--model {name}: it gave {type(model).__name__}, not a module or (module, inputs)")
    model.to(as_precision(precision).dtype)
    return model, inputs


def _free(place: Path) -> int:
    if not place.is_dir():
        raise UserError(f"--nvme-path {place}: no such directory")
    return shutil.disk_usage(place).free


def drive_bps(place: Path) -> tuple[float, float] | None:
    """Return the bytes per second that the drive was measured to read and write, or None."""
    from zcomm.machine import swap_tuning

    try:
        row = json.loads(swap_tuning.path().read_text())["drives"][swap_tuning.drive(place)]
        return float(row["read_gbps"]) * 1e9, float(row["write_gbps"]) * 1e9
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _count(text: str) -> int:
    units = {"k": 3, "m": 6, "b": 9, "g": 9, "t": 12}
    power = units.get(text[-1:].lower(), 0)
    try:
        value = Decimal(text[:-1] if power else text).scaleb(power)
    except InvalidOperation:
        value = Decimal(0)
    if not value.is_finite() or value < 1 or value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of parameters, such as 7B, 350M or 7e9")
    return int(value)


def _list(kind: type, choices: tuple[Any, ...] | None = None) -> Any:
    def parse(text: str) -> list[Any]:
        try:
            values = [kind(word) for word in text.split(",")]
        except ValueError:
            values = []
        if not values or any(value not in choices if choices else value < 1 for value in values):
            known = f"one or more of {', '.join(map(str, choices))}" if choices else "whole numbers above 0"
            raise argparse.ArgumentTypeError(f"{text!r} is not {known}, with commas between")
        return values

    return parse
