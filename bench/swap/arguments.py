"""The flags of bench/swap_bw."""

from __future__ import annotations

import argparse
from pathlib import Path

from harness.sizes import parse_size

WHAT = ("write", "read", "mixed", "batch")
VARIANTS = ("zcomm", "zcomm threads", "zcomm no crc")
PEERS = ("fio", "deepspeed")
MIN_ROUNDS = 5


def parse_arguments(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="swap_bw", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--dir", type=Path, default=Path("."), help="directory on the drive that is measured (here)")
    add("--size", type=parse_size, default="1G", help="bytes of write, read and mixed (1G)")
    add("--what", default=",".join(WHAT), help=f"by commas: {', '.join(WHAT)} (all)")
    add("--batch", default="256K,1M,4M", help="sizes of the tensors of batches (256K,1M,4M)")
    add("--batch-total", type=parse_size, default="512M", help="bytes of one batch (512M)")
    add("--rounds", type=int, default=MIN_ROUNDS, help=f"timed rounds of each variant, at least {MIN_ROUNDS}")
    add("--variants", default=",".join(VARIANTS), help=f"by commas: {', '.join(VARIANTS)} (all)")
    add("--block", type=parse_size, help="SwapFile's block_nbytes (its own default)")
    add("--depth", type=int, help="SwapFile's depth (its own default)")
    add("--peer", default=",".join(PEERS), help=f"also time, by commas: {', '.join(PEERS)} (all that are here)")
    add("--sweep", choices=("short", "full"), default="short", help="fio's: some flags, or all of them (short)")
    add("--deepspeed-python", metavar="FILE", help="an interpreter that imports deepspeed (ZCOMM_DEEPSPEED_PYTHON)")
    add("--out", metavar="STEM", type=Path, help="write STEM.jsonl and STEM.md")
    add("--append", action="store_true", help="keep the rows that STEM has")
    arguments = parser.parse_args()
    arguments.what = listed(parser, "--what", arguments.what, WHAT)
    arguments.variants = listed(parser, "--variants", arguments.variants, VARIANTS)
    arguments.peers = listed(parser, "--peer", arguments.peer, PEERS)
    try:
        arguments.batches = [parse_size(text) for text in arguments.batch.split(",") if text]
    except ValueError as error:
        parser.error(f"--batch: {error}")
    if not arguments.variants:
        parser.error("--variants: name at least one")
    if arguments.size % (2 << 20):
        parser.error("--size: a multiple of 2M")
    if not arguments.dir.is_dir():
        parser.error(f"--dir {arguments.dir}: no such directory")
    arguments.rounds = max(MIN_ROUNDS, arguments.rounds)
    return arguments


def listed(parser: argparse.ArgumentParser, flag: str, text: str, known: tuple[str, ...]) -> list[str]:
    names = list(dict.fromkeys(filter(None, text.split(","))))
    for name in names:
        if name not in known:
            parser.error(f"{flag} {name!r}: use {', '.join(known)}")
    return names
