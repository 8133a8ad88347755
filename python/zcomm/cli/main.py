"""Entry of the `zcomm` command: picks the command and turns errors of use into one line on stderr.

Exit codes: 0; 2 for an error of use; otherwise the command's own (`zcomm run`: see docs/launch.md).
Invariant: parsing imports neither torch nor the core, so that --help and a launch are immediate.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from zcomm.cli.parser import Parser
from zcomm.launch.errors import UserError


def build_parser() -> Parser:
    """Create the parser of all commands; each sets `command` to its function (args -> exit code)."""
    import zcomm
    from zcomm.cli import bench, ckpt, doctor, generate, plan, run, top, tune
    from zcomm.demo import command as demo

    parser = Parser(prog="zcomm", description="Collectives, memory tiers and ZeRO for PyTorch.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"zcomm {zcomm.__version__}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    commands = parser.add_subparsers(title="commands", dest="command_name", metavar="COMMAND", parser_class=Parser)
    run.add_parser(commands)
    demo.add_parser(commands)
    doctor.add_parser(commands)
    bench.add_parser(commands)
    ckpt.add_parser(commands)
    plan.add_parser(commands)
    tune.add_parser(commands)
    top.add_parser(commands)
    generate.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.command_name is None:
        parser.print_help()
        return 2
    if args.debug:
        os.environ["ZCOMM_DEBUG"] = "1"  # ranks see it too
    debug = bool(os.environ.get("ZCOMM_DEBUG"))
    command: Callable[[argparse.Namespace], int] = args.command
    try:
        return command(args)
    except UserError as error:
        if debug:
            raise
        print(f"zcomm {args.command_name}: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        if debug:
            raise
        print(f"zcomm {args.command_name}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
