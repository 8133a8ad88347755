"""`zcomm bench`: start a bench of the source tree, with its own flags."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import zcomm
from zcomm.cli.parser import Commands
from zcomm.launch.errors import UserError

_PROGRAMS = {"swap": ("swap.py", "bandwidth"), "swapped-step": ("swap.py", "step")}


def add_parser(commands: Commands) -> None:
    """Declare the command's options."""
    parser = commands.add_parser(
        "bench", help="measure against a roof and peers (in a source tree only)", allow_abbrev=False
    )
    parser.add_argument(
        "name",
        choices=_PROGRAMS,
        help="swap: SwapFile against the best fio (bench/swap.py bandwidth); swapped-step: AdamW with its state on a "
        "drive against the drive's and the RAM's roof (bench/swap.py step)",
    )
    parser.add_argument("args", nargs=argparse.REMAINDER, help="options of the bench itself; --help lists them")
    parser.set_defaults(command=command)


def command(args: argparse.Namespace) -> int:
    """Run the bench and return its exit code."""
    name, case = _PROGRAMS[args.name]
    program = folder() / name
    if not program.exists():
        raise UserError(f"the benches are not here: they come with zcomm's source tree, as bench/{program.name}")
    return subprocess.run([sys.executable, str(program), case, *args.args], check=False).returncode


def folder() -> Path:
    """Return the folder of the benches in the package's source tree."""
    return Path(zcomm.__file__).resolve().parent.parent.parent / "bench"
