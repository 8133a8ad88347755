"""`zcomm tune`: short runs of a program that choose its ZeRO stage and micro batch size."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from zcomm.cli.parser import Commands
from zcomm.launch.errors import UserError

_DESCRIPTION = """\
Start a script several times for a few steps, with other stages and micro batch sizes, and write the best configuration.
The script's arguments name a configuration of DeepSpeed: --deepspeed_config FILE or --deepspeed FILE. Its section
"autotuning" has the options, and "zero_optimization": {"stage": [1, 2, 3]} the stages.
"""


def add_parser(commands: Commands) -> None:
    """Declare the command's options."""
    parser = commands.add_parser(
        "tune",
        help="choose a ZeRO stage and a micro batch size by short runs of a script",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="zcomm tune [-n N | -H hostfile] [options] script.py --deepspeed_config FILE [args ...]",
        allow_abbrev=False,
    )
    parser.add_argument("-n", "--np", type=int, metavar="N", help="number of ranks, on this host")
    parser.add_argument("-H", "--hostfile", metavar="FILE", help="hosts, as in zcomm run")
    parser.add_argument("--run", action="store_true", help="train with the best configuration afterwards")
    parser.add_argument(
        "--limit-s", type=float, default=600.0, metavar="SECONDS", help="of each run; it is killed then (default: 600)"
    )
    parser.add_argument("script", help="the script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="args", help="its arguments")
    parser.set_defaults(command=command)


def _ranks(args: argparse.Namespace) -> int:
    """Return the number of ranks that `zcomm run` starts with these options."""
    from zcomm.launch import hostfile
    from zcomm.machine import gpus

    file = Path(args.hostfile) if args.hostfile else hostfile.DEFAULT
    if args.np:
        return int(args.np)
    if args.hostfile or file.exists():
        return sum(hostfile.read(file).values())
    return max(1, len(gpus.read().gpus))


def command(args: argparse.Namespace) -> int:
    """Tune, print the table, and train if asked."""
    from zcomm.tuning import Tuning

    if not Path(args.script).is_file():
        raise UserError(f"{args.script}: no such script")
    if not args.limit_s > 0:
        raise UserError(f"--limit-s {args.limit_s}: must be above 0")
    options = [word for name, value in (("-n", args.np), ("-H", args.hostfile)) if value for word in (name, str(value))]
    launch = [sys.executable, "-m", "zcomm.cli", "run", *options, args.script]
    try:
        tuning = Tuning(launch, args.arguments, args.limit_s, _ranks(args))
        tuning.tune()
    except (ValueError, NotImplementedError) as error:
        raise UserError(str(error)) from error
    tuning.print_tuning_results()
    return tuning.run_after_tuning() if args.run else 0
