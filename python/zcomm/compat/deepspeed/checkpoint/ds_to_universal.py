"""``deepspeed.checkpoint.ds_to_universal``: the universal form of a checkpoint, of zcomm or of DeepSpeed.

Source: the command line of DeepSpeed's ds_to_universal.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["main", "parse_arguments"]


def parse_arguments(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line. Options of DeepSpeed about workers and temporary files change nothing."""
    parser = argparse.ArgumentParser(prog="ds_to_universal", description="Write a universal checkpoint of DeepSpeed.")
    parser.add_argument("--input_folder", required=True, help="a checkpoint of zcomm or DeepSpeed: the folder of a tag")
    parser.add_argument("--output_folder", required=True, help="a new folder")
    parser.add_argument("--torch_adam", action="store_true", help="as of zcomm ckpt convert --torch-adam")
    for name in ("num_extract_workers", "num_merge_workers"):
        parser.add_argument(f"--{name}", type=int, default=1, help="no effect: one tensor at a time is written")
    parser.add_argument("--keep_temp_folder", action="store_true", help="no effect: there are no slices to keep")
    parser.add_argument("--no_strict", dest="strict", action="store_false", help="no effect: every check is made")
    parser.add_argument("--inject_missing_state", action="store_true", help="no effect: nothing needs that state")
    return parser.parse_args(args)


def main(args: Any = None) -> None:
    """Write ``args.output_folder`` from ``args.input_folder`` (None: of the command line), on one rank.

    Raises: FileNotFoundError, FileExistsError, OSError, ValueError, NotImplementedError (a tensor-parallel one of
    DeepSpeed).
    """
    from zcomm.convert.to_universal import to_universal

    given = parse_arguments() if args is None else args
    torch_adam = bool(getattr(given, "torch_adam", False))
    source, out = (Path(each).absolute() for each in (given.input_folder, given.output_folder))
    for line in to_universal(source, out, torch_adam):
        print(line)


if __name__ == "__main__":
    main()
