"""`zcomm generate FOLDER`: text from a language model that does not fit into memory."""

from __future__ import annotations

import argparse
from pathlib import Path

from zcomm.cli.parser import Commands
from zcomm.cli.sizes import nbytes
from zcomm.launch.errors import UserError


def add_parser(commands: Commands) -> None:
    """Declare the command's options."""
    parser = commands.add_parser("generate", help="generate with a model that does not fit", allow_abbrev=False)
    parser.set_defaults(command=command)
    parser.add_argument("model", type=Path, help="folder of transformers' save_pretrained, with its tokenizer")
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="may be given several times")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="a prompt on each line")
    parser.add_argument("--memory", type=nbytes, metavar="SIZE", help="most memory of the process, for example 4GB")
    parser.add_argument(
        "--weights", choices=("nvme", "cpu"), default="nvme", help="place of the weights (default: nvme)"
    )
    parser.add_argument(
        "--quantize", choices=("int8", "int4"), help="bits that matrices are kept in (default: their own)"
    )
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="most new tokens of a prompt (default: 64)")
    parser.add_argument("--batch", type=int, metavar="N", help="prompts at a time (default: as many as fit)")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="directory on a drive for the weights (default: MODEL)")
    parser.add_argument("--device", metavar="DEVICE", help="device that computes (default: cpu)")


def command(args: argparse.Namespace) -> int:
    """Generate, with a line of progress on stderr, and print the texts. Raises: UserError."""
    prompts = [*args.prompt, *(args.prompts.read_text(encoding="utf-8").splitlines() if args.prompts else [])]
    if not prompts:
        raise UserError("no prompt: give --prompt TEXT, or --prompts FILE")
    for name, value in (("--tokens", args.tokens), ("--batch", args.batch)):
        if value is not None and value < 1:
            raise UserError(f"{name} {value}: expected a number from 1 on")
    try:
        from zcomm.inference.command import generate

        for text in generate(
            args.model,
            prompts,
            args.tokens,
            args.batch,
            args.weights,
            args.quantize,
            args.memory,
            args.dir,
            args.device,
        ):
            print(text, flush=True)
    except (OSError, ValueError, NotImplementedError, ModuleNotFoundError) as error:
        raise UserError(str(error)) from error
    return 0
