"""Rows: each kind of load, its variants in turn, with what the device counted."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swap import counters
from swap.ours import Buffers, Swap
from swap.peers import Peer

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
    given = {"block_nbytes": arguments.block, "depth": arguments.depth}
    common = {name: value for name, value in given.items() if value is not None}
    todo = list(loads(arguments))
    buffers = Buffers(max(load.nbytes for load in todo))
    swaps = {name: Swap(folder, buffers, **common, **_OPTIONS[name]) for name in arguments.variants}
    try:
        for load in todo:
            best = {name: peer.tune(load.what, keep) for name, peer in peers.items()}
            yield {**_row(arguments, folder, load, swaps, peers), "best_flags": best}
    finally:
        for swap in swaps.values():
            swap.close()


def _row(
    arguments: argparse.Namespace, folder: Path, load: Load, swaps: dict[str, Swap], peers: dict[str, Peer]
) -> dict[str, Any]:
    variants: dict[str, Swap | Peer] = {**swaps, **peers}
    for swap in swaps.values():
        swap.fill(load.nbytes, load.tensor_nbytes)
    gbps: dict[str, list[float]] = {name: [] for name in variants}
    moved = dict.fromkeys(variants, 0)
    known = counters.moved(folder) is not None
    for turn in range(arguments.rounds):
        names = list(variants)
        for name in names if turn % 2 == 0 else reversed(names):
            before = counters.moved(folder)
            seconds = variants[name].seconds(load.what, load.nbytes, load.tensor_nbytes)
            after = counters.moved(folder)
            gbps[name].append(load.nbytes / seconds / 1e9)
            if before and after:
                moved[name] += sum(after) - sum(before)
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
        "share_of": {peer: {name: _share(gbps[name], gbps[peer]) for name in swaps} for peer in peers},
        "moved_over_asked": {
            name: moved[name] / load.nbytes / arguments.rounds if known else None for name in variants
        },
        "wrong": wrong,
    }


def _share(ours: list[float], theirs: list[float]) -> float:
    """Median of the ratios of the rounds: a drive that slows down slows both."""
    return statistics.median(mine / other for mine, other in zip(ours, theirs, strict=True))


def _words(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes % (1 << 20) == 0 else f"{nbytes >> 10} KiB"
