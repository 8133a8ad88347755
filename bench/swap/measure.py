"""Rows: each kind of load, its variants in turn, each beside the peers, with what the device counted."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
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
