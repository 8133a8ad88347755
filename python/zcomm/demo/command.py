"""The `zcomm demo` command: options, the run's folder, the launch of its ranks, and clearing up.

Invariant: a run that ends, or is interrupted, leaves no swap file, and an interrupted run removes the folder that it
created. The next run removes files that a killed rank left in the swap directory.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zcomm.demo.options import OFFLOADS, PRECISIONS, SIZES, UPDATES, DemoConfig
from zcomm.launch import Job, launch
from zcomm.launch.errors import UserError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_DESCRIPTION = """\
Train a small GPT over bytes on the source of Python's standard library (or --data PATH), sharded over ranks, with its
state swapped to disk. Shows loss, tokens/s and where each second goes; at the end memory by tier against ZeRO's
formula, the swap's speed and a sample. Writes runs/NAME/{metrics.jsonl, loss.png, report.html}."""


def add_parser(commands: _SubParsersAction[Any]) -> None:
    """Declare the command's options."""
    parser = commands.add_parser(
        "demo",
        help="train a small GPT on real text with stage 3 and NVMe swap",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    job = parser.add_argument_group("how it is sharded")
    job.add_argument(
        "-n",
        "--np",
        dest="world_size",
        type=int,
        metavar="N",
        help="number of ranks (default 2; 1 for --size 300m and more, and on a GPU)",
    )
    job.add_argument(
        "--device", default="cpu", metavar="cpu|cuda|cuda:N", help="cuda: ranks take the GPUs in turns (default cpu)"
    )
    job.add_argument(
        "--mesh",
        metavar="AXIS=N,...",
        help="divide the model by several forms, such as data=2,pipe=2; axes data and pipe, with --size llama and "
        "larger also tensor and sequence. The sizes multiply to the number of ranks",
    )
    job.add_argument(
        "--microbatches",
        type=int,
        metavar="N",
        help="of a pipeline's pass (default: 4 for each stage, --batch at most)",
    )
    job.add_argument(
        "--stage", type=int, metavar="{0,1,2,3}", help="ZeRO stage (default 3; with --mesh pipe= or tensor= 2)"
    )
    job.add_argument("--offload", choices=OFFLOADS, default="nvme", help="tier of the state (default nvme)")
    job.add_argument(
        "--nvme-path",
        "--swap-dir",
        metavar="DIR[,DIR...]",
        help="where to swap (default: runs/swap); several drives: a directory on each",
    )
    job.add_argument("--precision", choices=PRECISIONS, help="default fp32; bf16 for --size 300m and more")
    job.add_argument("--memory", metavar="SIZE", help="the most memory that a rank may hold, such as 4GiB")
    job.add_argument(
        "--update",
        choices=UPDATES,
        default="step",
        help="when weights are updated, in stage 3 with --offload nvme (default auto); backward needs --clip 0",
    )
    job.add_argument("--bucket-mb", type=float, default=4.0, metavar="MIB", help="gradients that travel together")
    job.add_argument(
        "--no-overlap", dest="overlap", action="store_false", help="reduce after the backward pass, not during it"
    )
    model = parser.add_argument_group("the model")
    model.add_argument(
        "--size",
        choices=SIZES,
        default="tiny",
        help="default tiny; 300m, 1b and 3b are of Llama's shape; the options below change it",
    )
    for option, meaning in (
        ("layers", "transformer blocks"),
        ("heads", "attention heads"),
        ("width", "width of the residual stream"),
        ("context", "bytes per sequence"),
        ("batch", "sequences per rank and micro-step"),
        ("steps", "optimizer steps"),
    ):
        model.add_argument(f"--{option}", type=int, metavar="N", help=meaning)
    model.add_argument("--lr", type=float, help="peak learning rate")
    model.add_argument("--accum", type=int, default=1, metavar="N", help="micro-steps per step (default 1)")
    model.add_argument("--clip", type=float, default=1.0, help="clip the gradient norm to this (default 1; 0: off)")
    model.add_argument("--seed", type=int, default=1, help="of weights, batches and sample (default 1)")
    model.add_argument("--data", metavar="PATH", help="text file or directory to train on")
    parser.add_argument("--name", help="folder under runs/ for the results (default: demo-DATE-TIME)")
    parser.add_argument("--quiet", action="store_true", help="no progress, only the result")
    parser.set_defaults(command=command)


def command(args: argparse.Namespace) -> int:
    """Run the demo and return its exit code."""
    config = make_config(args)
    config.check()
    if config.world_size < 1:
        raise UserError(f"--np {config.world_size}: must be at least 1")
    check_data(config.data)
    made = make_directory(config.directory)
    made_for_swap: list[Path] = []
    if config.offload == "nvme":
        # Not in the run's folder, because the next run must find, and remove, files that a killed run left.
        given = args.nvme_path.split(",") if args.nvme_path else [config.directory.parent / "swap"]
        drives = [Path(drive).expanduser().absolute() for drive in given]
        try:
            for drive in drives:
                made_for_swap = make_directory(drive, "--nvme-path {}: cannot swap there") + made_for_swap
        except UserError:
            take_back([*made_for_swap, *made], config.directory, with_content=False)
            raise
        config = dataclasses.replace(config, nvme_path=[str(drive) for drive in drives])
    job = Job(
        argv=[sys.executable, "-m", "zcomm.demo.rank", config.to_json()],
        world_size=config.world_size,
        prefix=False,
        inherit_stdout=True,
        once=True,
        announce="zcomm demo",
    )
    code = launch(job)
    take_back(made_for_swap, config.directory, with_content=False)
    take_back(made, config.directory, with_content=code in (129, 130, 143))
    return code


def make_config(args: argparse.Namespace) -> DemoConfig:
    """Return the run that the options describe."""
    name = time.strftime("demo-%Y%m%d-%H%M%S") if args.name is None else args.name
    made: dict[str, Any] = {"name": name, "run_dir": str(Path("runs").absolute() / name), "nvme_path": None}
    names = {field.name for field in dataclasses.fields(DemoConfig)}
    given = {key: value for key, value in vars(args).items() if key in names and value is not None}
    alone = {} if args.device == "cpu" else {"world_size": 1}
    if args.mesh is not None:
        given["mesh"] = mesh = mesh_of(args.mesh)
        if args.world_size not in (None, ranks := math.prod(mesh.values())):
            raise UserError(f"--mesh {args.mesh} has {ranks} ranks, but --np is {args.world_size}: leave --np out")
        given["world_size"] = ranks
    config = DemoConfig(**{**SIZES[args.size], "stage": 3, **alone, **given, **made})
    return dataclasses.replace(config, stage=2) if args.stage is None and config.divides_layers else config


def mesh_of(text: str) -> dict[str, int]:
    """Return the ranks by axis of ``--mesh``. Raises: UserError."""
    from zcomm.planning.forms import parse

    try:
        return parse(text)
    except ValueError as error:
        raise UserError(f"--mesh {text}: {error}") from None


def check_data(path: str | None) -> None:
    """Refuse a missing or empty --data before any rank starts. Raises: UserError."""
    if path is None:
        return
    data = Path(path).expanduser()
    if not data.exists():
        raise UserError(f"--data {path}: no such file or directory")
    if not data.is_dir() and not data.is_file():
        raise UserError(f"--data {path}: neither a file nor a directory")
    if data.is_file() and data.stat().st_size == 0:
        raise UserError(f"--data {path}: the file is empty")
    if not os.access(data, os.R_OK):
        raise UserError(f"--data {path}: not readable")


def make_directory(directory: Path, complaint: str = "{}: cannot make this folder") -> list[Path]:
    """Make a writable directory with its parents; return those that were made, the innermost first.

    Raises: UserError with ``complaint`` about the directory.
    """
    made: list[Path] = []
    try:
        for path in (directory, *directory.parents):
            if path.exists():
                break
            made.append(path)
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return made
    except OSError as error:
        take_back(made, directory, with_content=False)
        raise UserError(f"{complaint.format(directory)}: {error.strerror}") from None


def take_back(made: list[Path], run: Path, *, with_content: bool) -> None:
    """Remove the directories that this command made and left empty; of an interrupted run also the content."""
    if with_content and run in made:
        shutil.rmtree(run, ignore_errors=True)
    for directory in made:
        with contextlib.suppress(OSError):  # not empty, or gone already
            directory.rmdir()
