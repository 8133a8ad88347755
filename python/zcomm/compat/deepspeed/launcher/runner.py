"""``deepspeed.launcher.runner``: DeepSpeed's command line, on zcomm's launcher; the command ``deepspeed`` is `command`.

The functions have DeepSpeed's names and results; errors are ValueErrors with zcomm's words.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from zcomm.compat.deepspeed import alias
from zcomm.compat.deepspeed.modules import names_of
from zcomm.launch import hostfile
from zcomm.launch.errors import UserError
from zcomm.launch.job import Job
from zcomm.launch.options import add_options
from zcomm.launch.start import check_options, program, start
from zcomm.machine import gpus

DEEPSPEED_ENVIRONMENT_NAME = os.getenv("DS_ENV_FILE", ".deepspeed_env")  # file of variables for other hosts
DEEPSPEED_ENVIRONMENT_PATHS = [os.path.expanduser("~"), "."]
DLTS_HOSTFILE = str(hostfile.DEFAULT)
EXPORT_ENVS = ["MLFLOW", "PYTHON", "MV2", "UCX"]

__getattr__ = names_of(__name__)


def build_parser() -> argparse.ArgumentParser:
    """Create the parser of ``deepspeed``."""
    parser = argparse.ArgumentParser(prog="deepspeed", description="Start the ranks of a script, with zcomm.")
    add_options(parser, launcher="pdsh")
    parser.add_argument("--module", action="store_true", help="the script is a module name, as in python -m")
    parser.add_argument("--no_python", action="store_true", help="the script is any program")
    parser.add_argument("--autotuning", default="", choices=("tune", "run"), help="try configurations; run: train")
    parser.add_argument("user_script", help="script, module or program to run")
    parser.add_argument("user_args", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the arguments of ``deepspeed``, by default the program's own. Ends the program for a wrong one."""
    return build_parser().parse_args(args)


def main(args: Sequence[str] | None = None) -> None:
    """Start the ranks that the arguments describe, and wait for their end.

    Raises: SystemExit with the exit code of a job that failed; ValueError, UserError and OSError if none can start.
    """
    given = parse_args(args)
    if given.autotuning:
        code = _tune(given, sys.argv[1:] if args is None else args)
        sys.exit(code)
    if given.launcher == "pdsh" and shutil.which("pdsh") is None:
        given.launcher = "ssh"
    check_options(given)
    argv, local_rank_at = program(given.user_script, given.module, given.no_python)
    paths = alias.with_folder(os.environ.get("PYTHONPATH", ""))
    job = Job(
        argv=argv + given.user_args,
        world_size=1,
        environment={"PYTHONPATH": paths},
        announce="deepspeed",
        local_rank_at=local_rank_at,
        deepspeed=True,
    )
    code = start(job, given)
    if code:
        sys.exit(code)


def _tune(given: argparse.Namespace, words: Sequence[str]) -> int:
    """Try configurations of the script, and train with the best one if the option says "run". Returns: an exit code."""
    from zcomm.tuning import Autotuner

    before = list(words[: len(words) - len(given.user_args) - 1])
    at = next(at for at, word in enumerate(before) if word.partition("=")[0] == "--autotuning")
    given.launcher_words = before[:at] + before[at + (1 if "=" in before[at] else 2) :]
    pool = fetch_hostfile(given.hostfile or DLTS_HOSTFILE) or {
        "localhost": max(1, given.num_gpus, len(gpus.read().gpus))
    }
    hosts = parse_inclusion_exclusion(pool, given.include, given.exclude)
    tuner = Autotuner(given, hosts)
    tuner.tune()
    tuner.print_tuning_results()
    return tuner.run_after_tuning() if given.autotuning == "run" else 0


def command() -> None:
    """Run ``deepspeed`` as a command: an error of use is one line on stderr and exit code 2."""
    try:
        main()
    except UserError as error:
        print(f"deepspeed: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except (ValueError, OSError) as error:
        print(f"deepspeed: error: {error}", file=sys.stderr)
        sys.exit(2)


def fetch_hostfile(hostfile_path: str) -> dict[str, int] | None:
    """Return the number of slots of each host of a file, or None if there is no file. Raises: ValueError."""
    return hostfile.read(Path(hostfile_path)) if os.path.isfile(hostfile_path) else None


def _parse_hostfile(hostfile_lines: Iterable[str]) -> dict[str, int]:
    return hostfile.parse(hostfile_lines)


def parse_resource_filter(
    host_info: Mapping[str, Sequence[int]], include_str: str = "", exclude_str: str = ""
) -> dict[str, list[int]]:
    """Return the hosts and slots that are included, or not excluded. Raises: ValueError."""
    return hostfile.choose(host_info, include_str, exclude_str)


def parse_inclusion_exclusion(resource_pool: Mapping[str, int], inclusion: str, exclusion: str) -> dict[str, list[int]]:
    """Return the hosts with their chosen slots, of hosts with numbers of slots. Raises: ValueError."""
    return hostfile.choose(hostfile.slots_of(resource_pool), inclusion, exclusion)


def encode_world_info(world_info: Mapping[str, object]) -> str:
    """Return hosts and their slots as base64 of JSON."""
    return base64.urlsafe_b64encode(json.dumps(world_info).encode()).decode()


if __name__ == "__main__":
    command()
