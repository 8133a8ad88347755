"""Bandwidth of SwapFile (write, read, half and half, batches of tensors) beside the best fio of a sweep.

  bench/swap.py bandwidth --dir /mnt/nvme             (1 GiB, batches of 256 KiB, 1 MiB, 4 MiB: about four minutes)
  bench/swap.py bandwidth --what read,batch --batch 256K --rounds 9
  bench/swap.py bandwidth --sweep full --out bench/results/swap    (every block and depth of fio; writes .jsonl and .md)

Lines: zcomm with each engine, and without checksums; fio with the best flags of a sweep that goes first; DeepSpeed's
aio at its best. The sweep: io_uring and libaio, blocks of 256K to 4M, block x depth of 4 to 32 MiB, direct, one job.
Variants run in turn, each followed by the peers (A F B F C F A F ...), on the same file. GB/s is the median of the
rounds (1e9 bytes), share the median of (zcomm / what followed). moved/asked: bytes that the block device counted over
bytes that were asked for; well below 1, the page cache was in play. #wrong: bytes read back that were not written. fio
comes from the distribution (apt install fio).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from drive import counters, page
from harness import launch
from harness.program import listed, make_parser, parse_size
from harness.record import Results, command_line, machine

if TYPE_CHECKING:
    from drive.swap_file import Swap

WHAT = ("write", "read", "mixed", "batch")
VARIANTS = ("zcomm", "zcomm threads", "zcomm no crc")
PEERS = ("fio", "deepspeed")
MIN_ROUNDS = 5


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("bench/swap.py bandwidth", __doc__)
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
    arguments = parser.parse_args(words)
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


class Peer(Protocol):
    """A program that moves as many bytes to and from a file of its choice."""

    def tune(self, what: str, file: str, keep: Callable[[dict[str, object]], None]) -> dict[str, Any]:
        """Find its best flags for write, read or mixed; each trial is kept as a record."""

    def seconds(self, what: str, nbytes: int, tensor_nbytes: int, file: str) -> float:
        """Return the seconds of one pass; `file` has been written once and may be overwritten."""

    def close(self) -> None: ...


def open_peers(arguments: argparse.Namespace) -> tuple[dict[str, Peer], dict[str, str]]:
    from drive.deepspeed_aio import DeepSpeed
    from drive.fio import Fio

    makers: dict[str, Callable[[], Peer]] = {
        "fio": lambda: Fio(arguments.size, arguments.sweep),
        "deepspeed": lambda: DeepSpeed(max(arguments.size, arguments.batch_total), arguments.deepspeed_python),
    }
    opened, skipped = {}, {}
    for name in arguments.peers:
        try:
            opened[name] = makers[name]()
        except (OSError, RuntimeError) as error:
            skipped[name] = str(error)
    return opened, skipped


_OPTIONS: dict[str, dict[str, object]] = {
    "zcomm": {},
    "zcomm threads": {"engine": "threads"},
    "zcomm no crc": {"checksum": False},
}
_PIECE_NBYTES = 64 << 20  # tensors of the mixed load


@dataclass(frozen=True)
class Load:
    what: str  # write, read, mixed
    nbytes: int
    tensor_nbytes: int
    batch: bool = False

    @property
    def title(self) -> str:
        return f"{self.what}, tensors of {_words(self.tensor_nbytes)}" if self.batch else self.what


def loads(arguments: argparse.Namespace) -> Iterator[Load]:
    for what in ("write", "read"):
        if what in arguments.what:
            yield Load(what, arguments.size, arguments.size)
    if "mixed" in arguments.what:
        yield Load("mixed", arguments.size, min(_PIECE_NBYTES, arguments.size // 2))
    if "batch" in arguments.what:
        for tensor_nbytes in arguments.batches:
            for what in ("write", "read"):
                yield Load(what, max(arguments.batch_total // tensor_nbytes, 1) * tensor_nbytes, tensor_nbytes, True)


def rows(
    arguments: argparse.Namespace, folder: Path, peers: dict[str, Peer], keep: Callable[[dict[str, object]], None]
) -> Iterator[dict[str, Any]]:
    from drive.swap_file import Buffers, Swap

    given = {"block_nbytes": arguments.block, "depth": arguments.depth}
    common = {name: value for name, value in given.items() if value is not None}
    todo = list(loads(arguments))
    buffers = Buffers(max(load.nbytes for load in todo))
    swaps = {name: Swap(folder, buffers, **common, **_OPTIONS[name]) for name in arguments.variants}
    try:
        for load in todo:
            for swap in swaps.values():
                swap.fill(load.nbytes, load.tensor_nbytes)
            path = next(iter(swaps.values())).path
            best = {name: peer.tune(load.what, path, keep) for name, peer in peers.items()}
            yield {**_row(arguments, folder, load, swaps, peers), "best_flags": best}
    finally:
        for swap in swaps.values():
            swap.close()


def _row(
    arguments: argparse.Namespace, folder: Path, load: Load, swaps: dict[str, Swap], peers: dict[str, Peer]
) -> dict[str, Any]:
    gbps: dict[str, list[float]] = {name: [] for name in (*swaps, *peers)}
    moved = dict.fromkeys(gbps, 0)
    shares: dict[str, dict[str, list[float]]] = {peer: {name: [] for name in swaps} for peer in peers}
    size = load.nbytes, load.tensor_nbytes

    def go(name: str, seconds: Callable[[], float]) -> float:
        before = counters.moved(folder)
        speed = load.nbytes / seconds() / 1e9
        after = counters.moved(folder)
        gbps[name].append(speed)
        if before and after:
            moved[name] += sum(after) - sum(before)
        return speed

    for _ in range(arguments.rounds):
        for name, swap in swaps.items():
            swap.fill(*size)  # fio may have overwritten it
            ours = go(name, partial(swap.seconds, load.what, *size))
            for other, peer in peers.items():
                shares[other][name].append(ours / go(other, partial(peer.seconds, load.what, *size, swap.path)))
    for swap in swaps.values():
        swap.fill(*size)
    known = counters.moved(folder) is not None
    wrong = sum(swap.wrong(load.nbytes, load.tensor_nbytes) for swap in swaps.values())
    for swap in swaps.values():
        swap.clear(load.nbytes, load.tensor_nbytes)
    return {
        "kind": "row",
        "what": load.what,
        "batch": load.batch,
        "title": load.title,
        "nbytes": load.nbytes,
        "tensor_nbytes": load.tensor_nbytes,
        "gbps": {name: statistics.median(all_of) for name, all_of in gbps.items()},
        "rounds_gbps": gbps,
        "share_of": {
            peer: {name: statistics.median(of) for name, of in by_name.items()} for peer, by_name in shares.items()
        },
        "shares": shares,
        "moved_over_asked": {
            name: nbytes / load.nbytes / len(gbps[name]) if known else None for name, nbytes in moved.items()
        },
        "wrong": wrong,
    }


def _words(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes % (1 << 20) == 0 else f"{nbytes >> 10} KiB"


def main(words: Sequence[str]) -> int:
    arguments = parse_arguments(words)
    launch.use_project_python()
    results = Results(arguments.out, arguments.append)
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="zcomm-bench-", dir=arguments.dir) as folder:
        opened, skipped = open_peers(arguments)
        for name, why in skipped.items():
            print(f"# peer {name}: skipped, {why}", flush=True)
        drive = counters.describe(Path(folder))
        about = {"kind": "machine", "command": command_line(), "skipped": skipped, "drive": drive, **machine()}
        results.keep(about)
        print(f"# {about['cpu']}, {about['cores']} cores; {drive}", flush=True)
        try:
            for row in rows(arguments, Path(folder), opened, results.keep):
                results.keep(row)
                wrong += int(row["wrong"])
                print(*page.row_lines(row), sep="\n", flush=True)
        finally:
            for peer in opened.values():
                peer.close()
    results.write_page(page.page_of)
    print(f"# #wrong in all: {wrong}", flush=True)
    return 1 if wrong else 0
