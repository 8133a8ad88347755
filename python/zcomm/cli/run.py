"""`zcomm run`: start the ranks of a job, on this host or on the hosts of a hostfile."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from zcomm.cli.parser import Commands, OptionalChoice
from zcomm.cli.sizes import nbytes
from zcomm.compat.deepspeed import alias
from zcomm.launch import Job
from zcomm.launch.errors import UserError
from zcomm.launch.options import add_options
from zcomm.launch.start import program, start
from zcomm.watch import report

_DESCRIPTION = """\
Start the ranks of a Python script and answer for their end: one failed rank on any node ends all, and the first failure
is printed with its node and cause. Exit code: 0, that of the first failed rank, or 128 + signal.
With -n: N ranks on this host. With a hostfile: one rank per slot of its hosts. With neither: one rank per GPU here.
Each rank finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and ZCOMM_INIT_METHOD in its
environment; OMP_NUM_THREADS is cores / N unless you set it."""


class _Elsewhere(argparse.Action):
    """Option of another launcher: its error names zcomm's option. hint: {} is the option's value."""

    def __init__(self, option_strings: Sequence[str], dest: str, hint: str) -> None:
        super().__init__(option_strings, dest, nargs="?", help=argparse.SUPPRESS)
        self._hint = hint

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: object, values: object, option_string: str | None = None
    ) -> NoReturn:
        """End the command with the hint."""
        value = values if str(values or "").isdecimal() else "N"
        parser.error(f"{option_string}: {self._hint.format(value)}")


def add_parser(commands: Commands) -> None:
    """Declare the command's options."""
    parser = commands.add_parser(
        "run",
        help="start ranks of a script on this host or on several",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="zcomm run [-n N | -H hostfile] [options] script.py [args ...]  |  ... -m module [args ...]",
        allow_abbrev=False,
    )
    parser.add_argument("-n", "-np", "--np", type=positive, metavar="N", help="number of ranks, on this host")
    parser.add_argument(
        "--env", action="append", default=[], type=assignment, metavar="K=V", help="set a variable in every rank"
    )
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module name, as in python -m")
    parser.add_argument("--no-python", "--no_python", action="store_true", help="the script is any program")
    parser.add_argument("--no-prefix", action="store_true", help="do not start each line with [rank]")
    parser.add_argument(
        "--only-rank",
        type=int,
        metavar="RANK",
        help="show only the output of this rank; failures are shown",
    )
    parser.add_argument(
        "--report", type=Path, metavar="DIR", help="write DIR/report.html: loss, time and memory of the run, by rank"
    )
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        type=as_size,
        help="the most memory that the ranks of a host may hold together, such as 8GiB: a ZeroOptimizer keeps its part",
    )
    parser.add_argument("--tee", type=Path, metavar="DIR", help="also write DIR/rank0.out, DIR/rank0.err, ...")
    parser.add_argument(
        "--deepspeed",
        action=OptionalChoice,
        choices=("zcomm", "installed"),
        help="the package that `import deepspeed` finds in the ranks: zcomm (also without a value; the default if no "
        "deepspeed is installed), or the installed one",
    )
    add_options(parser.add_argument_group("nodes and GPUs (DeepSpeed's options; with - or _)"))
    for word in ("--nproc-per-node", "--nproc_per_node"):
        parser.add_argument(word, action=_Elsewhere, hint="did you mean -n {}?")
    parser.add_argument("--nnodes", action=_Elsewhere, hint="did you mean --num-nodes {}, of the hosts of a hostfile?")
    parser.add_argument("--hosts", action=_Elsewhere, hint="write lines HOST slots=N into a file, for --hostfile")
    parser.add_argument("--gpu-ring", action=_Elsewhere, hint="removed; to choose the GPUs set CUDA_VISIBLE_DEVICES")
    parser.add_argument("script", help="script, module or program to run")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    parser.set_defaults(command=command)


def command(args: argparse.Namespace) -> int:
    """Run the job and return its exit code."""
    argv, _ = program(args.script, args.module, args.no_python)
    environment = _environment(args.deepspeed, dict(args.env))
    job = Job(
        argv=argv + args.args,
        world_size=args.np or 1,
        environment=environment | _prepared(args.report) | ({"ZCOMM_MEMORY": args.memory} if args.memory else {}),
        prefix=not args.no_prefix,
        tee=args.tee,
        only_rank=args.only_rank,
    )
    try:
        code = start(job, args, args.np)
    except ValueError as error:
        raise UserError(str(error)) from None
    if args.report is not None:
        _report(args.report, code)
    return code


def _prepared(folder: Path | None) -> dict[str, str]:
    """Create the folder of a report. Returns: the variables of the ranks. Raises: UserError if that fails."""
    try:
        return {} if folder is None else report.prepare(folder)
    except OSError as error:
        raise UserError(f"--report {folder}: {error.strerror}") from None


def _report(folder: Path, code: int) -> None:
    try:
        print(f"zcomm run: {report.build(folder, code)}", file=sys.stderr)
    except OSError as error:
        print(f"zcomm run: no report in {folder}: {error.strerror}", file=sys.stderr)


def _environment(deepspeed: str | None, given: dict[str, str]) -> dict[str, str]:
    """Return ``given``, and the PYTHONPATH by which ``import deepspeed`` finds zcomm's, unless DeepSpeed's is wanted.

    Raises: UserError for "installed" if DeepSpeed is not installed.
    """
    there = alias.installed()
    if deepspeed == "installed" and there is None:
        raise UserError("--deepspeed installed: no deepspeed is installed here; leave it out to have zcomm's")
    if deepspeed == "installed" or (deepspeed is None and there is not None):
        return given
    return given | {"PYTHONPATH": alias.with_folder(given.get("PYTHONPATH", os.environ.get("PYTHONPATH", "")))}


def as_size(text: str) -> str:
    """Check a size such as 8GiB, for argparse."""
    nbytes(text)
    return text


def positive(text: str) -> int:
    """Parse an integer of at least 1, for argparse."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def assignment(text: str) -> tuple[str, str]:
    """Parse NAME=VALUE, for argparse."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value
