"""Options of `zcomm run` and `deepspeed` that choose nodes, slots and ranks: DeepSpeed's words, with "_" or "-"."""

from __future__ import annotations

import argparse
from typing import Any

from zcomm.launch.hostfile import DEFAULT
from zcomm.launch.runners import LAUNCHERS

DEFAULT_PORT = 29500  # of a job on several nodes, as torch's and DeepSpeed's
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


def add_options(parser: argparse._ActionsContainer, launcher: str = "ssh") -> None:
    """Declare the options; their names in the namespace and their defaults are DeepSpeed's. launcher: the default."""

    def option(*names: str, **how: Any) -> None:
        spellings = dict.fromkeys(each for name in names for each in (name, name[:2] + name[2:].replace("_", "-")))
        parser.add_argument(*spellings, **how)

    text: dict[str, Any] = {"default": "", "metavar": "TEXT"}
    count: dict[str, Any] = {"type": int, "default": -1, "metavar": "N"}
    option("-H", "--hostfile", metavar="FILE", help=f"lines HOST slots=N, a rank a slot (default {DEFAULT}, if there)")
    option("-i", "--include", **text, help="use these: HOST[:SLOT,...][@HOST...]")
    option("-e", "--exclude", **text, help="use all but these; as --include")
    option("--num_nodes", **count, help="use the first N hosts")
    option("--num_gpus", "--num_accelerators", **count, help="use the first N slots of each host")
    option("--master_addr", default="", metavar="HOST", help="where the ranks meet (default: the first host)")
    option("--master_port", type=int, metavar="PORT", help=f"(default {DEFAULT_PORT}; on one host a free one)")
    option("--launcher", default=launcher, type=str.lower, choices=LAUNCHERS, help="the program that starts the nodes")
    option("--launcher_args", **text, help="its options, as one argument, split as a shell does")
    option("--ssh_port", type=int, metavar="PORT", help="of sshd on the nodes")
    option("--venv_script", metavar="FILE", help="script that bash sources on each node before anything else")
    option("--force_multi", action="store_true", help="use the launcher for this host, too")
    option("--no_ssh", action="store_true", help="start the ranks of one node, here; give each node its --node_rank")
    option("--node_rank", **count, help="number of this node, with --no_ssh")
    option("--no_ssh_check", action="store_true", help="accepted; there is no check before the start")
    option("--no_local_rank", action="store_true", help="no --local_rank=N for the script, which `deepspeed` gives")
    option("--bind_cores_to_rank", action="store_true", help="bind each rank to its part of the cores")
    option("--bind_core_list", metavar="LIST", help="cores such as 0,4-7 (default: all)")
    option("--enable_each_rank_log", default="None", metavar="DIR", help="write output to files in DIR, and show none")
    option("--save_pid", action="store_true", help="write the launcher's pid to /tmp/<pid>.deepspeed")
    option("--elastic_training", action="store_true", help="torchrun starts the ranks, again when nodes come or go")
    option("--min_elastic_nodes", **count, help="(default 1)")
    option("--max_elastic_nodes", **count, help="(default: all)")
    option("--log_level", default="info", choices=LOG_LEVELS, help="from warning on the launcher's notes are left out")
    option("-q", "--quiet", action="store_true", help="as --log_level error")
